"""Checkpoints in Megatron-core's distributed format (torch_dist), which load under any other plan.

    common.pt metadata.json .metadata __RANK_N.distcp   weights, reference, critic, AdamW's moments and master weights, steps
    rng.safetensors                                     every process's random state

Each tensor is stored by its name and place in the whole model. Of the optimizer, only tensors and the number of steps
are stored (moments.py): parameter groups are made from the recipe, and their number depends on the plan.
"""

from __future__ import annotations

import errno
import queue
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError
from relax_hpc.trainers import state_files
from relax_hpc.trainers.megatron.checkpoint.index import UNDECODABLE, tensors
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.head import Policy

FILES_PER_PROCESS = 2
# Megatron writes in forked processes, and starts one more to hand results over. Here threads write: the results stay.
filesystem_async._get_write_results_queue = queue.SimpleQueue
NO_ROOM = re.compile(r"\[Errno (28|122)\]|No space left|quota", re.IGNORECASE)
PART = re.compile(r"__(\d+)_\d+\.distcp$")
"""Matches the name of a file that one process wrote."""


def sharded(chunks: list[Policy], groups: ProcessGroupCollection, prefix: str = "") -> dict[str, Any]:
    """The tensors of the model that this process has, with their places in the whole."""
    how = {"non_homogeneous_layers": True, "dp_cp_group": groups.dp_cp}
    state = {f"chunk{i}": chunk.sharded_state_dict(prefix, metadata=how) for i, chunk in enumerate(chunks)}
    # objects (a place for FP8's scales) would be pickles; they are empty
    return dict(extract_matching_values(state, lambda value: isinstance(value, ShardedObject))[1])


class Saving:
    """A checkpoint that threads are writing; see relax_hpc.trainers.base.Saving."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        """Begin to write `state` into `folder`, as it is now; collective."""
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=FILES_PER_PROCESS)
        self.request = dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, async_sharded_save=True)
        self.checksums: dict[str, str] = {}
        self.pool = ThreadPoolExecutor(FILES_PER_PROCESS)
        self.files: list[Future[Any]] = []
        if self.request.async_fn is not None:
            write = partial(_write, self.request.async_fn.args[0])
            self.files = [self.pool.submit(write, file) for file in map(_copied, self.request.preload_fn())]

    def done(self) -> bool:
        return all(file.done() for file in self.files)

    @supported
    def finish(self) -> None:
        results = [file.result() for file in self.files]
        self.pool.shutdown()
        written = [result for result, _ in results]
        if self.files:
            self.request.async_fn_args[2].put(dict(enumerate(written)))
        mine = next((str(r) for r in written if isinstance(r, Exception)), ""), dict(s for _, s in results if s)
        every = [mine] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        failed = next((error for error, _ in every if error), "")
        if failed:  # on every process, so that all of them try again
            raise OSError(errno.ENOSPC if NO_ROOM.search(failed) else errno.EIO, failed)
        for _, checksums in every:
            self.checksums |= checksums
        for finalize in self.request.finalize_fns:
            finalize()


def _copied(file: Any) -> Any:
    """Copy a file's tensors, which the next step will change. Megatron does so itself for those of a GPU."""
    path, name, (data, tensors) = file
    alone = torch.cuda.is_available()
    return path, name, (data, [(item, tensor if alone else tensor.clone()) for item, tensor in tensors])


def _write(transforms: Any, file: Any) -> Any:
    """Write a file. Returns its table of contents, or the exception; and its name with its checksum."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    to_do: queue.Queue[int] = queue.Queue()
    to_do.put(0)
    FileSystemWriterAsync.write_preloaded_data(transforms, 0, file, results, to_do, use_fsync=True)
    written, path = results.get()[1], Path(file[0])
    return written, None if isinstance(written, Exception) else (path.name, folder_checksums.of_file(path))


def verify(folder: Path) -> None:
    """Compare the files with their seal, each on the process that will read it. Raises DamagedCheckpoint on all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    of_rank: Callable[[str], int] = lambda name: int(found[1]) % world if (found := PART.match(name)) else 0
    error = ""
    try:
        mine = [name for name in folder_checksums.expected(folder) if of_rank(name) == rank]
        folder_checksums.compare_all(folder, mine)
    except folder_checksums.DamagedCheckpoint as damage:
        error = str(damage)
    errors = [error] * world
    dist.all_gather_object(errors, error)
    if any(errors):
        raise folder_checksums.DamagedCheckpoint(next(filter(None, errors)))


def load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Load the values of `state` from `folder`; collective. Raises RunError for a torn checkpoint."""
    try:
        # processes may ask for different parts at a time, so none can check that together they ask for all
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    except (CheckpointingException, CheckpointException, FileNotFoundError, *UNDECODABLE) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(f"'{folder}' cannot be read: {said[-1]}; go back to an older checkpoint") from error
    return loaded


def compare(folder: Path, state: dict[str, Any], everything: bool = True) -> None:
    """Raise RunError, on every process and before anything is read, when the checkpoint is of another model.
    everything: it may have no tensors beyond `state`."""
    saved = {name: list(about.size) for name, about in tensors(folder).items()}
    mine = {}
    for tensor in nested_values(load_preprocess(state)[0]):
        if isinstance(tensor, ShardedTensor):
            mine[tensor.key] = (list(tensor.global_shape), tensor.allow_shape_mismatch)
    every: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    wanted = {}
    for name, (shape, padded) in ((name, about) for said in every for name, about in said.items()):
        fits = padded and name in saved and saved[name][1:] == shape[1:]
        wanted[name] = saved[name] if fits else shape
    state_files.compare(saved if everything else {n: s for n, s in saved.items() if n in wanted}, wanted, folder)
