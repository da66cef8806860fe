"""Read a run from its files alone, after it or while it goes on; nothing is written, torch is not needed.

run = relax_hpc.open_run("runs/countdown")
run.trajectories()          one row a sample: text, reward, status, age, …
run.steps(), run.evals()    the curves         run.requests(), run.ages()    what was trained on what
run.media("r000001-000", 2)  what group 2 of a request showed: arrays by name
run.eval_sources()          the scores of each source, with pass@k
for table in run.iter_trajectories(): …        a shard at a time, for runs that do not fit into memory
"""

from __future__ import annotations

import contextlib
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.monitor.analysis.statuses import STATUSES, GroupStatuses, RequestStatus, collected, read_entries
from relax_hpc.monitor.analysis.tables import Decoder, arrow_table, arrow_type, choose_columns, sample_columns, verdicts
from relax_hpc.telemetry import read_metrics

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from relax_hpc.records import Media, MediaSource
    from relax_hpc.spool.shard import Shard

__all__ = ["STATUSES", "RunView"]


class RunView:
    """One run, for reading. Raises RunError when `path` is no run directory."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.run: RunDir = open_existing(path)

    def __repr__(self) -> str:
        return f"RunView('{self.run.root}')"

    def trajectories(
        self,
        format: Literal["pandas", "arrow"] = "pandas",
        columns: Sequence[str] | None = None,
        text: bool = True,
        skip_damaged: bool = False,
    ) -> Any:
        """One row a sample, of every shard there is: pandas.DataFrame or pyarrow.Table.

            shard, request, group, sample  where it is; group and sample count from 0 within the request
            source, prompt_index           which prompt: the recipe's [[source]] and the item of it
            step                           the step that took its request; null when none did
            status, reason                 trained, filtered, failed, dropped, unused or evaluation, and why
            detail                         of a failure: which source and prompt, and what was said
            reward, raw_reward             what was trained on, and what the verifier said
            finish, turns                  stop, length or failed; turns of the model
            prompt_length, length          tokens of the prompt, and of everything after it
            first_version, last_version    of the weights that made the first and the last token; null without tokens
            age                            step - first_version: versions between making the oldest token and training on it
            media                          what the prompt shows beside its text, as JSON: its digest, and each tensor's shape; null for text alone
            prompt, completion, answer     text; prompts with special tokens, completions without (`text=False` leaves all out)
            metadata                       what else the source says about the prompt, as one JSON object (`text=False` leaves it out too)
            extra/NAME                     whatever rewards and environments added; NaN where a shard has none

        `columns` picks some, and may name prompt_tokens, tokens, loss_mask, logprobs, versions (a list a row) too; and
        columns/reference, columns/teacher, columns/recomputed, columns/values: what scorers (logprobs) and critic said of the same tokens,
        null where they said nothing.
        Raises RunError for unknown columns, damaged shards and ledger entries, and text without a tokenizer in the run. `skip_damaged`
        leaves those files out, and one warning counts and names them; samples of a step whose entry is damaged are `unused` then.
        """
        import pyarrow as pa

        names, broken = self.columns(columns, text), list[RunError]()
        empty = pa.table({n: pa.array([], arrow_type(n)) for n in names})
        table = pa.concat_tables([empty, *self.tables(names, broken if skip_damaged else None)])
        if broken:
            warnings.warn(f"{len(broken)} damaged files were left out: {'; '.join(map(str, broken))}", stacklevel=2)
        if format == "arrow":
            return table
        import pandas as pd

        return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}.get)

    def columns(self, columns: Sequence[str] | None = None, text: bool = True) -> list[str]:
        """The columns that a table of trajectories will have; opens every shard when extra columns are in question."""
        extras: dict[str, None] = {}
        if columns is None or any(c.startswith("extra/") for c in columns):
            names = (name for shard in self.iter_shards(broken=[]) for name in shard.column_names())
            extras = dict.fromkeys(name for name in names if name.startswith("extra/"))
        return choose_columns(columns, extras, text)

    def iter_trajectories(
        self, columns: Sequence[str] | None = None, text: bool = True, broken: list[RunError] | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows of `trajectories` as an Arrow table a shard, one at a time. `broken`: see iter_shards."""
        return self.tables(self.columns(columns, text), broken)

    def tables(self, names: Sequence[str], broken: list[RunError] | None = None) -> Iterator[pa.Table]:
        """Yield what `iter_trajectories` does, for column names that `columns` returned."""
        decoder = self.decoder if {"prompt", "completion"} & set(names) else None
        statuses = self.statuses(broken)
        for shard in self.iter_shards(broken=broken):
            with collected(broken):
                yield arrow_table(sample_columns(shard, statuses.of(shard.path), names, decoder))

    def iter_shards(self, paths: Sequence[Path] | None = None, broken: list[RunError] | None = None) -> Iterator[Shard]:
        """Every shard (or those at `paths`), opened in turn and closed when the next one is asked for.

        Shards that retention removes meanwhile are passed over. Raises RunError at one whose index is damaged, unless `broken` is
        given, which then collects the errors; damage to other columns is found where they are read.
        """
        from relax_hpc.spool.shard import Shard

        for path in self.shard_paths() if paths is None else paths:
            with contextlib.ExitStack() as stack:
                try:
                    shard = stack.enter_context(Shard(path))
                    shard.index  # noqa: B018  what everybody reads
                except RunError as error:
                    if not path.exists():
                        continue
                    if broken is None:
                        raise
                    broken.append(error)
                    continue
                yield shard

    def shard_paths(self) -> list[Path]:
        """Training shards, then evaluations, then files quarantined; each by name."""
        places = ((self.run.shards, "*/*.h5"), (self.run.evals, "*.h5"), (self.run.quarantine, "*.h5"))
        return [path for folder, pattern in places for path in sorted(folder.glob(pattern))]

    def statuses(self, broken: list[RunError] | None = None) -> GroupStatuses:
        """Read the status of all requests and groups from the ledger, as of now. `broken`: see iter_shards."""
        return GroupStatuses(read_entries(self.run, broken))

    @cached_property
    def decoder(self) -> Decoder:
        """The run's tokenizer. Raises RunError when the run has no tokenizer.json."""
        from tokenizers import Tokenizer

        path = self.run.model / "tokenizer.json"
        if not self.has_text:
            raise RunError(f"no '{path}', so tokens cannot become text: ask without text (text=False, or --no-text)")
        decoder: Decoder = Tokenizer.from_file(str(path))
        return decoder

    @property
    def has_text(self) -> bool:
        return (self.run.model / "tokenizer.json").is_file()

    def media(self, request: str, group: int) -> dict[str, NDArray[Any]]:
        """The tensors that a group's prompt showed to the model, by name, compared with their digest; empty for text.

        Where the shard keeps files, they are made again, with transformers. Raises RunError where there is no such shard or
        group, or it keeps no more of media than their digest."""
        from relax_hpc.spool.shard import Shard

        with Shard(self.run.shard(request), self._media_again) as shard:
            if not 0 <= group < len(shard.groups):
                raise RunError(f"request {request} has no group {group}: they count from 0 to {len(shard.groups) - 1}")
            media = shard.media(group)
        return {} if media is None else dict(media.tensors)

    def media_files(self, request: str, group: int) -> list[tuple[str, bytes]]:
        """("image", "video" or "audio"; the file's bytes) of what a group's prompt shows, where the shard keeps the files
        (`spool.media = "source"`); else nothing. Raises RunError where there is no such shard or group."""
        from relax_hpc.spool.media import SOURCE
        from relax_hpc.spool.shard import Shard

        with Shard(self.run.shard(request)) as shard:
            if not 0 <= group < len(shard.groups):
                raise RunError(f"request {request} has no group {group}: they count from 0 to {len(shard.groups) - 1}")
            item = shard.media_index.item(group)
            files = item.files if item else ()
            return [(modality, shard.read(SOURCE, place.begin, place.end).tobytes()) for modality, place in files]

    def show(self, request: str, groups: Sequence[int] = (0,)) -> str:
        """Pictures, frames of videos and sounds of groups' prompts, for a notebook: small, with everything in it."""
        from relax_hpc.monitor.analysis.pictures import page

        return page(self, request, groups)

    def _media_again(self, source: MediaSource) -> Media:
        from relax_hpc.media.process import Processor
        from relax_hpc.recipe.tables.source import Media as Limits

        limits = Limits(**self.recipe.get("media", {}))
        return Processor(self.run.model, limits, keeps_files=True).remake(source)

    def steps(self) -> pd.DataFrame:
        """One row a training step, as the trainer measured it; for a step repeated after a restart, the last time."""
        return _frame(last_of(self.metrics("trainer-0", "step"), "step"))

    def evals(self) -> pd.DataFrame:
        """One row an evaluated version: version, score, low and high (its 95% interval), prompts, samples, failed, …"""
        lines = last_of(self.metrics("trainer-0", "eval"), "version")
        return _frame([{k: v for k, v in line.items() if k not in ("sources", "pass_at")} for line in lines])

    def eval_sources(self) -> pd.DataFrame:
        """One row an evaluated version and source: version, source, name, score, low, high, pass@1, pass@2, … and so on."""
        rows = []
        for line in last_of(self.metrics("trainer-0", "eval"), "version"):
            for one in line["sources"]:
                passes = {f"pass@{k}": share for k, share in one["pass_at"].items()}
                rows.append({"version": line["version"], **{k: v for k, v in one.items() if k != "pass_at"}, **passes})
        return _frame(rows)

    def ages(self) -> pd.DataFrame:
        """One row a step and age: step, age (in versions), tokens trained at that age."""
        rows = [
            {"step": s["step"], "age": age, "tokens": tokens}
            for s in last_of(self.metrics("trainer-0", "step"), "step")
            for age, tokens in enumerate(s.get("age_histogram", ()))
            if tokens
        ]
        return _frame(rows, ["step", "age", "tokens"])

    def requests(self) -> pd.DataFrame:
        """One row a request that has a shard, or that the ledger names (its shard may be gone by retention)."""
        return _frame(list(self.request_rows()))

    def request_rows(
        self, paths: Sequence[Path] | None = None, broken: list[RunError] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of `requests` as they are read; with `paths`, of these shards alone."""
        statuses = self.statuses(broken)
        seen = set()
        for shard in self.iter_shards(paths, broken):
            seen.add(shard.path.stem)
            yield _request_row(shard, statuses.of(shard.path))
        if paths is None:
            for request, status in sorted(statuses.requests.items()):
                if request not in seen:
                    about = {"status": status.status, "step": status.step, "reason": status.reason}
                    yield {"shard": None, "request": request, **about}

    def metrics(self, role: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Lines of metrics/ROLE.jsonl, all or of one kind, in the order written."""
        lines = read_metrics(self.run.metrics / f"{role}.jsonl")[0]
        return [line for line in lines if kind in (None, line.get("kind"))]

    def workers(self) -> dict[str, list[dict[str, Any]]]:
        """Worker -> its lines of kind "request"."""
        names = sorted((p.stem for p in self.run.metrics.glob("rollout-*.jsonl")), key=lambda n: (len(n), n))
        return {name: self.metrics(name, "request") for name in names}

    def events(self) -> list[dict[str, Any]]:
        """Events that the supervisor recorded: starts, losses, restarts, the outcome."""
        return self.metrics("supervisor")

    @property
    def outcome(self) -> dict[str, Any] | None:
        """The run's outcome; None while it has not ended."""
        outcome: dict[str, Any] | None = read_json(self.run.outcome)
        return outcome

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe in force, as plain tables. Raises RunError for one that is damaged."""
        try:
            return tomllib.loads(self.recipe_text)
        except ValueError as error:
            raise RunError(
                f"'{self.run.recipe}' is not TOML ({error}): it was damaged; put it back from a copy"
            ) from error

    @property
    def recipe_text(self) -> str:
        return self.run.recipe.read_text() if self.run.recipe.is_file() else ""


def last_of(lines: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The last line for each value of `key`, by that value."""
    return [line for _, line in sorted({line[key]: line for line in lines}.items())]


def _request_row(shard: Shard, status: RequestStatus) -> dict[str, Any]:
    samples, lengths = shard.samples, np.diff(shard.offsets)
    versions = shard.read("span_version")
    reasons = [v.reason for v in verdicts(shard, status) if v.reason]
    first = int(versions.min()) if len(versions) else None
    return {
        "shard": f"{shard.path.parent.name}/{shard.path.name}",
        "request": shard.request,
        "status": status.status,
        "step": status.step,
        "reason": ", ".join(dict.fromkeys(reasons)),
        "groups": len(shard.groups),
        "failed_groups": int(shard.groups["failed"].sum()),
        "filtered_groups": len(status.filtered or ()),
        "samples": len(samples),
        "tokens": int(shard.offsets[-1]),
        "reward": float(samples["reward"].mean()) if len(samples) else None,
        "length_mean": float(lengths.mean()) if len(samples) else None,
        "length_max": int(lengths.max(initial=0)),
        "first_version": first,
        "last_version": int(versions.max()) if len(versions) else None,
        "age": None if status.step is None or first is None else status.step - first,
        "bytes": shard.bytes,
        "media_bytes": shard.media_index.bytes,
        "worker": shard.meta.get("worker"),
        "attempt": shard.meta.get("attempt"),
    }


def _frame(rows: list[dict[str, Any]], columns: list[str] | None = None) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=columns if not rows else None)
    # A column of integers with gaps would become floating-point numbers.
    kinds = {column: {type(row.get(column)) for row in rows} for column in frame}
    return frame.astype({c: "Int64" for c, found in kinds.items() if int in found and found <= {int, type(None)}})
