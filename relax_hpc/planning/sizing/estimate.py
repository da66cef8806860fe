"""recipe + model size ──► what the run needs of each device, node and file system, and what does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import ValidationError

from relax_hpc.files.errors import RunError
from relax_hpc.planning.sizing.engine import MEM_FRACTION, EngineMemory, engine_memory
from relax_hpc.planning.sizing.model import Count, Shape, parameters, shape_in
from relax_hpc.planning.sizing.traffic import Traffic, step_of, traffic
from relax_hpc.planning.sizing.trainer import (
    FLOAT,
    TrainerMemory,
    checkpoint_bytes,
    micro_batches,
    replicas,
    scorer_weights,
    trainer_memory,
)
from relax_hpc.recipe import Recipe
from relax_hpc.recipe.schema import CRITIC_KEY
from relax_hpc.recipe.tables.algorithm import OwnAlgorithm
from relax_hpc.recipe.tables.trainer import misfit
from relax_hpc.slurm.plan import make_plan

GIB = 2**30
RESERVE = 4 * GIB
"""Bytes of each device kept for what is not counted: CUDA's context, buffers of NCCL and kernels, fragmentation."""
PROMPT_TOKENS = 256
MOST_REMEDIES = 3
MOST_MOVES = 3

Role = Literal["trainer", "rollout"]


@dataclass(frozen=True, slots=True)
class Asked:
    """Facts that the recipe does not say: memory of a device, bandwidth, tokens of a sample."""

    device_bytes: float = 80 * GIB
    bandwidth: float = 2e9
    """Bytes a second."""
    prompt_tokens: int | None = None
    answer_tokens: int | None = None

    def lengths(self, recipe: Recipe, shape: Shape) -> tuple[int, int]:
        """(tokens of a prompt, tokens of an answer): the usual prompt and the longest answer, as far as the context goes.

        For answers that exist already, what a micro-batch has room for.
        """
        room = min(shape.context, recipe.trainer.tokens_per_micro_batch) if recipe.supervised else shape.context
        most = recipe.rollout.max_new_tokens * recipe.rollout.max_turns
        if recipe.supervised:
            most = room - (self.prompt_tokens or min(_usual_prompt(recipe), room // 2))
        answer = self.answer_tokens or max(1, min(most, shape.context - 1))
        prompt = self.prompt_tokens or max(1, min(_usual_prompt(recipe), room - answer))
        if prompt + answer > shape.context:
            raise RunError(
                f"--prompt-tokens {prompt} and --answer-tokens {answer} are more than the model's context of {shape.context} "
                "together: lower one of them"
            )
        return prompt, answer


def _usual_prompt(recipe: Recipe) -> int:
    """Tokens of a prompt: PROMPT_TOKENS, or the most that the recipe allows to one with media."""
    most = (getattr(source, "max_prompt_tokens", None) or 0 for source in recipe.sources if source.shows)
    return max([PROMPT_TOKENS, *most])


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The processes of a role, and their devices."""

    role: Role
    nodes: int
    processes: int
    devices_each: int
    devices: int
    """Devices of all processes together."""
    given: int
    """Devices that [slurm] gives on all nodes; 0 where it does not say."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not fit, and changes that would make it fit."""

    role: Role
    what: str
    remedies: list[str]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The sizes of a run; bytes where nothing else is said."""

    model: Shape
    whole: Count
    active: int
    """Parameters that a token passes through."""
    groups: list[GroupSize]
    jobs: list[str]
    device_bytes: float
    reserve_bytes: float
    replicas: int
    """Data-parallel trainer processes."""
    micro_batches: int
    """Micro-batches of one replica in a step."""
    trainer: list[TrainerMemory]
    engine: EngineMemory | None
    """None where nothing is generated."""
    traffic: Traffic
    checkpoint_bytes: float
    problems: list[Problem]
    assumed: list[str]

    def to_json(self) -> dict[str, Any]:
        about = asdict(self)
        about["whole"] = self.whole._asdict()
        for stage, memory in zip(about["trainer"], self.trainer, strict=True):
            stage["total"] = memory.total
        if self.engine is not None:
            about["engine"] |= {"room": self.engine.room, "total": self.engine.total}
        return about


def estimate(recipe: Recipe, shape: Shape, asked: Asked) -> Estimate:
    """Estimate a run. Raises RunError for a plan that does not divide the model."""
    wrong = misfit(recipe.trainer.parallel, recipe.trainer.processes, shape.sizes)
    if wrong:
        raise RunError(wrong)
    if recipe.rollout.routed_experts and not shape.experts:
        raise RunError(f"rollout.routed_experts = true, but the model is a {shape.type} without experts: leave it out")
    made = _measure(recipe, shape, asked)
    for role, what in _misfits(recipe, made):
        remedies = itertools.islice(_remedies(recipe, shape, asked, role), MOST_REMEDIES)
        made.problems.append(Problem(role, what, list(remedies)))
    return made


def _measure(recipe: Recipe, shape: Shape, asked: Asked) -> Estimate:
    """Compute all sizes; problems are not looked for."""
    prompt, answer = asked.lengths(recipe, shape)
    step = step_of(recipe, shape, prompt, answer)
    engine = engine_memory(recipe, shape, asked.device_bytes, prompt, answer) if recipe.generates else None
    whole = parameters(shape)
    return Estimate(
        model=shape,
        whole=whole,
        active=whole.dense + (whole.experts * shape.chosen // shape.experts if shape.experts else 0),
        groups=_groups(recipe, engine),
        jobs=list(make_plan(recipe).jobs) if recipe.slurm else [],
        device_bytes=asked.device_bytes,
        reserve_bytes=RESERVE,
        replicas=replicas(recipe),
        micro_batches=micro_batches(recipe, step),
        trainer=trainer_memory(recipe, shape, step),
        engine=engine,
        traffic=traffic(recipe, shape, prompt, answer, asked.bandwidth),
        checkpoint_bytes=checkpoint_bytes(recipe, shape),
        problems=[],
        assumed=_assumed(recipe, shape, asked),
    )


def _groups(recipe: Recipe, engine: EngineMemory | None) -> list[GroupSize]:
    trainer, rollout, found = recipe.trainer, recipe.rollout, []
    roles: list[tuple[Role, int, int, int]] = [("trainer", trainer.nodes, trainer.processes, 1)]
    if engine is not None:
        roles.append(("rollout", rollout.nodes, rollout.workers, engine.devices))
    for role, nodes, processes, each in roles:
        asks = recipe.slurm.group(role) if recipe.slurm else None
        given = asks.node_gpus(processes // nodes) * nodes if asks else 0
        found.append(GroupSize(role, nodes, processes, each, each * processes, given))
    return found


def _misfits(recipe: Recipe, made: Estimate) -> Iterator[tuple[Role, str]]:
    room, engine = made.device_bytes - RESERVE, made.engine
    has = f"and {gib(RESERVE)} in reserve, a device has {gib(made.device_bytes)}"
    worst = max(made.trainer, key=lambda memory: memory.total)
    if worst.total > room:
        yield "trainer", f"a trainer process of stage {worst.stage} needs {gib(worst.total)} {has}"
    if engine is None:
        return
    if recipe.rollout.engine == "torch" and engine.total > room:
        yield "rollout", f"an engine needs {gib(engine.total)} {has}"
    if recipe.rollout.engine == "sglang" and engine.room < engine.longest:
        yield (
            "rollout",
            (
                f"weights of {gib(engine.weights)} leave {gib(max(engine.cache, 0))} of a device for the key/value cache: "
                f"room for {engine.room} tokens, one sequence may have {engine.longest}"
            ),
        )
    group = made.groups[1]
    if 0 < group.given < group.devices:
        yield (
            "rollout",
            (
                f"{group.processes} workers of {group.devices_each} GPUs each (rollout.sglang.tensor_parallel x data_parallel "
                f"x servers) take {group.devices}, [slurm] gives {group.given} on {group.nodes} nodes"
            ),
        )


def _remedies(recipe: Recipe, shape: Shape, asked: Asked, role: Role) -> Iterator[str]:
    """The fewest changes after which this role has no problem left, with `--set` before each."""
    moves = list(_trainer_moves(recipe, shape) if role == "trainer" else _rollout_moves(recipe))
    found: list[set[int]] = []
    for count in range(1, MOST_MOVES + 1):
        for numbers in itertools.combinations(range(len(moves)), count):
            changes: dict[str, Any] = {}
            for number in numbers:
                changes |= moves[number]
            apart = sum(len(moves[number]) for number in numbers) == len(changes)
            if not apart or any(known <= set(numbers) for known in found):
                continue
            changed = _changed(recipe, changes)
            if changed is None or misfit(changed.trainer.parallel, changed.trainer.processes, shape.sizes):
                continue
            if not any(other == role for other, _ in _misfits(changed, _measure(changed, shape, asked))):
                found.append(set(numbers))
                yield " ".join(f"--set {key}={_word(value)}" for key, value in changes.items())


def _trainer_moves(recipe: Recipe, shape: Shape) -> Iterator[dict[str, Any]]:
    config, plan = recipe.trainer, recipe.trainer.parallel
    megatron = {} if config.backend == "megatron" else {"trainer.backend": "megatron"}
    if config.dtype == "float32":
        yield {"trainer.dtype": "bfloat16"}
    if plan.recompute != "full":
        yield {**megatron, "trainer.parallel.recompute": "full"}
    if config.tokens_per_micro_batch > 2 * recipe.rollout.max_new_tokens:
        yield {"trainer.tokens_per_micro_batch": 2 * recipe.rollout.max_new_tokens}
    for tensor in (2 * plan.tensor, 4 * plan.tensor, 8 * plan.tensor):
        yield {**megatron, "trainer.parallel.tensor": tensor, "trainer.parallel.sequence": True}
    if shape.experts:
        for expert in (2 * plan.expert, 4 * plan.expert, 8 * plan.expert):
            yield {**megatron, "trainer.parallel.expert": expert}
    for pipeline in (2 * plan.pipeline, 4 * plan.pipeline):
        yield {**megatron, "trainer.parallel.pipeline": pipeline}
    for more in (2, 4):
        yield {"trainer.processes": more * config.processes, "trainer.nodes": more * config.nodes}


def _rollout_moves(recipe: Recipe) -> Iterator[dict[str, Any]]:
    config, asked = recipe.rollout, recipe.rollout.sglang
    if recipe.trainer.dtype == "float32":
        yield {"trainer.dtype": "bfloat16"}
    if config.engine == "torch":
        yield {"rollout.engine": "sglang"}
    for tensor in (2, 4, 8):
        yield {"rollout.sglang.tensor_parallel": tensor * asked.tensor_parallel}
    for fewer in (2, 4, 8):
        if config.workers % (fewer * config.nodes) == 0:
            yield {"rollout.workers": config.workers // fewer}


def _changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe | None:
    """The recipe with these values; None where it refuses them."""
    data = recipe.model_dump(by_alias=True)
    for key, value in changes.items():
        *tables, name = key.split(".")
        table = data
        for part in tables:
            table = table[part]
        table[name] = value
    try:
        return Recipe.model_validate(data, by_alias=True, by_name=False)
    except ValidationError:
        return None


def _assumed(recipe: Recipe, shape: Shape, asked: Asked) -> list[str]:
    prompt, answer = asked.lengths(recipe, shape)
    lengths = [f"prompts of {prompt} tokens (--prompt-tokens)", f"answers of {answer} tokens (--answer-tokens)"]
    bound = ": the longest there can be, so these are upper bounds"
    if recipe.supervised:
        bound = ": all that a micro-batch has room for (trainer.tokens_per_micro_batch)"
    said = [
        ", ".join(lengths) + ("" if asked.answer_tokens else bound),
        f"{gib(RESERVE)} of a device for CUDA's context, buffers of NCCL and of kernels, and fragmentation",
        "activations as our own layers keep them; Transformer Engine's keep less",
    ]
    if recipe.run.placement == "colocate":
        said.append(
            "trainer and rollout are the same devices, one after the other: each state waits in host memory meanwhile"
        )
    if recipe.generates:
        said.append(
            f"{asked.bandwidth / 1e9:g} GB/s (--bandwidth) for a version of the weights; loading it into the engine is not counted"
        )
    if shape.experts:
        said.append("experts take equally many tokens; where they do not, activations of some are larger")
    if recipe.generates and recipe.rollout.engine == "sglang" and recipe.rollout.sglang.mem_fraction is None:
        said.append(f"SGLang takes {MEM_FRACTION:.0%} of a device (rollout.sglang.mem_fraction says how much)")
    if isinstance(recipe.algorithm, OwnAlgorithm):
        said.append(
            'an algorithm of your own is taken to hold no reference model: with `needs = ("reference",)` add one copy of the weights'
        )
    if recipe.scorer is not None:
        said.append(
            f"{recipe.scorer.processes} scorer processes hold {gib(scorer_weights(recipe, shape))} of weights each, on devices that no trainer "
            "process has or beside one: not counted above"
        )
    if recipe.critic is not None:
        folder = recipe.models_beside.get(CRITIC_KEY)
        learning = parameters((shape_in(folder) if folder else None) or shape, critic=True).all
        said.append(
            f"{recipe.critic.processes} critic processes hold {gib(learning * 4 * FLOAT)} of weights, gradients and moments, on devices that "
            "neither trainer nor scorers have or beside one: not counted above"
        )
    for key, folder in recipe.models_beside.items():
        if shape_in(folder) is None:
            said.append(f"{key} is as large as the policy: it is not on this machine")
    return said


def gib(count: float) -> str:
    """Format a number of bytes in GiB for a person."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
