"""The program `python route.py`: sglang-router, which ends with its worker. It imports nothing that is slow.

Its arguments come on standard input, with the servers' key: command lines and environments can be read by others.
"""

from __future__ import annotations

import json
import sys

from relax_hpc.parent import end_with


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    end_with(asked["worker"])
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    Router.from_args(RouterArgs(**asked["arguments"])).start()


if __name__ == "__main__":
    main()
