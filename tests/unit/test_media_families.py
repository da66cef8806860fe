"""Families of models: positions are the library's own, names of parameters have their parts, unknown kinds are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.media.families import TEXT, family_of
from relax_hpc.media.families.gemma4_unified import Gemma4Unified
from relax_hpc.records import Media

ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rope_parameters": ROPE,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
}  # fmt: skip
IDS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
AUDIO = {
    "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
    "output_dim": 64, "downsample_hidden_size": 32, "max_source_positions": 200,
}  # fmt: skip
AUDIO_IDS = {"audio_token_id": 504, "audio_start_token_id": 505, "audio_end_token_id": 506}


def configs() -> dict[str, Any]:
    thinker = tf.Qwen3OmniMoeThinkerConfig(
        text_config={**SHAPE, **EXPERTS}, vision_config=VISION, audio_config=AUDIO, **IDS, **AUDIO_IDS
    )
    plain = {k: v for k, v in VISION.items() if k not in ("num_position_embeddings", "deepstack_visual_indexes")}
    return {
        "qwen3_vl": tf.Qwen3VLConfig(text_config=SHAPE, vision_config=VISION, **IDS),
        "qwen3_vl_moe": tf.Qwen3VLMoeConfig(text_config={**SHAPE, **EXPERTS}, vision_config=VISION, **IDS),
        "qwen2_5_vl": tf.Qwen2_5_VLConfig(
            text_config=SHAPE, vision_config={**plain, "fullatt_block_indexes": [0], "tokens_per_second": 2}, **IDS
        ),
        "qwen3_omni_moe": tf.Qwen3OmniMoeConfig(thinker_config=thinker.to_dict(), enable_audio_output=False),
    }


PICTURE = [502, *[500] * 6, 503]  # a grid of 1 × 4 × 6 patches, four to a token
FILM = [502, *[501] * 8, 503]  # 2 × 4 × 4
SOUND = [505, *[504] * 13, 506]  # 100 frames
GRIDS = {"image_grid_thw": np.array([[1, 4, 6]]), "video_grid_thw": np.array([[2, 4, 4]])}


def shown(kind: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A prompt with a picture and a film (and a sound) in the shape that this kind's processor gives it."""
    film = FILM
    extra: dict[str, np.ndarray] = {}
    if kind.startswith("qwen3_vl"):
        film = [502, *[501] * 4, 503, 9, *[502, *[501] * 4, 503]]
    if kind == "qwen2_5_vl":
        extra = {"second_per_grid_ts": np.array([1.5], np.float32)}
    tokens = [1, 2, *PICTURE, 3, *film, 4]
    if kind == "qwen3_omni_moe":
        extra = {
            "video_second_per_grid": np.array([1.0], np.float32),
            "feature_attention_mask": np.ones((1, 100), np.int64),
        }
        tokens = [1, 2, *SOUND, *PICTURE, 3, *film, 4]
    return np.array(tokens, np.int32), {**GRIDS, **extra}


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_omni_moe"])
def test_positions_are_those_that_the_model_computes_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs()[kind]
    family = family_of(config)
    model = family.model_class()._from_config(family.config(config)) if kind == "qwen3_omni_moe" else None
    model = model or family.model_class().from_config(config)
    tokens, tensors = shown(kind)
    owner = model if kind == "qwen3_omni_moe" else model.model
    if kind == "qwen3_omni_moe":
        arguments = {"audio_seqlens": torch.tensor([100]), "second_per_grids": torch.tensor([1.0])}
        arguments["attention_mask"] = torch.ones(1, len(tokens), dtype=torch.long)
    else:
        types = torch.tensor(np.select([tokens == 500, tokens == 501], [1, 2]))[None]
        arguments = {"mm_token_type_ids": types, "second_per_grid_ts": torch.tensor([1.5])}
    expected, delta = owner.get_rope_index(
        input_ids=torch.tensor(tokens.astype(np.int64))[None],
        **{name: torch.tensor(grid) for name, grid in GRIDS.items()}, **arguments,
    )  # fmt: skip

    found = family.positions(config, tokens, Media.of(tensors))

    assert found.shape == (3, len(tokens))
    np.testing.assert_array_equal(found, expected[:, 0].numpy())
    onward = family.positions_onward(config, np.append(tokens, 502), Media.of(tensors))
    np.testing.assert_array_equal(onward[:, : len(tokens)], found)
    assert (onward[:, -2:] - len(tokens) == [int(delta), int(delta) + 1]).all(), "a token that begins an image is plain"
    assert len({tuple(axis) for axis in found.tolist()}) == 3, "the three axes differ"


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3_omni_moe"])
def test_a_beginning_that_the_model_said_between_two_pictures_is_plain(kind: str) -> None:
    """What an environment shows after it keeps its place."""
    tokens, tensors = shown(kind)
    config, twice = configs()[kind], {name: np.concatenate([array, array]) for name, array in tensors.items()}
    place = lambda said: family_of(config).positions_onward(
        config, np.concatenate([tokens, np.array(said, tokens.dtype), tokens]), Media.of(twice)
    )
    beginnings = {"vision_start_token_id", "audio_start_token_id"} & {*vars(family_of(config).config(config))}
    for name in beginnings:
        begins = getattr(family_of(config).config(config), name)
        np.testing.assert_array_equal(place([7, begins, 8, begins]), place([7, 9, 8, 9]), name)


def test_positions_are_whole_where_a_videos_rate_makes_them_broken() -> None:
    """As servers of models cut them off, which know no others; so engines and trainers have the same."""
    tokens, tensors = shown("qwen3_omni_moe")
    found = [
        family_of(config).positions_onward(config, tokens, Media.of({**tensors, "video_second_per_grid": seconds}))
        for config in [configs()["qwen3_omni_moe"]]
        for seconds in (np.array([1.0], np.float32), np.array([1.07], np.float32))
    ]
    assert (found[1] == found[1].round()).all() and (found[0] != found[1]).any()
    assert (np.diff(found[1][:, -3:]) == 1).all(), "the text behind goes on by ones"


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3_omni_moe"])
def test_a_prompt_without_media_has_plain_positions(kind: str) -> None:
    config = configs()[kind]
    found = family_of(config).positions(config, np.arange(1, 6, dtype=np.int32), None)
    np.testing.assert_array_equal(found, np.tile(np.arange(5), (3, 1)))
    for length in range(3):
        onward = family_of(config).positions_onward(config, np.arange(1, 1 + length, dtype=np.int32), None)
        assert onward.shape == (3, length + 1), "the shortest too"


def test_parameters_have_parts() -> None:
    expected = {
        "qwen3_vl": {
            "lm_head.weight": "language", "model.language_model.layers.0.mlp.up_proj.weight": "language",
            "model.visual.merger.norm.weight": "projector", "model.visual.patch_embed.proj.bias": "vision",
            "model.visual.deepstack_merger_list.0.norm.weight": "projector",
        },
        "qwen3_omni_moe": {
            "model.norm.weight": "language", "visual.merger.ln_q.weight": "projector", "visual.pos_embed.weight": "vision",
            "visual.merger_list.0.ln_q.weight": "projector", "audio_tower.conv_out.weight": "audio",
            "audio_tower.proj2.weight": "projector",
        },
    }  # fmt: skip
    for kind, parts in expected.items():
        family = family_of(configs()[kind])
        model = family.model_class()
        built = model._from_config if kind == "qwen3_omni_moe" else model.from_config
        names = dict(built(family.config(configs()[kind])).named_parameters())
        assert set(parts) <= {*names, "lm_head.weight"}
        assert {name: family.part(name) for name in parts} == parts


def test_placeholders_and_modalities() -> None:
    config = configs()["qwen3_omni_moe"]
    family = family_of(config)
    assert family.placeholders(config) == {"image": 500, "video": 501, "audio": 504}
    assert family_of(family.config(config)) is family, "the thinker's own config is of the same family"
    assert family_of(configs()["qwen3_vl"]).modalities == ("image", "video")


def test_text_models_and_unknown_ones() -> None:
    text = tf.Qwen3Config()
    assert family_of(text) is TEXT
    np.testing.assert_array_equal(TEXT.positions(text, np.ones(3, np.int32), None), [0, 1, 2])
    with pytest.raises(RunError, match=r"'qwen2_audio', which has \['audio_config'\].*'qwen3_vl'"):
        family_of(tf.Qwen2AudioConfig())


def test_tensors_of_several_prompts_are_joined_and_padded() -> None:
    one = Media.of({"input_features": np.ones((1, 2, 3), np.float32), "image_grid_thw": np.array([[1, 2, 2]])})
    two = Media.of({"input_features": np.full((2, 2, 5), 2, np.float32)})
    joined = TEXT.joined([one, two])
    assert joined["input_features"].shape == (3, 2, 5)
    np.testing.assert_array_equal(joined["input_features"][0, 0], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(joined["image_grid_thw"], [[1, 2, 2]])


def test_pictures_that_are_filled_up_to_several_sizes_are_joined_without_new_patches() -> None:
    one, two = (Media.of({"image_position_ids": np.zeros((1, patches, 2), np.int64)}) for patches in (1, 3))
    joined = Gemma4Unified().joined([one, two])["image_position_ids"]
    assert joined[0].tolist() == [[0, 0], [-1, -1], [-1, -1]], "transformers knows by -1 that a patch only fills"


def test_a_digest_covers_names_types_shapes_and_bytes() -> None:
    values = np.arange(6, dtype=np.float32)
    base = {"a": values.reshape(2, 3), "b": np.array([1])}
    others = [
        {"a": values.reshape(3, 2), "b": np.array([1])},
        {"a": values.reshape(2, 3).astype(np.float64), "b": np.array([1])},
        {"c": values.reshape(2, 3), "b": np.array([1])},
        {"a": values.reshape(2, 3) + 1, "b": np.array([1])},
    ]
    assert len({Media.of(tensors).digest for tensors in [base, *others]}) == 5
    assert Media.of(dict(reversed(base.items()))).digest == Media.of(base).digest
    assert Media.of({**base, "a": np.asfortranarray(base["a"])}).digest == Media.of(base).digest


def test_changed_media_are_damaged() -> None:
    media = Media.of({"pixel_values": np.zeros((2, 2), np.float32)})
    media.check("here")
    media.tensors["pixel_values"][0, 0] = 1e-30
    with pytest.raises(Damaged, match="the trainer: a prompt's media have the checksum"):
        media.check("the trainer")
