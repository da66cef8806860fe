"""Prompts: where they come from, in which order, and which are held out.

[[source]] ──► PromptSources ──(index ──► Prompt)──► rollout
                    ▲
PromptCursor ───────┴──(which index next)──► requests, or examples to learn
"""

from relax_hpc.data.cursor import PromptCursor, PromptRef
from relax_hpc.data.sources import PromptSources

__all__ = ["PromptCursor", "PromptRef", "PromptSources"]
