"""A run's metrics: one JSON line per step, each step once, whenever the run was killed."""

import json
import os
from pathlib import Path
from typing import Any, Self


class Metrics:
    """A file of JSON lines, one per step, in order.

    Args:
      path: of the file; made if it is missing.
      after: the step that the run goes on after. What the file has of later steps, and a line that
        was cut short, is dropped: those steps are done again.
    """

    def __init__(self, path: Path, after: int) -> None:
        kept = [line for line in read(path) if line["step"] <= after]
        whole = path.with_suffix(".tmp")
        whole.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        whole.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._file.close()

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Appends lines; on the disk when this returns."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, none if there is no file."""
    if not path.exists():
        return []
    *lines, last = path.read_text(encoding="utf-8").split("\n")
    del last  # what follows the last line's end: nothing, or a line that was cut short
    return [json.loads(line) for line in lines]
