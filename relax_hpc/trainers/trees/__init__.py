"""Samples of a group that begin alike, as trees: their tokens, and attention that sees a token's ancestors alone."""
