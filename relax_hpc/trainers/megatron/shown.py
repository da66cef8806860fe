"""What a micro-batch shows, for the processes that encode it, and where its features go.

media of the samples' prompts ──compared with their digest, each once──► tensors for the encoders ──► features [n, H]
placeholders in the prompts ──of those, this process's──► (place of the token, number of its feature)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.huggingface import as_arguments
from relax_hpc.media.families import Family
from relax_hpc.records import Media, Rollouts
from relax_hpc.trainers.packing import media_of


@dataclass(frozen=True, slots=True)
class Shown:
    """A micro-batch's media. Features are counted through its images, then its video, then its sounds."""

    tensors: dict[str, Tensor]
    """Arguments of the encoders by name: different media one after the other, those of several samples once."""
    counts: dict[str, int]
    """Modality -> its features."""
    places: Tensor  # [p] which of this process's tokens are placeholders, those of images and video first
    features: Tensor  # [p] the feature that each of them takes
    visual: int
    """How many of `places` are of images and video."""


def shown_by(
    rollouts: Rollouts,
    samples: list[int],
    starts: NDArray[np.int64],
    here: NDArray[np.int64],
    family: Family,
    config: Any,
    device: torch.device,
) -> Shown:
    """Join the media of samples whose tokens start at `starts`; `here`: the tokens that this process has. Raises Damaged
    where media are not those that the engine was given."""
    placeholders = family.placeholders(config)
    media: dict[str, Media] = {}
    found: list[tuple[tuple[str, str], NDArray[np.int64]]] = []
    for sample, start in zip(samples, starts, strict=False):
        if (one := media_of(rollouts, sample)) is None:
            continue
        media[one.digest] = one
        prompt = rollouts.prompt_tokens[slice(*rollouts.prompt_offsets[sample : sample + 2])]
        found += [((m, one.digest), start + np.flatnonzero(prompt == token)) for m, token in placeholders.items()]
    for one in media.values():
        one.check("the trainer's encoders")
    sizes = {key: len(places) for key, places in found}
    ordered = sorted(sizes, key=lambda key: list(placeholders).index(key[0]))  # images, video, sounds; in media's order
    first = dict(zip(ordered, np.cumsum([0, *(sizes[key] for key in ordered)]), strict=False))
    places = np.concatenate([here[:0], *(places for _, places in found)])
    features = np.concatenate([here[:0], *(first[key] + np.arange(len(places)) for key, places in found)])
    counts = {m: sum(size for (other, _), size in sizes.items() if other == m) for m in placeholders}
    order = np.argsort(here)
    local = np.searchsorted(here, places, sorter=order)
    mine = np.flatnonzero(np.isin(places, here))
    mine = mine[np.argsort(features[mine], kind="stable")]
    return Shown(
        tensors=as_arguments(family.joined(list(media.values())), torch.float32, device) if media else {},
        counts=counts,
        places=torch.from_numpy(order[local[mine]]).to(device),
        features=torch.from_numpy(features[mine]).to(device),
        visual=int((features[mine] < sum(n for m, n in counts.items() if m != "audio")).sum()),
    )
