"""A run's metrics: a line per step, each step once, whenever the run was killed."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Self

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from experiments import folder


class Metrics:
    """A file of JSON lines, one per step, in order.

    Args:
      path: of the file; made if it is missing.
      wanted: whether to write at all.
      after: the step that the run goes on after. What the file has of later steps, and a line that
        was cut short, is dropped: those steps are done again.
    """

    def __init__(self, path: Path, wanted: bool, after: int) -> None:
        self.missing, self._file = 0, None
        if wanted:
            kept = [line for line in read(path) if line["step"] <= after]
            folder.write(path, "".join(json.dumps(line) + "\n" for line in kept))
            self.missing = after - len(kept)
            self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Appends lines; on the disk when this returns."""
        if self._file is not None:
            self._file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._file.flush()
            os.fsync(self._file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, damaged ones and repeated steps left out; none without a file."""
    if not path.exists():
        return []
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    del last  # what follows the last line's end: nothing, or a line that was cut short
    found: list[dict[str, Any]] = []
    for text in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            line = json.loads(text)
            if not found or line["step"] > found[-1]["step"]:
                found.append(line)
    return found


class TensorBoard:
    """The same lines as scalars for TensorBoard.

    Written at once and by this thread, so that a full disk is an OSError here: the package's own
    writer waits for a thread that may have ended.

    Args:
      place: folder of the event files.
      wanted: whether to write at all.
      after: the step that the run goes on after; TensorBoard drops what it has of later ones.
    """

    def __init__(self, place: Path, wanted: bool, after: int) -> None:
        self._writer = None
        if wanted:
            place.mkdir(parents=True, exist_ok=True)
            # Files are named by the second, which a run that goes on may share with the one before.
            self._writer = EventsWriter(str(place / "events"), f".{after}")
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=after + 1, session_log=start)
            self._writer.write_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._writer:
            self._writer.close()

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Appends lines; on the disk when this returns, unless the machine fails."""
        if self._writer:
            for line in lines:
                values = [
                    Summary.Value(tag=name, simple_value=value)
                    for name, value in line.items()
                    if name != "step"
                ]
                summary = Summary(value=values)
                event = Event(wall_time=time.time(), step=line["step"], summary=summary)
                self._writer.write_event(event)
            self._writer.flush()


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
    if not rows:
        return "Not evaluated yet."
    columns = {name: how for name, how in COLUMNS.items() if any(name in row for row in rows)}
    cells = [[heading for heading, _ in columns.values()], ["---"] * len(columns)]
    for row in rows:
        cells.append([how.format(row[name]) for name, (_, how) in columns.items()])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
