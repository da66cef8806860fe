"""Checksums of a dataset's blocks, compared as rows are read: no row is returned unchecked.

    rows [begin, end) ──► the blocks that they touch ──read──► memory, cache-hot ──XXH3-64──► equal: the rows; else ValueError

A block has BLOCK_ROWS rows, so reading a slice of a large shard reads little more than that slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_hpc.spool import hdf5

BLOCK_ROWS = hdf5.CHUNK
"""Rows of a block, as many as in a compressed chunk: half a megabyte of tokens stays in a core's cache from reading to
comparing."""
DIGITS = 16
"""Hexadecimal digits of an XXH3-64 checksum."""

Rows = tuple[int, int]
"""A range of rows, [begin, end)."""


def checksums(column: hdf5.Column) -> str:
    """Return the XXH3-64 of each block's bytes, DIGITS hexadecimal digits each, joined; a column without rows has the
    checksum of no bytes."""
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
    """A dataset whose rows are compared with their checksums. Making it and reading it raise ValueError where they
    differ."""

    def __init__(self, dataset: hdf5.Dataset, expected: str) -> None:
        self._dataset, self._dtype, self._expected = dataset, dataset.dtype, expected
        self.rows = dataset.rows
        blocks = max(1, -(-self.rows // BLOCK_ROWS))
        if len(expected) != DIGITS * blocks:
            raise ValueError(f"it has {self.rows} rows and {len(expected) // DIGITS} checksums, expected {blocks}")

    def read(self, pieces: Sequence[Rows]) -> NDArray[Any]:
        """Read these ranges of rows (ascending, disjoint) and return them joined in one array."""
        if len(pieces) == 1 and pieces[0] == (0, self.rows):  # most columns: quicker than block by block
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
        """Read all rows and compare them, in the memory of one block. Raises ValueError where they differ."""
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
        """Yield each block that the ranges touch, with the rows wanted of it."""
        found: dict[int, list[Rows]] = {}
        for begin, end in pieces:
            for block in range(begin // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
                x, y = self._of(block)
                found.setdefault(block, []).append((max(begin, x), min(end, y)))
        yield from found.items()
