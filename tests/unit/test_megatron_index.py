"""The index of a Megatron checkpoint is data: nothing that stands in it can run, change torch, or end the process."""

from __future__ import annotations

import enum
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from relax_hpc.files.errors import RunError
from relax_hpc.trainers.megatron.checkpoint import index


def metadata(file: str = "__0_0.distcp", rows: int = 3) -> records.Metadata:
    """The index of one tensor, beside an object and what else Megatron writes there."""
    whole = records.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 4]))
    properties = records.TensorProperties(dtype=torch.bfloat16)
    place = records.MetadataIndex("w", torch.Size([0, 0]), 0)
    made = records.Metadata(
        {
            "w": records.TensorStorageMetadata(properties, torch.Size([rows, 4]), [whole]),
            "object": records.BytesStorageMetadata(),
        },
        storage_data={place: _StorageInfo(file, 5, 2**40)},
        storage_meta=records.StorageMeta(checkpoint_id="/elsewhere"),
    )
    made.all_local_plans = [SavePlan([WriteItem(place, WriteItemType.SHARD)], planner_data={})]  # type: ignore[attr-defined]
    return made


class _As3110(pickle.Pickler):
    """Writes enumerations' members as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class _AsLater(pickle.Pickler):
    """Writes enumerations' members as every other Python does."""

    def reducer_override(self, value: Any) -> Any:
        return (type(value), (value.value,)) if isinstance(value, enum.Enum) else NotImplemented


def written(folder: Path, data: bytes) -> Path:
    (folder / index.NAME).write_bytes(data)
    return folder


@pytest.mark.parametrize("pickler", [_As3110, _AsLater])
def test_what_any_python_writes_is_read(tmp_path: Path, pickler: type[pickle.Pickler]) -> None:
    file, made = io.BytesIO(), metadata()
    pickler(file).dump(made)
    assert (b"getattr" in file.getvalue()) == (pickler is _As3110)
    found = index.read(written(tmp_path, file.getvalue()))
    assert found.state_dict_metadata == {"w": made.state_dict_metadata["w"]}
    assert found.storage_data == made.storage_data


def test_an_index_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    assert index.read(written(tmp_path, pickle.dumps(metadata()))).state_dict_metadata["w"].size == (3, 4)
    assert index.read(written(tmp_path, pickle.dumps(metadata(rows=7)))).state_dict_metadata["w"].size == (7, 4)


class _Runs:
    def __init__(self, what: Path) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.what),)


def test_torchs_own_reader_runs_nothing_either(tmp_path: Path) -> None:
    made = metadata()
    made.planner_data = _Runs(tmp_path / "ran")
    reader = dcp.FileSystemReader(written(tmp_path, pickle.dumps(made)))
    assert reader.read_metadata().state_dict_metadata.keys() == {"w"}, "what runs is beside what is read"
    written(tmp_path, pickle.dumps(_Runs(tmp_path / "ran")))
    with pytest.raises(RunError, match="no index of a distributed checkpoint"):
        reader.read_metadata()
    assert not (tmp_path / "ran").exists()


RECORD = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
"""Names the class Metadata."""
TUPLES = b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60))
"""A tuple of one tuple twice, 60 times over: its hash takes 2**60 steps."""
HOSTILE = {
    "attributes of a class of torch's": RECORD + b"N}\x8c\x08__init__K\x01s\x86b.",
    "a function's defaults": b"\x8c\x13torch.serialization\x8c\x0b_get_layout\x93N}\x8c\x0c__defaults__K\x01s\x86b.",
    "a class made of names": b"\x8c\x04enum\x8c\x04Enum\x93\x8c\x01X}\x86R.",
    "a name with a dot": b"\x8c\x04enum\x8c\x06sys.os\x93.",
    "another thing": b"K\x01.",
    "an older protocol's global": b"cos\nsystem\n.",
    "a memo of gigabytes": b"K\x01r\xff\xff\xff\x7f.",
    "a text of a terabyte": b"\x8d" + struct.pack("<Q", 2**40) + b"x",
    "a byte array of a terabyte": b"\x96" + struct.pack("<Q", 2**40) + b"x",
    "a frame of a terabyte": b"\x95" + struct.pack("<Q", 2**40) + b"x",
    "marks and nothing": b"(" * 5_000_000 + b".",
    "tuples as a key": b"}" + TUPLES + b"K\x01s.",
    "no end": b"]\x94",
    "nothing to take": b"R.",
    "nothing": b"",
    "no text": b"\x8c\x02\xff\xfe.",
    "an unknown opcode": b"\x07.",
    "a memo that is not there": b"h\x07.",
    "a place outside": pickle.dumps(metadata(file="../../../etc/passwd")),
    "a negative size": pickle.dumps(metadata()).replace(b"K\x03K\x04", b"J\xff\xff\xff\xffK\x04"),
    "half of it": pickle.dumps(metadata())[:400],
    "a record without attributes": RECORD + b")\x81.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_index_is_one_error_that_names_the_file(tmp_path: Path, what: str) -> None:
    data = HOSTILE[what]
    written(tmp_path, data if data[:1] == b"\x80" else b"\x80\x04" + data)
    before = records.Metadata.__init__, torch.serialization._get_layout.__defaults__
    with pytest.raises(RunError) as said:
        index.read(tmp_path)
    assert str(tmp_path / index.NAME) in str(said.value) and "older checkpoint" in str(said.value)
    assert len(str(said.value)) < len(str(tmp_path)) + 300 and "\n" not in str(said.value)
    assert (records.Metadata.__init__, torch.serialization._get_layout.__defaults__) == before


def test_every_flipped_byte_is_read_or_refused(tmp_path: Path) -> None:
    data = pickle.dumps(metadata())
    read = 0
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        try:
            index.read(written(tmp_path, damaged))
        except RunError:
            continue
        read += 1
    assert read < len(data)
