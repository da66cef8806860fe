"""Takes the machine's own settings and ignored signals away from the tests, makes the modules of this folder importable, says what is quick."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

SETTINGS = re.compile(
    r"PYTHON|PIP_|GLOO_|NCCL_|OMP_|GOMP_|KMP_|OPENBLAS_|GOTO_|BLIS_|MKL_|NUMEXPR_|TORCH_|PMI_|PMIX_|MPICH_|OMPI_|HYDRA_|RELAX_HPC_|WANDB_|CLEARML_"
    r"|(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SCONTROL|SACCT)_|(COLUMNS|LINES|FORCE_COLOR|NO_COLOR|CLICOLOR\w*)$"
)
"""Of a shell, a container or a job around the tests: none may decide whether they pass."""

for name in filter(
    SETTINGS.match, list(os.environ)
):  # before torch is loaded, and before there are processes to inherit them
    del os.environ[name]


for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup, or behind a shell's `&`: children would inherit it
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A role that runs within the test takes signals: given back at its end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


SHARED = "--shared-filesystems"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(SHARED, action="store_true", help="tests/shared_filesystems too: real GlusterFS and MooseFS")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as quick the unit tests that are not marked as slow; other tests are when they say so.

    Those on real shared file systems are deselected where nobody asked for them.
    """
    if not config.getoption(SHARED) and (
        left_out := [item for item in items if "shared_filesystems" in item.path.parts]
    ):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if "unit" in item.path.parts and item.get_closest_marker("slow") is None:
            item.add_marker("quick")
