"""Damage to a shard, or malice: whatever is read is compared with its checksum, and what a file claims with what it has."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash

from relax_hpc.files.errors import RunError
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.spool import checked
from relax_hpc.spool.column import DamagedColumn, read_column
from relax_hpc.spool.column import encode as encode_column
from relax_hpc.spool.shard import DamagedShard, Shard
from relax_hpc.spool.shard_writer import encode
from tests.flips import flip

COLUMNS = ("prompt_tokens", "prompt_offsets", "tokens", "offsets", "loss_mask", "logprobs", "span_start", "span_version", "samples", "groups")  # fmt: skip
ROOM_BYTES = 4 << 30
"""More than any of these files needs, less than they claim."""


def sample(tokens: int, version: int = 3) -> Sample:
    values = np.arange(1, tokens + 1)
    routed = np.ones((tokens + 2, 2, 1), np.uint8)
    return Sample(
        values.astype(np.int32), np.ones(tokens, np.uint8), -values.astype(np.float32), [(0, version)], Finish.STOP, 1.0, 1.0,
        extra={"format": 0.5}, routed_experts=routed,
    )  # fmt: skip


def shard(path: Path, lengths: tuple[int, ...] = (5, 9), compression: Any = "none") -> Path:
    """A group a length, of two samples each."""
    groups = [
        Group(Prompt(0, i, "", np.array([7, 8, 9], np.int32), "1"), [sample(n), sample(n)])
        for i, n in enumerate(lengths)
    ]
    path.write_bytes(b"".join(encode("r000001-000", groups, {"version": 3, "run": "mine"}, compression)))
    return path


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """Whatever allocates what a file claims fails here, on any machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("column", [*COLUMNS, "routed_experts", "extra/format"])
def test_a_flipped_bit_in_any_column_is_found_where_the_column_is_used(tmp_path: Path, column: str) -> None:
    path = shard(tmp_path / "a.h5")
    flip(path, column)
    with pytest.raises(DamagedShard, match=f"a.h5.*column '{column}'.*checksum"), Shard(path) as opened:
        opened.group(0) if column.startswith("extra") else opened.rollouts(routed=True)
    with pytest.raises(DamagedShard, match=f"column '{column}'"), Shard(path) as opened:
        opened.validate()


def test_who_reads_a_slice_compares_the_blocks_that_it_touches_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 8 rows: a flip in the first block is seen by who reads it, and by nobody who reads the others."""
    monkeypatch.setattr(checked, "BLOCK_ROWS", 8)
    path = shard(tmp_path / "a.h5", (3, 5, 8, 8, 30))
    with Shard(path) as opened:
        whole, offsets = opened.rollouts(), opened.offsets.tolist()
    flip(path, "tokens", row=2)
    with Shard(path) as opened:
        for which in ([4, 5], [3, 6, 8], [9]):
            part = opened.rollouts(np.array(which))
            wanted = [whole.tokens[offsets[i] : offsets[i + 1]] for i in which]
            assert part.tokens.tolist() == np.concatenate(wanted).tolist()
        for which in ([0], [1, 9], [2]):
            with pytest.raises(DamagedShard, match="column 'tokens': rows 0 to 8"):
                opened.rollouts(np.array(which))
        with pytest.raises(DamagedShard, match="column 'tokens'"):
            opened.validate()


def test_a_flipped_bit_in_any_block_is_found_by_who_reads_the_whole_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 8 rows, the last of which has 4."""
    monkeypatch.setattr(checked, "BLOCK_ROWS", 8)
    path = shard(tmp_path / "a.h5", (3, 5, 8, 30))
    for begin in range(0, 92, 8):
        end = min(begin + 8, 92)
        flip(path, "logprobs", row=end - 1)
        with Shard(path) as opened:
            with pytest.raises(DamagedShard, match=f"column 'logprobs': rows {begin} to {end} "):
                opened.rollouts()
            with pytest.raises(DamagedShard, match=f"column 'logprobs': rows {begin} to {end} "):
                opened.validate()
        flip(path, "logprobs", row=end - 1)
    with Shard(path) as opened:
        assert len(opened.rollouts().logprobs) == 92


def test_one_rank_of_a_large_shard_reads_little_more_than_its_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = shard(tmp_path / "a.h5", (2 << 20, 64)), 0
    before = checked.Checked._block

    def counted(self: checked.Checked, block: int, memory: Any) -> Any:
        nonlocal read
        read += memory.nbytes
        return before(self, block, memory)

    monkeypatch.setattr(checked.Checked, "_block", counted)
    with Shard(path) as opened:
        part = opened.rollouts(np.array([2, 3]))
    assert part.tokens.tolist() == [*range(1, 65)] * 2
    assert read < 2 * 9 * checked.BLOCK_ROWS < opened.bytes / 5


def test_anothers_shard_under_this_name_is_refused(tmp_path: Path) -> None:
    with Shard(shard(tmp_path / "a.h5")) as opened:
        opened.check_owner("r000001-000", "mine")
        opened.check_owner("r000001-000", None)
        with pytest.raises(DamagedShard, match="of request 'r000001-000', its name says 'r000002-000'"):
            opened.check_owner("r000002-000", "mine")
        with pytest.raises(DamagedShard, match="of run 'mine', its name says 'another'"):
            opened.check_owner("r000001-000", "another")


def write_meta(file: h5py.File, text: bytes) -> None:
    del file["meta"]
    file["meta"] = np.frombuffer(text, np.uint8)
    file.attrs["meta_checksum"] = np.uint64(xxhash.xxh3_64_intdigest(text))


def replaced(column: str, **how: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[column]
        file.create_dataset(column, **how)

    return change


def said(column: str, row: int, value: Any, field: str | None = None) -> Callable[[h5py.File], None]:
    """Another value, and the checksums that go with it: malice, not damage."""

    def change(file: h5py.File) -> None:
        data = file[column][:]
        (data if field is None else data[field])[row] = value
        file[column][:] = data
        meta = json.loads(file["meta"][:].tobytes())
        meta["checksums"][column] = xxhash.xxh3_64_hexdigest(data.tobytes())
        write_meta(file, json.dumps(meta).encode())

    return change


def linked(column: str, to: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[column]
        file[column] = to

    return change


def meta_with(**values: Any) -> Callable[[h5py.File], None]:
    return lambda file: write_meta(file, json.dumps(json.loads(file["meta"][:].tobytes()) | values).encode())


HUGE = {"shape": (1 << 40,), "chunks": (1 << 20,)}
MALICE: dict[str, Callable[[h5py.File], None]] = {
    "huge tokens": replaced("tokens", dtype=np.int32, fillvalue=7, **HUGE),
    "huge prompt tokens": replaced("prompt_tokens", dtype=np.int32, **HUGE),
    "huge meta": replaced("meta", dtype=np.uint8, **HUGE),
    "huge contiguous": replaced("logprobs", shape=(1 << 40,), dtype=np.float32),
    "deep meta": lambda file: write_meta(file, b"[" * 300_000 + b"]" * 300_000),
    "meta of another kind": lambda file: write_meta(file, b"[1, 2]"),
    "meta that is no JSON": lambda file: write_meta(file, b"\xff{"),
    "meta with reasons that are none": meta_with(reasons=[]),
    "meta with checksums that are none": meta_with(checksums={"tokens": 5}),
    "meta without prompts": meta_with(prompts=[]),
    "meta with prompts that are none": meta_with(prompts=[1, 2]),
    "experts of impossible layers": meta_with(routed_experts=[0, 1]),
    "experts of huge layers": meta_with(routed_experts=[1 << 60, 1 << 60]),
    "external storage": replaced("tokens", shape=(28,), dtype=np.int32, external=[("/etc/passwd", 0, 112)]),
    "external link": linked("tokens", h5py.ExternalLink("/etc/passwd", "/x")),
    "soft link": linked("tokens", h5py.SoftLink("/span_version")),
    "scalar": linked("tokens", np.int32(3)),
    "two dimensions": replaced("tokens", data=np.zeros((28, 1), np.int32)),
    "another type": replaced("tokens", data=np.zeros(28, np.int64)),
    "texts": replaced("tokens", shape=(28,), dtype=h5py.string_dtype()),
    "variable length": replaced("tokens", shape=(28,), dtype=h5py.vlen_dtype(np.int32)),
    "group": lambda file: (file.pop("tokens"), file.create_group("tokens"))[0],
    "shuffled bytes": replaced("tokens", data=np.zeros(28, np.int32), chunks=(28,), shuffle=True),
    "huge offsets": said("offsets", -1, 1 << 50),
    "offsets before the beginning": said("offsets", 1, -5),
    "prompt offsets that fall": said("prompt_offsets", 1, 100),
    "group that is not there": said("samples", slice(None), 99_999, "group"),
    "group before the first": said("samples", 0, -1, "group"),
    "finish that is none": said("samples", 0, 77, "finish"),
    "span beyond the end": said("span_start", -1, 1 << 40),
    "span before the beginning": said("span_start", 0, -3),
    "sample without a span": said("span_start", 1, 6),
    "version before the first": said("span_version", 0, -(1 << 31)),
    "attribute of many": lambda file: file.attrs.create("schema", np.arange(4)),
    "attribute of another kind": lambda file: file.attrs.create("meta_checksum", 1.5),
}  # fmt: skip


@pytest.mark.parametrize("what", MALICE)
def test_what_a_file_claims_is_compared_with_what_it_has(tmp_path: Path, what: str) -> None:
    path = shard(tmp_path / "bomb.h5")
    with h5py.File(path, "r+", locking=False) as file:
        MALICE[what](file)
    with pytest.raises(RunError, match=r"bomb\.h5"), Shard(path) as opened:
        opened.rollouts(routed=True)
    with pytest.raises(RunError, match=r"bomb\.h5"), Shard(path) as opened:
        opened.validate()


@pytest.mark.parametrize("what", ["huge tokens", "huge contiguous", "external link", "external storage", "scalar", "texts", "group"])  # fmt: skip
def test_files_of_columns_are_compared_likewise(tmp_path: Path, what: str) -> None:
    """A column file with the column `tokens` (or `logprobs`, which it is called in one of them)."""
    name = "logprobs" if what == "huge contiguous" else "tokens"
    path = tmp_path / "bomb.h5"
    path.write_bytes(b"".join(encode_column(name, "r000001-000", 7, "m", np.zeros(28, np.float32))))
    assert read_column(path, name) is not None
    with h5py.File(path, "r+", locking=False) as file:
        MALICE[what](file)
    with pytest.raises(DamagedColumn, match=r"bomb\.h5"):
        read_column(path, name)
