"""Real accounting (sacct, limits of accounts and QOS): a private MariaDB and slurmdbd, all files in the cluster's folder."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .config import CLUSTER, DATABASE, ClusterError, Settings, slurmdbd_conf

BINARIES = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-client",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "mariadb": "mariadb-client-core",
}
INSTALL = "apt-get install --no-install-recommends slurmdbd mariadb-server-core mariadb-client-core"
ACCOUNT = "users"
DEADLINE_S = 60.0

Client = Callable[..., "subprocess.CompletedProcess[str]"]
Daemon = Callable[[list[str]], None]


def start(settings: Settings, client: Client, daemon: Daemon) -> None:
    """`client` runs a command where the controller runs, `daemon` starts there what forks."""
    folder = Path(settings.folder)
    data, server_socket = folder / "state" / "mariadb", folder / "run" / "mariadb.sock"
    account = ["--no-defaults", f"--user={settings.user}", f"--datadir={data}"]
    _must(client, ["mariadb-install-db", *account, "--auth-root-authentication-method=normal", "--skip-test-db"])
    # mariadbd does not fork by itself.
    server = [
        "setsid",
        "--fork",
        "mariadbd",
        *account,
        f"--socket={server_socket}",
        "--skip-networking",  # several clusters and a database of the machine's own share its ports
        f"--pid-file={folder}/run/mariadb.pid",
        f"--log-error={folder}/log/mariadb.log",
        "--innodb-buffer-pool-size=32M",
        "--innodb-lock-wait-timeout=900",  # slurmdbd asks for it
    ]
    daemon(server)
    root = ["mariadb", "--no-defaults", "--user=root", f"--socket={server_socket}", "--execute"]
    _until(client, [*root, "select 1"])
    owner = f"{DATABASE}@localhost"
    _must(client, [*root, f"create user {owner} identified by '{DATABASE}'; grant all on {DATABASE}.* to {owner}"])
    conf = folder / "etc" / "slurmdbd.conf"
    conf.touch(mode=0o600)  # slurmdbd refuses a password that others can read
    conf.write_text(slurmdbd_conf(settings))
    # The client library's own way to say which socket "localhost" means; slurmdbd.conf has none.
    daemon(["env", f"MYSQL_UNIX_PORT={server_socket}", "slurmdbd"])
    add = ["sacctmgr", "--immediate", "add"]
    _until(client, [*add, "cluster", CLUSTER])
    # Limits hold for users who are known.
    _must(client, [*add, "account", ACCOUNT])
    _must(client, [*add, "user", settings.user, f"account={ACCOUNT}"])


def _must(client: Client, command: list[str]) -> None:
    done = client(command, timeout=DEADLINE_S)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")


def _until(client: Client, command: list[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (done := client(command)).returncode:
        if time.monotonic() > deadline:
            raise ClusterError(f"{' '.join(command)} fails for {DEADLINE_S:g} s:\n{done.stdout}{done.stderr}")
        time.sleep(0.2)
