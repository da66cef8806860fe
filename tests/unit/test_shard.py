"""Shards: what goes in comes out, and damage of any kind is found and named."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.files.errors import RunError
from relax_hpc.records import Finish, Group, Prompt, Sample, concatenate
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode

ROOT = Path(__file__).parents[2]


def make_sample(tokens: list[int], spans: list[tuple[int, int]], **fields: Any) -> Sample:
    count = len(tokens)
    values: dict[str, Any] = {
        "tokens": np.array(tokens, np.int32),
        "loss_mask": np.array([t % 3 > 0 for t in tokens], np.uint8),
        "logprobs": -np.arange(count, dtype=np.float32) / 7,
        "spans": spans,
        "finish": Finish.STOP,
    }
    return Sample(**(values | fields))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=9))
    starts = sorted(draw(st.sets(st.integers(1, max(1, len(tokens) - 1)), max_size=3))) if len(tokens) > 1 else []
    first = draw(st.integers(0, 10_000))
    spans = [(s, first + i) for i, s in enumerate([0, *starts])]
    return make_sample(
        tokens,
        spans if tokens else draw(st.sampled_from([spans[:1], []])),
        finish=draw(st.sampled_from(Finish)),
        reward=draw(st.floats(-1e6, 1e6, width=32)),
        raw_reward=draw(st.floats(-1e6, 1e6, width=32)),
        turns=draw(st.integers(0, 100)),
        extra=draw(st.dictionaries(st.sampled_from(["format", "länge", "a b"]), st.floats(-10, 10, width=32))),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    prompt = Prompt(
        source=draw(st.integers(0, 30)),
        index=draw(st.integers(0, 2**60)),
        text="",
        tokens=np.array(draw(st.lists(st.integers(0, 1000), max_size=5)), np.int32),
        answer=draw(st.none() | st.text(max_size=5)),
        metadata=draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)),
    )
    return Group(
        prompt, draw(st.lists(samples(), max_size=4)), draw(st.sampled_from(["", "", "TimeoutError: 30 s ≠ ∞"]))
    )


def versions_of(sample: Sample) -> list[int]:
    """The version of each token, by definition: that of the last span that began."""
    return [[v for start, v in sample.spans if start <= t][-1] for t in range(len(sample.tokens))]


def write(path: Path, made: list[Group], **meta: Any) -> Path:
    compression = meta.pop("compression", "none")
    path.write_bytes(b"".join(encode("r000001-002", made, {"version": 7, **meta}, compression)))
    return path


@given(made=st.lists(groups(), max_size=4), compression=st.sampled_from(["none", "lz4", "zstd"]))
@settings(max_examples=80, deadline=None)
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, made: list[Group], compression: str) -> None:
    path = write(
        tmp_path_factory.mktemp("shard") / "a.h5", made, compression=compression, attempt=2, worker="rollout-1"
    )
    flat = [(g, s) for g, group in enumerate(made) for s in group.samples]
    with Shard(path) as shard:
        shard.validate()
        assert shard.request == "r000001-002"
        assert (shard.meta["attempt"], shard.meta["worker"]) == (2, "rollout-1")
        assert shard.meta["reasons"] == {str(i): g.reason for i, g in enumerate(made) if g.reason}
        assert shard.meta["prompts"] == [{"answer": g.prompt.answer, "metadata": g.prompt.metadata} for g in made]
        assert [tuple(g) for g in shard.groups.tolist()] == [
            (g.prompt.source, g.prompt.index, int(bool(g.reason))) for g in made
        ]
        assert len(shard.samples) == len(flat)
        for i, (group, sample) in enumerate(flat):
            row, begin, end = shard.samples[i], int(shard.offsets[i]), int(shard.offsets[i + 1])
            assert row["group"] == group
            assert (row["reward"], row["raw_reward"], row["finish"], row["turns"]) == (
                sample.reward, sample.raw_reward, sample.finish, sample.turns,
            )  # fmt: skip
            for column in ("tokens", "loss_mask", "logprobs"):
                found = shard.read(column, begin, end)
                assert found.dtype == getattr(sample, column).dtype
                assert found.tolist() == getattr(sample, column).tolist()
            assert shard.versions(begin, end).tolist() == versions_of(sample)
            for name in {n for _, s in flat for n in s.extra}:
                assert np.array_equal(shard.read(f"extra/{name}")[i], sample.extra.get(name, np.nan), equal_nan=True)
        if flat:
            everything = [v for _, s in flat for v in versions_of(s)]
            assert not everything or shard.first_version <= min(everything)


@given(made=st.lists(groups(), min_size=1, max_size=4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_slices_equal_the_whole(
    tmp_path_factory: pytest.TempPathFactory, made: list[Group], data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("shard") / "a.h5", made)
    flat = [(group, s) for group in made for s in group.samples]
    picked = sorted(data.draw(st.sets(st.integers(0, len(flat) - 1)))) if flat else []
    with Shard(path) as shard:
        part = shard.rollouts(np.array(picked, np.int64))
    assert part.ids == [f"r000001-002/{i}" for i in picked]
    for row, i in enumerate(picked):
        group, sample = flat[i]
        begin, end = part.offsets[row], part.offsets[row + 1]
        assert part.tokens[begin:end].tolist() == sample.tokens.tolist()
        assert part.loss_mask[begin:end].tolist() == sample.loss_mask.tolist()
        assert part.logprobs[begin:end].tolist() == sample.logprobs.tolist()
        assert part.versions[begin:end].tolist() == versions_of(sample)
        assert (
            part.prompt_tokens[part.prompt_offsets[row] : part.prompt_offsets[row + 1]].tolist()
            == group.prompt.tokens.tolist()
        )
        assert made[part.group[row]] is group
        assert (part.rewards[row], part.finish[row]) == (sample.reward, sample.finish)
    assert part.offsets[-1] == len(part.tokens) == len(part.loss_mask) == len(part.logprobs) == len(part.versions)


def three_groups() -> list[Group]:
    """Two groups that were generated, over two versions, and a failed one."""
    prompts = [
        Prompt(0, 40 + i, "", np.array([1, 2, 3 + i], np.int32), answer=str(i), metadata={"level": i}) for i in range(3)
    ]
    generated = [
        Group(
            p,
            [
                make_sample(list(range(5 + j, 30 + j)), [(0, 4), (9, 5)], reward=float(j), extra={"format": 0.5})
                for j in range(2)
            ],
        )
        for p in prompts[:2]
    ]
    return [*generated, Group(prompts[2], [], "RewardError: no number in 'x'")]


def test_concatenate_numbers_groups_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", three_groups())
    with Shard(path) as shard:
        both = concatenate([shard.rollouts(np.array([2, 3])), shard.rollouts()])
    assert both.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.lengths().tolist() == [28] * 6
    assert both.tokens[both.offsets[1] : both.offsets[2]].tolist() == list(range(6, 31))
    assert concatenate([]).offsets.tolist() == [0]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_truncated_anywhere_is_named(tmp_path: Path, compression: str) -> None:
    image = write(tmp_path / "whole.h5", three_groups(), compression=compression).read_bytes()
    cut = tmp_path / "cut.h5"
    for size in [*range(0, len(image), 23), len(image) - 1]:
        cut.write_bytes(image[:size])
        with pytest.raises(RunError, match=re.escape(str(cut))), Shard(cut) as shard:
            shard.validate()


def test_a_flipped_bit_is_found_wherever_it_changes_anything(tmp_path: Path) -> None:
    """Byte by byte: either validate names the file, or every reader still sees what was written (unused space)."""
    image = write(tmp_path / "whole.h5", three_groups()).read_bytes()
    with Shard(tmp_path / "whole.h5") as shard:
        written = contents(shard)
    flipped, silent, leaked = tmp_path / "flipped.h5", [], []
    for position in range(0, len(image), 5):
        damaged = bytearray(image)
        damaged[position] ^= 0x10
        flipped.write_bytes(damaged)
        try:
            with Shard(flipped) as shard:
                shard.validate()
                if contents(shard) != written:
                    silent.append(position)
        except RunError as error:
            assert str(flipped) in str(error)
        except Exception as error:
            leaked.append((position, repr(error)))
    assert silent == [], f"{len(silent)} bytes can change unnoticed"
    assert leaked == [], f"{len(leaked)} flips raise something else than RunError"


def contents(shard: Shard) -> dict[str, bytes]:
    return {name: shard.read(name).tobytes() for name in sorted(shard.column_names())} | {
        "about": json.dumps(shard.meta).encode()
    }


def test_what_is_no_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="never published, or retention removed it"):
        Shard(tmp_path / "missing.h5")
    (tmp_path / "text.h5").write_text("not HDF5 at all\n" * 100)
    with pytest.raises(RunError, match="not HDF5"):
        Shard(tmp_path / "text.h5")
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["x"] = [1, 2, 3]
    with pytest.raises(RunError, match="not a shard"):
        Shard(tmp_path / "foreign.h5")
    with h5py.File(write(tmp_path / "later.h5", three_groups()), "r+", locking=False) as file:
        file.attrs.modify("schema", np.int32(4))
    with pytest.raises(RunError, match=r"later\.h5.*4.*expected.*3"):
        Shard(tmp_path / "later.h5")


def test_a_column_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with Shard(write(tmp_path / "a.h5", three_groups())) as shard:
        assert "extra/format" in shard and "logprobs" in shard and "extra/other" not in shard and "values" not in shard
        with pytest.raises(RunError, match="no column 'values'.*extra/format.*logprobs"):
            shard.read("values")


def test_the_documented_example_reads_a_shard_with_h5py_alone(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "shard-format.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    imports = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert imports == {"json", "h5py"} and len(code.splitlines()) <= 20
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"PATH": str(write(tmp_path / "a.h5", three_groups()))})
    lines = printed.getvalue().splitlines()
    assert lines[0] == "request r000001-002 failed groups: {'2': \"RewardError: no number in 'x'\"}"
    assert len(lines) == 1 + 3 * 4
    assert lines[4:6] == [
        "1 group 0 reward 1.0 answer should be 0",
        f"  prompt [1, 2, 3] completion {list(range(6, 31))}",
    ]
    own = sum(-t / 7 for t in range(25) if (t + 6) % 3 > 0)
    versions, logprob = re.fullmatch(r"  versions (.*) logprob of the model's own tokens (.*)", lines[6]).groups()  # type: ignore[union-attr]
    assert json.loads(versions) == [4] * 9 + [5] * 16
    assert float(logprob) == pytest.approx(own, rel=1e-5)


def test_the_documented_datasets_are_those_of_a_shard(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "shard-format.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \| \[", page, re.MULTILINE))
    with h5py.File(write(tmp_path / "a.h5", three_groups()), "r", locking=False) as file:
        found = {
            n: "compound" if d.dtype.fields else d.dtype.name for n, d in file.items() if isinstance(d, h5py.Dataset)
        }
        fields = {n: t.name for d in (file["samples"], file["groups"]) for n, (t, *_) in d.dtype.fields.items()}
        assert file["extra/format"].dtype == np.float32
    assert documented == found
    assert fields.items() <= dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE)).items()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routed_experts_of_each_sample_come_out(tmp_path: Path, dtype: Any) -> None:
    """Rows are those of prompt and answer less one, whatever is before; no `extra` is made of them."""
    rng, made = np.random.default_rng(0), []
    for length in (1, 4):
        prompt = Prompt(0, length, "", np.arange(length, dtype=np.int32))
        routed = lambda t: rng.integers(0, 200, (length + t - 1, 3, 2)).astype(dtype)  # noqa: B023
        sizes = [1, 5, 2]
        made.append(Group(prompt, [make_sample([7] * t, [(0, 0)], routed_experts=routed(t)) for t in sizes]))
    with Shard(write(tmp_path / "x.h5", made)) as shard:
        shard.validate()
        read = [sample for g in range(2) for sample in shard.group(g).samples]
        some = concatenate([shard.rollouts(np.array([1, 4]), routed=True), shard.rollouts(np.array([5]), routed=True)])
    wanted = [made[0].samples[1], *made[1].samples[1:]]
    assert some.routed_experts is not None and some.routed_experts.dtype == dtype
    assert np.array_equal(some.routed_experts, np.concatenate([s.routed_experts for s in wanted]))
    assert len(some.routed_experts) == (some.lengths() - 1).sum()
    for sample, expected in zip(read, [s for g in made for s in g.samples], strict=True):
        assert sample.routed_experts is not None and sample.routed_experts.dtype == dtype and sample.extra == {}
        assert np.array_equal(sample.routed_experts, expected.routed_experts)


def test_experts_that_were_not_kept_are_not_made_up(tmp_path: Path) -> None:
    with Shard(write(tmp_path / "x.h5", three_groups())) as shard:
        assert shard.rollouts().routed_experts is None
        with pytest.raises(RunError, match="generated without rollout.routed_experts"):
            shard.rollouts(routed=True)
