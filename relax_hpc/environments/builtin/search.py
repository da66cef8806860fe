"""A search over a corpus of one's own, by BM25; the index is made once in each process that holds environments."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from relax_hpc.environments.base import ToolError
from relax_hpc.environments.builtin.with_tools import WithTools, schema
from relax_hpc.files.errors import RunError


class Search(WithTools):
    """Answers calls of `search` with the passages that fit best."""

    schemas = (schema("search", "Search for passages of text.", query=("string", "words to look for")),)

    def __init__(self, *, corpus: str, key: str = "text", passages: int = 3, longest: int = 1000) -> None:
        """corpus: a .jsonl file with a passage a line, under `key`; passages: how many are shown, at most; longest:
        characters that are shown of each."""
        self._corpus, self._key, self._passages, self._longest = corpus, key, passages, longest

    def use_search(self, query: str) -> str:
        texts, index = _indexed(self._corpus, self._key)
        import bm25s

        words = bm25s.tokenize(query, show_progress=False, return_ids=False)
        if not words[0]:
            raise ToolError("the query has no words that could be looked for")
        found, scores = index.retrieve(words, k=min(self._passages, len(texts)), show_progress=False, n_threads=0)
        best = [i for i, score in zip(found[0].tolist(), scores[0].tolist(), strict=True) if score > 0]
        return "\n\n".join(f"[{i}] {texts[i][: self._longest]}" for i in best) or "nothing was found"


@functools.cache
def _indexed(corpus: str, key: str) -> tuple[list[str], Any]:
    try:
        import bm25s
    except ImportError:
        raise RunError("environment 'search' needs bm25s: pip install 'relax-hpc[agents]'") from None
    try:
        texts = [
            str(json.loads(line)[key]) for line in Path(corpus).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"environment 'search': corpus = '{corpus}', key = '{key}': {type(error).__name__}: {error}"
        ) from error
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False, return_ids=False), show_progress=False)
    return texts, index
