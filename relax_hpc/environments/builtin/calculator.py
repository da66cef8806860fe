"""A calculator: +, -, *, /, //, %, ** and brackets over numbers. Expressions are read as syntax, never run as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from relax_hpc.environments.base import ToolError
from relax_hpc.environments.builtin.with_tools import WithTools, schema

LONGEST, LARGEST_POWER, MOST_BITS = 1000, 1000, 10_000
"""Limits of an expression's characters, of an exponent, and of a number's bits."""
Number = int | float
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


class Calculator(WithTools):
    """Answers calls of `calculator`; a turn without a call is the final answer."""

    schemas = (schema("calculator", "Calculate an expression of numbers.", expression=("string", "such as 12*(3+4)")),)

    def __init__(self, *, operations: int | None = None) -> None:
        """operations: the most operations of one expression; None: any number. With 1, longer sums take several calls."""
        self._operations = operations

    def use_calculator(self, expression: str) -> str:
        return str(calculate(expression, self._operations))


def calculate(expression: str, operations: int | None = None) -> Number:
    """Calculate an expression with at most so many operations. Raises ToolError, for the model."""
    if len(expression) > LONGEST:
        raise ToolError(f"the expression has {len(expression)} characters, at most {LONGEST} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        count = sum(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        if operations is not None and count > operations:
            raise ToolError(f"{count} operations at once, at most {operations} are allowed")
        value = _value(tree)
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise ToolError("the number is too large")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"'{expression:.80}' is not an expression of numbers") from error
    except (ArithmeticError, TypeError) as error:
        raise ToolError(str(error)) from error
    return value


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            first, second = _value(left), _value(right)
            _check_size(op, first, second)
            result: Number = BINARY[type(op)](first, second)
            if isinstance(result, int | float):
                return result
    raise ToolError(f"only numbers, brackets and + - * / // % ** are allowed, found {type(node).__name__}")


def _check_size(op: ast.operator, first: Number, second: Number) -> None:
    """Refuse before it is calculated what would take memory and time."""
    if isinstance(op, ast.Pow) and (
        abs(second) > LARGEST_POWER or (isinstance(first, int) and first.bit_length() * abs(second) > MOST_BITS)
    ):
        raise ToolError(f"{first}**{second} is too large"[:200])
    if isinstance(first, int) and isinstance(second, int) and first.bit_length() + second.bit_length() > 2 * MOST_BITS:
        raise ToolError("the number is too large")
