"""Games of Gymnasium, as text or as pictures: the model says its move, and reads what became of it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any, Literal

from relax_hpc.environments.base import Part, Turn
from relax_hpc.files.errors import RunError
from relax_hpc.records import Prompt

PREFIX = "gymnasium:"
"""`environment = "gymnasium:ID"` is the environment `game` with that id."""
_NUMBER = re.compile(r"-?\d+")


class Game:
    """A game whose moves are numbers, or have names. Its reward is the sum of the game's own."""

    def __init__(
        self, *, game: str, show: Literal["observation", "ansi", "pixels"] = "observation", moves: Sequence[str] = (),
        options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """game: its id; show: what the model reads (`ansi` and `pixels` are the game's own renderings); moves: a name for
        each move, in place of its number; options: arguments of `gymnasium.make`."""
        try:
            import gymnasium
        except ImportError:
            raise RunError(f"environment '{PREFIX}{game}' needs gymnasium: pip install 'relax-hpc[agents]'") from None
        self._show, self._moves = show, [*moves]
        modes = {"ansi": "ansi", "pixels": "rgb_array"}
        self._game: Any = gymnasium.make(game, render_mode=modes.get(show), **(options or {}))
        if not isinstance(self._game.action_space, gymnasium.spaces.Discrete):
            raise RunError(
                f"environment '{PREFIX}{game}': its moves are {self._game.action_space}, and only Discrete ones can be said"
            )
        self._count = int(self._game.action_space.n)
        if self._moves and len(self._moves) != self._count:
            raise RunError(f"environment '{PREFIX}{game}': {len(self._moves)} names in `moves` for {self._count} moves")

    def reset(self, prompt: Prompt) -> None:
        """Begin with the seed in the row's column `seed`, else with the prompt's index: the same prompt is the same game."""
        self._total, self._made, self._refused = 0.0, 0, 0
        self._game.reset(seed=int(prompt.metadata.get("seed", prompt.index)))

    def step(self, answer: str) -> Turn:
        move = self._move(answer)
        if move is None:
            self._refused += 1
            known = ", ".join(self._moves) or f"a number from 0 to {self._count - 1}"
            return Turn(False, [{"role": "user", "content": f"That is no move: say {known}."}])
        seen, reward, over, cut, _ = self._game.step(move)
        self._total, self._made = self._total + float(reward), self._made + 1
        if over or cut:
            numbers = {"moves": float(self._made), "refused_moves": float(self._refused)}
            return Turn(True, reward=self._total, extra=numbers)
        return Turn(False, [{"role": "user", "content": self._shown(seen)}])

    def close(self) -> None:
        self._game.close()

    def _move(self, answer: str) -> int | None:
        """Find the last move that the answer names."""
        if self._moves:
            places = [(answer.casefold().rfind(name.casefold()), number) for number, name in enumerate(self._moves)]
            place, number = max(places)
            return number if place >= 0 else None
        numbers = [int(found) for found in _NUMBER.findall(answer)]
        return numbers[-1] if numbers and 0 <= numbers[-1] < self._count else None

    def _shown(self, seen: Any) -> str | list[Part]:
        if self._show == "ansi":
            return str(self._game.render())
        if self._show == "observation":
            return " ".join(f"{value:.3g}" for value in seen.ravel()) if hasattr(seen, "ravel") else str(seen)
        from PIL import Image

        memory = io.BytesIO()
        Image.fromarray(self._game.render()).save(memory, "PNG")
        return [{"type": "image", "image": memory.getvalue()}]
