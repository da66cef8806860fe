"""Tools of environments: the calls in what the model says; schemas.py has what the chat template shows the model."""

from relax_hpc.environments.tools.calls import Call, CallError, parse_calls

__all__ = ["Call", "CallError", "parse_calls"]
