"""The SGLang engine: a server of this worker's own, or one at an address, spoken to over HTTP.

    prompts ──one request each, for all of its samples──► server (or several: fleet.py) ──► tokens, logprobs, the version of each token
    a newer version in mid-generation: pause ► load ► resume; requests continue with the new weights, spans say where

A server that is lost is started again in place, without weights: EngineRestarted says that they are to be loaded again.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from relax_hpc.engines.base import Abort, Completion, EngineError, EngineRestarted, Sampling, Tokens, Weights
from relax_hpc.engines.model_folder import aliases, check_whole, context_of, end_tokens, room_for, weights_of
from relax_hpc.engines.sglang.adapters import Adapters
from relax_hpc.engines.sglang.client import Client
from relax_hpc.engines.sglang.experts import Experts
from relax_hpc.engines.sglang.fleet import Fleet
from relax_hpc.engines.sglang.group import UpdateGroup
from relax_hpc.engines.sglang.media_files import MediaFiles
from relax_hpc.engines.sglang.outside.checks import KEY_VARIABLE, about_outside, check_lengths
from relax_hpc.engines.sglang.outside.pictures import Pictures
from relax_hpc.engines.sglang.requests import Requests, seed_of
from relax_hpc.engines.sglang.server import Server
from relax_hpc.engines.sglang.stream import Pulse, SglangStream, end_all
from relax_hpc.engines.sglang.weights_files import WeightsFiles
from relax_hpc.files.errors import RunError
from relax_hpc.files.tensor_files import shapes
from relax_hpc.huggingface import from_config
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Media, Progress

PROGRESS_EVERY_S = 0.2
MOST_REQUESTS = 256
"""Requests in flight at once; SGLang queues those it cannot run yet."""
OWN_HEAD = {"qwen2_moe", "qwen3_moe"}
"""Model types whose output layer SGLang keeps apart from the embedding even where the model ties them."""


class SglangEngine:
    """See relax_hpc.engines.base.Engine."""

    swaps = True
    """False for an adapter: a request keeps the one that it began with."""
    seeded = False

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        _check_vocabulary(len(tokenizer), config.get_text_config().vocab_size, model_dir)
        with torch.device("meta"):
            model = from_config(config)
        self._expected = shapes(weights_of(model).items())
        self._aliases = aliases(model)
        self._heads = _own_heads(model, self._aliases)
        self._left_out = self._aliases - set(self._heads.values())
        """Names of tensors that the server does not know."""
        lora = recipe.trainer.lora
        self._adapters = Adapters(model, lora, model_dir) if lora and lora.sync == "adapter" else None
        self.swaps = self._adapters is None
        shown = family_of(config).placeholders(config).values()
        ends = sorted({*end_tokens(model_dir, config, tokenizer), *shown})
        self._settings = recipe.rollout.sglang
        experts = Experts.of(config, model_dir) if recipe.rollout.routed_experts else None
        pictures = Pictures(model_dir, config) if shown and self._settings.address else None
        self._requests = Requests(tokenizer, ends, experts, pictures, self._adapters)
        self.context = context_of(config)
        self.version = -1
        self._group: UpdateGroup | None = None
        self._stream: SglangStream | None = None
        if self._settings.address:
            self._server = None
            self._outside = Client(self._settings.address, os.environ.get(KEY_VARIABLE, ""))
            about = about_outside(self._outside, self.context, self._settings.folder, bool(shown))
            self._sharing, self._copies = int(about["tp_size"]), int(about["dp_size"])
        else:
            self._sharing, self._copies = self._settings.tensor_parallel, self._settings.data_parallel
            self._server = (Fleet if self._settings.servers > 1 else Server)(recipe, model_dir, self.context)
            self._server.start(lambda: None)

    @property
    def client(self) -> Client:
        return self._server.client if self._server else self._outside

    def load(
        self, version: int, tensors: Weights, progress: Progress = lambda: None, files: Sequence[Path] = ()
    ) -> None:
        if self._adapters is not None:
            try:
                self._adapters.load(self.client, version, tensors)
            except EngineError as error:
                raise self.failed(error, progress) from error
        elif self._server is None and self._settings.folder is None:
            self._send(version, tensors)
        else:
            self._load_files(version, tensors, progress, files)
        self.version = version

    def load_base(self, tensors: Weights, progress: Progress = lambda: None) -> None:
        self._load_files(0, tensors, progress, ())

    def _load_files(self, version: int, tensors: Weights, progress: Progress, files: Sequence[Path]) -> None:
        """Have the server take a version from files."""
        with WeightsFiles(self._settings.folder) as served:
            given = list(tensors) if files else tensors  # mapped: to look at a name reads nothing
            # The server may read the version's files itself where it is on this machine, and is to know just these names.
            own = files and self._server and not self._heads and self._aliases.isdisjoint(name for name, _ in given)
            if not (own and served.link(files, given)):
                served.write(self._with_heads(given), leave_out=self._left_out)
            check_whole(f"version {version}", served.shapes, self._expected, self._aliases)
            self.version = -1
            try:
                self._take(str(served.folder), version)
            except EngineError as error:
                raise self.failed(error, progress) from error

    def _send(self, version: int, tensors: Weights) -> None:
        """Broadcast a version to an outside server that shares no folder with us."""
        given = dict(self._with_heads(tensors))
        check_whole(f"version {version}", shapes(given.items()), self._expected, self._aliases)
        self.version = -1
        try:
            if self._group is None:
                self._group = UpdateGroup(self.client, self._sharing)
            self.client.pause()
            self.client.begin_update()
            self._group.send({name: t for name, t in given.items() if name not in self._left_out})
            self.client.end_update(str(version))
            self.client.resume()
        except EngineError:
            self._leave_group()
            raise

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _take(self, folder: str, version: int) -> None:
        self.client.pause()
        self.client.update_from_disk(folder, str(version))
        self.client.resume()
        if self._sharing > 1:  # the folder goes when we return
            self.client.wait_for_ranks(self._copies)

    def _with_heads(self, tensors: Weights) -> Weights:
        """The tensors, and tied output layers also by their own names where SGLang holds them apart."""
        for name, tensor in tensors:
            if name not in self._heads.values():
                yield name, tensor
            if name in self._heads:
                yield self._heads[name], tensor.clone()  # safetensors writes no memory twice

    def generate(
        self,
        prompts: Sequence[Tokens],
        samples_per_prompt: int,
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] = lambda tokens: None,
        begun: Sequence[Tokens] = (),
        media: Sequence[Media | None] = (),
    ) -> list[Completion]:
        if not len(prompts) * samples_per_prompt:
            return []
        rooms = room_for(prompts, self.context, sampling.max_new_tokens, begun)
        if self.version < 0:
            raise EngineError("no version was loaded yet: there is nothing to generate with")
        contexts = [np.concatenate(both) for both in zip(prompts, begun, strict=True)] if begun else prompts
        together = 1 if self._settings.servers > 1 else samples_per_prompt
        try:
            with MediaFiles() as files:
                shown = [
                    (self._requests.pictures or files).name(one) if one else []
                    for one in media or [None] * len(prompts)
                ]
                bodies = [
                    self._requests.body(
                        contexts[i],
                        [seed_of(seed, row) for row in range(first, first + together)],
                        sampling,
                        rooms[i],
                        shown[i],
                    )
                    for i in range(len(prompts))
                    for first in range(i * samples_per_prompt, (i + 1) * samples_per_prompt, together)
                ]
                answers, abort = self._ask(bodies, progress)
        except EngineRestarted:  # by `load`, called from `progress`
            raise
        except EngineError as error:
            raise self.failed(error, functools.partial(_say, progress, 0)) from error
        if self._requests.pictures:
            check_lengths(self.client, answers, contexts, samples_per_prompt)
        before = begun or [np.empty(0, np.int32)]
        return [
            self._requests.completion(answer, abort, before[i % len(before)], sampling.stop)
            for i, answer in enumerate(answers)
        ]

    def stream(self, progress: Progress = lambda: None) -> SglangStream:
        self._leave_stream()
        most = MOST_REQUESTS * self._settings.servers
        self._stream = SglangStream(self, self._requests, most, functools.partial(_say, progress))
        return self._stream

    def offload(self) -> None:
        self.version = -1
        try:
            self.client.release_memory()
        except EngineError:
            if self._server is None:
                raise
            self._server.stop()  # which frees it too

    def onload(self, progress: Progress = lambda: None) -> None:
        if self.lost():
            self._restart(progress)
        else:
            self.client.onload()

    def close(self) -> None:
        self._leave_stream()
        self._leave_group()
        if self._server is not None:
            self._server.stop()

    def _ask(
        self, bodies: list[dict[str, Any]], progress: Callable[[int], None]
    ) -> tuple[list[dict[str, Any] | None], bool]:
        """Send all requests; returns their answers in order, and True where `progress` raised Abort: then an answer is
        what there is, None for a request that was not sent yet. On any other exception of `progress` the server ends
        all requests. Raises EngineError when the server does not answer a request, or makes no tokens any more."""
        threads = ThreadPoolExecutor(min(len(bodies), MOST_REQUESTS * self._settings.servers) + 1, "sglang")
        futures: list[Future[Any]] = [threads.submit(self.client.generate, body, self.lost) for body in bodies]
        waiting: set[Future[Any]] = set(futures)
        done, pulse, abort = 0, Pulse(self.client, threads), False
        try:
            while waiting:
                ended, waiting = wait(waiting, PROGRESS_EVERY_S, FIRST_COMPLETED)
                done += sum(a["meta_info"]["completion_tokens"] for future in ended for a in future.result())
                pulse.listen(bool(ended))
                progress(done)
        except EngineError:
            raise
        except Abort:
            end_all(self.client, waiting)
            abort = True
        except BaseException:
            with contextlib.suppress(EngineError):
                end_all(self.client, waiting)
            raise
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # a server that hangs would never let them end
        answers: list[dict[str, Any] | None] = []
        for future, body in zip(futures, bodies, strict=True):
            answers += [None] * len(body["input_ids"]) if future.cancelled() else future.result()
        return answers, abort

    def lost(self) -> bool:
        """Return True if our own server's process is gone."""
        return self._server is not None and not self._server.alive

    def failed(self, error: EngineError, progress: Progress) -> EngineError:
        """Return the exception to raise for this one, with our own server started again."""
        if self._server is None:
            return error
        self._restart(progress)
        return EngineRestarted(f"{error}; SGLang was started again")

    def _restart(self, progress: Progress) -> None:
        """Stop our server, which may still answer some calls, and start it again; it then has no weights."""
        assert self._server is not None
        self.version = -1
        if self._adapters is not None:
            self._adapters.forget()
        self._server.stop()
        self._leave_stream()
        self._server.start(progress)

    def _leave_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _say(progress: Callable[..., None], *said: int) -> None:
    """Call `progress` while nothing is generated, and ignore its Abort."""
    with contextlib.suppress(Abort):
        progress(*said)


def _own_heads(model: PreTrainedModel, tied: set[str]) -> dict[str, str]:
    """The embedding's name -> the name by which SGLang wants it once more as the output layer; empty for most models."""
    if model.config.get_text_config().model_type not in OWN_HEAD or "lm_head.weight" not in tied:
        return {}
    return {"model.embed_tokens.weight": "lm_head.weight"}


def _check_vocabulary(tokens: int, rows: int, model_dir: Path) -> None:
    """Raise RunError for a tokenizer that has more tokens than the model has rows."""
    if tokens > rows:
        raise RunError(
            f"'{model_dir}': the tokenizer has {tokens} tokens, the model's vocabulary has {rows}: they are not of the same model"
        )
