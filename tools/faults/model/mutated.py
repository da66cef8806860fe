"""A plugin for pytest: `python -m pytest -p tools.faults.model.mutated --mutant "WHAT IT SAYS" TEST` runs tests of a mutant."""

from __future__ import annotations

import contextlib

import pytest

from tools.faults.model.mutants import MUTANTS, applied


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutant", required=True, choices=[mutant.says for mutant in MUTANTS], help="the step that is left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put the mutant in place before the tests import anything; processes that they fork have it too."""
    mutations = contextlib.ExitStack()
    mutations.enter_context(applied(next(mutant for mutant in MUTANTS if mutant.says == config.getoption("--mutant"))))
    config.add_cleanup(mutations.close)
