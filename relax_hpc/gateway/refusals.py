"""What the gateway refuses, in the shape that each API gives its errors."""

from __future__ import annotations

from typing import Any

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Anthropic's names of errors by their status; OpenAI's clients look at the status alone."""
OTHER = "invalid_request_error"


class Refusal(Exception):
    """A request that is not answered. The message names what is wrong, and the fix."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def openai(self) -> dict[str, Any]:
        """The body as OpenAI's clients read it."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body as Anthropic's clients read it."""
        return {"type": "error", "error": {"type": self.type, "message": str(self)}}

    @property
    def type(self) -> str:
        return TYPES.get(self.status, OTHER)


def unsupported(name: str, value: object, fix: str) -> Refusal:
    """Refuse an argument that the gateway cannot carry out."""
    return Refusal(f"{name} = {str(value)[:80]!r} is not supported: {fix}", param=name, code="unsupported_parameter")
