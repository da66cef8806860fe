"""A picture to look at more closely: the model zooms and turns it, and is rewarded as DeepEyes does (arXiv 2505.14362)."""

from __future__ import annotations

import io
import re
from typing import Any

from relax_hpc.environments.base import Part, ToolError, Turn
from relax_hpc.environments.builtin.with_tools import WithTools, schema
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue

ACCURACY, FORMAT, TOOL = 0.8, 0.2, 1.2
"""Weights of a right answer, of a wrong form, and of a right answer with a tool: without the last, tool use dies out."""
SMALLEST = 8
"""Pixels of the shortest side that a zoom may have."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ImageTools(WithTools):
    """Shows parts of the prompt's picture. The final answer stands in <answer>…</answer>."""

    schemas = (
        schema(
            "zoom", "Show a part of the picture.", box=("array", "[left, top, right, bottom] in pixels of the picture")
        ),
        schema("rotate", "Show the picture turned.", degrees=("number", "to the left")),
    )

    def __init__(self, *, image_key: str = "image_file", zoomed: int = 2) -> None:
        """image_key: the row's column with the path of the picture (that of `media` is not passed on to environments);
        zoomed: times that a part is enlarged."""
        self._key, self._zoomed = image_key, zoomed

    def reset(self, prompt: Prompt) -> None:
        from PIL import Image

        super().reset(prompt)
        if self._key not in prompt.metadata:
            raise WrongValue(f"the row has no column '{self._key}' (image_key); it has {sorted(prompt.metadata)}")
        self._picture: Any = Image.open(prompt.metadata[self._key]).convert("RGB")
        self._expected = prompt.answer or ""

    def use_zoom(self, box: list[Any]) -> list[Part]:
        width, height = self._picture.size
        if len(box) != 4 or not all(isinstance(at, int | float) for at in box):
            raise ToolError("a box is [left, top, right, bottom] in pixels")
        left, top, right, bottom = (
            int(min(max(at, 0), most)) for at, most in zip(box, (width, height) * 2, strict=True)
        )
        if min(right - left, bottom - top) < SMALLEST:
            raise ToolError(f"the box {box} is smaller than {SMALLEST} pixels within the picture of {width} x {height}")
        part = self._picture.crop((left, top, right, bottom))
        return _shown(part.resize((part.width * self._zoomed, part.height * self._zoomed)))

    def use_rotate(self, degrees: float) -> list[Part]:
        return _shown(self._picture.rotate(degrees % 360, expand=True))

    def ended(self, answer: str) -> Turn:
        answers = _ANSWER.findall(answer)
        right = bool(answers) and answers[-1].strip().casefold() == self._expected.strip().casefold()
        well_formed, used = len(answers) == 1, self.used > self.wrong
        reward = ACCURACY * right - FORMAT * (not well_formed) + TOOL * (right and used)
        return Turn(True, reward=reward, extra=self.numbers() | {"accuracy": right, "well_formed": well_formed})


def _shown(picture: Any) -> list[Part]:
    memory = io.BytesIO()
    picture.save(memory, "PNG")
    return [{"type": "image", "image": memory.getvalue()}]
