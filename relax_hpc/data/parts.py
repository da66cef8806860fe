"""Media in a prompt's content: `<image>` in its text, or structured parts ──► places, which the row's cells fill in order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.data.render import ContentError
from relax_hpc.media.process import Cell
from relax_hpc.media.values import KEYS
from relax_hpc.recipe.tables.source import MODALITIES

TYPES = {f"{modality}{ending}": modality for modality in MODALITIES for ending in ("", "_url")} | {
    f"input_{modality}": modality for modality in MODALITIES
}
"""Types of structured parts, as OpenAI's and Hugging Face's messages name them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt shows something."""

    modality: str
    value: Any = None
    """The value that a structured part brings itself; None where the row's column has it."""


def placed(content: Any, from_columns: Sequence[str], marks: Mapping[str, str]) -> tuple[Any, list[Place]]:
    """Find the places in a prompt's content; returns the content for the chat template, and the places in their order.

    from_columns: modalities whose `<…>` in a text is a place. marks: the model's own texts for the modalities that it
    has. Raises ContentError for a modality that it has not.
    """
    places: list[Place] = []
    pattern = re.compile("<(" + "|".join(from_columns) + ")>") if from_columns else None
    if isinstance(content, str):
        return _in_text(content, pattern, marks, places), places
    if not isinstance(content, list) or not all(isinstance(message, dict) for message in content):
        return content, places
    messages = [
        {**message, "content": _in_message(message.get("content"), pattern, marks, places)} for message in content
    ]
    return messages, places


def filled(places: Sequence[Place], columns: Mapping[str, Sequence[Any]], names: Mapping[Any, str]) -> list[Cell]:
    """Fill the places with the row's cells. names: each modality's column. Raises ContentError for too few or too many."""
    for modality, column in names.items():
        asked = sum(place.modality == modality and place.value is None for place in places)
        if asked != (found := len(columns.get(modality, ()))):
            raise ContentError(
                f"the prompt has {asked} <{modality}> and its column '{column}' (media.{modality}) {found} values: give as many"
            )
    without = sorted({p.modality for p in places if p.value is None} - set(names))
    if without:
        raise ContentError(
            f"the prompt shows {without} without saying what: its parts bring no value, and media names no column"
        )
    left = {modality: iter(cells) for modality, cells in columns.items()}
    return [Cell(p.modality, next(left[p.modality]) if p.value is None else p.value) for p in places]


def observed(content: Any, marks: Mapping[str, str]) -> tuple[str, list[Cell]]:
    """Render what an environment shows: its text with the model's own mark for each of its media, and these in their order.

    content: text, or a list of parts that bring their own values. Raises ContentError for other content, or a modality that
    the model has not.
    """
    if isinstance(content, str):
        return content, []
    places: list[Place] = []
    made = _in_message(content, None, marks, places)
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in made]
    if other := sorted({str(kind) for kind in kinds} - {"text", *MODALITIES}):
        raise ContentError(f"parts of type {other} are not known: they are 'text' or of {list(MODALITIES)}")
    text = "".join(str(part["text"]) if part["type"] == "text" else marks[part["type"]] for part in made)
    return text, filled(places, {}, {})


def _in_text(text: str, pattern: re.Pattern[str] | None, marks: Mapping[str, str], places: list[Place]) -> str:
    """Put the model's own marks into a text without messages."""
    if pattern is None:
        return text

    def mark(found: re.Match[str]) -> str:
        places.append(_place(found[1], marks))
        return marks[found[1]]

    return pattern.sub(mark, text)


def _in_message(content: Any, pattern: re.Pattern[str] | None, marks: Mapping[str, str], places: list[Place]) -> Any:
    """Split a message's content into parts, where it shows anything."""
    parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        return content
    made, before = list[Any](), len(places)
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TYPES:
            brought = {
                key: part[key]
                for key in (*KEYS, "frames", "fps", "array", "sampling_rate")
                if part.get(key) is not None
            }
            places.append(_place(TYPES[kind], marks, brought))
            made.append({"type": TYPES[kind]})
        elif kind == "text" and pattern is not None and isinstance(part.get("text"), str):
            for i, piece in enumerate(pattern.split(part["text"])):
                if i % 2:
                    places.append(_place(piece, marks))
                if i % 2 or piece:
                    made.append({"type": piece} if i % 2 else {"type": "text", "text": piece})
        else:
            made.append(part)
    return made if len(places) > before else content


def _place(modality: str, marks: Mapping[str, str], brought: Mapping[str, Any] | None = None) -> Place:
    if modality not in marks:
        knows = f"only {sorted(marks)} beside text" if marks else "only text"
        raise ContentError(f"the prompt shows {modality}, but the model knows {knows}")
    if not brought:
        return Place(modality)
    return Place(modality, brought.get(modality, dict(brought)))
