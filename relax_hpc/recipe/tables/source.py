"""[[source]] and [[evaluation.source]]: where prompts come from, the environment that they run in, and their reward.

[media]: limits of what prompts show, the same for all sources, since one processor serves the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import PositiveFloat, PositiveInt, Tag, model_validator

from relax_hpc.recipe.agent import Agent
from relax_hpc.recipe.sandbox import AnySandbox, Sandbox
from relax_hpc.recipe.tables.table import Key, Table, conflict, named

WEIGHT = "Share of prompts drawn from this source, against the other sources' weights."
Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")
LIMIT = "The most prompts of this source that are evaluated; absent: all of them."


class RewardPart(Table):
    """One reward of a weighted sum; it becomes a column of the shard under its name."""

    reward: str = Key(help="As `reward` of a source.", looked_up=True)
    name: str = Key("", "Name of its column; absent: that of the reward.")
    weight: float = Key(1.0, "What it is multiplied by in the sum.")
    options: dict[str, Any] = Key({}, "Keyword arguments for the reward.")
    kind: str | None = Key(None, "The value of `reward_column` in the rows that it is for; absent: all rows.")


class Prompts(Table):
    """Keys of all prompt sources."""

    table: ClassVar[str] = "source"
    """The recipe's list of tables in which this one stands."""

    environment: str = Key(
        "single_turn",
        "`single_turn`, `calculator`, `python`, `bash`, `search`, `image_tools`, `gymnasium:ID` of a game, or MODULE:CLASS or FILE.py:CLASS of "
        "your own.",
        looked_up=True,
    )
    environment_options: dict[str, Any] = Key({}, "Keyword arguments for the environment.")
    sandbox: AnySandbox = Key(
        Sandbox(), "Sandbox in which the processes of this source's environment run: a kind, or a table."
    )
    agent: Agent | None = Key(
        None, "A program that plays each sample by itself, in place of an environment and a reward."
    )
    rewards: list[RewardPart] = Key(
        [], "Several rewards, added with their weights, in place of `reward`; each becomes a column of its own."
    )
    reward_column: str = Key(
        "", "Column that names a row's kind, where `rewards` are for rows of one `kind`; other kinds are an error."
    )

    @model_validator(mode="after")
    def _rewards_fit_together(self) -> Prompts:
        set_too = {"reward", "reward_options"} & self.model_fields_set
        if self.rewards and any(getattr(self, key) != type(self).model_fields[key].default for key in set_too):
            raise conflict(
                "`reward` and `rewards` are both given: put the one reward into the list too, or leave it out"
            )
        names = Counter((part.name or part.reward, part.kind) for part in self.rewards)
        for (name, kind), count in names.items():
            if count > 1 or (kind is not None and (name, None) in names):
                raise conflict(f"rewards has '{name}' twice for the same rows: give each part a `name` of its own")
        if bool(self.reward_column) != any(part.kind is not None for part in self.rewards):
            raise conflict("reward_column and the `kind` of a part of `rewards` go together: give both or neither")
        return self

    @model_validator(mode="after")
    def _agent_plays_alone(self) -> Prompts:
        if self.agent is not None and self.environment != "single_turn":
            raise conflict(
                f"`agent` and environment = '{self.environment}' are both given: an agent takes an environment's place, leave one out"
            )
        if self.agent is not None and self.shows:
            raise conflict(
                "a source with an `agent` shows media, but the gateway takes text only: leave `media` or `agent` out"
            )
        return self

    tools: list[dict[str, Any] | str] = Key(
        [],
        "Tools that the chat template shows the model: JSON schemas, or MODULE:FUNCTION or FILE.py:FUNCTION with type hints and a docstring; by "
        "default those of the environment's `tools()`.",
        looked_up=True,
    )
    template_options: dict[str, Any] = Key(
        {}, "Further arguments of the chat template, such as `{enable_thinking = false}`."
    )

    @property
    def of_template(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        return {**({"tools": self.tools} if self.tools else {}), **self.template_options}

    @property
    def shown(self) -> tuple[Modality, ...]:
        """The modalities of the columns whose media prompts show."""
        return ()

    @property
    def shows(self) -> bool:
        """True where prompts show any."""
        return bool(self.shown)


class FilePrompts(Prompts):
    """Prompts from a JSONL or Parquet file."""

    name: Literal["file"] = Key("file", "A .jsonl or .parquet file, or the folder of a data set, one prompt a row.")
    prompts: Path = Key(
        help="The file; or a folder that `Dataset.save_to_disk` wrote, or one of .parquet files.", looked_up=True
    )
    prompt_key: str = Key(
        "prompt",
        "Column with the prompt (a.b for nested ones): text, or a list of chat messages for the tokenizer's chat template.",
    )
    answer_key: str = Key(
        "answer",
        "Column with the reference answer, which the reward compares with, or which is trained on; empty where there is none, or "
        "where the prompt is a conversation whose last message, the assistant's, is the answer.",
    )
    max_prompt_tokens: PositiveInt | None = Key(
        None, "Longest prompt in tokens; absent: the model's context, less one token for an answer."
    )
    too_long: Literal["error", "drop", "truncate"] = Key(
        "error",
        "Treatment of a longer prompt: an error before the run begins, the row is left out, or the prompt's beginning is cut off "
        "(needs `max_prompt_tokens`). `drop` also leaves out an answer to be trained on that, with its prompt, exceeds the context.",
    )
    missing_answer: Literal["error", "drop"] = Key(
        "error",
        "Treatment of a row whose answer is missing, null or, where it is to be trained on, blank; `drop` leaves out rows with a blank one too.",
    )
    media: dict[Modality, str] = Key(
        {},
        'Columns with what the prompt shows: `{image = "images", video = "video", audio = "audio"}`. They take the places of '
        "`<image>`, `<video>` and `<audio>` in its text, in their order; as many as there are places.",
    )
    broken_media: Literal["error", "drop"] = Key(
        "error",
        "Treatment of a row whose media are missing, damaged by the look of their headers, or of another number than their places: "
        "an error before the run begins, or the row is left out. What is found when a row is decoded fails its group alone.",
    )
    reward: str = Key(
        "exact",
        "`exact`, `math`, `dapo`, `deepscaler`, `geo3k`, `openr1mm`, `multiple_choice`, `gpqa`, `f1`, `ifeval`, `format`, `length`, `remote`, "
        "or MODULE:FUNCTION or FILE.py:FUNCTION of your own.",
        looked_up=True,
    )
    reward_options: dict[str, Any] = Key({}, "Keyword arguments for the reward.")

    @model_validator(mode="after")
    def _says_where_to_cut(self) -> FilePrompts:
        if self.too_long == "truncate" and self.max_prompt_tokens is None:
            raise conflict(
                'too_long = "truncate" needs max_prompt_tokens, such as half of the model\'s context: the rest is for the answer'
            )
        if self.too_long == "truncate" and self.media:
            raise conflict(
                'too_long = "truncate" would cut pictures and sounds in two: use "error" or "drop" for a source with media'
            )
        if len(set(self.media.values())) < len(self.media):
            raise conflict(f"media = {self.media} names a column twice: each modality has one of its own")
        return self

    @property
    def shown(self) -> tuple[Modality, ...]:
        return tuple(self.media)

    @property
    def drops(self) -> bool:
        """True where a row may be left out."""
        return "drop" in (self.too_long, self.missing_answer, self.broken_media)

    @property
    def counted(self) -> bool:
        """True where rows may be left out or cut, and are counted."""
        return self.drops or self.too_long == "truncate"


class TaskPrompts(Prompts):
    """Prompts and verifier of a reasoning-gym task."""

    name: Literal["reasoning_gym"] = Key("reasoning_gym", "Procedural tasks with their own verifiers.")
    task: str = Key(help="The task's name, such as 'chain_sum'.")
    size: PositiveInt = Key(10000, "Number of items that the task makes; an epoch goes through them once.")
    seed: int = Key(0, "The task's own seed, which decides its items.", ge=0)
    config: dict[str, Any] = Key({}, "The task's own options.")
    template: str | None = Key(
        None, "The prompt, from the item's fields, such as '{metadata[expression]}='; absent: its question."
    )
    reward: str = Key("reasoning_gym", "`reasoning_gym` is the task's verifier; or any other reward.", looked_up=True)
    reward_options: dict[str, Any] = Key({}, "Keyword arguments for the reward.")


class FileSource(FilePrompts):
    """Prompts from a JSONL or Parquet file."""

    weight: PositiveFloat = Key(1.0, WEIGHT)


class ReasoningGymSource(TaskPrompts):
    """Prompts and verifier of a reasoning-gym task."""

    weight: PositiveFloat = Key(1.0, WEIGHT)


class Curriculum(Table):
    """Weights that follow progress: sources whose prompts are solved about half the time come more often. Each one's
    weight is multiplied by 4 p (1 - p), at least by 0.1, p being its pass rate (over about 10 steps)."""

    solved_at: float = Key(1.0, "Raw reward from which a sample counts as solved.")


class EvaluationFile(FilePrompts):
    """A file of prompts that are evaluated, never trained on."""

    table: ClassVar[str] = "evaluation.source"
    limit: PositiveInt | None = Key(None, LIMIT)


class EvaluationTask(TaskPrompts):
    """A reasoning-gym task that is evaluated; its texts are never trained on."""

    table: ClassVar[str] = "evaluation.source"
    limit: PositiveInt | None = Key(None, LIMIT)


class Media(Table):
    """Limits of images, video and audio in prompts. What is larger is made smaller or refused before the model sees it."""

    image_tokens: tuple[PositiveInt, PositiveInt] = Key(
        (4, 16384), "Fewest and most tokens of a picture; it is made larger or smaller to fit."
    )
    largest_image_pixels: PositiveInt = Key(
        1 << 26, "Most pixels of a picture's file, and of a video's frame; larger ones are refused unread."
    )
    video_fps: PositiveFloat = Key(2.0, "Frames a second that are taken of a video.")
    video_frames: tuple[PositiveInt, PositiveInt] = Key(
        (4, 768), "Fewest and most frames of a video; the rate becomes higher or lower to fit."
    )
    video_frame_tokens: tuple[PositiveInt, PositiveInt] = Key(
        (128, 768), "Fewest and most tokens that a frame would have as a picture of its size."
    )
    longest_video_s: PositiveFloat = Key(3600.0, "Longest video in seconds; longer ones are refused.")
    longest_audio_s: PositiveFloat = Key(300.0, "Longest sound in seconds; longer ones are refused.")

    @model_validator(mode="after")
    def _ordered(self) -> Media:
        for key in ("image_tokens", "video_frames", "video_frame_tokens"):
            fewest, most = getattr(self, key)
            if fewest > most:
                raise conflict(f"media.{key} = {[fewest, most]} has its fewest first: [{most}, {fewest}]")
        return self


def _kind(value: dict[str, Any]) -> str:
    return "reasoning_gym" if "task" in value else "file"


AnySource = Annotated[
    Union[Annotated[FileSource, Tag("file")], Annotated[ReasoningGymSource, Tag("reasoning_gym")]],
    named(default=_kind),
]
AnyEvaluationSource = Annotated[
    Union[Annotated[EvaluationFile, Tag("file")], Annotated[EvaluationTask, Tag("reasoning_gym")]],
    named(default=_kind),
]
AnyPrompts = FilePrompts | TaskPrompts


def keys_of(sources: Sequence[AnyPrompts]) -> list[str]:
    """The key of each source in the recipe: "source.0", …, "evaluation.source.0", …"""
    seen: Counter[str] = Counter()
    keys = []
    for source in sources:
        keys.append(f"{source.table}.{seen[source.table]}")
        seen[source.table] += 1
    return keys


def labels(sources: Sequence[AnyPrompts]) -> list[str]:
    """A short name for each source: its file's or its task's, with the key where several share that name."""
    names = [s.prompts.stem if isinstance(s, FilePrompts) else s.task for s in sources]
    return [
        name if names.count(name) == 1 else f"{name} {key}" for name, key in zip(names, keys_of(sources), strict=True)
    ]


def left_out(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Put RUN/rows.json into words: a line for each source, by its key, that leaves rows out or cuts them."""
    lines = []
    for key, count in counts.items():
        said = [
            f"{count[name]:,} {words}"
            for name, words in (
                ("too_long", "left out as too long"),
                ("no_answer", "left out without an answer"),
                ("broken_media", "left out for their media"),
                ("cut", "cut off at the beginning"),
            )
            if count.get(name)
        ]
        if said:
            lines.append(f"{key}: of {count['rows']:,} rows {', '.join(said)}")
    return lines
