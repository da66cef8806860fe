"""Agents: does the agent quickstart learn, what do slow tools cost, and what do sandboxes hold back?

learn    recipes/quickstart-agent.toml from the warm start to its end: held-out success of version 0 and of the last version
         (goals: 0.3 at most ──► 0.85 at least); control: the same recipe without the tool (goal: 0.4 at most)
gateway  the policy of `learn` asked by examples/calculator_agent.py, with OpenAI's client: its success; and a few more steps of
         training on what such agents do: tokens in the loss that are others than their clients heard (goal: 0)
slow     64 episodes at once, with tools of lognormal seconds: the median throughput over the bound that engine and tools give
         apart (goal: 0.9), and that of lockstep over ours; episodes for each CPU second, where tools take no time
storm    kills of every role, and of environments' processes in their sandboxes: what is lost, trained twice, torn (goals: 0), and
         whether the weights are those of an undisturbed run where only roles are killed (see agents_storm.py)
sandbox  by kind: sandboxes that are started and ended in a second, and attempts to escape that succeed (goal: 0)
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table

from relax_hpc.sandbox.escapes import escapes, starts_per_s
from relax_hpc.sandbox.wrap import missing
from tools.bench.agents_gateway import gateway
from tools.bench.agents_slow import slow
from tools.bench.agents_storm import storm
from tools.bench.common import BENCH, ROOT, doing, finish, parse, parser, progress, show
from tools.bench.runs import Finished, run

RECIPE = ROOT / "recipes" / "quickstart-agent.toml"
FOLDER = BENCH / "agents"
TOOL = 'environment = "calculator"\nenvironment_options = {operations = 1}\n'
"""How the recipe gives its model the tool."""


def make_data() -> None:
    """Make the data of the recipe below FOLDER, and put the recipe beside it, once with the tool and once without."""
    with doing("making the data"):
        command = [sys.executable, str(ROOT / "examples" / "agent_rows.py"), str(FOLDER / "data" / "agent")]
        subprocess.run(command, check=True, stdout=sys.stderr)
    text = RECIPE.read_text()
    (FOLDER / "with.toml").write_text(text)
    (FOLDER / "without.toml").write_text(text.replace(TOOL, 'environment = "single_turn"\n'))


def learn(given: Any) -> dict[str, Any]:
    """Train with the tool, and without."""
    make_data()
    done: dict[str, Finished] = {}
    with progress("learn: runs", 2) as step:
        for name in ("with", "without"):
            done[name] = run(FOLDER / f"{name}.toml", f"agents/{name}", {"run.seed": given.seed})
            step()
    table = Table("calculator", "success by version", "seconds")
    for name, each in done.items():
        table.add_row(name, " ".join(f"{v}: {s:.3f}" for v, s in each.scores), f"{each.seconds:.0f}")
    show(table)
    tool, control = (done[name].scores for name in ("with", "without"))
    return {
        "success_before": round(tool[0][1], 3),
        "success_after": round(tool[-1][1], 3),
        "control": round(control[-1][1], 3),
        "seconds": round(done["with"].seconds, 1),
    }


def sandbox(given: Any) -> dict[str, Any]:
    """Start sandboxes of each kind that this node has, and try to escape from them."""
    starts, passed, table = (
        dict[str, float](),
        dict[str, int](),
        Table("sandbox", "starts a second", "attempts", "succeed"),
    )
    for kind in ("bwrap", "landlock"):
        if reason := missing(kind):
            table.add_row(kind, reason, "", "")
            continue
        with doing(f"attempts to escape from {kind}"):
            starts[kind], made = round(starts_per_s(kind), 1), escapes(kind, has_socket=True)
        passed[kind] = sum(made.values())
        names = ", ".join(name for name, succeeded in made.items() if succeeded)
        table.add_row(kind, f"{starts[kind]:.1f}", str(len(made)), f"{passed[kind]} {names}".strip())
    show(table)
    return {"sandbox_starts_per_s": starts, "escapes": passed}


def kill_storm(given: Any) -> dict[str, Any]:
    make_data()
    return storm(FOLDER / "with.toml", given.kills, given.seed)


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "learn": learn,
    "gateway": gateway,
    "slow": slow,
    "storm": kill_storm,
    "sandbox": sandbox,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="(default: all)")
    arguments.add_argument("--seed", type=int, default=0, help="learn: run.seed")
    arguments.add_argument("--asked", type=int, default=100, help="gateway: held-out tasks (default: %(default)s)")
    arguments.add_argument("--episodes", type=int, default=64, help="slow: at once (default: %(default)s)")
    arguments.add_argument("--seconds", type=float, default=1.0, help="slow: mean of a tool (default: %(default)s)")
    arguments.add_argument("--rounds", type=int, default=3, help="slow: rounds (default: %(default)s)")
    arguments.add_argument("--kills", type=int, default=10, help="storm: of each of two runs (default: %(default)s)")
    given = parse(arguments)
    result: dict[str, Any] = {}
    for name in given.parts:
        result |= PARTS[name](given)
    finish(result, given.json)


if __name__ == "__main__":
    main()
