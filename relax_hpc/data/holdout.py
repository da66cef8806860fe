"""Choice of the prompts that are held out: a share of the distinct texts, by a hash of the text alone. Of a prompt with
media, its text ends with the digests of their bytes (see data.media_rows).

A text is on the same side in every source, process, run and machine, however often it comes up; so a held-out text is
never learned from under another index.
"""

from __future__ import annotations

from hashlib import blake2b

_HASH_BYTES = 8
_FINGERPRINT_BYTES = 16


def falls_in(text: str, share: float) -> bool:
    """Return True if the hash of `text`, as a fraction of its range, lies below `share`."""
    digest = blake2b(text.encode(), digest_size=_HASH_BYTES, person=b"relax-holdout").digest()
    return int.from_bytes(digest, "big") / 256.0**_HASH_BYTES < share


def fingerprint(text: str) -> bytes:
    """A short hash that stands for `text` in a set of texts."""
    return blake2b(text.encode(), digest_size=_FINGERPRINT_BYTES).digest()
