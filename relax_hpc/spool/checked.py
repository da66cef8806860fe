"""Checksums of a column's blocks, and datasets compared with them as they are read: no row is given to anybody unchecked.

    rows [begin, end) ──► the blocks that they touch ──read──► memory, cache-hot ──XXH3-64──► equal: the rows; else ValueError

A block has BLOCK_ROWS rows, so that who reads a slice of a large shard reads little more than that slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_hpc.spool import hdf5

BLOCK_ROWS = hdf5.CHUNK
"""As many as a compressed chunk has: half a megabyte of tokens stays in a core's cache between reading and comparing."""
DIGITS = 16
"""Hexadecimal ones of an XXH3-64."""

Rows = tuple[int, int]
"""The rows [begin, end)."""


def checksums(column: hdf5.Column) -> str:
    """XXH3-64 of each block's bytes, DIGITS digits each, one after the other; a column without rows has that of no bytes."""
    block_bytes = room = BLOCK_ROWS * column.dtype.itemsize
    digest, found = xxhash.xxh3_64(), []
    for piece in column.pieces:
        while len(piece) > room:
            digest.update(piece[:room])
            found.append(digest.hexdigest())
            piece, room = piece[room:], block_bytes
            digest.reset()
        digest.update(piece)
        room -= len(piece)
    return "".join([*found, digest.hexdigest()])


class Checked:
    """A dataset and its checksums. Raises ValueError, here and where it is read, for what does not fit them."""

    def __init__(self, dataset: hdf5.Dataset, expected: str) -> None:
        self._dataset, self._dtype, self._expected = dataset, dataset.dtype, expected
        self.rows = dataset.rows
        blocks = max(1, -(-self.rows // BLOCK_ROWS))
        if len(expected) != DIGITS * blocks:
            raise ValueError(f"it has {self.rows} rows and {len(expected) // DIGITS} checksums, expected {blocks}")

    def read(self, pieces: Sequence[Rows]) -> NDArray[Any]:
        """These rows (ascending, apart), one piece after the other."""
        if len(pieces) == 1 and pieces[0] == (0, self.rows):  # as of most columns: nothing is asked block by block
            return self._all()
        array, done = np.empty(sum(end - begin for begin, end in pieces), self._dtype), 0
        for block, wanted in self._by_block(pieces):
            begin, end = self._of(block)
            count = sum(y - x for x, y in wanted)
            whole = count == end - begin  # then without a copy
            read = self._block(block, array[done : done + count] if whole else np.empty(end - begin, self._dtype))
            for x, y in () if whole else wanted:
                array[done : done + y - x] = read[x - begin : y - begin]
                done += y - x
            done += count if whole else 0
        return array

    def compare(self) -> None:
        """Read all of it, in the memory of one block."""
        memory = np.empty(min(BLOCK_ROWS, self.rows), self._dtype)
        for block in range(-(-self.rows // BLOCK_ROWS)):
            begin, end = self._of(block)
            self._block(block, memory[: end - begin])

    def _all(self) -> NDArray[Any]:
        array = np.empty(self.rows, self._dtype)
        for block, begin in enumerate(range(0, self.rows, BLOCK_ROWS)):
            self._block(block, array[begin : begin + BLOCK_ROWS])
        return array

    def _of(self, block: int) -> Rows:
        return block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, self.rows)

    def _block(self, block: int, memory: NDArray[Any]) -> NDArray[Any]:
        """Read a block into `memory` and compare it."""
        self._dataset.read(block * BLOCK_ROWS, memory)
        found = xxhash.xxh3_64_hexdigest(memory.data)
        if not self._expected.startswith(found, block * DIGITS):
            begin, end = self._of(block)
            expected = self._expected[block * DIGITS : (block + 1) * DIGITS]
            raise ValueError(f"rows {begin} to {end} have checksum {found}, expected {expected}")
        return memory

    def _by_block(self, pieces: Sequence[Rows]) -> Iterator[tuple[int, list[Rows]]]:
        """Each block that is touched, with what is wanted of it."""
        found: dict[int, list[Rows]] = {}
        for begin, end in pieces:
            for block in range(begin // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
                x, y = self._of(block)
                found.setdefault(block, []).append((max(begin, x), min(end, y)))
        yield from found.items()
