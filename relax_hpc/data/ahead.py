"""Prompts of the next request, read, decoded and processed by torchdata's loader while the engine generates this one's.

    expect(next request's names) ──► worker processes: row ► decode ► the model's processor ──► take: prompts, in that order

One request is read ahead at most, so memory is bounded. Nothing of it is kept: a prompt follows from its name, and whoever
goes on after a restart reads it again. A process that dies costs the prompt on which it died, and no other.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from relax_hpc.data.media_rows import UnusablePrompt
from relax_hpc.data.sources import PromptSources
from relax_hpc.files.errors import RunError
from relax_hpc.parent import end_with
from relax_hpc.records import Failure, Prompt

Name = tuple[int, int]
"""(source, index) of a prompt."""
_FORK = multiprocessing.get_context("fork")


class Unusable(NamedTuple):
    """A prompt that fails from the start, without its media, and why."""

    prompt: Prompt
    failure: Failure


class ProcessDied(Exception):
    """A process that makes prompts is gone."""


class PromptLoader:
    """Prompts by name, made in `workers` processes where they were expected; in this one where there are none."""

    def __init__(self, sources: PromptSources, workers: int, at_once: int) -> None:
        """at_once: prompts of a request."""
        self._sources, self._workers, self._at_once = sources, workers, at_once
        self._epoch = _Epoch()
        self._expected: tuple[Name, ...] = ()
        self._loader: StatefulDataLoader[Any] | None = None
        self._made: Iterator[Any] = iter(())
        self._processes: list[BaseProcess] = []

    @property
    def reads_ahead(self) -> bool:
        """True where prompts are made in processes."""
        return self._workers > 0

    def expect(self, names: Sequence[Name]) -> None:
        """Begin to make these prompts, in place of those that were expected before."""
        if self._workers and tuple(names) != self._expected:
            self._expected = tuple(names)
            self._begin(names)

    def take(self, names: Sequence[Name]) -> Iterator[Prompt | Unusable]:
        """Yield these prompts, in this order. Raises RunError for one that a person must mend."""
        if not self._workers:
            yield from (_checked(made(self._sources, name)) for name in names)
            return
        self.expect(names)
        self._expected = ()
        for place in range(len(names)):
            yield _checked(self._next(names[place:]))

    def close(self) -> None:
        """End the processes."""
        self._epoch.begin(())
        self._made, self._loader, self._expected = iter(()), None, ()

    def _begin(self, names: Sequence[Name]) -> None:
        """Have the processes make these prompts; those that they are still to make are given up."""
        self._epoch.begin(names)
        if self._loader is not None:
            try:
                with self._noticing_death():
                    self._made = iter(self._loader)
                return
            except ProcessDied as error:
                self._give_up(error)
                self._epoch.begin(names)
        self._start()

    def _start(self) -> None:
        before, handler = multiprocessing.active_children(), signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings():  # torchdata 0.11 calls what later torch deprecates; a log need not say so
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                _Prompts(self._sources, self._epoch), sampler=self._epoch, batch_size=None, num_workers=self._workers,
                prefetch_factor=math.ceil(self._at_once / self._workers), persistent_workers=True,
                multiprocessing_context=_FORK, worker_init_fn=_End(os.getpid()), generator=torch.Generator(),
            )  # fmt: skip
        self._made = iter(self._loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        signal.signal(signal.SIGCHLD, handler)  # torch's own raises out of whatever this process is doing

    @contextmanager
    def _noticing_death(self) -> Iterator[None]:
        """Raise ProcessDied, also out of a read of what a process did not finish writing."""

        def look(*about: Any) -> None:
            if callable(before) and about:
                before(*about)
            died = [child.exitcode for child in self._processes if not child.is_alive()]
            if died:
                raise ProcessDied(f"a process that reads prompts ahead ended with code {died[0]}")

        before = signal.getsignal(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, look)
        try:
            look()
            yield
        except RuntimeError:  # the loader's word for the same
            look()
            raise
        finally:
            signal.signal(signal.SIGCHLD, before)

    def _next(self, names: Sequence[Name]) -> Any:
        """Return the first of these, of which the processes have begun to make all."""
        try:
            with self._noticing_death():
                return next(self._made)
        except ProcessDied as error:
            self._give_up(error)
        self._begin(names[:1])  # alone, to see whether the process died on this one
        try:
            with self._noticing_death():
                found = next(self._made)
        except ProcessDied as error:
            self._give_up(error)
            failure = Failure(
                "a process died that decoded the prompt's media", f"source {names[0][0]}, prompt {names[0][1]}: {error}"
            )
            found = Unusable(self._sources.without_media(*names[0]), failure)
        self._begin(names[1:])
        return found

    def _give_up(self, error: ProcessDied) -> None:
        logging.getLogger("prompts").warning("%s; others take its place", error)
        self.close()


class _Epoch(Sampler[tuple[int, Name]]):
    """The loader's sampler: the prompts that are to be made now, each with the number of this request."""

    def __init__(self) -> None:
        self._names: tuple[Name, ...] = ()
        self.number = _FORK.Value("q", 0)
        """Seen by the processes too."""

    def begin(self, names: Sequence[Name]) -> None:
        """Make these next; what is asked for already has an old number then."""
        self._names = tuple(names)
        self.number.value += 1

    def __iter__(self) -> Iterator[tuple[int, Name]]:
        return iter([(self.number.value, name) for name in self._names])


class _Prompts(Dataset[Any]):
    """The loader's data set: makes a prompt by its name."""

    def __init__(self, sources: PromptSources, epoch: _Epoch) -> None:
        self._sources, self._epoch = sources, epoch

    def __getitem__(self, asked: tuple[int, Name]) -> Any:
        number, name = asked
        return made(self._sources, name) if number == self._epoch.number.value else None


class _End:
    """Ends a process with the one that started it."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self, worker: int) -> None:
        end_with(self._parent)


def made(sources: PromptSources, name: Name) -> Prompt | Unusable | str:
    """Make a prompt, or return what is wrong with it: an error that crosses processes would bring its traceback."""
    try:
        return sources.prompt(*name)
    except UnusablePrompt as error:
        return Unusable(error.prompt, error.failure)
    except RunError as error:
        return str(error)


def _checked(found: Prompt | Unusable | str) -> Prompt | Unusable:
    if isinstance(found, str):
        raise RunError(found)
    return found
