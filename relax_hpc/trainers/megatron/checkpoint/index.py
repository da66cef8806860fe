"""The index of a distributed checkpoint (`.metadata`), read as data: nothing in it is imported, called or written to.

    bytes ──_Reader: a pickle's few data opcodes──► numbers, texts, tuples, lists, dicts, _Named, _Made ──read()──► Metadata

torch writes the index as a pickle, and unpickles it with all that a pickle can do. A run's directory is shared, so here
a name stays a name, and an object that would be made by calling it stays a record of name and arguments. Out of those
the tensors are picked (names, shapes, places in files), each value checked. The rest is never looked at: Python 3.11.0
to 3.11.3 write an enumeration's member as a call of getattr, others as a call of its class.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from relax_hpc.files.errors import RunError

NAME = ".metadata"
DEPTH = 50
"""Most levels of collections in collections; an index has about ten."""
UNDECODABLE = (
    AttributeError, EOFError, ImportError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError, struct.error,
)  # fmt: skip
"""Exceptions that decoding damaged or hostile bytes may raise (RuntimeError: by torch, and for too deep a recursion)."""


class _Named(NamedTuple):
    """A class or function that the pickle names, not looked up."""

    module: str
    name: str


class _Made:
    """An object that the pickle would make by calling `maker` with `given`, and the state that it would set on it."""

    __slots__ = ("maker", "given", "state")

    def __init__(self, maker: object, given: object) -> None:
        self.maker, self.given, self.state = maker, given, None


class _Reader(pickle._Unpickler):
    """Reads a pickle into plain data, _Named and _Made. In the pure-Python unpickler each opcode's effect can be chosen."""

    stack: list[Any]
    metastack: list[list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        return _Named(module, name)

    def mark(self) -> None:
        if len(self.metastack) >= DEPTH:
            raise pickle.UnpicklingError(f"more than {DEPTH} collections in one another")
        pickle._Unpickler.dispatch[pickle.MARK[0]](self)  # type: ignore[arg-type]

    def make(self) -> None:
        given = self.stack.pop()
        self.stack[-1] = _Made(self.stack[-1], given)

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _Made) or self.stack[-1].state is not None:
            raise pickle.UnpicklingError("it sets attributes of something else than a new object")
        self.stack[-1].state = state

    def set_items(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.set(key, value)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set(key, value)

    def set(self, key: object, value: object) -> None:
        if not isinstance(key, (str, _Made)):  # the hash of tuples in tuples can take for ever
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}")
        self.stack[-1][key] = value


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"opcode {chr(opcode)!r} has no place in it")


_DATA = """PROTO FRAME STOP MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 SHORT_BINUNICODE
BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT STACK_GLOBAL"""
_OWN = {
    "MARK": _Reader.mark, "REDUCE": _Reader.make, "NEWOBJ": _Reader.make, "BUILD": _Reader.build,
    "SETITEM": _Reader.set_item, "SETITEMS": _Reader.set_items,
}  # fmt: skip
_CODES = {name: getattr(pickle, name)[0] for name in (*_DATA.split(), *_OWN)}
_Reader.dispatch = _Opcodes({code: _OWN.get(name) or pickle._Unpickler.dispatch[code] for name, code in _CODES.items()})


def tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of the checkpoint in `folder`, by name. Raises RunError, which names the file."""
    return cast(dict[str, TensorStorageMetadata], read(folder).state_dict_metadata)


def read(folder: Path) -> Metadata:
    """Read the tensors of the checkpoint in `folder`, and their places in its files. Raises RunError, naming the file."""
    path = folder / NAME
    try:
        about = path.stat()
        return _read(path, (about.st_ino, about.st_size, about.st_mtime_ns))
    except FileNotFoundError:
        raise RunError(f"checkpoint has no '{path}': it is incomplete or of another trainer backend") from None
    except UNDECODABLE as error:
        raise RunError(
            f"'{path}' is no index of a distributed checkpoint ({type(error).__name__}: {error}): go back to an older checkpoint"
        ) from error


@functools.lru_cache(maxsize=1)
def _read(path: Path, version: tuple[int, ...]) -> Metadata:
    """Read an index, and keep it: a checkpoint is loaded in several parts. version: changes with the file."""
    index = _state(_Reader(io.BytesIO(path.read_bytes())).load(), "Metadata")
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        _text(name): _tensor(about)
        for name, about in _of(index["state_dict_metadata"], dict).items()
        if _is_tensor(about)
    }
    places = {_index(key): _place(about) for key, about in _of(index["storage_data"], dict).items()}
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return str(_of(value, str))


def _natural(value: Any) -> int:
    if _of(value, int) < 0:
        raise ValueError(f"{value} in the place of a size or an offset")
    return int(value)


def _state(value: Any, name: str) -> dict[str, Any]:
    """The attributes of a record of torch's class `name`."""
    if not isinstance(value, _Made) or not isinstance(value.maker, _Named) or value.maker.name != name:
        raise ValueError(f"no {name} where one belongs")
    return dict(_of(value.state, dict))


def _is_tensor(value: Any) -> bool:
    """Return True for a tensor. Other entries are objects, pickles of their own: none is ever loaded."""
    tensor = ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")
    return isinstance(value, _Made) and value.maker == tensor


def _size(value: Any) -> torch.Size:
    if not isinstance(value, _Made) or value.maker != ("torch", "Size"):
        raise ValueError("no torch.Size where one belongs")
    (numbers,) = _of(value.given, tuple)
    return torch.Size(map(_natural, _of(numbers, tuple)))


def _tensor(value: _Made) -> TensorStorageMetadata:
    about = _state(value, "TensorStorageMetadata")
    named = _of(about["properties"].state, tuple)[0]
    dtype = getattr(torch, named.name, None) if isinstance(named, _Named) and named.module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("no torch.dtype where one belongs")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in _of(about["chunks"], list)]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(about["size"]),
        chunks=[ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(value: Any) -> MetadataIndex:
    about = _state(value, "MetadataIndex")
    offset, index = about.get("offset"), about.get("index")
    return MetadataIndex(_text(about["fqn"]), offset and _size(offset), index if index is None else _natural(index))


def _place(value: Any) -> _StorageInfo:
    about = _state(value, "_StorageInfo")
    path = _text(about["relative_path"])
    if Path(path).name != path:
        raise ValueError(f"the file {path!r} is not in the checkpoint's folder")
    return _StorageInfo(path, _natural(about["offset"]), _natural(about["length"]))


def _read_metadata(reader: FileSystemReader, *_: Any, **__: Any) -> Metadata:
    return read(Path(reader.path))


FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign, assignment]  # torch's own unpickles
