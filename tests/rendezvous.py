"""The groups in which weights are broadcast, as far as they go without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

from relax_hpc import weights
from relax_hpc.weights.groups.rendezvous import Rendezvous

RENDEZVOUS: dict[str, Callable[..., Rendezvous]] = {
    **weights.RENDEZVOUS,
    "nccl": functools.partial(weights.NcclRendezvous, backend="gloo"),
}
"""nccl: its processes and all that they do, but gloo between them and no copies to a GPU."""
