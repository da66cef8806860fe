"""The session gateway: outside agents speak to the policy by the APIs that they know; every token is kept as it was sampled."""

from relax_hpc.gateway.server import Gateway
from relax_hpc.gateway.sessions import Session

__all__ = ["Gateway", "Session"]
