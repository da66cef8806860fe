"""No setting of the machine around the tests reaches them, or what they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = {"HOME": "/home/me", "LANG": "C.UTF-8", "MY_OMP_": "1", "SLURMISH": "1", "COLUMNS_OF_MINE": "1"}
THEIRS = (
    "PYTHONDONTWRITEBYTECODE PYTHONWARNINGS PIP_INDEX_URL OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS SLURM_JOB_ID "
    "SQUEUE_FORMAT SBATCH_PARTITION COLUMNS FORCE_COLOR RELAX_HPC_SITE TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD PMI_RANK"
)


def test_settings_of_the_machine_are_taken_away_before_a_test_begins() -> None:
    left = "import json, os, tests.conftest; print(json.dumps(dict(os.environ)))"
    around = {"PATH": os.environ["PATH"], **OURS, **dict.fromkeys(THEIRS.split(), "1")}
    said = subprocess.run(
        [sys.executable, "-c", left], cwd=ROOT, env=around, capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout).keys() - {"LC_CTYPE"} == {"PATH", *OURS}
