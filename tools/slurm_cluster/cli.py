"""The command line of tools/slurm-cluster."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import cluster
from .config import ClusterError
from .namespaces import NamespaceError

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / ".slurm-cluster"

TEACHING = """\
a real Slurm on this machine, in one folder, for root or a plain user; several run side by side in different folders

  tools/slurm-cluster up                        start it: nodes t1 t2 (partition trainer), r1 r2 (rollout)
  tools/slurm-cluster exec -- sinfo             any command in it, as on a login node
  tools/slurm-cluster exec -- sbatch job.sh
  tools/slurm-cluster node-kill .slurm-cluster r1     the node is lost with everything on it; Slurm notices after 10 s
  tools/slurm-cluster node-start .slurm-cluster r1
  tools/slurm-cluster link-down .slurm-cluster r1     the node is cut off, its processes go on; link-up
  tools/slurm-cluster down                      nothing is left: no process, no interface, no file

Each node has its own host name, address, PIDs and /dev/shm, and shares the file system; there is no way out of the
cluster's network. Each has 4 GPUs that exist for Slurm only. `low` (preemptible) and `high` are partitions over all nodes.
DIR is by default .slurm-cluster in this checkout.
"""


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    options, command = _parser().parse_args(given[:cut]), given[cut + 1 :]
    # Some site folders are not in a plain user's PATH.
    os.environ["PATH"] = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    folder: Path = options.folder.absolute()
    try:
        match options.action:
            case "up":
                _up(folder, options)
            case "down":
                cluster.down(folder, options.keep_logs)
            case "exec":
                if not command:
                    raise ClusterError("nothing to run: tools/slurm-cluster exec [DIR] -- COMMAND...")
                return cluster.execute(folder, command, options.node)
            case "node-kill":
                cluster.node_kill(folder, options.node)
            case "node-start":
                cluster.node_start(folder, options.node)
            case "link-down" | "link-up":
                cluster.link(folder, options.node, options.action.removeprefix("link-"))
    except (ClusterError, NamespaceError) as error:
        print(f"slurm-cluster: {error}", file=sys.stderr)
        return 2
    return 0


def _up(folder: Path, options: argparse.Namespace) -> None:
    began = time.monotonic()
    state = cluster.up(
        folder,
        dict(options.nodes),
        options.extra_nodes_declared,
        use_namespaces=not options.no_namespaces,
        preempt_signal=not options.no_preempt_signal,
        requeue=not options.no_requeue,
        accounting=options.accounting,
        cpus=options.cpus,
        memory_mb=options.memory_mb,
        slurmd_timeout_s=options.slurmd_timeout,
    )
    nodes = " ".join(node.name for node in state.plan.nodes if node.started)
    kind = "with namespaces" if state.plan.namespaces else "told apart by ports"
    print(f"""\
Slurm is up in {folder} after {time.monotonic() - began:.1f} s: {nodes}, {kind}
  tools/slurm-cluster exec {folder} -- sinfo
  tools/slurm-cluster exec {folder} -- sbatch JOB
  tools/slurm-cluster down {folder}""")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/slurm-cluster", description=TEACHING, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, folder_needed: bool = False) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=text)
        added.add_argument(
            "folder", metavar="DIR", type=Path, default=DEFAULT_FOLDER, nargs=None if folder_needed else "?"
        )
        return added

    up = action("up", "start a cluster and wait until its nodes are idle")
    up.add_argument(
        "--nodes",
        nargs="+",
        type=_partition,
        default=[("trainer", 2), ("rollout", 2)],
        metavar="PARTITION=COUNT",
        help="trainer=2 rollout=2; nodes are named t1, t2, r1, r2",
    )
    up.add_argument(
        "--extra-nodes-declared",
        type=int,
        default=0,
        metavar="N",
        help="N more nodes in every partition that are down until node-start",
    )
    up.add_argument("--no-namespaces", action="store_true", help="all nodes on this host, told apart by ports")
    up.add_argument("--no-preempt-signal", action="store_true", help="preemption sends SIGTERM, whatever --signal says")
    up.add_argument("--no-requeue", action="store_true", help="jobs are not requeued unless they ask (JobRequeue=0)")
    up.add_argument("--accounting", action="store_true", help="slurmdbd and a private MariaDB, so that sacct works")
    up.add_argument("--cpus", type=int, default=8, metavar="N", help="CPUs that each node claims to have (8)")
    up.add_argument("--memory-mb", type=int, default=64_000, metavar="N", help="memory that each node claims (64000)")
    up.add_argument(
        "--slurmd-timeout", type=int, default=10, metavar="S", help="seconds until a silent node is down (10)"
    )

    action("down", "end every process and remove every file").add_argument(
        "--keep-logs", action="store_true", help="leave DIR/log"
    )
    action("exec", "run the command after -- in the cluster; its exit code is passed on").add_argument(
        "--node", help="on this node, outside of any job, instead of the controller"
    )
    for name, text in (
        ("node-kill", "kill a node with all that runs on it"),
        ("node-start", "boot a node that was killed or only declared"),
        ("link-down", "cut a node off; its processes go on"),
        ("link-up", "connect it again"),
    ):
        action(name, text, folder_needed=True).add_argument("node", metavar="NODE")
    return parser


def _partition(text: str) -> tuple[str, int]:
    name, separator, count = text.partition("=")
    if not (name.isalpha() and separator and count.isdigit() and int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not PARTITION=COUNT, as in trainer=2")
    return name, int(count)
