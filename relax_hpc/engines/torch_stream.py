"""The torch engine's stream: rows that join at a prefill of what waits, and leave when they end.

    asks ──wait──► prefill ──► rows join ─┐
                                          ├─► draw a token for each row ──ended?──► Completion; the row leaves
    rows ──forward, one position each ────┘

Between two steps every row has a token that was drawn and not yet fed. A row draws by numbers of its own seed, one for
each place in its answer: with whom it shares a batch, and when, changes no draw.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from relax_hpc.engines.base import Ask, Completion, Sampling
from relax_hpc.engines.model_folder import check_new, room_of
from relax_hpc.engines.sampling import draw
from relax_hpc.engines.slots import SlotCache
from relax_hpc.engines.torch_model import LOOK_EVERY, Prefilled, Shown, TorchModel, fitting
from relax_hpc.records import Finish


@dataclass(slots=True, eq=False)
class _Row:
    """An ask on its way."""

    ask: Ask
    room: int
    """Tokens that its completion may have."""
    began: float
    """When it was asked, on time.monotonic()."""
    joined: int = 0
    """Number of the step at which it joined."""

    @property
    def shown(self) -> Shown:
        return np.concatenate([self.ask.context, self.ask.begun]), self.ask.media

    @property
    def length(self) -> int:
        return len(self.ask.context) + len(self.ask.begun)

    def completion(self, tokens: Tensor, logprobs: Tensor, version: int, finish: Finish | None) -> Completion:
        """The completion with these tokens and logprobs [T]."""
        return Completion(
            tokens=tokens.to("cpu", torch.int32).numpy().copy(),
            logprobs=logprobs.cpu().numpy().copy(),
            spans=[(0, version)] if len(tokens) else [],
            finish=finish,
            seconds=time.monotonic() - self.began if len(tokens) else 0.0,
        )


@dataclass(slots=True)
class _State:
    """Tensors with n rows, in the order of the cache's; T is the most tokens of any, and one."""

    drawn: Tensor  # [n] the last token
    position: Tensor  # [n] of that token
    count: Tensor  # [n] tokens so far
    room: Tensor  # [n] tokens that there may be
    over: Tensor  # [n] bool: ended, or has all its tokens
    stopped: Tensor  # [n] bool: ended by a token or a stop string
    tokens: Tensor  # [n, T]
    logprobs: Tensor  # [n, T]
    uniform: Tensor  # [n, T] float64, one for each draw

    def join(self, other: _State) -> None:
        """Append the rows of another."""
        for name in (field.name for field in fields(self)):
            both: list[Tensor] = [getattr(self, name), getattr(other, name)]
            if both[0].ndim == 2:
                both = [pad(x, (0, max(self.tokens.shape[1], other.tokens.shape[1]) - x.shape[1])) for x in both]
            setattr(self, name, torch.cat(both))

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        for name in (field.name for field in fields(self)):
            setattr(self, name, getattr(self, name)[rows])


def _begun(rows: Sequence[_Row], made: Prefilled) -> _State:
    """Return the state of rows that were prefilled, and drew nothing yet."""
    count, device, most = len(rows), made.row.device, max(row.room for row in rows) + 1
    uniform = np.zeros((count, most))
    for mine, row in zip(uniform, rows, strict=True):
        begun = len(row.ask.begun)
        mine[: row.room] = np.random.default_rng(row.ask.seed).random(begun + row.room)[begun:]
    with device:
        return _State(
            drawn=torch.zeros(count, dtype=torch.long),
            position=made.following[made.row] - 1,
            count=torch.zeros(count, dtype=torch.long),
            room=torch.tensor([row.room for row in rows]),
            over=torch.zeros(count, dtype=torch.bool),
            stopped=torch.zeros(count, dtype=torch.bool),
            tokens=torch.zeros(count, most, dtype=torch.long),
            logprobs=torch.zeros(count, most),
            uniform=torch.from_numpy(uniform).to(device),
        )


class TorchStream:
    """See relax_hpc.engines.base.Stream."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self._waiting: deque[_Row] = deque()
        self._keys: set[int] = set()
        """Keys of all asks without a completion."""
        self._rows: list[_Row] = []
        """Those that joined, in the order of `_state` and `_cache`."""
        self._state: _State | None = None
        self._cache: SlotCache | None = None
        self._steps = 0
        self._draws: list[tuple[Sampling, Tensor | slice]] = []
        """The rows that draw with the same settings."""

    @property
    def busy(self) -> bool:
        return bool(self._keys)

    def ask(self, asks: Sequence[Ask]) -> None:
        rows = [_Row(ask, room_of(ask, self._model.context), time.monotonic()) for ask in asks]
        check_new(asks, self._keys)
        self._keys.update(ask.key for ask in asks)
        self._waiting.extend(rows)

    @torch.inference_mode()
    def advance(self, wait_s: float) -> list[tuple[int, Completion]]:
        until, done = time.monotonic() + wait_s, list[tuple[int, Completion]]()
        look_every = LOOK_EVERY[self._model.device.type]
        while self.busy and not done:
            self._steps += 1
            logits = [self._feed(self._state, self._cache)] if self._state and self._cache else []
            if self._waiting:
                logits.append(self._join())
            self._draw(torch.cat(logits))
            if self._steps % look_every == 0:
                done = self._leave()
                if time.monotonic() > until:
                    break
        return done

    @torch.inference_mode()
    def abort(self) -> list[tuple[int, Completion]]:
        done = self._leave()
        if self._state is not None:
            going = enumerate(zip(self._rows, self._state.count.tolist(), strict=True))
            done += [self._ended(row, i, count, None) for i, (row, count) in going]
        nothing = torch.empty(0)
        done += [(row.ask.key, row.completion(nothing, nothing, 0, None)) for row in self._waiting]
        self._waiting.clear()
        self._keys.clear()
        self._keep([])
        return done

    def _feed(self, state: _State, cache: SlotCache) -> Tensor:
        """[n, V] logits after the token that each row drew last."""
        cache.end = self._steps + max(row.length - row.joined for row in self._rows)
        cache.reserve(len(self._rows), cache.end)
        visible = torch.arange(cache.end, device=self._model.device) <= cache.lengths[:, None]
        logits = self._model.forward(cache, state.drawn[:, None], state.position[:, None], visible[:, None, None])
        cache.lengths += ~state.over
        return logits

    def _join(self) -> Tensor:
        """Prefill what waits, as much of it as one forward takes; returns the logits [k, V] of the rows that joined."""
        joined = [self._waiting.popleft() for _ in range(fitting(row.shown for row in tuple(self._waiting)))]
        made = self._model.prefill([row.shown for row in joined])
        state = _begun(joined, made)
        if self._state is None or self._cache is None:
            self._state, self._cache = state, SlotCache(made)
        else:
            self._state.join(state)
        self._cache.join(made)
        for row in joined:
            row.joined = self._steps
        self._rows += joined
        self._sort()
        return made.logits[made.row]

    def _draw(self, logits: Tensor) -> None:
        """Draw a token for each row, and see which rows end with it."""
        state = self._state
        assert state is not None
        every, ended = torch.arange(len(self._rows), device=logits.device), torch.zeros_like(state.over)
        for sampling, rows in self._draws:
            at = every[rows], state.count[rows]
            drawn, state.logprobs[at] = draw(logits[rows], sampling, state.uniform[at][:, None])
            state.tokens[at] = state.drawn[rows] = drawn
            ended[rows] = self._model.ends[drawn]
            if stops := self._model.stop_strings(sampling.stop):
                numbers = at[0].tolist()
                for i in (numbers[place] for place in stops.possible(drawn)):
                    ended[i] |= stops.complete(self._said(i, stops.window))
        going = ~state.over
        state.position += going
        state.count += going
        state.stopped |= ended & going
        state.over |= ended | (state.count >= state.room)

    def _said(self, i: int, last: int) -> list[int]:
        """Return the last tokens of an answer, the one just drawn and those that were begun included."""
        assert self._state is not None
        end = int(self._state.count[i]) + 1
        drawn: list[int] = self._state.tokens[i, max(0, end - last) : end].tolist()
        return [*self._rows[i].ask.begun[-last:].tolist(), *drawn]

    def _leave(self) -> list[tuple[int, Completion]]:
        """Return the answers that have ended; others take their rows."""
        state = self._state
        if state is None:
            return []
        over, stopped, counts = state.over.tolist(), state.stopped.tolist(), state.count.tolist()
        done = [
            self._ended(row, i, counts[i], Finish.STOP if stopped[i] else Finish.LENGTH)
            for i, row in enumerate(self._rows)
            if over[i]
        ]
        if done:
            going = len(over) - len(done)
            last = (i for i in range(going, len(over)) if not over[i])
            self._keep([next(last) if over[i] else i for i in range(going)])
        return done

    def _ended(self, row: _Row, i: int, count: int, finish: Finish | None) -> tuple[int, Completion]:
        assert self._state is not None
        self._keys.discard(row.ask.key)
        tokens, logprobs = self._state.tokens[i, :count], self._state.logprobs[i, :count]
        return row.ask.key, row.completion(tokens, logprobs, self._model.version, finish)

    def _keep(self, rows: list[int]) -> None:
        """Keep these rows, in this order; the memory goes with the last one."""
        self._rows = [self._rows[i] for i in rows]
        if not rows or self._state is None or self._cache is None:
            self._state = self._cache = None
        else:
            self._state.select(torch.tensor(rows, device=self._model.device))
            self._cache.select(rows)
        self._sort()

    def _sort(self) -> None:
        """Find the rows that draw with the same settings."""
        alike: dict[Sampling, list[int]] = {}
        for i, row in enumerate(self._rows):
            alike.setdefault(replace(row.ask.sampling, max_new_tokens=0), []).append(i)
        numbers = (torch.tensor(rows, device=self._model.device) for rows in alike.values())
        self._draws = [(how, rows if len(alike) > 1 else slice(None)) for how, rows in zip(alike, numbers, strict=True)]
