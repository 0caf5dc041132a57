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
        # A killed run loses what was not flushed, and does steps before its checkpoint never again.
        # Files are named by the second, which a run that goes on may share with the one before it.
        how = {"purge_step": after + 1, "flush_secs": 1, "filename_suffix": f".{after}"}
        self._writer = SummaryWriter(str(folder), **how) if wanted else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._writer:
            self._writer.close()

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Appends lines; they are in the event file soon after."""
        if self._writer:
            for line in lines:
                for name in line.keys() - {"step"}:
                    self._writer.add_scalar(name, line[name], line["step"])


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, none if there is no file."""
    if not path.exists():
        return []
    *lines, last = path.read_text(encoding="utf-8").split("\n")
    del last  # what follows the last line's end: nothing, or a line that was cut short
    return [json.loads(line) for line in lines]


# Of the table: what is in a line, its heading, and how it is written.
COLUMNS = {
    "step": ("step", "{:,}"),
    "loss": ("loss", "{:.4f}"),
    "validation_loss": ("held out", "{:.4f}"),
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "validation_accuracy": ("accuracy", "{:.2%}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "images_per_second": ("images/s", "{:,.0f}"),
}


def table(lines: list[dict[str, Any]]) -> str:
    """The evaluations as a Markdown table: loss of a batch, what held-out data says, and speed."""
    rows = [line for line in lines if "validation_loss" in line]
    columns = {name: how for name, how in COLUMNS.items() if any(name in row for row in rows)}
    cells = [[heading for heading, _ in columns.values()], ["---"] * len(columns)]
    for row in rows:
        cells.append([how.format(row[name]) for name, (_, how) in columns.items()])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
