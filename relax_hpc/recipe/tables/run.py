"""[run], [spool], [supervision]: the run's name, place and length; its files; what happens when something fails."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from relax_hpc.recipe.tables.table import Key, Table

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Run(Table):
    """The run's name, its place, and its length."""

    name: str = Key("run", "The run's name: its directory is ROOT/NAME.", pattern=NAME_PATTERN)
    root: Path = Key("runs", "The directory that holds runs; on a cluster, on the shared file system.")
    seed: int = Key(
        0, "Seed of the run: request ids, prompts and sampling seeds depend on it and the prompt cursor alone.", ge=0
    )
    steps: PositiveInt = Key(100, "Training steps until the run is done.", resume=True)
    checkpoint_every: PositiveInt = Key(50, "Steps between two checkpoints.", resume=True)
    async_checkpoints: bool = Key(
        False, "Continue training while a checkpoint is being written; for the megatron backend.", resume=True
    )
    keep_checkpoints: PositiveInt = Key(
        2, "Checkpoints kept; the oldest one decides how far back a run can restart.", resume=True
    )
    placement: Literal["split", "colocate"] = Key(
        "split",
        "`split`: the rollout workers have devices of their own; reference, critic and teacher share the trainer's (elsewhere called "
        "hybrid). `colocate`: trainer and workers take turns on the same devices; needs async.max_staleness = 0.",
        resume=True,
    )
    group_access: Literal["none", "read"] = Key(
        "none",
        "Access of others to the run's directory, whatever your umask is: `none`, or your group may `read` it. Nobody else "
        "may ever write there: anybody who can write a run's directory runs code in your name.",
        resume=True,
    )


class Spool(Table):
    """Shards: where they lie, how they are stored, how long they stay."""

    node_cache: Path | None = Key(
        None, "A directory in memory (such as /dev/shm) that holds a second copy for readers on the same node."
    )
    compression: Literal["none", "lz4", "zstd"] = Key(
        "none", "Blosc2 over token columns; `none` stores them contiguous, to be mapped."
    )
    media: Literal["tensors", "source"] = Key(
        "tensors",
        "What a shard keeps of images, video and audio, once for all samples of a prompt: the `tensors` that the model's processor made, or "
        "their `source`, the files' own bytes, of which they are made again when they are read, and compared. Files are smaller; making takes time.",
        resume=True,
    )
    keep: Literal["all", "needed"] = Key(
        "all",
        "`all` keeps every shard for analysis; `needed` keeps those that the oldest checkpoint replays (or a critic's; where room is short, the newest).",
        resume=True,
    )
    quota_gb: PositiveFloat | None = Key(
        None, "The most gigabytes of shards; room is reserved when a request is released.", resume=True
    )
    full_disk_wait_s: float = Key(
        300.0, "How long a role waits for room on a full disk before it stops the run.", ge=0, resume=True
    )


class Supervision(Table):
    """Failures: when a role counts as lost, and how often it is started again."""

    hang_s: PositiveFloat = Key(
        120.0, "A role without a heartbeat for this long is killed and started again.", resume=True
    )
    start_s: PositiveFloat = Key(
        600.0,
        "As hang_s, but before a role's first progress (loading, SFT warm start; on a cluster, a node on which srun starts nothing).",
        resume=True,
    )
    node_agent_silent_s: PositiveFloat = Key(
        15.0,
        "On a cluster: a rollout node that is not heard of for this long counts as lost, and others generate its requests.",
        resume=True,
    )
    leader_silent_s: PositiveFloat = Key(
        60.0,
        "On a cluster: rollout nodes end the job of a leader whose lease is silent for this long, so that its successor begins.",
        resume=True,
    )
    io_wait_s: PositiveFloat = Key(
        600.0,
        "Supervisor, node agents and leaders outlive errors of the file system (input/output error, stale handle, no room, no permission) that "
        "last at most this long: they try again every few seconds.",
        resume=True,
    )
    max_restarts: int = Key(
        10, "Restarts of one role without progress in between before the run fails.", ge=0, resume=True
    )
    backoff_s: PositiveFloat = Key(
        0.5, "Wait before a restart; doubles with each one that made no progress, to 60 s.", resume=True
    )
