"""The examples of parts that live in the source tree keep the contracts that the built-in ones keep: the same tests, run over them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from relax_hpc.engines import ENGINES
from relax_hpc.files.run_dir import RunDir
from relax_hpc.trainers import BACKENDS
from relax_hpc.weights import RENDEZVOUS
from tests.contract import test_engines as engines
from tests.contract import test_trainers as trainers
from tests.contract import test_transports as transports

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.slow


def example(name: str) -> ModuleType:
    """A file of the examples as a module."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engines.Setup]:
    """The example in the place of the torch engine, for tests/contract/test_engines.py."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "torch", example("engine").PlainEngine)
        made = engines.Setup("torch", tmp_path_factory.mktemp("model"))
        yield made
        made.engine.close()


OF_TORCH = ("prefilled_in_parts", "at_rest_holds_no_weights", "outgrows_its_room")
"""Tests of how the torch engine does it, not of what it does."""
globals().update(
    {n: test for n, test in vars(engines).items() if n.startswith("test_") and not any(o in n for o in OF_TORCH)}
)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[transports.Transport]:
    """The example as a further group, for tests/contract/test_transports.py."""
    run = RunDir(tmp_path)
    run.create()
    run.identity.write_text('{"id": "contract"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RENDEZVOUS, "sockets", example("transport").SocketRendezvous)
        made = transports.by_group(run, "sockets")
        yield made
        if made.now is not None:
            made.now.publisher.close()
        made.receiver().close()


OF_FILES = ("_file_", "_on_disk_")
"""Tests that reach for the files of the file transport."""
globals().update(
    {n: test for n, test in vars(transports).items() if n.startswith("test_") and not any(o in n for o in OF_FILES)}
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """The example in the place of the torch trainer, for tests/contract/test_trainers.py."""
    torch.set_num_threads(1)
    monkeypatch.setitem(sys.modules, "relax_hpc.trainers.plain", example("trainer"))
    monkeypatch.setitem(BACKENDS, "torch", "plain.Plain")
    return "torch"


OF_TRAINERS = (
    "test_steps_are_those_of_the_plain_formula",
    "test_updates_of_a_step_train_on_groups_in_turn_and_recompute_before_the_first",
    "test_a_step_without_tokens_leaves_the_weights_alone",
    "test_the_warm_up_and_fine_tuning_learn_the_answers",
    "test_training_begins_with_a_fresh_optimizer_and_the_weights_of_now_as_reference",
    "test_every_so_many_steps_the_policy_becomes_the_reference",
    "test_a_checkpoint_before_the_first_step_loads",
    "test_a_checkpoint_of_another_model_or_a_torn_one_is_refused",
    "test_a_flipped_byte_in_any_file_of_a_sealed_checkpoint_is_found_when_it_is_loaded",
    "test_what_is_exported_loads_as_a_hugging_face_model",
    "test_an_algorithm_of_the_wrong_shape_is_told_so",
    "test_progress_is_reported",
)
"""All but what it refuses: critics, teachers, several processes, bfloat16."""
globals().update({name: getattr(trainers, name) for name in OF_TRAINERS})


@pytest.mark.parametrize("name", ["grpo", "grpo, kl"])
def test_a_resumed_trainer_goes_on_to_the_bit(backend: str, tmp_path: Path, name: str) -> None:
    trainers.test_a_resumed_trainer_goes_on_to_the_bit(backend, tmp_path, name)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_is_skipped(backend: str, tmp_path: Path, poison: float) -> None:
    trainers.test_a_loss_that_is_not_finite_is_skipped_and_leaves_no_trace(backend, tmp_path, poison, "grpo")


def test_the_contracts_were_found() -> None:
    names = [name for name in globals() if name.startswith("test_")]
    assert {"test_greedy_is_what_transformers_generates", "test_the_same_bits_arrive"} <= {*names} and len(names) > 25
