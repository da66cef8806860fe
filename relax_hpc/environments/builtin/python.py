"""Python: each call is a process of its own in the sample's folder."""

from __future__ import annotations

import sys

from relax_hpc.environments.builtin.bash import InFolder
from relax_hpc.environments.builtin.with_tools import schema


class Python(InFolder):
    """Answers calls of `python`: what the code prints. Files stay from call to call, variables do not."""

    schemas = (schema("python", "Run Python code; what it prints is the answer.", code=("string", "the code")),)

    def use_python(self, code: str) -> str:
        script = self.folder / ".call.py"
        script.write_text(code, encoding="utf-8", errors="replace")
        return self.run(sys.executable, "-I", str(script))
