"""Environments that show pictures in later turns: what the model sees is what the trainer feeds, at the same positions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from relax_hpc.engines import Abort
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Group, Media, Rollouts, Sample, concatenate
from relax_hpc.roles.rollout.episodes import RolloutAborted
from relax_hpc.roles.rollout.runner import RolloutRunner
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode
from relax_hpc.trainers import make_scoring
from relax_hpc.trainers.packing import join, pack, plan
from relax_hpc.trainers.torch import load_model
from tests import tiny

EACH = 2
REQUEST = Request("r000001-000", ((0, 0), (0, 1), (0, 2)), EACH, 7, 0)
"""A prompt with a picture, one of text, and one whose environment shows a broken file."""
ENVIRONMENT = '''
"""Shows a picture whose size depends on the answer, then a square of text and another picture, then it is done."""
import io
from PIL import Image
from relax_hpc.environments import Turn

class Shows:
    def reset(self, prompt):
        self.broken, self.turns = prompt.answer == "broken", 0

    def step(self, answer):
        self.turns += 1
        if self.turns == 3:
            return Turn(done=True, reward=1.0)
        memory = io.BytesIO()
        Image.new("RGB", (32 + 16 * (ord(answer[0]) % 3), 32), ("red", "blue")[self.turns % 2]).save(memory, "PNG")
        data = memory.getvalue()[:20] if self.broken else memory.getvalue()
        return Turn(False, [{"type": "text", "text": "see "}, {"type": "image", "image": data}, {"type": "text", "text": "?"}])

    def close(self): ...
'''


TURN = 3
"""Tokens of each turn of the model."""


class Drawing:
    """Draws two letters and the end of a turn, however unlikely; logprobs are the model's own."""

    def __init__(self, letters: list[int], end: int) -> None:
        self._letters, self._end, self._drawn = torch.tensor(letters), end, 0

    def __call__(self, logits: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        self._drawn += 1
        tokens = self._letters[logits[:, self._letters].softmax(-1).multinomial(1)[:, 0]]
        if self._drawn % TURN == 0:
            tokens = torch.full_like(tokens, self._end)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


class Setup:
    """A tiny model that sees, the environment, and the engine with everything that a worker has."""

    def __init__(self, folder: Path, audio: bool) -> None:
        (folder / "shows.py").write_text(ENVIRONMENT)
        Image.new("RGB", (48, 32), "green").save(folder / "green.png")
        rows = [{"prompt": p, "answer": a} for p, a in (("<image>what?", "x"), ("what?", "x"), ("what?", "broken"))]
        rows = [row | {"image": ["green.png"] if "<image>" in row["prompt"] else []} for row in rows]
        (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        towers = {"audio": {}, "experts": 4} if audio else {"vision": {}}
        self.recipe: Recipe = tiny.recipe(
            model={"context": 160, "heads": 2, "alphabet": "abcdefghijklmnopqrstuvwxyz ?", **towers},
            source=[{"prompts": str(folder / "p.jsonl"), "media": {"image": "image"}, "environment": f"{folder}/shows.py:Shows"}],
            rollout={"max_turns": 3, "max_new_tokens": 5, "device": "cpu", "data_workers": 0, "groups_per_request": 1, "lockstep": True},  # draws are patched
            algorithm={"kl_coef": 0.1}, scorer={"scores": ["reference"]},
        )  # fmt: skip
        self.folder = tiny.folder(self.recipe, folder / "model")
        self.runner = RolloutRunner(self.recipe, self.folder)
        self.runner.engine.load(0, load_file(self.folder / "model.safetensors").items())
        self.prompts = self.runner.prompts(REQUEST)
        self.model = load_model(self.folder, torch.device("cpu"))


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_omni"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    torch.set_num_threads(1)
    made = Setup(tmp_path_factory.mktemp("turns"), request.param == "qwen3_omni")
    tokenizer = made.runner.engine.tokenizer  # type: ignore[attr-defined]
    drawing = Drawing(tokenizer.convert_tokens_to_ids([*"abcdefgh"]), tokenizer.eos_token_id)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("relax_hpc.engines.torch.draw", drawing)
        yield made
    made.runner.close()


@pytest.fixture(scope="module")
def groups(setup: Setup) -> list[Group]:
    return setup.runner.groups(REQUEST, setup.prompts, lambda state: None)


def answered(groups: list[Group]) -> list[tuple[Group, Sample]]:
    return [(g, s) for g in groups for s in g.samples if not g.reason]


def compare(setup: Setup, groups: list[Group]) -> None:
    """Compare each drawn token's logprob with transformers' own forward over the whole sample."""
    for group, sample in answered(groups):
        assert sample.media is not None and sample.turns == 3
        whole = np.concatenate([group.prompt.tokens, sample.tokens])
        logits = logits_of(setup, whole, sample.media)
        drawn = np.flatnonzero(sample.loss_mask)
        at = drawn + len(group.prompt.tokens)
        np.testing.assert_allclose(sample.logprobs[drawn], logits[at - 1, whole[at]], atol=1e-5)


def logits_of(setup: Setup, whole: NDArray[np.int32], media: Media) -> NDArray[np.float32]:
    """[T, V] log-probabilities, as transformers computes all by itself."""
    tokens = torch.from_numpy(whole.astype(np.int64))[None]
    arguments = {name: torch.from_numpy(array) for name, array in media.tensors.items()}
    ids = setup.runner.engine.family.placeholders(setup.model.config)  # type: ignore[attr-defined]
    if hasattr(setup.model, "audio_tower"):
        arguments["attention_mask"] = torch.ones_like(tokens)
    else:
        arguments["mm_token_type_ids"] = (tokens == ids["image"]).long()
    setup.model.base_model.rope_deltas = None
    with torch.no_grad():
        logits: np.ndarray = (
            setup.model(input_ids=tokens, use_cache=False, **arguments).logits[0].log_softmax(-1).numpy()
        )
    return logits


def test_what_is_drawn_after_a_picture_of_a_later_turn(setup: Setup, groups: list[Group]) -> None:
    ids = setup.runner.engine.family.placeholders(setup.model.config)  # type: ignore[attr-defined]
    for group, sample in answered(groups):
        assert sample.media is not None
        grids = sample.media.tensors["image_grid_thw"]
        before = 1 if group.prompt.media else 0
        assert len(grids) == before + 2
        whole = np.concatenate([group.prompt.tokens, sample.tokens])
        assert int((whole == ids["image"]).sum()) == int(grids.prod(1).sum()) // 4
        assert not sample.loss_mask[sample.tokens == ids["image"]].any()
    assert len(answered(groups)) == 2 * EACH
    compare(setup, groups)


def test_a_broken_picture_of_an_environment_costs_its_group(groups: list[Group]) -> None:
    assert [g.reason for g in groups] == ["", "", "what the environment shows cannot be used"]
    assert "image 1 of 1: 20 bytes is damaged" in groups[2].detail


def read(groups: list[Group], path: Path) -> tuple[Rollouts, list[Group]]:
    path.write_bytes(b"".join(encode(REQUEST.id, groups, {"version": 0, "run": "mine"})))
    with Shard(path) as shard:
        shard.validate()
        assert shard.media_index.bytes == sum(item.bytes for item in shard.media_index.items)
        return shard.rollouts(), [shard.group(i) for i in range(len(groups))]


def test_the_trainer_computes_the_same_from_the_shard(setup: Setup, groups: list[Group], tmp_path: Path) -> None:
    found, again = read(groups, tmp_path / "s.h5")
    said = lambda groups: [[s.media.digest if s.media else "" for s in g.samples] for g in groups]
    assert said(again) == said(groups)
    assert found.shown_later is not None and found.shown_later.tolist() == [1] * 4 + [0, 0]
    assert len(join(found, np.arange(4))) == 4, "none shares its prompt: each saw something else later"
    for budget in (16384, 40):
        recipe = setup.recipe.model_copy(
            update={"trainer": setup.recipe.trainer.model_copy(update={"tokens_per_micro_batch": budget})}
        )
        scoring = make_scoring(recipe, setup.folder, 0, 1)
        scoring.hold("reference", setup.folder)
        chosen = found.loss_mask == 1
        np.testing.assert_allclose(scoring.logprobs("reference", found)[chosen], found.logprobs[chosen], atol=1e-5)
    family = setup.runner.engine.family  # type: ignore[attr-defined]
    ((rows,),) = plan(found, 1, 1 << 14)
    assert len(pack(found, rows, family, setup.model.config).media["image_grid_thw"]) == EACH * (3 + 2)


def test_megatron_finds_the_places_of_later_pictures(setup: Setup, groups: list[Group], tmp_path: Path) -> None:
    from relax_hpc.trainers.megatron import shown

    found, _ = read(groups, tmp_path / "s.h5")
    family, config = setup.runner.engine.family, setup.model.config  # type: ignore[attr-defined]
    rows = [[(sample,)] for sample in range(2 * EACH)]
    tokens = [pack(found, [row], family, config).tokens[0] for row in rows]
    starts = np.cumsum([0, *map(len, tokens)])
    seen = shown.shown_by(
        found, [0, 1, 2, 3], starts, np.arange(starts[-1]), family, config, torch.device("cpu"), shown.Among(1, 0)
    )
    image = family.placeholders(config)["image"]
    assert sorted(seen.places.tolist()) == np.flatnonzero(np.concatenate(tokens) == image).tolist()
    assert seen.visual == len(seen.places) == len(seen.features)
    assert int(seen.features.max()) + 1 == int(seen.tensors["image_grid_thw"].prod(1).sum()) // 4


def test_samples_that_were_shown_the_same_later_share_no_prompt(groups: list[Group]) -> None:
    """The placeholders of what they show stand behind the prompt, in each of them."""
    made = tiny.rollouts(tiny.prompts([40] * 3), [np.arange(3, 8, dtype=np.int32)] * 3, 3)
    made = replace(made, prompt_tokens=np.tile(made.prompt_tokens[:40], 3), media=(groups[0].prompt.media,) * 3)
    assert join(made, np.arange(3)) == [(0, 1, 2)]
    assert join(replace(made, shown_later=np.ones(3, np.uint8)), np.arange(3)) == [(0,), (1,), (2,)]
    both = concatenate([made, replace(made, shown_later=np.ones(3, np.uint8))])
    assert both.shown_later is not None and both.shown_later.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_request_that_is_given_back_goes_on_with_the_pictures_of_its_turns(setup: Setup, tmp_path: Path) -> None:
    calls: list[str] = []

    def progress(state: str) -> None:
        calls.append(state)
        if state == "generating" and calls.count("generating") == 5:  # two a turn: the third turn begins
            raise Abort

    with pytest.raises(RolloutAborted) as aborted:
        setup.runner.groups(REQUEST, setup.prompts, progress)
    partial = aborted.value.partial
    assert {len(begins) for begins in partial.turns[: 2 * EACH]} == {3}
    rest = setup.runner.groups(REQUEST, setup.prompts, lambda state: None, 1, partial)
    compare(setup, rest)
    for (_, before), (_, after) in zip(answered(partial.groups), answered(rest), strict=True):
        assert after.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()
    shutil.rmtree(tmp_path)
