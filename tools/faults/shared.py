"""Real shared file systems on this machine: GlusterFS and MooseFS, with daemons, network and folders of their own.

    with GlusterFS() as disk:
        trainer, worker = disk.mount("trainer"), disk.mount("rollout-0")      two clients: what two hosts would have

All lies in one folder, disk.folder; all processes are in one network namespace, in which nothing else is. So what a killed process
left behind is found by the folder's name alone, and the next start removes it. Needs root and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from tools.faults.build import Unavailable

PREFIX = "relax-hpc-shared-"
ADDRESS = "10.213.0.1"
"""Of the daemons, in their own network. Both file systems refuse 127.0.0.1 between servers."""
START_S = 60.0
STOP_S = 10.0
NETWORK = f'ip link set lo up && ip address add {ADDRESS}/32 dev lo && exec -a "$0" sleep infinity'
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
BRICK_LOGS = Path("/var/log/glusterfs/bricks")


class SharedFileSystem(ABC):
    """A server, and as many clients of it as are mounted."""

    programs: tuple[str, ...]

    def __enter__(self) -> Self:
        self._check()
        clean_up_stale()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._owner = _lock(self.folder)
        try:
            self._network = subprocess.Popen(
                ["unshare", "--net", "bash", "-c", NETWORK, str(self.folder)], env={"PATH": SYSTEM_PATH}
            )
            self._wait(lambda: _name(self._network.pid) == "sleep", "its network")
            self._serve()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmount, stop all daemons, and remove the folder."""
        _remove(self.folder)
        if self._owner is not None:
            self._owner.close()

    def mount(self, name: str) -> Path:
        """Mount it once more, by a client of its own, at `folder / name`."""
        mount = self.folder / name
        mount.mkdir()
        client = self._start(*self._client(mount), log=f"{name}.log")
        self._wait(lambda: os.path.ismount(mount) and os.statvfs(mount).f_blocks > 0, f"the client {name}", client)
        return mount

    @abstractmethod
    def _serve(self) -> None:
        """Start the servers."""

    @abstractmethod
    def _client(self, mount: Path) -> Sequence[str]:
        """The command of a client that stays in the foreground."""

    def _start(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                self._inside(*words), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={"PATH": SYSTEM_PATH}
            )

    def _inside(self, *words: str) -> list[str]:
        """The command, run in the network of the daemons."""
        return ["nsenter", f"--net=/proc/{self._network.pid}/ns/net", *words]

    def _wait(self, what: Callable[[], bool], name: str, process: subprocess.Popen[bytes] | None = None) -> None:
        deadline = time.monotonic() + START_S
        while not what():
            if time.monotonic() > deadline or (process is not None and process.poll() is not None):
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))
                raise Unavailable(f"{type(self).__name__}: {name} does not start: {logs}")
            time.sleep(0.1)

    def _check(self) -> None:
        lacks = [program for program in self.programs if shutil.which(program, path=SYSTEM_PATH) is None]
        lacks += ["root"] * (os.geteuid() != 0) + ["/dev/fuse"] * (not os.access("/dev/fuse", os.R_OK | os.W_OK))
        if lacks:
            raise Unavailable(f"{type(self).__name__} needs {', '.join(lacks)}: tools/shared-filesystems-install.sh")


class GlusterFS(SharedFileSystem):
    """A volume as `gluster volume create` makes it, whose files are distributed over two bricks by the hash of their names:
    a rename may leave a pointer on one brick to the file on the other."""

    programs = ("glusterd", "glusterfsd", "glusterfs", "gluster", "unshare", "nsenter", "ip")

    def _serve(self) -> None:
        folders = {name: self.folder / name for name in ("state", "run", "brick-0", "brick-1")}
        for folder in folders.values():
            folder.mkdir()
        socket = folders["run"] / "cli.sock"
        options = {
            "working-directory": folders["state"],
            "run-directory": folders["run"],
            "glusterd-sockfile": socket,
            "transport-type": "socket",
            "transport.socket.bind-address": ADDRESS,
            "transport.address-family": "inet",
        }
        lines = "".join(f"    option {name} {value}\n" for name, value in options.items())
        volfile = self.folder / "glusterd.vol"
        volfile.write_text(f"volume management\n    type mgmt/glusterd\n{lines}end-volume\n")
        log, pid = self.folder / "glusterd.log", folders["run"] / "glusterd.pid"
        server = self._start("glusterd", "-N", "-f", str(volfile), "-l", str(log), "-p", str(pid), log="server.log")
        command = ["gluster", "--mode=script", f"--glusterd-sock={socket}", f"--log-file={self.folder / 'cli.log'}"]

        def tell(*words: str) -> bool:
            done = subprocess.run(
                self._inside(*command, "volume", *words), capture_output=True, env={"PATH": SYSTEM_PATH}, check=False
            )
            return done.returncode == 0

        bricks = [f"{ADDRESS}:{folders[name]}" for name in ("brick-0", "brick-1")]
        self._wait(lambda: tell("create", "shared", "transport", "tcp", *bricks, "force"), "the volume", server)
        self._wait(lambda: tell("start", "shared"), "the bricks", server)

    def _client(self, mount: Path) -> Sequence[str]:
        log = self.folder / f"{mount.name}.client.log"
        return ["glusterfs", "-N", f"--volfile-server={ADDRESS}", "--volfile-id=shared", "-l", str(log), str(mount)]


class MooseFS(SharedFileSystem):
    """A master and one chunk server, with the options that they have by themselves."""

    programs = ("mfsmaster", "mfschunkserver", "mfsmount", "unshare", "nsenter", "ip")

    def _serve(self) -> None:
        for name in ("master", "chunkserver", "disk"):
            (self.folder / name).mkdir()
        shutil.copy("/var/lib/mfs/metadata.mfs.empty", self.folder / "master" / "metadata.mfs")
        (self.folder / "exports").write_text("* / rw,alldirs,admin,maproot=0:0\n")
        (self.folder / "disks").write_text(f"{self.folder / 'disk'}\n")
        own = {"EXPORTS_FILENAME": self.folder / "exports", "TOPOLOGY_FILENAME": self.folder / "none"}
        self._daemon("master", own)
        self._daemon("chunkserver", {"HDD_CONF_FILENAME": self.folder / "disks", "MASTER_HOST": ADDRESS})

    def _daemon(self, name: str, own: Mapping[str, object]) -> None:
        options = {
            "WORKING_USER": "root", "WORKING_GROUP": "root", "DATA_PATH": self.folder / name, "NICE_LEVEL": 0,
            "DISABLE_OOM_KILLER": 0, **own,
        }  # fmt: skip
        config = self.folder / f"{name}.cfg"
        config.write_text("".join(f"{key} = {value}\n" for key, value in options.items()))
        log = self.folder / f"{name}.log"
        daemon = self._start(f"mfs{name}", "-f", "-n", "-c", str(config), "start", log=log.name)
        self._wait(lambda: "initialized properly" in log.read_text(errors="replace"), name, daemon)

    def _client(self, mount: Path) -> Sequence[str]:
        return ["mfsmount", "-f", "-H", ADDRESS, "-o", "mfsnice=0,mfsallowoomkiller", str(mount)]


def clean_up_stale() -> None:
    """Remove what killed processes left: folders of this name that nobody locks, with their mounts and daemons."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if (owner := _lock(folder)) is not None:
            _remove(folder)
            owner.close()


def _lock(folder: Path) -> IO[str] | None:
    """Lock the folder as long as the file is open; None where another process has."""
    owner = (folder / "owner").open("w")
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner.close()
        return None
    return owner


def mounts(folder: Path) -> list[Path]:
    """What is mounted below `folder`."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [path for line in lines if (path := Path(line.split()[4])).is_relative_to(folder)]


def processes(folder: Path) -> list[psutil.Process]:
    """All processes in the network of those that name `folder`, if that is not our own."""
    spaces = {process: _network_of(process.pid) for process in psutil.process_iter()}
    named = {space for process, space in spaces.items() if str(folder) in _words(process)}
    named -= {"", _network_of(os.getpid())}
    return [process for process, space in spaces.items() if space in named]


def _remove(folder: Path) -> None:
    for mount in mounts(folder):
        subprocess.run(["umount", "--lazy", str(mount)], capture_output=True, check=False)
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        left = processes(folder)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(process)
        psutil.wait_procs(left, timeout=STOP_S)
    if not mounts(folder):  # never the files of one that is mounted still
        shutil.rmtree(folder, ignore_errors=True)
    for log in BRICK_LOGS.glob(f"{str(folder).strip('/').replace('/', '-')}-*"):
        log.unlink(missing_ok=True)


def _network_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
