"""Starting, entering, breaking and clearing away a cluster."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import accounting, config, namespaces, processes
from .config import CONTROLLER, SUBNET, ClusterError, Node, Settings
from .state import State, opened

BINARIES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
}
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2"
TAG, NODE_TAG = "TOY_SLURM_DIR", "SLURMD_NODENAME"
"""In the environment of every process of a cluster; Slurm itself sets the second one in its tasks."""
SUBFOLDERS = ("dev", "etc", "log", "run", "spool", "state", "tmp")
LONGEST_FOLDER = 75
"""A socket's path has at most 107 bytes, and the step daemons' end in /spool/t1/t1_12345.4294967291."""
IDLE_DEADLINE_S = 30.0
UNPLUGGED_DEADLINE_S = 10.0
CLIENT_TIMEOUT_S = 10.0
JOBS_END_S = 3.0
"""KillWait and a little: on a node that was lost they never end."""


def up(folder: Path, partitions: dict[str, int], declared_only: int, use_namespaces: bool, **options: Any) -> State:
    """Start everything and wait until the started nodes are idle; `options` are those of Settings."""
    _require({**BINARIES, **({"ip": "iproute2"} if use_namespaces else {})}, INSTALL)
    if options["accounting"]:
        _require(accounting.BINARIES, accounting.INSTALL)
    if len(str(folder)) > LONGEST_FOLDER:
        raise ClusterError(
            f"{folder} has {len(str(folder))} characters; Slurm's sockets leave room for {LONGEST_FOLDER}"
        )
    names = config.plan_nodes(partitions, declared_only)
    state = _claim(folder)
    try:
        if not (use_namespaces and _with_namespaces(state, names, options)):
            _with_ports(state, names, options)
        if state.plan.accounting:
            accounting.start(state.plan, partial(client, state), partial(daemon, state))
        daemon(state, ["slurmctld", "-c"])
        for node in state.plan.nodes:
            if node.started:
                daemon(state, ["slurmd", "-N", node.name], node.name)
        _wait_until_idle(state)
    except BaseException:
        _kill_all(state)  # the files stay for whoever asks why; the next up or down removes them
        raise
    return state


def down(folder: Path, keep_logs: bool = False) -> None:
    """End every process and remove every file of the cluster in `folder`; nothing to do is no error."""
    state = State.read(folder)
    if state is None:
        return
    if state.settings and not state.settings.namespaces:
        _cancel_jobs(state)
    _kill_all(state)
    for name in SUBFOLDERS:
        if not (keep_logs and name == "log"):
            shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("cluster.json", "cluster.new"):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        folder.rmdir()


def execute(folder: Path, command: list[str], node: str | None = None) -> int:
    """Run a command on the controller, or on a node outside of any job, to its end; its exit code."""
    state = opened(folder)
    if node is not None and state.node(node) and state.plan.namespaces and node not in state.inits:
        raise ClusterError(f"node {node} is not running: tools/slurm-cluster node-start {folder} {node}")
    environment, here = _environment(state, node), os.getcwd()
    if init := _init(state, node):
        namespaces.enter(init)
    child = os.fork()  # only a child is in the PID namespace
    if child == 0:
        try:
            namespaces.die_with_parent()  # a caller that kills us at a time limit means the command
            with contextlib.suppress(OSError):
                os.chdir(here)
            os.execvpe(command[0], command, environment)
        except OSError as error:
            print(f"slurm-cluster exec: {command[0]}: {error.strerror}", file=sys.stderr)
        finally:
            os._exit(127)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(child, received))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def node_kill(folder: Path, name: str) -> None:
    """The node is gone between two instructions: slurmd, step daemons and all that its jobs started there."""
    state = opened(folder)
    state.node(name)
    if state.plan.namespaces:
        processes.kill(state.inits.pop(name, None))
        state.write()
    else:
        _kill_tagged(state, name)


def node_start(folder: Path, name: str) -> None:
    """Boot a node that was killed, or one that was only declared."""
    state = opened(folder)
    node = state.node(name)
    if state.plan.namespaces:
        if processes.alive(state.inits.get(name)):
            raise ClusterError(f"node {name} is running")
        _create_node(state, node)
    daemon(state, ["slurmd", "-N", name], name)


def link(folder: Path, name: str, direction: str) -> None:
    """Pull a node's cable ("down") or put it back ("up"); its processes go on."""
    state = opened(folder)
    state.node(name)
    if not state.plan.namespaces:
        raise ClusterError("links are there with namespaces only; this cluster tells its nodes apart by ports")
    _ip(_init(state), f"link set v{name} {direction}")


def client(state: State, command: list[str], timeout: float = CLIENT_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """A short command on the controller."""
    return subprocess.run(
        command,
        env=_environment(state),
        preexec_fn=_entering(_init(state), pids=False),
        text=True,
        capture_output=True,
        check=False,
        timeout=timeout,
    )


def daemon(state: State, command: list[str], node: str | None = None) -> None:
    """Start a daemon, which forks by itself: its child is then in the PID namespace, and dies with the init."""
    log = state.folder / "log" / f"{command[0]}{'-' + node if node else ''}.out"
    with log.open("w") as output:
        done = subprocess.run(
            command,
            env=_environment(state, node),
            preexec_fn=_entering(_init(state, node)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: exit {done.returncode}\n{log.read_text()}")


def _require(binaries: dict[str, str], install: str) -> None:
    missing = [f"{name} (package {package})" for name, package in binaries.items() if not shutil.which(name)]
    if missing:
        raise ClusterError(f"missing: {', '.join(missing)}. On Debian and Ubuntu:\n  {install}")


def _claim(folder: Path) -> State:
    """The folder for one cluster alone; what a dead one left in it is cleared away first."""
    left = State.read(folder)
    if left is not None:
        if processes.alive(left.anchor):
            raise ClusterError(f"a cluster runs in {folder}; end it with tools/slurm-cluster down {folder}")
        down(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if foreign := sorted({path.name for path in folder.iterdir()} - {"log"}):
        raise ClusterError(f"{folder} is not empty ({', '.join(foreign[:5])}): name a new folder")
    (folder / "cluster.json").touch(exist_ok=False)
    for name in SUBFOLDERS:
        (folder / name).mkdir(exist_ok=True)
    return State(folder)


def _with_namespaces(state: State, names: list[tuple[str, str, bool]], options: dict[str, Any]) -> bool:
    """Every node in namespaces of its own; False, with a word to the user, where the machine does not allow them."""
    nodes = tuple(
        Node(name, partition, f"{SUBNET}.{10 + number}", 6818, started)
        for number, (name, partition, started) in enumerate(names, 1)
    )
    ports = {"slurmctld": 6817, "slurmdbd": 6819}
    _configure(state, nodes, ports, CONTROLLER, f"{SUBNET}.1", True, options)
    hosts = state.folder / "etc" / "hosts"
    hosts.write_text(config.hosts(state.plan))

    def setup() -> None:
        namespaces.mount(str(hosts), "/etc/hosts", flags=namespaces.MS_BIND)
        _set_up_host(CONTROLLER)

    def anchored(pid: int) -> None:
        state.anchor = processes.identity(pid)
        state.write()

    try:
        namespaces.create(setup, anchored, user=os.geteuid() != 0)
        _ip(
            _init(state),
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {SUBNET}.1/24 dev br0",
            "link set br0 up",
        )
        for node in nodes:
            if node.started:
                _create_node(state, node)
    except namespaces.NamespaceError as error:
        _kill_all(state)
        print(
            f"slurm-cluster: namespaces are not allowed here ({error}), so all nodes run on this host, told apart by "
            "their ports: no link-down, no host names of their own",
            file=sys.stderr,
        )
        return False
    return True


def _create_node(state: State, node: Node) -> None:
    def started(pid: int) -> None:
        process = processes.identity(pid)
        assert process is not None, "the init waits for our answer"
        state.inits[node.name] = process
        state.write()

    namespaces.create(partial(_set_up_host, node.name), started, inside=_init(state))
    switch, cable = _init(state), f"v{node.name}"
    _wait_until_unplugged(switch, cable)
    _ip(
        switch,
        f"link add {cable} type veth peer name eth0 netns {_init(state, node.name)}",
        f"link set {cable} master br0 up",
    )
    # No default route: a node reaches the other nodes and nothing else.
    _ip(
        _init(state, node.name),
        "link set lo up",
        f"addr add {node.address}/24 dev eth0",
        "link set eth0 up",
    )


def _wait_until_unplugged(switch: int | None, cable: str) -> None:
    """The kernel takes the cable of a killed node away some time after its last process has gone."""
    deadline = time.monotonic() + UNPLUGGED_DEADLINE_S
    while f"{cable}:" in Path(f"/proc/{switch}/net/dev").read_text().split():
        if time.monotonic() > deadline:
            raise ClusterError(f"{cable} is still plugged in after {UNPLUGGED_DEADLINE_S:g} s: is the node still used?")
        time.sleep(0.02)


def _set_up_host(name: str) -> None:
    socket.sethostname(name)
    # Shared memory does not reach from host to host, and what a killed process leaves in it goes with the host.
    namespaces.mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")


def _with_ports(state: State, names: list[tuple[str, str, bool]], options: dict[str, Any]) -> None:
    """All nodes on this host, each slurmd on a port of its own."""
    host = socket.gethostname().partition(".")[0]
    free = _free_ports(2 + len(names))
    ports = dict(zip(("slurmctld", "slurmdbd"), free, strict=False))
    nodes = tuple(
        Node(name, partition, "127.0.0.1", port, started)
        for (name, partition, started), port in zip(names, free[2:], strict=True)
    )
    _configure(state, nodes, ports, host, "127.0.0.1", False, options)


def _configure(
    state: State,
    nodes: tuple[Node, ...],
    ports: dict[str, int],
    controller: str,
    address: str,
    with_namespaces: bool,
    options: dict[str, Any],
) -> None:
    folder = state.folder
    user = pwd.getpwuid(os.geteuid()).pw_name
    state.settings = Settings(str(folder), user, controller, address, ports, nodes, with_namespaces, **options)
    state.write()
    for node in nodes:
        for parent in ("spool", "tmp"):
            (folder / parent / node.name).mkdir(exist_ok=True)
    for gpu in range(config.GPUS_PER_NODE):
        device = folder / "dev" / f"nvidia{gpu}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")  # Slurm refuses a plain file
    (folder / "etc" / "slurm.conf").write_text(config.slurm_conf(state.settings))
    (folder / "etc" / "gres.conf").write_text(config.gres_conf(state.settings))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_idle(state: State) -> None:
    wanted = {node.name for node in state.plan.nodes if node.started}
    deadline = time.monotonic() + IDLE_DEADLINE_S
    idle: set[str] = set()
    while not wanted <= idle:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"nodes {', '.join(sorted(wanted - idle))} are not idle after {IDLE_DEADLINE_S:g} s; "
                f"see the logs in {state.folder / 'log'}"
            )
        time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            idle = set(client(state, ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]).stdout.split())


def _environment(state: State, node: str | None = None) -> dict[str, str]:
    """Ours without the variables of a Slurm job or site around us, which would redirect every command."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_", "SALLOC_", "SRUN_"))}
    kept["PATH"] = f"{kept.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    kept |= {"SLURM_CONF": str(state.folder / "etc" / "slurm.conf"), TAG: str(state.folder)}
    return kept | ({NODE_TAG: node} if node else {})


def _init(state: State, node: str | None = None) -> int | None:
    """The process whose namespaces a command on the controller, or on this node, must enter; None: none to enter."""
    process = state.anchor if node is None else state.inits.get(node)
    return process[0] if process and state.plan.namespaces else None


def _entering(init: int | None, **how: bool) -> Callable[[], None] | None:
    return None if init is None else partial(namespaces.enter, init, **how)


def _ip(init: int | None, *commands: str) -> None:
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(commands),
        preexec_fn=_entering(init, pids=False, capabilities=True),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise namespaces.NamespaceError(f"ip: {done.stderr.strip()}")


def _cancel_jobs(state: State) -> None:
    """Give the step daemons the chance to end what they started; whatever is left is killed afterwards."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        client(state, ["scancel", "--full", "--user", state.plan.user])
        deadline = time.monotonic() + JOBS_END_S
        while client(state, ["squeue", "--noheader"]).stdout and time.monotonic() < deadline:
            time.sleep(0.1)


def _kill_all(state: State) -> None:
    processes.kill(state.anchor)
    state.anchor, state.inits = None, {}
    _kill_tagged(state)
    state.write()


def _kill_tagged(state: State, node: str | None = None) -> None:
    def ours(environment: dict[str, str]) -> bool:
        if node is not None and environment.get(NODE_TAG) != node:
            return False
        # A task started with --export=NONE has only what Slurm itself sets.
        configured = environment.get("SLURM_CONF") == str(state.folder / "etc" / "slurm.conf")
        return environment.get(TAG) == str(state.folder) or (configured and NODE_TAG in environment)

    processes.kill_with_environment(ours)
