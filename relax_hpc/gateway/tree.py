"""The tree of a session's turns: histories that share a beginning share its tokens; each leaf becomes a sample.

    root ── told (system, task) ── said ──┬── told (tool's answer) ── said            leaf: a sample
                                          └── told (another one) ── said ── …        leaf: a sample; what it shares is masked
    root ── told (a rewritten history) ── said                                       leaf: a sample

Tokens that the model said are kept as they were sampled, and never made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from relax_hpc.engines import Completion
from relax_hpc.records import Finish, Sample

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Node:
    """A turn: what the model was told since the turn before, and what it said."""

    parent: Node | None
    told: Tokens
    said: Completion
    continued: bool = False
    """True where another turn followed."""

    def path(self) -> list[Node]:
        """The turns from the root to this one."""
        return [*(self.parent.path() if self.parent else ()), self]

    def tokens(self) -> Tokens:
        """All tokens up to the end of this turn."""
        parts = [part for node in self.path() for part in (node.told, node.said.tokens)]
        return np.concatenate(parts, dtype=np.int32)


@dataclass(slots=True)
class Tree:
    """All turns of a session, in the order in which they ended."""

    nodes: list[Node] = field(default_factory=list)
    _known: dict[str, Node] = field(default_factory=dict)
    """History's fingerprint -> the turn that ends it."""

    def find(self, history: Sequence[str]) -> tuple[Node | None, int]:
        """Return the turn that the longest known beginning of a history ends with, and how many messages that is."""
        for length in range(len(history), 0, -1):
            if (node := self._known.get(history[length - 1])) is not None:
                return node, length
        return None, 0

    def find_tokens(self, context: Tokens) -> tuple[Node | None, int]:
        """Return the turn whose tokens are the longest beginning of a context, and how many tokens that is."""
        best: tuple[Node | None, int] = None, 0
        for node in self.nodes:
            tokens = node.tokens()
            if best[1] < len(tokens) <= len(context) and np.array_equal(tokens, context[: len(tokens)]):
                best = node, len(tokens)
        return best

    def add(self, parent: Node | None, told: Tokens, said: Completion, history: str | None) -> Node:
        """Add a turn. history: fingerprint of the messages up to its end; None where tokens alone recognize it."""
        node = Node(parent, told, said)
        if parent is not None:
            parent.continued = True
        self.nodes.append(node)
        if history is not None:
            self._known[history] = node
        return node

    def leaves(self) -> list[Node]:
        """The turns that nothing followed, in the order in which they ended."""
        return [node for node in self.nodes if not node.continued]


def samples(tree: Tree, rollout: int) -> tuple[list[Sample], list[Tokens]]:
    """Return a sample for each leaf, whole contexts included, and what each was told before its first own token.

    A turn that several leaves share is in the loss of the first of them alone.
    """
    found, contexts, trained = list[Sample](), list[Tokens](), set[int]()
    for leaf in tree.leaves():
        found.append(_sample(leaf, rollout, trained))
        contexts.append(leaf.path()[0].told)
        trained |= {id(node) for node in leaf.path()}
    return found, contexts


def _sample(leaf: Node, rollout: int, trained: set[int]) -> Sample:
    path = leaf.path()
    masks, logprobs, versions = list[NDArray[np.uint8]](), list[NDArray[np.float32]](), list[NDArray[np.int32]]()
    for node in path:
        own, told = id(node) not in trained, len(node.told)
        masks += [np.zeros(told, np.uint8), np.full(len(node.said.tokens), own, np.uint8)]
        logprobs += [np.zeros(told, np.float32), node.said.logprobs * np.float32(own)]
        versions.append(_versions(node))
    made_by = np.concatenate(versions)
    changes = np.flatnonzero(np.diff(made_by, prepend=-1))
    return Sample(
        tokens=leaf.tokens(),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        spans=[(int(at), int(made_by[at])) for at in changes],
        finish=leaf.said.finish or Finish.STOP,
        turns=len(path),
        routed_experts=leaf.said.routed_experts,
        seconds=sum(node.said.seconds for node in path),
        rollout=rollout,
    )


def _versions(node: Node) -> NDArray[np.int32]:
    """[told + said] the version of each token; what the model was told counts to its first word."""
    starts, versions = zip(*node.said.spans, strict=True)
    lengths = np.diff([*starts, len(node.said.tokens)])
    lengths[0] += len(node.told)
    return np.repeat(np.asarray(versions, np.int32), lengths)
