"""A run's metrics: a line per step, each step once, whenever the run was killed."""

import json
import os
from pathlib import Path
from typing import Any, Self

from tensorboardX import SummaryWriter


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


class TensorBoard:
    """The same lines as scalars for TensorBoard.

    Args:
      folder: of the event files.
      wanted: whether to write at all.
      after: the step that the run goes on after; TensorBoard drops what it has of later ones.
    """

    def __init__(self, folder: Path, wanted: bool, after: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=after + 1) if wanted else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._writer:
            self._writer.close()

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Appends lines."""
        for line in lines if self._writer else []:
            for name, value in line.items():
                if name != "step":
                    self._writer.add_scalar(name, value, line["step"])


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, none if there is no file."""
    if not path.exists():
        return []
    *lines, last = path.read_text(encoding="utf-8").split("\n")
    del last  # what follows the last line's end: nothing, or a line that was cut short
    return [json.loads(line) for line in lines]


def table(lines: list[dict[str, Any]]) -> str:
    """The evaluations as a Markdown table: what was measured on held-out data, and how fast."""
    rows = [line for line in lines if "validation_loss" in line]
    columns = ["step", *dict.fromkeys(name for row in rows for name in row if name != "step")]
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    header = [[name.replace("_", " ") for name in columns], ["---"] * len(columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*header, *cells])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) and value < 1e4 else f"{value:,.0f}"
