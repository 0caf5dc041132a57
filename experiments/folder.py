"""The output folder of a run: one run lives there, and one process at a time works on it."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock


class FolderError(Exception):
    """The output folder cannot be used for this run; the message says why."""


@contextlib.contextmanager
def claimed(
    folder: Path, run: dict[str, Any], free: Sequence[str], tokenizer: Path | None
) -> Iterator[None]:
    """Notes in config.json what run the folder holds, or checks that it holds this one.

    Args:
      folder: made if it is missing.
      run: what determines the run, as plain values.
      free: names of those values with which a run may go on when they have changed.
      tokenizer: a file that is kept with the run, as tokenizer.json.

    Raises:
      FolderError: the folder holds another run or something else, another process works on it, or
        it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(folder / "lock").acquire(blocking=False)
    except filelock.Timeout as error:
        raise FolderError(f"another process is at work in '{folder}'") from error
    except OSError as error:
        raise FolderError(f"the output folder '{folder}' cannot be written to: {error}") from error
    with held:
        if (folder / "config.json").exists():
            _refuse_another(folder, read(folder), run, free)
        elif (folder / "checkpoints").exists():
            raise FolderError(f"'{folder}' has checkpoints, but no config.json says of what run")
        else:
            if tokenizer is not None:
                write(folder / "tokenizer.json", tokenizer.read_text(encoding="utf-8"))
            write(folder / "config.json", json.dumps(run, indent=2) + "\n")
        yield


def read(folder: Path) -> dict[str, Any]:
    """What run the folder holds.

    Raises:
      FolderError: it holds none.
    """
    try:
        run = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FolderError(f"'{folder}' holds no run: there is no config.json") from error
    except ValueError as error:
        raise FolderError(f"config.json in '{folder}' is damaged: {error}") from error
    if not isinstance(run, dict):
        raise FolderError(f"config.json in '{folder}' holds no run, but {type(run).__name__}")
    return run


def _refuse_another(
    folder: Path, held: dict[str, Any], run: dict[str, Any], free: Sequence[str]
) -> None:
    differ = [name for name in run if name not in free and held.get(name) != run[name]]
    if differ:
        was = ", ".join(
            "other data" if name == "data_sha256" else f"{name} {held.get(name)}, not {run[name]}"
            for name in differ
            if name not in ("fits", "unit")  # which follow from the data
        )
        raise FolderError(f"'{folder}' holds another run: {was}; choose another --out")


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a full disk leaves no half of it behind."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
