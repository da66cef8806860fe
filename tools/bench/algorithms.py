"""Each algorithm on the quickstart's task: held-out accuracy before and after, by seed.

warm-up ──► one step ──fork──► the same weights and prompts for every algorithm ──► its own last version
                                        of grpo ──export──► the teacher of opd
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from relax_hpc.launch.export import export_checkpoint
from tools.bench.common import BENCH, console, finish, parse, parser, progress
from tools.bench.runs import QUICKSTART, run

TIS = "{name = 'tis'}"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo decoupled": {"old_logprobs": "'recomputed'", "correction": TIS},
    "dr_grpo": {},
    "dapo": {"dynamic_sampling": {"max_extra_batches": 0}},  # as many generated groups for each algorithm
    "gspo": {"clip": "[0.2, 0.28]"},  # the paper's are for steps a thousand times smaller
    "sapo": {},
    "cispo": {},
    "rloo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "ppo": {"critic": "{learning_rate = 1e-3, warmup_steps = 10}"},
    "ppo apart": {"critic": "{learning_rate = 1e-3, warmup_steps = 10}"},
    "opd": {},
}
"""Keys of [algorithm] besides its name."""
OTHER_TABLES: dict[str, dict[str, Any]] = {
    "grpo decoupled": {"trainer.updates_per_step": 2},
    "ppo apart": {"critic.processes": 1},
    "rloo": {"async.max_staleness": 0},
}


def sets(label: str, seed: int) -> dict[str, Any]:
    """What the run of `label` changes in the recipe; the recipe's own [algorithm] gives way as a whole."""
    keys = {"name": f"'{label.split()[0]}'", "group_size": 8} | ALGORITHMS[label]
    if label == "opd":
        keys["teacher"] = f"'{teacher(seed)}'"
    table = ", ".join(f"{key} = {value}" for key, value in keys.items())
    return {"algorithm": f"{{{table}}}", **OTHER_TABLES.get(label, {})}


def teacher(seed: int) -> Path:
    """A folder with what grpo made of this seed's weights."""
    output = BENCH / "runs" / "algorithms" / f"teacher-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    export_checkpoint(output.with_name(f"grpo-{seed}"), output)
    return output


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=1, metavar="N", help="runs, with run.seed = 0 … N-1")
    arguments.add_argument(
        "--steps", type=int, default=80, help="that each algorithm trains; the recipe's own number is 500"
    )
    arguments.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    given = parse(arguments)
    if "opd" in given.only and "grpo" not in given.only:
        arguments.error("--only opd: its teacher is what grpo has made: --only grpo opd")
    given.only.sort(key=list(ALGORITHMS).index)
    found: dict[str, dict[str, list[float]]] = {
        label: {"before": [], "after": [], "seconds": []} for label in given.only
    }
    with progress("seeds × algorithms", given.seeds * (1 + len(given.only))) as step:
        for seed in range(given.seeds):
            warm = run(QUICKSTART, f"algorithms/warm-{seed}", {"run.steps": 1, "run.seed": seed})
            step()
            for label in given.only:
                done = run(
                    QUICKSTART,
                    f"algorithms/{label.replace(' ', '-')}-{seed}",
                    {"run.steps": 1 + given.steps, "evaluation.every": given.steps + 1, **sets(label, seed)},
                    fork_of=warm.root,
                )
                before, after = warm.scores[0][1], done.scores[-1][1]
                for key, value in (("before", before), ("after", after), ("seconds", round(done.seconds, 1))):
                    found[label][key].append(value)
                console.print(f"{label}, seed {seed}: {before:.3f} → {after:.3f} in {done.seconds:.1f} s")
                step()
    finish(found, given.json)


if __name__ == "__main__":
    main()
