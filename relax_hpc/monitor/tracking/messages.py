"""Alerts ► messages, by Apprise. Addresses hold secrets: they are read from the environment or a file, and are said nowhere.

What was sent is in RUN/tracking/sent.json, so that a follower that starts again tells nothing twice. An address that does not
answer is tried again at growing intervals, TRIES times, by itself: others have heard it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.tracking.alerts import Alert
from relax_hpc.recipe.tables.tracking import Notify

TRIES = 8
FIRST_WAIT_S = 5.0
"""Wait after the first failure; it doubles with each one, which makes about twenty minutes in all."""
LAST_TRIES, LAST_WAIT_S = 3, 1.0
"""Tries and waits when the follower ends, which must not take long."""
VARIABLE = "RELAX_HPC_NOTIFY"
"""Environment variable with Apprise URLs."""
REMEMBERED = 1000
"""How many keys of sent alerts to remember."""


def addresses(config: Notify, root: Path) -> list[str]:
    """The Apprise URLs. Raises RunError where there is none; `root`: the directory of runs, where they may not lie."""
    if config.file is None:
        text = os.environ.get(VARIABLE, "")
        if not text.split():
            raise RunError(
                f"[notify] takes its addresses from ${VARIABLE}, which is not set: export Apprise URLs in it (blanks between "
                "them), or name a file with notify.file"
            )
        return text.split()
    if config.file.is_relative_to(root):
        raise RunError(
            f"notify.file = '{config.file}' lies below run.root = '{root}': it holds secrets, keep it elsewhere"
        )
    try:
        found = config.file.read_text().split()
    except OSError as error:
        raise RunError(
            f"notify.file = '{config.file}' cannot be read: {error.strerror}; it holds one Apprise URL a line"
        ) from error
    if not found:
        raise RunError(f"notify.file = '{config.file}' is empty: it holds one Apprise URL a line")
    return found


def targets(urls: list[str]) -> list[Any]:
    """Make an Apprise for each address. Raises RunError that does not repeat one that it does not know."""
    import apprise

    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # what it says names addresses
    made = []
    for number, url in enumerate(urls, 1):
        made.append(apprise.Apprise())
        if not made[-1].add(url):
            scheme = url.split("://")[0] if "://" in url else ""
            raise RunError(
                f"[notify] address {number} of {len(urls)}, '{scheme}://…', is not one that Apprise knows: see "
                "https://github.com/caronc/apprise for the schemes"
            )
    return made


@dataclass(slots=True)
class Pending:
    """An alert that some addresses have not received yet."""

    alert: Alert
    left: list[int]
    """Addresses still to be told, by index."""
    tries: int = 0
    not_before: float = 0.0


class Messenger:
    """Sends alerts, each once."""

    def __init__(self, run: RunDir, name: str, made: list[Any], since: float) -> None:
        """name: the run's; made: what `targets` gave; since: alerts of before are old, where this is the run's first messenger."""
        self._name, self._targets, self._path = name, made, run.tracking / "sent.json"
        state = read_json(self._path) or {"since": since, "sent": {}}
        self._since, self._sent = float(state["since"]), dict[str, float](state["sent"])
        self._pending: dict[str, Pending] = {}
        self._log = logging.getLogger("notify")

    def put(self, alert: Alert) -> None:
        """Queue an alert for the next `send`, unless it was sent already."""
        if alert.time > self._since and alert.key not in self._sent and alert.key not in self._pending:
            self._pending[alert.key] = Pending(alert, list(range(len(self._targets))))

    def send(self) -> None:
        """Try the alerts that are due, as one message for each address."""
        due = [p for p in self._pending.values() if p.not_before <= time.monotonic()]
        if not due:
            return
        for number, target in enumerate(self._targets):
            mine = [p for p in due if number in p.left]
            if mine and target.notify(title=f"relax-hpc: {self._name}", body="\n".join(p.alert.text for p in mine)):
                for pending in mine:
                    pending.left.remove(number)
        for pending in due:
            pending.tries += 1
            pending.not_before = time.monotonic() + FIRST_WAIT_S * 2 ** (pending.tries - 1)
            if pending.left and pending.tries >= TRIES:
                self._log.warning("%d addresses did not take: %s", len(pending.left), pending.alert.text)
                pending.left = []
            if not pending.left:
                del self._pending[pending.alert.key]
                self._sent[pending.alert.key] = pending.alert.time
        while len(self._sent) > REMEMBERED:  # nothing older than the last one forgotten is sent again
            self._since = max(self._since, self._sent.pop(min(self._sent, key=lambda key: self._sent[key])))
        self._path.parent.mkdir(exist_ok=True)
        replace(self._path, to_json({"since": self._since, "sent": self._sent}))

    def close(self) -> None:
        """Try what is left a few times, without waiting long."""
        for again in range(LAST_TRIES):
            for pending in self._pending.values():
                pending.not_before = 0.0
            self.send()
            if not self._pending:
                return
            if again < LAST_TRIES - 1:
                time.sleep(LAST_WAIT_S)
        self._log.warning("not sent: %s", [p.alert.text for p in self._pending.values()])
