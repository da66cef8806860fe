"""Every way to split a model over processes makes the steps of the torch trainer on one; real gloo processes, started once."""

from __future__ import annotations

import os
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relax_hpc.algorithms import Algorithm, make_algorithm
from relax_hpc.planning.sizing.model import shape_of
from relax_hpc.planning.sizing.trainer import Step, trainer_memory
from relax_hpc.recipe.schema import TEACHER_KEY, Recipe
from relax_hpc.recipe.tables.scoring import Scorer
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_scoring, make_trainer
from tests import media_splits, processes, tiny

JOIN_S = 900
WORLD = 4
LAYERS = 4
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ODD = "0123456789+-*/=() .,:?abcdefghijklmnopqrstuvwxyz\n!"
"""51 tokens with the special ones: no number of processes divides them."""
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"layers": LAYERS, "alphabet": ODD},
    "critic": {"layers": LAYERS, "alphabet": ODD},
    "experts": {"layers": LAYERS, "alphabet": ODD, "experts": 4, "moe_intermediate_size": 16},
}
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("critic", {"overlap": True}),
    "tensor": ("critic", {"tensor": 2}),
    "tensor, sequence": ("dense", {"tensor": 2, "sequence": True, "recompute": "full"}),
    "pipeline": ("dense", {"pipeline": 2}),
    "pipeline, virtual": ("critic", {"pipeline": 2, "virtual_pipeline": 2}),
    "context": ("dense", {"context": 2, "recompute": "selective"}),
    "tensor, sequence, context": ("critic", {"tensor": 2, "sequence": True, "context": 2}),
    "tensor, pipeline": ("dense", {"tensor": 2, "pipeline": 2}),
    "expert": ("experts", {"expert": 2}),
    "expert, tensor": ("experts", {"expert": 2, "expert_tensor": 2, "tensor": 2, "sequence": True}),
    "expert, context, recomputed": ("experts", {"expert": 4, "context": 2, "recompute": "full"}),
    "expert, pipeline": ("experts", {"expert": 2, "pipeline": 2}),
    "expert, tensor apart": ("experts", {"expert": 2, "tensor": 2, "sequence": True}),
    "experts whole": ("experts", {"expert_tensor": 2, "tensor": 2, "sequence": True}),
}


BUCKET_BYTES = 32 * 1024


class Live(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known | old:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return made

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


ALGORITHMS: dict[str, dict[str, Any]] = {
    # a token's loss depends on all tokens of its sample, which context parallelism splits
    "dense": {"name": "gspo", "clip": [0.9, 9.0], "kl_coef": 0.3, "entropy_coef": 0.1, "old_logprobs": "recomputed",
              "correction": {"name": "tis", "high": 20.0}, "teacher_coef": 0.1},
    "critic": {"name": "ppo", "kl_coef": 0.3},
    "experts": {"name": "grpo", "kl_coef": 0.3},
}  # fmt: skip


FURTHER: dict[str, dict[str, Any]] = {
    "data": {"name": "reinforce_plus_plus", "kl_coef": 0.1, "discount": 0.7},
    "tensor": {"name": "gmpo", "aggregate": "prompt", "opsm": 0.05},
    "tensor, sequence": {"name": "opd", "teacher": "other", "aggregate": "sequence"},
    "pipeline": {"name": "own", "factory": f"{EXAMPLES / 'preference.py'}:Preference", "options": {"beta": 3.0}},
    "pipeline, virtual": {"name": "reinforce_plus_plus_baseline", "kl_coef": 0.1},
    "context": {"name": "gspo", "clip": [0.5, 0.5], "level": "token"},
    "tensor, sequence, context": {"name": "grpo", "dual_clip": 1.5, "entropy_coef": 0.1, "aggregate": "sequence"},
    "tensor, pipeline": {"name": "rloo"},
    "expert": {"name": "sapo"},
    "expert, tensor": {"name": "cispo"},
    "expert, context, recomputed": {"name": "dppo", "clip": [0.001, 0.001], "rejection": {"max_kl": 1.0}},
    "expert, pipeline": {"name": "grpo", "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "expert, tensor apart": {"name": "dapo"},
    "experts whole": {"name": "dr_grpo", "old_logprobs": "recomputed", "correction": {"name": "mis", "high": 20.0}},
}
"""One more step of each split, with another algorithm than the model's own."""


def further(split: str) -> Algorithm:
    return make_algorithm(tiny.recipe(algorithm=FURTHER[split], **{"async": {"max_staleness": 0}}).algorithm)


SCORED = ("data", "tensor, pipeline", "context", "expert, context, recomputed", "expert, tensor apart")
"""Splits of which scorers are compared too."""
OTHER = tiny.recipe(model={"layers": LAYERS, "alphabet": ODD, "hidden_size": 48})
"""The teacher or what the critic begins as: of another size."""


def recipe_of(model: str, folder: Path, **trainer: Any) -> Recipe:
    updates = {"dense": 2, "critic": 2, "experts": 1}[model]
    beside: dict[str, Any] = {
        "dense": {"teacher": folder / "other"},
        "critic": {"critic": {"model": folder / "other", "learning_rate": 1e-3}},
        "experts": {},
    }[model]
    return tiny.recipe(
        model=MODELS[model],
        trainer={
            "tokens_per_micro_batch": 60,
            "weight_decay": 0.1,
            "clip_grad_norm": 0.5,
            "updates_per_step": updates,
            **trainer,
        },
        algorithm=ALGORITHMS[model] | beside,
        rollout={"temperature": 0.8},
    )


def replayed() -> Rollouts:
    return tiny.routed(tiny.random_rollouts(14, seed=2), LAYERS, MODELS["experts"]["experts"], 2)


def planned(recipe: Recipe, stage: int) -> dict[str, float]:
    """Bytes of weights, gradients, AdamW's state and frozen models, as `relax-hpc plan` says them."""
    shape, _ = shape_of(recipe.model, Path("recipe.toml"))
    memory = trainer_memory(recipe, shape, Step(14, 40, 14 * 40))[stage]
    return {name: getattr(memory, name) for name in ("weights", "gradients", "optimizer", "frozen")}


def held(trainer: Any) -> dict[str, float]:
    """The same, of this process's tensors; AdamW's is the mean over the processes of the stage."""

    def size(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    weights, frozen = (
        size(p for c in chunks for p in c.parameters())
        for chunks in (
            [c for learning in trainer.learning.values() for c in learning.chunks],
            [*trainer.reference, *trainer.teacher],
        )
    )
    reduced = [c for learning in trainer.learning.values() for c in learning.reduced]
    gradients = size(b.grad_data for c in reduced for b in c.buffers + c.expert_parallel_buffers)
    optimizers = [o for learning in trainer.learning.values() for o in learning.optimizers()]
    states = (state for o in optimizers for state in o.optimizer.state.values())
    mine = torch.tensor(float(size(t for state in states for t in (state["exp_avg"], state["exp_avg_sq"]))))
    stage = trainer.groups.pp.rank()
    every = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_gather(every, torch.tensor([mine, stage]))
    of_stage = [float(other) for other, where in every if where == stage]
    optimizer = sum(of_stage) / len(of_stage)
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "frozen": frozen}


def scores(recipe: Recipe, model_dir: Path, trainer: Any, exported: Path) -> None:
    """Scorers under the same split say what the trainer says, of experts that are replayed too."""
    from relax_hpc.trainers.megatron.cpu import supported

    scorer = Scorer(scores=["reference"], processes=WORLD)
    budgeted = recipe.trainer.model_copy(update={"tokens_per_micro_batch": 60})
    apart = recipe.model_copy(update={"scorer": scorer, "trainer": budgeted})
    scoring = make_scoring(apart, model_dir, dist.get_rank(), WORLD)
    rollouts = replayed() if "experts" in model_dir.name else tiny.random_rollouts(14, seed=2)
    scoring.load("recomputed", load_file(exported), exported)
    names = ["recomputed"]
    if TEACHER_KEY in recipe.models_beside:
        scoring.hold("teacher", recipe.models_beside[TEACHER_KEY])
        names.append("teacher")
    column = supported(trainer._column)
    for name in names:
        expected = column(name, rollouts, recipe.rollout.temperature, lambda: None)
        assert expected[rollouts.loss_mask == 1].std() > 0.1
        np.testing.assert_allclose(scoring.logprobs(name, rollouts), expected, atol=5e-6)


def work(rank: int, folder: Path, results: Any) -> None:
    """Step 0 of every split, then step 1 from the checkpoint that the split before it wrote between the two."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # here, not in the process of the tests: others would inherit it
    from relax_hpc.trainers.megatron.export.weights import export

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    try:
        for name, (model, parallel) in SPLITS.items():
            recipe = recipe_of(model, folder, backend="megatron", processes=WORLD, parallel=parallel)
            trainer, algorithm = make_trainer(recipe, folder / model, rank, WORLD), make_algorithm(recipe.algorithm)
            mine, said_before = held(trainer), planned(recipe, trainer.groups.pp.rank())
            assert mine.pop("gradients") == pytest.approx(
                said_before.pop("gradients"), rel=0.1
            )  # Megatron-core pads them
            assert mine == pytest.approx(said_before)
            said = [trainer.step(tiny.random_rollouts(14, seed=0), algorithm, 0)]
            saved = folder / f"{model}-checkpoint"
            if rank == 0:
                (folder / name).mkdir()
            dist.barrier()
            trainer.save(folder / name)
            if saved.exists():
                trainer.load(saved)
            dist.barrier()
            if rank == 0:
                saved.unlink(missing_ok=True)
                saved.symlink_to(folder / name)
            said.append(trainer.step(tiny.random_rollouts(14, seed=1), algorithm, 1))
            if model == "experts":
                said.append(trainer.step(replayed(), algorithm, 2))
            with Live() as live:
                for _ in export(trainer.parts, trainer.sending, trainer.hf, trainer.dtype, BUCKET_BYTES):
                    pass
            assert live.most <= 2 * BUCKET_BYTES, live.most
            weights = dict(trainer.export())
            assert bool(weights) == (rank == 0)
            exported = folder / f"{name}.safetensors"
            if rank == 0:
                assert sum(t.nbytes for t in weights.values()) > 4 * BUCKET_BYTES
                save_file(weights, exported)
            dist.barrier()
            if name in SCORED:
                scores(recipe, folder / model, trainer, exported)
            said.append(trainer.step(tiny.random_rollouts(14, seed=3), further(name), 3))
            results.put((rank, name, said, ""))
        for name in media_splits.TESTED:
            results.put((rank, name, media_splits.steps(name, folder, rank, WORLD), ""))
    except BaseException:
        results.put((rank, name, [], traceback.format_exc()))
        raise
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[dict[str, float]]]]]:
    """(folder with the exported weights, each split's metrics on every rank)"""
    folder = tmp_path_factory.mktemp("splits")
    for name in MODELS:
        tiny.folder(recipe_of(name, folder), folder / name)
    tiny.folder(OTHER, folder / "other", seed=1)
    media_splits.folders(folder)
    context = processes.context()
    results = context.Queue()
    ranks = [context.Process(target=work, args=(rank, folder, results)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + JOIN_S
    every = [*SPLITS, *media_splits.TESTED]
    found: dict[str, list[list[dict[str, float]]]] = {name: [[]] * WORLD for name in every}
    try:
        for _ in range(WORLD * len(every)):
            rank, name, said, error = results.get(timeout=max(1.0, deadline - time.monotonic()))
            assert not error, f"rank {rank}, {name}: {error}"
            found[name][rank] = said
    finally:
        for process in ranks:
            process.kill()
    return folder, found


@pytest.fixture(scope="module")
def alone(
    splits: tuple[Path, dict[str, Any]],
) -> tuple[dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]], dict[str, dict[str, float]]]:
    """Of each model, on one process: metrics and weights of the torch trainer; of Megatron where experts are replayed. Of each split, metrics of
    its further step."""
    torch.set_num_threads(1)
    found, last = {}, {}
    for name in MODELS:
        made: list[tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = []
        for backend in ("torch", "megatron") if name == "experts" else ("torch",):
            recipe = recipe_of(name, splits[0], backend=backend)
            trainer, algorithm = make_trainer(recipe, splits[0] / name, 0, 1), make_algorithm(recipe.algorithm)
            said = [trainer.step(tiny.random_rollouts(14, seed=s), algorithm, s) for s in range(2)]
            if backend == "megatron":
                said.append(trainer.step(replayed(), algorithm, 2))
                for mine, one in zip(said, made[0][0], strict=False):
                    assert mine == pytest.approx(one, rel=5e-5, abs=1e-6)
            made.append((said, dict(trainer.export())))
        found[name] = made[-1]
        (saved := splits[0] / f"{name}-alone").mkdir()
        trainer.save(saved)
        for split in (split for split, (model, _) in SPLITS.items() if model == name):
            trainer.load(saved)
            last[split] = trainer.step(tiny.random_rollouts(14, seed=3), further(split), 3)
    return found, last


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_makes_the_steps_of_one_process_and_goes_on_from_another_splits_checkpoint(
    name: str, splits: tuple[Path, dict[str, Any]], alone: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    folder, found = splits
    (expected, weights), last = alone[0][SPLITS[name][0]], alone[1][name]
    compare(folder, name, found[name], [*expected, last], weights)


@pytest.mark.parametrize("kind", media_splits.SHAPES)
def test_a_split_of_a_model_with_media_makes_the_steps_of_one_process(
    kind: str, splits: tuple[Path, dict[str, Any]]
) -> None:
    folder, found = splits
    torch.set_num_threads(1)
    expected, weights = media_splits.alone(kind, folder)
    for name in (name for name in media_splits.TESTED if media_splits.SPLITS[name][0] == kind):
        compare(folder, name, found[name], expected, weights)


def compare(
    folder: Path,
    name: str,
    found: list[list[dict[str, float]]],
    expected: list[dict[str, float]],
    weights: dict[str, torch.Tensor],
) -> None:
    assert all(said == found[0] for said in found), f"{name}: metrics differ between ranks"
    for mine, one in zip(found[0], expected, strict=True):
        assert mine.keys() == one.keys()
        for metric, value in one.items():
            assert mine[metric] == pytest.approx(value, rel=5e-5, abs=5e-6), f"{name}: {metric}"
    exported = load_file(folder / f"{name}.safetensors")
    assert exported.keys() == weights.keys()
    for key, tensor in weights.items():
        # Softmax takes no notice of a key's bias: its gradient is rounding, of which Adam makes whole steps.
        if key.endswith("k_proj.bias"):
            continue
        torch.testing.assert_close(exported[key], tensor, rtol=0, atol=1e-4, msg=f"{name}: {key}")
