"""Media on their way from the worker into its own server: files that only memory holds, named in the requests.

Media.tensors ──safetensors──► anonymous memory file ◄── /proc/WORKER/fd/N, the digest: an "image" of each request
    the server (hooks.py) maps the file, compares the digest, and shows the tensors to the model

Nothing is left behind by a kill, and all samples of a prompt, and all prompts of the same media, name one file.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
from safetensors.numpy import load_file, save

from relax_hpc.records import Media

MARK = "relax-hpc-media"


class MediaFiles:
    """The files of media under way, which exist until they are dropped, and no longer than a `with` block."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        """Digest -> descriptor."""

    def __enter__(self) -> MediaFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def drop(self, media: Media) -> None:
        """Let go of the file with these media."""
        os.close(self._files.pop(media.digest))

    def name(self, media: Media) -> list[str]:
        """Name the file with these media, written when they are first seen. Raises Damaged for media that were changed."""
        if media.digest not in self._files:
            media.check("the engine's encoders")
            file = self._files[media.digest] = os.memfd_create(MARK)
            with open(file, "wb", closefd=False) as written:
                written.write(save({name: np.ascontiguousarray(array) for name, array in media.tensors.items()}))
        return [f"{MARK}:{media.digest}:/proc/{os.getpid()}/fd/{self._files[media.digest]}"]


def read(name: str) -> Media | None:
    """Read what MediaFiles.name gave; None for any other name. Raises Damaged where it is not what was written."""
    mark, _, rest = name.partition(":")
    if mark != MARK:
        return None
    digest, _, path = rest.partition(":")
    media = Media(load_file(Path(path)), digest)
    media.check("SGLang's encoders")
    return media
