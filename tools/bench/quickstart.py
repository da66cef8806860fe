"""The quickstart recipe from warm-up to end: held-out accuracy before and after GRPO, and the seconds of the whole command."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from tools.bench.common import console, finish, parse, parser, progress
from tools.bench.runs import QUICKSTART, run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=2, metavar="N", help="runs, with run.seed = 0 … N-1")
    arguments.add_argument("--steps", type=int, help="run.steps, where another number than the recipe's is wanted")
    given = parse(arguments)
    sets = {"run.steps": given.steps} if given.steps else {}
    before, after, seconds = [], [], []
    with progress("quickstart: seeds", given.seeds) as step:
        for seed in range(given.seeds):
            done = run(QUICKSTART, f"quickstart-{seed}", {**sets, "run.seed": seed})
            before.append(done.scores[0][1])
            after.append(done.scores[-1][1])
            seconds.append(round(done.seconds, 1))
            console.print(
                f"seed {seed}: {before[-1]:.3f} → {after[-1]:.3f} in {seconds[-1]} s; "
                + " ".join(f"{v}:{s:.2f}" for v, s in done.scores)
            )
            step()
    finish({"before": before, "after": after, "seconds": seconds}, given.json)


if __name__ == "__main__":
    main()
