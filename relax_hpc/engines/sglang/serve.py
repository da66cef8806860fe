"""`python -m relax_hpc.engines.sglang.serve …SGLang's arguments…`: the server, as an engine starts it.

The api key comes on standard input: command lines and environments can be read by others. The server ends with its worker,
however that ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    key, worker = sys.stdin.readline().split()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(worker):
        sys.exit("the worker that started this server is gone")
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
