"""One cluster for all tests of this folder; each test leaves it idle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        started = SlurmCluster(Path(folder) / "c")
        try:
            started.up()
            yield started
        finally:
            started.down()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For a second cluster: in tmp_path the paths of Slurm's sockets may become too long."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_job_left(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.cancel_all()
