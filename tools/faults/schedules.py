"""Every kind of commit that a run makes, each as the calls of the file system that it consists of.

A path is written as below the run's folder, with {n} for a number, {h} for hexadecimal digits, {i} for an incarnation's folder,
{l} for a lease's, {r} for a request's name, {any} for one name and {all} for any path below. "source > target" is a rename or link.

A call that no kind lists is a commit that nobody has thought about: `unknown` finds it in the log of a whole run. The kinds themselves are
in commits.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from tools.faults.faultfs import Hit

CHANGES = (
    "mkdir",
    "rmdir",
    "create",
    "write",
    "truncate",
    "rename",
    "link",
    "symlink",
    "unlink",
    "chmod",
    "chown",
    "utime",
)
"""Calls that change what others see."""
NEW = re.compile(r"/\.[^/]+\.new(/|>|$)")
"""Paths of a run that is being made."""
WORDS = {
    "n": "[0-9]+",
    "h": "[0-9a-f]+",
    "l": "lease/[0-9]+",
    "i": "lease/[0-9]+/i[0-9]+",
    "r": "[re][0-9]+(l[0-9]+)?-[0-9a-zA-Z_]+",
    "any": "[^/]+",
    "all": ".*",
}


@dataclass(frozen=True)
class Call:
    """One call of a commit."""

    op: str
    path: str
    """In the words of this module."""

    def regex(self, run: str = "[^/]+") -> str:
        """Return the extended regex of a rule for this call; `run`: a regex of the run's folder on the mount."""
        return "^" + ">".join(f"/{run}/{_regex(path)}" for path in self.path.split(" > ")) + "$"

    def __str__(self) -> str:
        return f"{self.op} {self.path}"


@dataclass(frozen=True)
class Kind:
    """A kind of commit."""

    name: str
    calls: tuple[Call, ...]
    role: str = "trainer"
    """Whose calls they are."""
    begins: str = ""
    """When it is made (tools/faults/commits.py)."""
    scene: str = "plain"
    """The run in which it is made (tools/faults/scenes.py)."""


def _regex(path: str) -> str:
    parts = re.split(r"\{(\w+)\}", path)
    return "".join(WORDS[part] if i % 2 else re.sub(r"([.+])", r"\\\1", part) for i, part in enumerate(parts))


def calls(*texts: str) -> tuple[Call, ...]:
    return tuple(Call(*text.split(" ", 1)) for text in texts)


def written(path: str) -> tuple[Call, ...]:
    return calls(f"create {path}", f"write {path}")


def _hidden(folder: str, final: str) -> str:
    return f"{folder}/".lstrip("/") + f".{final.rsplit('/', 1)[-1]}.{{h}}"


def published(folder: str, final: str) -> tuple[Call, ...]:
    """The calls of files.publish.publish; `folder`: the temporary name's."""
    hidden = _hidden(folder, final)
    return (*written(hidden), *calls(f"link {hidden} > {final}", f"unlink {hidden}"))


def replaced(folder: str, final: str) -> tuple[Call, ...]:
    """The calls of files.publish.replace."""
    hidden = _hidden(folder, final)
    return (*written(hidden), *calls(f"rename {hidden} > {final}"))


def removed(path: str, gone: str) -> tuple[Call, ...]:
    """The calls of a removal by way of an incarnation's folder."""
    return calls(f"rename {path} > {gone}", f"unlink {gone}/{{all}}", f"rmdir {gone}")


def name_of(hit: Hit) -> str:
    return f"{hit.path}>{hit.target}" if hit.target else hit.path


def unknown(hits: Iterable[Hit], kinds: Iterable[Kind]) -> Iterator[Hit]:
    """Yield the changes that belong to no kind. What is made under a new run's hidden name is one commit, which its rename ends."""
    known: dict[str, list[re.Pattern[str]]] = {}
    for call in chain.from_iterable(kind.calls for kind in kinds):
        known.setdefault(call.op, []).append(re.compile(call.regex()))
    for hit in hits:
        if (
            hit.path  # else its file has no name any more
            and hit.op in CHANGES
            and not NEW.match(name := name_of(hit))
            and not any(each.search(name) for each in known.get(hit.op, ()))
        ):
            yield hit
