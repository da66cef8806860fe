"""What a micro-batch shows, for the processes that encode it, and where its features go.

media of the samples' prompts ──compared with their digest, each once──► this process's share ──encoders──► features [n, H]
placeholders in the prompts ──of those, this process's──► (place of the token, number of its feature)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.huggingface import as_tensors
from relax_hpc.media.families import Family
from relax_hpc.records import Media, Rollouts
from relax_hpc.trainers.packing import balance
from relax_hpc.trainers.trees.segments import media_of, shows_later


class Among(NamedTuple):
    """The processes that encode a micro-batch's media, a share each, and this one's number among them."""

    ranks: int
    rank: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A micro-batch's media. Features are counted through its images, then its video, then its sounds."""

    tensors: dict[str, Tensor]
    """Arguments of the encoders by name, for this process's share: media one after the other, no media twice."""
    counts: dict[str, list[int]]
    """Modality -> its features in each share."""
    rank: int
    """Number of this process's share."""
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
    among: Among,
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
        tokens = rollouts.prompt_tokens[slice(*rollouts.prompt_offsets[sample : sample + 2])]
        if shows_later(rollouts, sample):  # placeholders stand behind the prompt too; a sample's last token is not fed
            begin, end = rollouts.offsets[sample : sample + 2]
            tokens = np.concatenate([tokens, rollouts.tokens[begin : end - 1]])
        found += [((m, one.digest), start + np.flatnonzero(tokens == token)) for m, token in placeholders.items()]
    for one in media.values():
        one.check("the trainer's encoders")
    sizes, digests = {key: len(places) for key, places in found}, list(media)
    weights = np.array([sum(sizes[m, digest] for m in placeholders) for digest in digests], np.int64)
    shares = [[digests[i] for i in share] for share in balance(weights, among.ranks)]
    ordered = [(m, digest) for m in placeholders for share in shares for digest in share]
    first = dict(zip(ordered, np.cumsum([0, *(sizes[key] for key in ordered)]), strict=False))
    counts = {m: [sum(sizes[m, digest] for digest in share) for share in shares] for m in placeholders}
    visual = sum(sum(each) for modality, each in counts.items() if modality != "audio")
    places = np.concatenate([here[:0], *(places for _, places in found)])
    features = np.concatenate([here[:0], *(first[key] + np.arange(len(places)) for key, places in found)])
    order = np.argsort(here)
    local = np.searchsorted(here, places, sorter=order)
    mine = np.flatnonzero(np.isin(places, here))
    mine = mine[np.argsort(features[mine], kind="stable")]
    own = [media[digest] for digest in shares[among.rank]]
    return Shown(
        tensors=as_tensors(family.joined(own), torch.float32, device) if own else {},
        counts=counts,
        rank=among.rank,
        places=torch.from_numpy(order[local[mine]]).to(device),
        features=torch.from_numpy(features[mine]).to(device),
        visual=int((features[mine] < visual).sum()),
    )
