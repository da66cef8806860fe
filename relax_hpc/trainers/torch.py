"""The torch trainer: a Hugging Face causal model, data parallel, one optimizer step or more from a step's rollouts.

    rollouts ──forward of reference, teacher, critic, where needed──► columns ──updates──► for each, most often one:
    rollouts ──plan──► this rank's micro-batches ──forward, algorithm.loss, backward──► gradients (sums over tokens)
    gradients ──all-reduce──► norm ──finite?──► AdamW        metrics ──summed over ranks──► means over tokens

Every rank sees all rollouts and takes its share; each loss is divided by one global token count before its backward, so
ranks may have different numbers of micro-batches, and the sums are the same under every split.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import transformers
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import relax_hpc.huggingface.lora as adapters
import relax_hpc.trainers.state_files as state_files
from relax_hpc.algorithms.base import RECOMPUTED, TEACHER, VALUES
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import to_json, write_file
from relax_hpc.huggingface import name_in_files, named_as_in_files, unfilled
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import CRITIC_KEY, TEACHER_KEY, Recipe
from relax_hpc.recipe.tables.trainer import Lora
from relax_hpc.records import Progress, Rollouts
from relax_hpc.trainers.base import Saved
from relax_hpc.trainers.build import check_beside, weights_folder
from relax_hpc.trainers.forward import Critic, check_head, token_logprobs, token_values
from relax_hpc.trainers.host_copies import HostCopies
from relax_hpc.trainers.optim import Learning
from relax_hpc.trainers.packing import MicroBatch, pack, plan
from relax_hpc.trainers.token_loss import Learner, TokenLoss, add, needs_reference
from relax_hpc.trainers.update import CriticUpdating, PolicyUpdating, Updating
from relax_hpc.trainers.work import position_costs


class _Models:
    """One data-parallel process of models that compute outputs: its micro-batches, and the outputs at their targets."""

    def __init__(self, recipe: Recipe, rank: int, world: int, device: torch.device) -> None:
        self.recipe, self.rank, self.world, self.device = recipe, rank, world, device
        self.dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)
        self._budget = recipe.trainer.tokens_per_micro_batch

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _logprobs(
        self, model: PreTrainedModel, rollouts: Rollouts, batch: MicroBatch, temperature: float, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        targets = torch.from_numpy(rollouts.tokens[batch.targets].astype(np.int64)).to(self.device)
        with self._autocast():
            return token_logprobs(model, batch, targets, temperature, entropy_gradient=entropy)

    def _share(self, rollouts: Rollouts, model: PreTrainedModel, whole_groups: bool = False) -> Iterator[MicroBatch]:
        """Pack this process's micro-batches for a model, or its body."""
        family = family_of(model.config)
        costs, share = position_costs(model), self.recipe.trainer.share_prefixes
        for rows in plan(rollouts, self.world, self._budget, family, costs, share, whole_groups)[self.rank]:
            yield pack(rollouts, rows, family=family, config=model.config)

    @torch.no_grad()
    def _said(
        self, say: Callable[[MicroBatch], Tensor], rollouts: Rollouts, model: PreTrainedModel, progress: Progress
    ) -> NDArray[np.float32]:
        """[T] the results of `say`, of this model or body, at the targets of all processes' micro-batches; 0
        elsewhere."""
        column = torch.zeros(len(rollouts.tokens), device=self.device)
        for batch in self._share(rollouts, model):
            column[torch.from_numpy(batch.targets).to(self.device)] = say(batch)
            progress()
        if self.world > 1:
            dist.all_reduce(column)  # each rank has its share, zeros elsewhere
        return cast(NDArray[np.float32], column.cpu().numpy())


class _Learners(_Models, Updating):
    """One data-parallel process of models that learn."""

    def __init__(self, recipe: Recipe, rank: int, world: int, device: torch.device) -> None:
        super().__init__(recipe, rank, world, device)
        self.learning: dict[Learner, Learning] = {}
        torch.manual_seed(recipe.run.seed + rank)

    def save(self, folder: Path) -> Mapping[str, str]:
        written: Mapping[str, str] = {}
        states = state_files.rng_tensors(self.rank, self.device)
        for other in self._gather(states)[1:]:
            states |= other
        if self.rank == 0:
            files = {**self._models(), state_files.RNG: states}
            for stem, learning in self._optimizers().items():
                moments = state_files.optimizer_tensors(learning.optimizer, learning.parameters)
                files |= state_files.in_parts(stem, moments)
            written = state_files.write(folder, files)
        if self.world > 1:
            dist.barrier()
        return written

    def _models(self) -> dict[str, dict[str, Tensor]]:
        """The weights that a checkpoint holds, by their file."""
        return {state_files.CRITIC: self._critic.state_dict()} if "critic" in self.learning else {}

    def _optimizers(self) -> dict[str, Learning]:
        """The optimizers that a checkpoint holds, by the stem of their files."""
        files: dict[Learner, str] = {"policy": state_files.OPTIMIZER, "critic": state_files.CRITIC_OPTIMIZER}
        return {files[learner]: learning for learner, learning in self.learning.items()}

    @property
    def _critic(self) -> Critic:
        if "critic" not in self.learning:
            raise RunError("the algorithm of this step needs a critic, the recipe's does not: none is held")
        return cast(Critic, self.learning["critic"].model)

    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Progress
    ) -> dict[str, float]:
        learning = self.learning[token_loss.learner]
        learning.gradients.zero()
        sums: dict[str, float] = {}
        learns_values = token_loss.learner == "critic"
        policy = cast(PreTrainedModel, self._critic.body if learns_values else learning.model)
        for batch in self._share(rollouts, policy, token_loss.whole_groups):
            if learns_values:
                loss, said = token_loss(batch.targets, self._values(batch))
            else:
                found = self._logprobs(policy, rollouts, batch, temperature, token_loss.entropy_gradient)
                loss, said = token_loss(batch.targets, *found)
            if loss.requires_grad:  # nothing may learn from what shows no media
                (loss / tokens).backward()
            sums = add([sums, said])
            progress()
        if self.world > 1:
            learning.gradients.all_reduce()
        return sums

    def _gradient_norm(self, learner: Learner) -> float:
        return self.learning[learner].gradients.norm()

    def _update(self, learner: Learner, norm: float, rate: float) -> None:
        self.learning[learner].update(norm, rate)

    def _values(self, batch: MicroBatch) -> Tensor:
        critic = self._critic
        with self._autocast():
            return token_values(critic, batch, self.device)


class TorchTrainer(_Learners, PolicyUpdating):
    """One data-parallel process; see relax_hpc.trainers.base.Trainer."""

    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        super().__init__(recipe, rank, world, device_of(recipe.trainer.device, "trainer"))
        check_beside(recipe, model_dir)
        self._model_dir = model_dir
        self.model = load_model(weights_folder(recipe.model, model_dir), self.device)
        self.lora = recipe.trainer.lora
        held = needs_reference(recipe) and self.lora is None  # an adapter's base is there already
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if held else None
        self.teacher: PreTrainedModel | None = None
        if TEACHER_KEY in recipe.models_held:
            self.teacher = load_model(recipe.models_held[TEACHER_KEY], self.device).requires_grad_(False)
        if self.lora and not recipe.sft_warm_start:  # which is the whole model's
            self._adapt(self.lora)
        self.learning = {"policy": self._policy_learning()}
        if recipe.trains_critic:
            self.learning["critic"] = Learning(self._new_critic(), recipe.trainer)
        self.host = HostCopies()

    def begin_training(self) -> None:
        if self.lora and not adapters.layers(self.model):
            self._adapt(self.lora)
            self.learning["policy"] = self._policy_learning()
        for learning in self.learning.values():
            learning.begin()
        self._refer()
        if "critic" in self.learning and CRITIC_KEY not in self.recipe.models_held:
            self._critic.body.load_state_dict(adapters.of_base(self.model.base_model.state_dict()))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        if self.lora is None or self.lora.sync == "merge":
            layers = adapters.layers(self.model) if self.lora else {}
            merged = {name_in_files(f"{name}.weight", family_of(self.model.config)): layers[name] for name in layers}
            for name, tensor in tensors_of(self.model).items():
                yield name, self._published(merged[name].merged() if name in merged else tensor)
        else:
            for name, tensor in adapters.adapter_of(self.model).items():
                yield name, self._published(tensor)

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors_of(self.model).items():
            yield name, self._published(tensor)

    def load_base(self, tensors: Mapping[str, Tensor], where: Path) -> None:
        state_files.fill(tensors_of(self.model), tensors, where)

    def _published(self, tensor: Tensor) -> Tensor:
        # a copy even where type and device are right: the next step changes the weights in place
        return tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    @torch.no_grad()
    def _adapt(self, lora: Lora) -> None:
        """Freeze the model as the base that is published, and let an adapter learn."""
        for parameter in self.model.parameters():
            parameter.copy_(parameter.to(self.dtype))
        adapters.adapt(self.model, lora, self.recipe.run.seed)

    def _policy_learning(self) -> Learning:
        return Learning(self.model, self.recipe.trainer, family_of(self.model.config).part)

    def save(self, folder: Path) -> Mapping[str, str]:
        if self.rank == 0 and self.lora is not None:
            about = adapters.peft_config(self.model, self.lora, weights_folder(self.recipe.model, self._model_dir))
            write_file(folder / state_files.ADAPTER_CONFIG, to_json(about))
        return super().save(folder)

    def begin_save(self, folder: Path) -> Saved:
        return Saved(self.save(folder))

    def load(self, folder: Path) -> None:
        if self.lora is None:
            model = folder / state_files.MODEL
            state_files.fill(tensors_of(self.model), state_files.read(model), model)
        self.begin_training()  # so begin reference and critic where the checkpoint is of a run that had none
        if self.lora is not None:
            adapter = folder / state_files.ADAPTER
            state_files.fill(adapters.adapter_of(self.model), state_files.read(adapter), adapter)
        for path, tensors in ((folder / file, tensors) for file, tensors in self._models().items()):
            if path.exists():
                state_files.fill(tensors, state_files.read(path), path)
        for stem, learning in self._optimizers().items():
            if stem == state_files.OPTIMIZER or state_files.has(folder, stem):
                state_files.fill_optimizer(learning.optimizer, learning.parameters, folder, stem)
        state_files.fill_rng(self.rank, self.device, state_files.read(folder / state_files.RNG))

    def _held(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        frozen = [model for model in (self.reference, self.teacher) if model is not None]
        learning = self.learning.values()
        return [*(each.model for each in learning), *frozen], [each.optimizer for each in learning]

    def _models(self) -> dict[str, dict[str, Tensor]]:
        models = {state_files.MODEL: tensors_of(self.model)}
        if self.lora is not None:
            models = {state_files.ADAPTER: adapters.adapter_of(self.model)}
        if self.reference is not None:
            models[state_files.REFERENCE] = tensors_of(self.reference)
        return models | super()._models()

    def _column(self, name: str, rollouts: Rollouts, temperature: float, progress: Progress) -> NDArray[np.float32]:
        if name == VALUES:
            return self._said(self._values, rollouts, self._critic.body, progress)
        if name == "reference" and self.lora is not None:
            with adapters.base_alone(self.model):
                return self._column(RECOMPUTED, rollouts, temperature, progress)
        model = {RECOMPUTED: self.model, "reference": self.reference, TEACHER: self.teacher}[name]
        if model is None:
            raise RunError(f"the algorithm of this step needs a {name}, the recipe's does not: none is held")
        return self._said(
            lambda batch: self._logprobs(model, rollouts, batch, temperature)[0], rollouts, model, progress
        )

    def _refer(self) -> None:
        if self.reference is not None:
            self.reference.load_state_dict(self.model.state_dict())

    def _new_critic(self) -> Critic:
        """Make a critic with the body of its own model, where the recipe has one, or else of the policy."""
        own = self.recipe.models_held.get(CRITIC_KEY)
        body = copy.deepcopy(self.model.base_model) if own is None else load_model(own, self.device).base_model
        adapters.strip(body)
        return Critic(cast(PreTrainedModel, body)).to(self.device).eval()


class TorchCritic(_Learners, CriticUpdating):
    """One data-parallel process; see relax_hpc.trainers.base.CriticTrainer."""

    def __init__(self, recipe: Recipe, folder: Path, rank: int, world: int) -> None:
        """folder: the model that its body starts from."""
        assert recipe.critic is not None
        super().__init__(recipe, rank, world, device_of(recipe.trainer.device, "critic"))
        body = cast(PreTrainedModel, load_model(folder, self.device).base_model)
        self.learning["critic"] = Learning(Critic(body).to(self.device).eval(), recipe.trainer)

    def load(self, folder: Path) -> None:
        learning, model = self.learning["critic"], folder / state_files.CRITIC
        state_files.fill(self._critic.state_dict(), state_files.read(model), model)
        state_files.fill_optimizer(learning.optimizer, learning.parameters, folder, state_files.CRITIC_OPTIMIZER)
        state_files.fill_rng(self.rank, self.device, state_files.read(folder / state_files.RNG))

    def _column(self, name: str, rollouts: Rollouts, temperature: float, progress: Progress) -> NDArray[np.float32]:
        return self._said(self._values, rollouts, self._critic.body, progress)


class TorchScoring(_Models):
    """A scorer's models on one device, in one process. See relax_hpc.trainers.base.Scoring."""

    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        assert recipe.scorer is not None and world == 1, "scorers of this backend work each on its own"
        super().__init__(recipe, rank, world, device_of(recipe.trainer.device, "scorer"))
        self._model_dir = model_dir
        self.models: dict[str, PreTrainedModel] = {}

    def hold(self, name: str, folder: Path) -> None:
        self.models[name] = load_model(folder, self.device).requires_grad_(False)

    def load(self, name: str, tensors: Mapping[str, Tensor], where: Path) -> None:
        if name not in self.models:
            config = AutoConfig.from_pretrained(self._model_dir, local_files_only=True)
            self.models[name] = unfilled(config, torch.float32, self.device)
        state_files.fill(tensors_of(self.models[name]), tensors, where)

    def logprobs(self, name: str, rollouts: Rollouts, progress: Progress = lambda: None) -> NDArray[np.float32]:
        model, temperature = self.models[name], self.recipe.rollout.temperature
        return self._said(
            lambda batch: self._logprobs(model, rollouts, batch, temperature)[0], rollouts, model, progress
        )


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters (tied ones once) and the buffers that belong to the state, by the names of Hugging Face's files; no
    adapters."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in model.state_dict().items() if name not in every}
    return named_as_in_files(adapters.of_base(dict(model.named_parameters()) | buffers), model.config)


def device_of(choice: str, role: str) -> torch.device:
    """The device that `role` computes on. Raises RunError where it asks for a GPU and torch sees none."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError(f'{role}.device = "cuda" but torch sees no GPU: use "auto" or "cpu"')
    return torch.device("cuda", torch.cuda.current_device())  # the role has chosen it


def load_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """Load the model in float32. Raises RunError for missing weights, which transformers would draw at random."""
    transformers.utils.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        load = family_of(config).model_class().from_pretrained
        found: Any = load(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE):
            raise  # an error of the file system: another start may succeed
        raise RunError(f"no model can be loaded from '{folder}': {error}") from error
    model, info = found
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise RunError(
            f"the weights in '{folder}' do not fill its config.json: {absent[:3]} ({len(absent)} in all) are missing or differ"
        )
    loaded: PreTrainedModel = model.to(device).eval()  # eval: no dropout
    check_head(loaded)
    return loaded
