"""The requests that SGLang's server is sent, and what its answers say."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relax_hpc.engines.base import Completion, EngineError, Sampling, Tokens
from relax_hpc.engines.sglang.adapters import Adapters
from relax_hpc.engines.sglang.experts import Experts
from relax_hpc.engines.sglang.outside.pictures import Pictures
from relax_hpc.engines.stops import straddling
from relax_hpc.records import Finish

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one model."""

    tokenizer: Any
    ends: list[int]
    """Tokens that end an answer."""
    experts: Experts | None
    """Decodes routed experts, where the recipe asks for them."""
    pictures: Pictures | None = None
    """Makes pictures of media for a server at an address, which processes them by itself."""
    adapter: Adapters | None = None
    """The adapter that requests are for."""

    def body(
        self, prompt: Tokens, seeds: list[int], sampling: Sampling, room: int, shown: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The body of a request: the prompt once for each seed, which counts under enable-deterministic-inference.
        shown: its media, as MediaFiles or Pictures name them."""
        given = self.pictures.unexpanded(prompt) if self.pictures and shown else prompt
        common = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "max_new_tokens": room, "stop": list(sampling.stop), "stop_token_ids": self.ends,
            "skip_special_tokens": False, "no_stop_trim": True,
        }  # fmt: skip
        return {
            "input_ids": [given.tolist()] * len(seeds),
            "sampling_params": [{**common, "sampling_seed": seed} for seed in seeds],
            "return_logprob": True,
            "return_routed_experts": self.experts is not None,
            **({"lora_path": self.adapter.name} if self.adapter else {}),
            **({"image_data": [[*shown]] * len(seeds)} if shown else {}),
        }

    def completion(self, answer: dict[str, Any] | None, abort: bool, begun: Tokens, stops: Sequence[str]) -> Completion:
        """Read the server's answer. Of an aborted one, the last token is left out: the server did not check whether it
        ends the answer, and drawing it again only where it does would favor the other tokens."""
        nothing = Completion(np.empty(0, np.int32), np.empty(0, np.float32), [], None)
        if answer is None:
            return nothing
        about = answer["meta_info"]
        kind = about["finish_reason"]["type"]
        cut = abort and kind == "abort"
        if kind not in FINISHES and not cut:
            raise EngineError(f"SGLang ended a request before its end: {about['finish_reason']}")
        drawn = (about.get("output_token_logprobs") or [])[:-1] if cut else about["output_token_logprobs"]
        if cut and not drawn:
            return nothing
        if self.adapter:  # requests keep theirs
            versions = [{"start": 0, "version": self.adapter.version}]
        else:
            versions = about.get("weight_versions") or [{"start": 0, "version": about["weight_version"]}]
        done = Completion(
            tokens=np.array([token for _, token, *_ in drawn], np.int32),
            logprobs=np.array([logprob for logprob, *_ in drawn], np.float32),
            spans=[(s["start"], int(s["version"])) for s in versions if s["start"] < len(drawn)],
            finish=None if cut else FINISHES[kind],
            routed_experts=self.experts.decode(about["routed_experts"]) if self.experts and not cut else None,
            seconds=float(about["e2e_latency"]),
        )
        return self._stopped(done, begun, stops) if len(begun) else done

    def _stopped(self, done: Completion, begun: Tokens, stops: Sequence[str]) -> Completion:
        """Cut the completion behind a stop string that began in the tokens `begun`: the server does not look there."""
        count = straddling(self.tokenizer, stops, begun.tolist(), done.tokens.tolist())
        if count is None:
            return done
        routed, spans = done.routed_experts, [span for span in done.spans if span[0] < count]
        if routed is not None:
            routed = routed[: len(routed) - len(done.tokens) + count]
        tokens, logprobs = done.tokens[:count], done.logprobs[:count]
        return replace(done, tokens=tokens, logprobs=logprobs, spans=spans, finish=Finish.STOP, routed_experts=routed)


def seed_of(seed: int, row: int) -> int:
    """Derive a seed of its own for each completion."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=7).digest(), "big")
