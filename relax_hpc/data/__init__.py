"""Prompts: where they come from, in which order, and which are held out.

[[source]] ──► PromptSources ──(index ──► Prompt)──► rollout
                    ▲
PromptCursor ───────┴──(which index next)──► requests
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.data.sources import PromptSources

if TYPE_CHECKING:
    from relax_hpc.data.cursor import PromptCursor, PromptRef

__all__ = ["PromptCursor", "PromptRef", "PromptSources"]


def __getattr__(name: str) -> Any:
    # The cursor needs torch, through torchdata; rewards use this package and run in processes that do without.
    if name not in ("PromptCursor", "PromptRef"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from relax_hpc.data import cursor

    return getattr(cursor, name)
