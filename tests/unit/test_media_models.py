"""Models with media in the recipe and in episodes: what cannot be shown is refused, what cannot be said ends a sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_hpc.engines.sampling import draw
from relax_hpc.engines.torch import TorchEngine
from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.media.families.qwen3_omni import Qwen3Omni
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Media, Prompt
from relax_hpc.roles.rollout.cast import DREW_MEDIA
from relax_hpc.roles.rollout.runner import RolloutRunner
from relax_hpc.spool.request import Request
from relax_hpc.trainers import fit
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.packing import join
from relax_hpc.trainers.torch import load_model, tensors_of
from relax_hpc.trainers.work import position_costs
from tests import omni, tiny

USER = Path(__file__).with_name("user_code.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return omni.folder("qwen3_vl", tmp_path_factory.mktemp("model"))


OUTSIDE = {"engine": "sglang", "sglang": {"address": "http://node7:30000"}}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"rollout": OUTSIDE},
            r'sees image, video, and rollout.engine = "sglang" keeps what.*trainer.freeze must name \[\'projector\', \'vision\'\]',
        ),
        (
            {"rollout": OUTSIDE, "source": [{"prompts": "p.jsonl", "media": {"image": "i", "video": "v"}}]},
            r"is sent pictures alone where its server has an address, and sources show \['video'\]",
        ),
        (
            {"trainer": {"backend": "megatron", "processes": 2, "parallel": {"pipeline": 2}}},
            r"leaves 2 layers on the first stage, and the vision encoder's features go into the model's first 3 \(deepstack\): use fewer stages",
        ),
        (
            {"trainer": {"freeze": ["audio"]}},
            r"name \['audio'\], and the model \(qwen3_vl\) has \['language', 'projector'",
        ),
        ({"trainer": {"learning_rates": {"audio": 1e-5}}}, r"name \['audio'\], and the model"),
        ({"trainer": {"freeze": ["vision", "language", "projector"]}}, "names all parts of the model.*nothing learns"),
    ],
)
def test_what_does_not_know_of_media_is_refused(folder: Path, tables: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=said):
        fit.check(omni.recipe(folder, **tables), folder)


def test_what_sglang_cannot_serve_is_refused(tmp_path: Path) -> None:
    asked = {"rollout": {"engine": "sglang"}}
    part = omni.folder("qwen3_omni", tmp_path / "part")
    with pytest.raises(
        RunError, match='rollout.engine = "sglang" serves qwen3_omni whole: give the folder of the whole'
    ):
        fit.check(omni.recipe(part, **asked), part)
    shallow = tiny.recipe(model={"heads": 2, "experts": 4, "vision": {"layers": 2}}, **asked)
    materialise(shallow.model, tmp_path / "shallow", 0)
    with pytest.raises(
        RunError, match=r"knows a model with experts only with 3 vision layers.*this has 2.*use \"torch\""
    ):
        fit.check(shallow, tmp_path / "shallow")
    dense = tiny.recipe(model={"heads": 2, "vision": {"layers": 2}}, **asked)
    materialise(dense.model, tmp_path / "dense", 0)
    fit.check(dense, tmp_path / "dense")
    frozen = {"freeze": ["vision", "projector"]}
    fit.check(omni.recipe(tmp_path / "dense", rollout=OUTSIDE, trainer=frozen), tmp_path / "dense")
    for kind in ("qwen2_5_vl", "gemma4_unified"):
        other = omni.folder(kind, tmp_path / kind)
        with pytest.raises(
            RunError, match='shows media .*only to qwen3_vl.*(leave rollout.sglang.address|use "torch")'
        ):
            fit.check(omni.recipe(other, **asked), other)
    with pytest.raises(
        RunError, match="cannot train this model: it has model_type 'gemma4_unified_text'.*use the torch"
    ):
        fit.check(omni.recipe(other, trainer={"backend": "megatron"}), other)


def test_a_teacher_of_another_family_is_refused_and_a_text_model_has_one_part(folder: Path, tmp_path: Path) -> None:
    blind = tiny.folder(tiny.recipe(), tmp_path / "text")
    teacher = {"name": "opd", "teacher": str(blind)}
    with pytest.raises(
        RunError, match=r"algorithm.teacher = '.*text' is of another family \(text\): give one that sees"
    ):
        fit.check(omni.recipe(folder, algorithm=teacher), folder)
    fit.check(omni.recipe(folder, algorithm={**teacher, "teacher": str(folder)}), folder)
    with pytest.raises(RunError, match=r"name \['vision'\], and the model \(text\) has \['language'\]"):
        fit.check(omni.recipe(blind, trainer={"freeze": ["vision"]}), blind)


def test_a_part_is_frozen_or_has_a_rate() -> None:
    with pytest.raises(ValueError, match=r"both name \['vision'\]"):
        tiny.recipe(trainer={"freeze": ["vision"], "learning_rates": {"vision": 1e-5}})


def test_a_placeholder_that_is_drawn_ends_its_sample_and_its_shard_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment of three turns is left after the first, where the next would stand behind an image that lacks."""
    source = {"task": "chain_sum", "environment": f"{USER}:Counting", "environment_options": {"turns": 3}}
    recipe = Recipe.model_validate(
        omni.recipe(folder, rollout={"max_turns": 3, "max_new_tokens": 4, "lockstep": True}).model_dump(mode="json")
        | {"source": [source]}
    )
    runner = RolloutRunner(recipe, folder)
    engine = runner.engine
    assert isinstance(engine, TorchEngine)
    engine.load(
        0, {n: t.detach().clone() for n, t in tensors_of(load_model(folder, torch.device("cpu"))).items()}.items()
    )

    def drawn(logits: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = draw(logits, *how)
        tokens[:] = 1  # the end
        tokens[0] = omni.IMAGE if len(tokens) == 2 else 1
        return tokens, logprobs

    monkeypatch.setattr("relax_hpc.engines.torch.draw", drawn)
    shown = omni.prompt("qwen3_vl", ("image",), 0)
    prompts = [Prompt(0, 0, "", shown.tokens, media=shown.media), Prompt(0, 1, "", np.arange(5, 9, dtype=np.int32))]
    try:
        first, second = runner.groups(Request("r", ((0, 0), (0, 1)), 1, 1, 0), prompts, lambda state: None)
    finally:
        runner.close()
    assert not first.reason and not second.reason, (first, second)
    [ended], [other] = first.samples, second.samples
    assert ended.tokens.tolist() == [omni.IMAGE] and ended.turns == 1 and ended.finish is Finish.STOP
    assert ended.extra[DREW_MEDIA] == 1
    assert other.turns == 3 and DREW_MEDIA not in other.extra


def test_answers_share_a_prompt_only_where_they_share_its_media() -> None:
    shown = omni.prompt("qwen3_vl", ("image",), 0)
    assert shown.media is not None
    other = Media.of({**shown.media.tensors, "pixel_values": -shown.media.tensors["pixel_values"]})
    made = tiny.rollouts([shown.tokens] * 2, tiny.prompts([2, 3]), group_size=2)
    trees = [join(replace(made, media=(shown.media, second)), np.arange(2)) for second in (shown.media, other)]
    assert trees == [[(0, 1)], [(0,), (1,)]]


def test_a_patch_costs_as_its_encoder_is_large(folder: Path) -> None:
    """Counted by hand; less where the encoder does not learn; the same for a model and its body."""
    model = load_model(folder, torch.device("cpu"))
    sizes = {
        name: p.numel()
        for name, p in model.named_parameters()
        if "embed_tokens" not in name and ".pos_embed" not in name
    }
    vision = sum(n for name, n in sizes.items() if ".visual." in name and "merger" not in name)
    language = sum(n for name, n in sizes.items() if "language_model" in name)
    costs = position_costs(model)
    assert costs == {"vision": pytest.approx(vision / language), "audio": 0.0}
    assert position_costs(model.base_model) == costs
    assert position_costs(load_model(folder, torch.device("cpu")).requires_grad_(False)) == costs, (
        "both are without gradients"
    )
    model.get_submodule("model.visual").requires_grad_(False)
    assert position_costs(model)["vision"] == pytest.approx(vision / language / 3)
    shown = omni.prompt("qwen3_vl", ("image", "video"), 0).media
    assert shown is not None and family_of(model.config).encoded(shown) == {"vision": 32, "audio": 0}
    heard = omni.prompt("qwen3_omni", ("long", "audio"), 0).media
    assert heard is not None and Qwen3Omni().encoded(heard)["audio"] == (104 + 40) / 8
