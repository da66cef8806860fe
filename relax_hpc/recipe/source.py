"""The recipe's [[source]]: where prompts come from, and what they are rewarded by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import PositiveFloat, PositiveInt, Tag

from relax_hpc.recipe.table import Key, Table, named


class Source(Table):
    """What all prompt sources have."""

    weight: PositiveFloat = Key(1.0, "Share of prompts drawn from this source, against the other sources' weights.")
    environment: str = Key(
        "single_turn", "`single_turn`, or MODULE:CLASS or FILE.py:CLASS of your own.", looked_up=True
    )
    environment_options: dict[str, Any] = Key({}, "Keyword arguments for the environment.")


class FileSource(Source):
    """Prompts from a JSONL or Parquet file."""

    name: Literal["file"] = Key("file", "A .jsonl or .parquet file, one prompt a row.")
    prompts: Path = Key(help="The file.", looked_up=True)
    prompt_key: str = Key(
        "prompt",
        "Column with the prompt (a.b for nested ones): text, or a list of chat messages for the tokenizer's chat template.",
    )
    answer_key: str = Key(
        "answer", "Column with the reference answer that the reward compares with; empty where there is none."
    )
    reward: str = Key("exact", "`exact`, `math`, or MODULE:FUNCTION or FILE.py:FUNCTION of your own.", looked_up=True)
    reward_options: dict[str, Any] = Key({}, "Keyword arguments for the reward.")


class ReasoningGymSource(Source):
    """Prompts and verifier of a reasoning-gym task."""

    name: Literal["reasoning_gym"] = Key("reasoning_gym", "Procedural tasks with their own verifiers.")
    task: str = Key(help="The task's name, such as 'chain_sum'.")
    size: PositiveInt = Key(10000, "How many items the task makes; an epoch goes through them once.")
    seed: int = Key(0, "The task's own seed: which items it makes.", ge=0)
    config: dict[str, Any] = Key({}, "The task's own options.")
    template: str | None = Key(
        None, "The prompt, from the item's fields, such as '{metadata[expression]}='; none takes its question."
    )
    reward: str = Key("reasoning_gym", "`reasoning_gym` is the task's verifier; or any other reward.", looked_up=True)
    reward_options: dict[str, Any] = Key({}, "Keyword arguments for the reward.")


AnySource = Annotated[
    Union[Annotated[FileSource, Tag("file")], Annotated[ReasoningGymSource, Tag("reasoning_gym")]],
    named(default=lambda v: "reasoning_gym" if "task" in v else "file"),
]
