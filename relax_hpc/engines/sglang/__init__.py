"""The SGLang engine: SGLang's own server, started and supervised by the worker, which speaks to it over HTTP."""

from relax_hpc.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
