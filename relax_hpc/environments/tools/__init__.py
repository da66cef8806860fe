"""Tools of environments: their schemas, which the chat template shows the model, and the calls in what it says."""

from relax_hpc.environments.tools.calls import Call, CallError, parse_calls
from relax_hpc.environments.tools.schemas import schemas_of, with_tools

__all__ = ["Call", "CallError", "parse_calls", "schemas_of", "with_tools"]
