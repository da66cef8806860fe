"""plan + run directory ──► the text of a batch script. Pure: one function, straight lines, every value quoted.

The script ends in the process that does the work (`exec`), so that Slurm's signal reaches it. It starts no step itself:
that process does so with srun, as relax_hpc.slurm.srun says.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.slurm.plan import SETUP_FAILED, Group, Kind, Plan, gres_text, job_name
from relax_hpc.slurm.srun import job_python, rollout_step, sidecar_step, trainer_step

MODULE = "relax_hpc.slurm.batch"
MAKE_MODULE = "relax_hpc.slurm.submission.make_run"
_INTERFACE = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")  # fmt: skip
"""Variables that name the network interface, read by NCCL, gloo, libfabric (MPICH), and Open MPI (two)."""
_WHAT = {
    "leader": "the trainer's job, which leads the run",
    "rollout": "the rollout job",
    "elastic": "a further rollout job of one node, to be sent or cancelled at any time",
}
_SBATCH_ONLY = ("batch", "container-id", "export-file", "get-user-env", "ignore-pbs", "kill-on-invalid-dep")
_HANDED_ON: dict[str, object] = {"exclude": "", "mem": "0", "nice": 0, "comment": ""}
"""Options that sbatch copies into the second component of a heterogeneous job, and the value that means "not given" there.

Memory has no such value: 0 is all of the node's.
"""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
Option = tuple[str, object]
"""A long option without dashes, and its value; None for an option without one."""


@dataclass(frozen=True, slots=True)
class ByHand:
    """A script that is sent by hand; it makes the run if it does not exist yet."""

    recipe: Path
    """Path as seen from the directory in which sbatch is called, as is the plan's root."""
    overrides: tuple[str, ...] = ()
    seeds: int = 0
    """A job array of this many runs that differ in run.seed and name; 0 for one run and no array."""
    site: Path | None = None


def render(plan: Plan, kind: Kind, by_hand: ByHand | None = None) -> str:
    """Render the batch script of a job."""
    run = _run(plan, by_hand)
    python = shlex.quote(job_python(plan))
    elastic = " --elastic" if kind == "elastic" else ""
    command = f"exec {python} -P -m {MODULE} {'leader' if kind == 'leader' else 'rollout'} {run}{elastic}"
    # Runs the code that was submitted, even if the installed one has changed.
    path = f'export PYTHONPATH={run}/snapshot/code"${{PYTHONPATH:+:$PYTHONPATH}}"'
    head = [
        *_head(plan, kind, by_hand),
        *(_directive(option) for option in _options(plan, kind, by_hand)),
        *_second_component(plan, kind),
    ]
    _refuse_line_breaks(head)
    lines = [
        "#!/bin/bash",
        *head,
        "",
        *_begin(plan.slurm.setup, "" if by_hand else f'{run}/slurm/jobs/"$SLURM_JOB_ID"{SETUP_FAILED}'),
        *_exports(plan),
        *([_make(python, plan, kind, by_hand)] if by_hand else []),
        path,
        command,
    ]
    return "\n".join(lines) + "\n"


def _head(plan: Plan, kind: Kind, by_hand: ByHand | None) -> list[str]:
    lines = [f"# {plan.name}: {_WHAT[kind]}."]
    if by_hand:
        lines += [
            f"# Made by `relax-hpc render {by_hand.recipe}`: call sbatch in the directory from which that path is right.",
            "# It makes the run's directory where it is missing, and goes on with the run where it is there.",
        ]
    if kind == "leader":
        lines += [f"# Trainer processes are started by: {shlex.join(trainer_step(plan))} …"]
        for name, role in plan.sidecars.items():
            who = f"The {name}'s processes are" if role.together else f"A {name} is"
            lines += [f"# {who} started by: {shlex.join(sidecar_step(plan, name))} …"]
    if kind != "leader" or plan.slurm.shape != "split":
        lines += [
            f"# Rollout node agents are started by: {shlex.join(rollout_step(plan, elastic=kind == 'elastic'))} …"
        ]
    return lines


def _run(plan: Plan, by_hand: ByHand | None) -> str:
    """The run's directory, as a word of the shell."""
    path = plan.root / plan.name
    text = shlex.quote(str(path)) if path.is_absolute() else f'"$PWD"/{shlex.quote(str(path))}'
    return text + ('-"$SLURM_ARRAY_TASK_ID"' if by_hand and by_hand.seeds else "")


def _options(plan: Plan, kind: Kind, by_hand: ByHand | None) -> list[Option]:
    slurm, group = plan.slurm, _group(plan, kind)
    requeue = kind == "leader" and slurm.restart == "requeue"
    logs = "" if by_hand else str(plan.root / plan.name / "logs" / "slurm").replace("%", "%%") + "/"
    seeds = by_hand.seeds if by_hand else 0
    mail = [("mail-user", slurm.mail_user), ("mail-type", slurm.mail_type)] if kind == "leader" else []
    return [
        ("job-name", job_name(plan.name, kind)),
        *([("array", f"0-{seeds - 1}")] if seeds else []),
        ("output", f"{logs}%x-%A_%a.out" if seeds else f"{logs}%x-%j.out"),
        ("open-mode", "append"),
        ("requeue" if requeue else "no-requeue", None),
        ("signal", f"B:USR2@{slurm.signal_lead_s}"),  # not USR1: NCCL catches that one
        *[(name, value) for name, value in mail if value],
        *_comment(plan, group, by_hand),
        *(_both(plan) if kind == "leader" and slurm.shape == "single" else _asked(group)),
    ]


def _second_component(plan: Plan, kind: Kind) -> list[str]:
    if kind != "leader" or plan.slurm.shape != "het":
        return []
    # Components get different names: `singleton` waits forever when two share one.
    requeue = "requeue" if plan.slurm.restart == "requeue" else "no-requeue"
    asked, comment = _asked(plan.rollout), _comment(plan, plan.rollout)
    own = {name for name, _ in [*asked, *comment]}
    not_asked = [(name, _HANDED_ON[name]) for name, _ in _asked(plan.trainer) if name in _HANDED_ON and name not in own]
    options = [("job-name", job_name(plan.name, "rollout")), (requeue, None), *asked, *not_asked, *comment]
    return ["#SBATCH hetjob", *map(_directive, options)]


def _comment(plan: Plan, group: Group, by_hand: ByHand | None = None) -> list[Option]:
    """The --comment option that shows the run's directory in squeue and sacct; the recipe's own comment comes first."""
    seeds = "-*" if by_hand and by_hand.seeds else ""
    return [] if "comment" in group.asks.options else [("comment", f"{plan.root / plan.name}{seeds}")]


def _refuse_line_breaks(head: list[str]) -> None:
    """Raise RunError where a comment or #SBATCH line would go on in a line that the shell runs."""
    for line in head:
        if _CONTROL.search(line):
            raise RunError(
                f"{line!r}: a line break or control character cannot stand in a batch script: rename the file or directory "
                "that it is from (the recipe's own, or run.root)"
            )


def _group(plan: Plan, kind: Kind) -> Group:
    return {"leader": plan.trainer, "rollout": plan.rollout, "elastic": plan.elastic}[kind]


def _asked(group: Group) -> list[Option]:
    asks = group.asks
    return [
        *_place(group),
        ("nodes", group.nodes),
        ("ntasks-per-node", group.per_node),
        *_given(("cpus-per-task", asks.cpus_per_task), ("mem", asks.mem), ("gpus-per-node", asks.gpus_per_node)),
        *_given(("gres", asks.gres), ("gpus-per-task", asks.gpus_per_task)),
        *_further(group),
    ]


def _both(plan: Plan) -> list[Option]:
    """Options of one allocation for both groups: a node has what they ask for together."""
    trainer, rollout = plan.trainer, plan.rollout
    counted = trainer.asks.cpus_per_task or rollout.asks.cpus_per_task
    each = [(group.asks.cpus_per_task or 1) * group.per_node for group in (trainer, rollout)]
    tasks = [trainer.per_node, rollout.per_node]
    most = max if plan.takes_turns else sum
    gres = Counter(trainer.node_gres) if plan.shares_devices else trainer.node_gres + rollout.node_gres
    return [
        *_place(trainer),
        ("nodes", trainer.nodes),
        *([("ntasks-per-node", 1), ("cpus-per-task", most(each))] if counted else [("ntasks-per-node", most(tasks))]),
        *_given(("mem", trainer.asks.mem), ("gres", gres_text(gres) or None)),
        *_further(trainer),
    ]  # fmt: skip


def _place(group: Group) -> list[Option]:
    keys = ("time", "partition", "account", "qos", "constraint", "exclude", "reservation")
    return _given(*((key, getattr(group.asks, key)) for key in keys))


def _further(group: Group) -> list[Option]:
    options = [(name.replace("_", "-"), value) for name, value in group.asks.options.items() if value is not False]
    return [(name, None if value is True else value) for name, value in options]


def _given(*options: Option) -> list[Option]:
    return [(name, value) for name, value in options if value is not None]


def _directive(option: Option) -> str:
    name, value = option
    return f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _begin(setup: list[str], failed: str = "") -> list[str]:
    """The shell's options and the lines of slurm.setup.

    `failed`: shell word for the file that names the line that ended it.
    """
    if not setup:
        return ["set -euo pipefail"]
    said = f'printf \'exit code %s: %s\\n\' "$?" "$BASH_COMMAND" >{failed}'
    watched = [
        # TERM and USR2 are no failures: a command that they end returns 143 or 140, the shell itself 0, as where a line exits.
        'setup_failed() { case "$?:$BASH_COMMAND" in 14[03]:*) ;; 0:exit*|[!0]*) ' + said + " ;; esac; }",
        "trap setup_failed EXIT",
        *setup,
        "trap - EXIT",
    ]
    # Activation scripts of conda and modules read variables that are not set.
    return ["set -eo pipefail", *(watched if failed else setup), "set -u"]


def _exports(plan: Plan) -> list[str]:
    values = dict.fromkeys(_INTERFACE, plan.slurm.interface) if plan.slurm.interface else {}
    return [f"export {name}={shlex.quote(value)}" for name, value in {**values, **plan.slurm.environment}.items()]


def node_script(plan: Plan, lines: list[str]) -> str:
    """A script for one node: it prepares itself as the run's jobs do, then runs `lines`."""
    return "\n".join(["#!/bin/bash", *_begin(plan.slurm.setup), *_exports(plan), *lines]) + "\n"


def place(group: Group) -> list[str]:
    """Options that place a group's job, as srun takes them; without its time, and without what only sbatch knows."""
    options = [*_place(group), *_further(group)]
    known = [option for option in options if option[0] != "time" and option[0] not in _SBATCH_ONLY]
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in known]


def _make(python: str, plan: Plan, kind: Kind, by_hand: ByHand) -> str:
    words = [python, "-P", "-m", MAKE_MODULE, kind, shlex.quote(str(by_hand.recipe))]
    words += [word for override in by_hand.overrides for word in ("--set", shlex.quote(override))]
    if by_hand.seeds:
        words += ["--set", f'run.name={shlex.quote(plan.name)}-"$SLURM_ARRAY_TASK_ID"']
        words += ["--set", 'run.seed="$SLURM_ARRAY_TASK_ID"']
    if by_hand.site:
        words += ["--site", shlex.quote(str(by_hand.site))]
    return " ".join(words)


def shown_from(plan: Plan, folder: Path) -> Plan:
    """The plan with a root relative to `folder`, where the root lies in it."""
    return replace(plan, root=plan.root.relative_to(folder)) if plan.root.is_relative_to(folder) else plan
