"""A metric sink of one's own: one CSV file for each curve."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TextIO

from relax_hpc.monitor.tracking.points import Point


class CsvSink:
    """See relax_hpc.monitor.tracking.sinks.Sink. FOLDER/train/loss.csv has lines of step, time, value."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}
        self._writers: dict[str, Any] = {}

    def add(self, point: Point) -> None:
        for name, value in point.values.items():
            if name not in self._files:
                self._begin(name)
            self._writers[name].writerow([point.step, point.time, value])

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def where(self) -> str:
        return f"pandas.read_csv('{self._folder}/train/loss.csv')"

    def _begin(self, name: str) -> None:
        path = self._folder / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self._files[name] = path.open("w", newline="")
        self._writers[name] = csv.writer(file)
        self._writers[name].writerow(["step", "time", "value"])
