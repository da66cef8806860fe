"""Each algorithm on the quickstart's task: held-out accuracy of version 0 and of the last version, by seed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from tools.bench.common import console, finish, parse, parser, progress
from tools.bench.runs import QUICKSTART, run

TIS = "{name = 'tis'}"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo decoupled": {"behaviour": "'recomputed'", "correction": TIS},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {"clip": "[0.2, 0.28]"},  # the paper's are for steps a thousand times smaller
    "sapo": {},
    "cispo": {},
    "rloo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
}
"""Keys of [algorithm] besides its name."""
OTHER_TABLES: dict[str, dict[str, Any]] = {
    "grpo decoupled": {"trainer.updates_per_step": 2},
    "rloo": {"async.max_staleness": 0},
}


def sets(label: str) -> dict[str, Any]:
    """What the run of `label` changes in the recipe; the recipe's own [algorithm] gives way as a whole."""
    keys = {"name": f"'{label.split()[0]}'", "group_size": 8} | ALGORITHMS[label]
    table = ", ".join(f"{key} = {value}" for key, value in keys.items())
    return {"algorithm": f"{{{table}}}", **OTHER_TABLES.get(label, {})}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3, metavar="N", help="runs, with run.seed = 0 … N-1")
    arguments.add_argument("--steps", type=int, default=200, help="run.steps; the recipe's own number is 500")
    arguments.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    given = parse(arguments)
    found: dict[str, dict[str, list[float]]] = {}
    with progress("algorithms × seeds", len(given.only) * given.seeds) as step:
        for label in given.only:
            before, after, seconds = [], [], []
            for seed in range(given.seeds):
                name = f"algorithms/{label.replace(' ', '-')}-{seed}"
                done = run(QUICKSTART, name, {"run.steps": given.steps, "run.seed": seed, **sets(label)})
                before.append(done.scores[0][1])
                after.append(done.scores[-1][1])
                seconds.append(round(done.seconds, 1))
                console.print(f"{label}, seed {seed}: {before[-1]:.3f} → {after[-1]:.3f} in {seconds[-1]} s")
                step()
            found[label] = {"before": before, "after": after, "seconds": seconds}
    finish(found, given.json)


if __name__ == "__main__":
    main()
