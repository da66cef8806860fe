"""Agents as black boxes: programs play the attempts at a request's prompts, and ask the policy through the gateway.

    attempt ──start──► agent's process ──HTTP, the session's key──► gateway ──relay──► engine's stream
        └── ended ──► $RELAX_HPC_RESULT ──► reward;  the session's tree of turns ──► samples, which share it

An agent that fails costs its own sample. What all agents of a group were told first is the group's prompt.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from relax_hpc.engines import EngineError, Streams
from relax_hpc.files.errors import RunError
from relax_hpc.gateway import Gateway, Session
from relax_hpc.gateway.openai import MODEL
from relax_hpc.gateway.relay import Relay
from relax_hpc.gateway.sessions import MAX_REFUSED
from relax_hpc.gateway.tree import Tokens, samples
from relax_hpc.recipe.agent import Agent
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Failure, Finish, Group, Prompt, Sample, failed_group, with_experts
from relax_hpc.roles.rollout.agent_process import AgentError, AgentProcess
from relax_hpc.roles.rollout.cast import FEWEST
from relax_hpc.roles.rollout.setup import Asked, RolloutSetup
from relax_hpc.sandbox.wrap import require
from relax_hpc.spool.request import request_seed

LOOK_EVERY_S = 0.1
"""Seconds between two looks at the agents' processes."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """One agent's attempt at a prompt."""

    prompt: Prompt
    group: int
    number: int
    """Its place in the group."""
    agent: Agent
    failure: Failure | None = None
    samples: list[Sample] = field(default_factory=list)
    told: list[Tokens] = field(default_factory=list)
    """What the agent told the model before its first word, for each sample."""

    def fail(self, error: AgentError) -> None:
        """Note the first reason."""
        self.failure = self.failure or Failure.of(self.prompt, error.reason, str(error))


@dataclass(slots=True, eq=False)
class _Running:
    """An attempt under way."""

    attempt: _Attempt
    session: Session
    process: AgentProcess
    until: float
    """Time at which it is ended, on time.monotonic()."""


class Agents:
    """Plays requests by agents, through a gateway of the worker's own."""

    def __init__(self, setup: RolloutSetup, recipe: Recipe) -> None:
        """Raises RunError where the engine has no streams, or the node lacks a sandbox."""
        if not isinstance(setup.engine, Streams):
            raise RunError(
                f"rollout.engine = '{recipe.rollout.engine}' has no `stream`, which agents need: add one, or use 'torch'"
            )
        self._setup, self._engine = setup, setup.engine
        self._agents = [source.agent for source in recipe.sources if source.agent is not None]
        for agent in self._agents:
            require(agent.sandbox)
        self._gateway = Gateway(setup.tokenizer, setup.engine.context)

    def groups(self, asked: Asked, progress: Callable[[str], None]) -> list[Group]:
        """Play all attempts at a request's prompts to their ends."""
        attempts = [
            _Attempt(prompt, group, number, self._agents[prompt.source], asked.unusable.get(group))
            for group, prompt in enumerate(asked.prompts)
            for number in range(asked.samples_per_prompt)
        ]
        waiting, running = deque(a for a in attempts if a.failure is None), list[_Running]()
        relay = Relay(self._gateway, self._engine, lambda: progress("generating"))
        try:
            while waiting or running:
                progress("generating")
                while waiting and len(running) < waiting[0].agent.at_once:
                    running += self._start(waiting.popleft(), asked)
                relay.advance(LOOK_EVERY_S)
                running = [one for one in running if not self._ended(one)]
        finally:
            for one in running:
                self._gateway.end(one.session)
                one.process.close()
            with contextlib.suppress(EngineError):
                relay.close()
        together = itertools.groupby(attempts, lambda attempt: attempt.group)
        return with_experts([self._group([*mine]) for _, mine in together])

    def _start(self, attempt: _Attempt, asked: Asked) -> list[_Running]:
        """Start an attempt's agent; returns nothing where that cannot be done: the attempt has failed."""
        seed = request_seed(asked.seed, f"attempt {attempt.group}/{attempt.number}")
        session, prompt = self._gateway.begin(seed, asked.sampling), attempt.prompt
        task = {"prompt": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
        try:
            process = AgentProcess(attempt.agent, task, self._variables(session), self._gateway.socket)
        except AgentError as error:
            attempt.fail(error)
            self._gateway.end(session)
            return []
        return [_Running(attempt, session, process, time.monotonic() + attempt.agent.timeout_s)]

    def _variables(self, session: Session) -> dict[str, str]:
        url, key = self._gateway.url, session.key
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
        return {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": MODEL,
            "RELAX_HPC_SOCKET": str(self._gateway.socket), "RELAX_HPC_MODEL": MODEL, "NO_PROXY": direct, "no_proxy": direct,
        }  # fmt: skip

    def _ended(self, one: _Running) -> bool:
        """See whether an attempt is over, and end one that goes too far."""
        attempt, session = one.attempt, one.session
        if one.process.ended():
            self._gateway.end(session)
            self._finish(one)
            one.process.close()
            return True
        if time.monotonic() > one.until:
            attempt.fail(
                AgentError("the agent reached its time limit", f"agent.timeout_s = {attempt.agent.timeout_s:g}")
            )
        elif session.refused >= MAX_REFUSED:
            said = f"{session.refused} requests in a row were refused, the last one: {session.last_refusal}"
            attempt.fail(AgentError("the agent asks for ever for what is refused", said))
        if attempt.failure is not None:
            self._gateway.end(session)
            one.process.stop()
        return False

    def _finish(self, one: _Running) -> None:
        """Take the reward and the samples of an attempt whose agent has ended."""
        attempt = one.attempt
        try:
            reward, numbers = one.process.reward()
            made, told = samples(one.session.tree, attempt.number)
            if not made:
                raise AgentError("the agent never asked the model", f"its last output:\n{one.process.output}")
        except AgentError as error:
            attempt.fail(error)
        if attempt.failure is None:
            attempt.samples = [replace(s, reward=reward, raw_reward=reward, extra=dict(numbers)) for s in made]
            attempt.told = told

    def _group(self, attempts: list[_Attempt]) -> Group:
        """Make the group of a prompt's attempts."""
        prompt, version = attempts[0].prompt, self._setup.engine.version
        failed, told = [a for a in attempts if a.failure], [t for a in attempts for t in a.told]
        left = len(attempts) - len(failed)
        shared = _shared(told)
        if told and not shared:
            failure = Failure.of(
                prompt, "agents of a group tell the model different things from the first token on", ""
            )
            return failed_group(prompt, len(attempts), version, failure)
        if told:
            prompt = replace(prompt, tokens=told[0][:shared])
        nothing = failed_group(prompt, 1, version, Failure("", "")).samples[0]
        made = [
            sample
            for a in attempts
            for sample in ([_behind(s, shared) for s in a.samples] or [replace(nothing, rollout=a.number)])
        ]
        details = "\n".join(f"sample {a.number}: {a.failure.reason}: {a.failure.detail}" for a in failed if a.failure)
        too_few = left < min(FEWEST, len(attempts)) or (failed and self._setup.on_failed_sample == "group")
        if too_few and (first := failed[0].failure):
            return Group(prompt, [replace(s, finish=Finish.FAILED) for s in made], first.reason, first.detail)
        return Group(prompt, made, "", details)

    def close(self) -> None:
        """End the gateway."""
        self._gateway.close()


def _shared(told: list[Tokens]) -> int:
    """Return how many tokens all of these begin with."""
    length = min((len(tokens) for tokens in told), default=0)
    if not length:
        return 0
    rows = np.stack([tokens[:length] for tokens in told])
    differ = np.flatnonzero((rows != rows[0]).any(0))
    return int(differ[0]) if len(differ) else length


def _behind(sample: Sample, prompt: int) -> Sample:
    """Return the sample without its first tokens, which are the group's prompt."""
    return replace(
        sample,
        tokens=sample.tokens[prompt:],
        loss_mask=sample.loss_mask[prompt:],
        logprobs=sample.logprobs[prompt:],
        spans=[(max(0, at - prompt), version) for at, version in sample.spans],
    )
