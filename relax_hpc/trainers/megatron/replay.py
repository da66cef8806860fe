"""Router replay (R3): tokens go to the experts that the behavior policy sent them to.

Engine and trainer add up the same router's scores in different orders; where two experts are nearly tied they would
choose differently. The micro-batch carries the experts. Each layer is given its micro-batch's as it is called, also
when it is called again in the backward pass, so stages, reference and policy cannot mix them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from relax_hpc.trainers.megatron.packing import Packed


class Replay:
    """Takes the place of Megatron-core's RouterReplay in one router."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.routed: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """([t, K] scores, [t, K] experts) of these tokens; by the router's own choice where none were recorded."""
        if self.routed is None:
            assert default_compute_topk is not None
            return default_compute_topk(scores, topk, num_groups, group_topk)
        experts = self.routed[:, self.layer]
        return scores.gather(1, experts), experts


def attach(layers: Any) -> None:
    """Let the routers among `layers` replay the experts that their micro-batches carry."""
    for layer in layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            router.router_replay = Replay(layer.layer_number - 1)
            layer.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    packed: Packed = kwargs["packed_seq_params"]
    layer.mlp.router.router_replay.routed = packed.routed
