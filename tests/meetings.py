"""The groups in which weights are broadcast, as far as they go without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

from relax_hpc import weights
from relax_hpc.weights.collective import Meeting

MEETINGS: dict[str, Callable[..., Meeting]] = {
    **weights.MEETINGS,
    "nccl": functools.partial(weights.NcclMeeting, backend="gloo"),
}
"""nccl: its processes and all that they do, but gloo between them and no copies to a GPU."""
