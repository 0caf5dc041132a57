"""Several processes as one run: they join, agree before they start, and end together."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.terminal import say

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
        if self.coordinator not in (None, AUTO) and not re.fullmatch(r".+:\d+", self.coordinator):
            raise ValueError(f"coordinator must be HOST:PORT or auto, not {self.coordinator}")


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
        if asked.process == 0:
            _refuse_used_port(asked.coordinator)
    if asked.processes > 1:
        say(f"process {asked.process} waits for {asked.processes - 1} more at {asked.coordinator}")
    # Python would not get to see a Ctrl-C while JAX waits.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            **named, heartbeat_timeout_seconds=HEARTBEAT, initialization_timeout=PATIENCE
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessesError(
            f"cannot join the other processes at {asked.coordinator}: {error}"
        ) from error
    finally:
        signal.signal(signal.SIGINT, handler)
    sys.excepthook = _end
    each = collections.Counter(device.process_index for device in jax.devices())
    if len(set(each.values())) > 1:
        raise ProcessesError(
            f"each process must have as many devices as the others, but they have {dict(each)}"
        )


def _refuse_used_port(coordinator: str) -> None:
    """Which ends JAX with a segmentation fault."""
    port = int(coordinator.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise ProcessesError(
                f"process 0 cannot listen at port {port} of the coordinator: {error}"
            ) from error


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
        values = [json.dumps(told[name]).encode() for name in sorted(told)]
        digests = np.stack([np.frombuffer(hashlib.sha256(v).digest(), np.uint8) for v in values])
        differ = (found := multihost_utils.process_allgather(digests)) != found[:1]
        if differ.any():
            names = np.array(sorted(told))[differ.any((0, 2))]
            raise ProcessesError(
                f"processes {np.flatnonzero(differ.any((1, 2))).tolist()} differ from process 0 in "
                + ", ".join(names)
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
