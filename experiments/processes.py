"""Several processes as one run: they join, agree before they start, and end together."""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

AUTO = "auto"

# Of JAX's coordination service, which ends the others when a process is silent for so long. Where
# they wait for it in a collective operation, that may fail sooner and say more.
HEARTBEAT = 20  # seconds
# For all processes to come.
PATIENCE = 120  # seconds


class ProcessesError(Exception):
    """The processes of a run cannot work together; the message says why."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which of how many processes this is. Each is started with the same options but for that."""

    coordinator: str | None = None
    """HOST:PORT where process 0 listens, for a run of several processes; auto on a cluster that JAX
    knows, such as Slurm's."""
    processes: int = 1
    """How many there are."""
    process: int = 0
    """Which of them this is, from 0."""
    cpu_devices: int = 1
    """Devices to make of the CPU in each process."""

    def __post_init__(self) -> None:
        for name in ("processes", "cpu_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.process < self.processes:
            raise ValueError(
                f"process must be from 0 to processes - 1 = {self.processes - 1}, "
                f"not {self.process}"
            )
        if self.processes > 1 and self.coordinator in (None, AUTO):
            raise ValueError(
                f"coordinator must be HOST:PORT for {self.processes} processes, "
                f"not {self.coordinator}"
            )


def join(asked: Processes) -> None:
    """Before anything else of JAX: makes devices of the CPU, and waits for the other processes.

    Raises:
      ProcessesError: they did not come.
    """
    if asked.cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", asked.cpu_devices)
    if asked.coordinator is None:
        return
    named: dict[str, Any] = {}
    if asked.coordinator != AUTO:
        named = {
            "coordinator_address": asked.coordinator,
            "num_processes": asked.processes,
            "process_id": asked.process,
        }
    try:
        jax.distributed.initialize(
            **named, heartbeat_timeout_seconds=HEARTBEAT, initialization_timeout=PATIENCE
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessesError(
            f"cannot join the other processes at {asked.coordinator}: {error}"
        ) from error
    sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What an exception that nobody handles comes to."""
    traceback.print_exception(kind, error, trace)
    leave(1)


def is_first() -> bool:
    """Whether this is the process that prints and writes; checkpoints are written by all."""
    return jax.process_index() == 0


def are_several() -> bool:
    """Whether there is another process."""
    return jax.process_count() > 1


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around what each process does before they work together: if one fails, so do all.

    Raises:
      ProcessesError: another one failed.
    """
    try:
        yield
    except Exception:
        _all_are_ready(False)
        raise
    if not _all_are_ready(True):
        raise ProcessesError("another process could not start: what it printed says why")


def _all_are_ready(ready: bool) -> bool:
    return largest(int(not ready)) == 0


def largest(number: int) -> int:
    """The largest of the processes' numbers; all must call this together."""
    return (
        int(np.max(multihost_utils.process_allgather(np.int32(number))))
        if are_several()
        else number
    )


def refuse_differences(told: dict[str, Any]) -> None:
    """Compares what determines a run, as plain values, with what the other processes have.

    Raises:
      ProcessesError: they differ.
    """
    if are_several():
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()
        digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
        others = [i for i, row in enumerate(digests) if (row != digests[0]).any()]
        if others:
            raise ProcessesError(
                f"processes {others} have other options, data or versions than process 0"
            )


def leave(code: int) -> int:
    """Gives back the code of an exit, or ends this process at once if it is one of several.

    To wait for the others, as JAX would at the end of Python, is to wait for processes that wait
    for this one.
    """
    if not are_several():
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():  # with it goes JAX's coordination service, and with that all the others
        time.sleep(2)
    os._exit(code)


def why_lost(error: Exception) -> str | None:
    """What an error says of another process that has ended; None if it is of something else."""
    text = " ".join(str(error).split())
    signs = ("Gloo", "NCCL", "coordination", "Connection reset", "heartbeat", "barrier", "Barrier")
    return text[:200] if are_several() and any(sign in text for sign in signs) else None
