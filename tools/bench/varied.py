"""A reward for runs whose bits are compared: it varies with every character, so every group has advantages, every step a gradient.

Where a reward can be the same for a whole group (exact answers of an untrained model), a run may hardly train; then the same
bits at its end say little.
"""

from __future__ import annotations

import zlib

from relax_hpc.records import Prompt


def score(prompt: Prompt, answer: str) -> float:
    """A number from 0 to 1 that depends on the answer alone, and on all of it."""
    return zlib.crc32(answer.encode()) / 2**32
