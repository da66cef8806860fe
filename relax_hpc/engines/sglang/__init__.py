"""The SGLang engine: SGLang's own server, started and looked after by the worker, spoken to over HTTP."""

from relax_hpc.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
