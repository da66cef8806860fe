"""The program `python -m relax_hpc.engines.sglang.serve …SGLang's arguments…`: the server, which ends with its worker.

The API key comes on standard input: command lines and environments can be read by others.
"""

from __future__ import annotations

import gc
import os
import sys

from relax_hpc.engines.sglang.hooks import register
from relax_hpc.parent import end_with

register()  # also in the processes that this one starts: they import it


def main() -> None:
    key, worker = sys.stdin.readline().split()
    end_with(int(worker))
    gc.disable()  # while a million objects are made that stay
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    gc.enable()
    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], f"--api-key={key}"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
