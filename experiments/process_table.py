"""One run in one process and in several: are the losses the same?

``python -m experiments.process_table`` trains on four and on two devices of a CPU, which belong to
one process or to several, and prints a Markdown table; ``--write`` puts it into
docs/distributed.md. All devices add in the same order where one library adds, which is Gloo as soon
as processes have a coordinator; without one, XLA adds itself.
"""

import dataclasses
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from experiments import metrics, pages

OPTIONS = (
    "--model transformer --recipe nvfp4 --steps 20 --sequence 64 --evals 2 --validation 8 "
    "--checkpoint-every 20 --no-tensorboard"
).split()


@dataclasses.dataclass(frozen=True)
class Joined:
    """Processes with as many devices each; with a coordinator, or by itself."""

    processes: int
    devices: int
    coordinated: bool = True

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices}" + ("" if self.coordinated else ", XLA adds")


# The first of each is what the others are compared with.
CASES = (
    (Joined(1, 2), Joined(2, 1), Joined(1, 2, coordinated=False)),
    (Joined(1, 4), Joined(2, 2), Joined(4, 1), Joined(1, 4, coordinated=False)),
)


def train(joined: Joined, out: Path, options: Sequence[str]) -> np.ndarray:
    """The losses of a run, [steps].

    Raises:
      RuntimeError: a process failed; what it printed is on stderr.
    """
    command = [sys.executable, "-m", "experiments.pretrain", "--out", str(out), *options]
    command += ["--cpu-devices", str(joined.devices)]
    if joined.coordinated:
        command += ["--coordinator", f"127.0.0.1:{free_port()}"]
        command += ["--processes", str(joined.processes)]
    started = [
        subprocess.Popen([*command, "--process", str(i)], stdout=subprocess.DEVNULL)
        for i in range(joined.processes)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError(f"processes of {joined} ended with the codes {codes}")
    return np.array([line["loss"] for line in metrics.read(out / "metrics.jsonl")])


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def row(joined: Joined, losses: np.ndarray, first: np.ndarray | None) -> str:
    """A row of the table: are the losses those of the first, bit for bit?"""
    same = "compared with"
    if first is not None:
        differ, apart = np.flatnonzero(losses != first), np.abs(losses / first - 1)
        same = "yes"
        if differ.size:
            step = differ[0]
            same = f"from step {step + 1} on {apart[step]:.1g} apart, at the end {apart[-1]:.1g}"
    return f"| {joined} | {joined.processes * joined.devices} | {losses[-1]:.6f} | {same} |"


@dataclasses.dataclass(frozen=True)
class Config:
    """The table of processes in docs/distributed.md."""

    write: bool = False
    """Put it into the page, too."""


def main() -> None:
    """Prints the table row by row, and writes it if asked."""
    config = tyro.cli(Config)
    lines = [
        "| processes x devices | devices | last loss | the same losses |",
        "| --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for cases in CASES:
            first = None
            for joined in cases:
                options = [*OPTIONS, "--mesh.fsdp", str(joined.processes * joined.devices)]
                out = Path(folder) / str(joined).replace(" ", "")
                losses = train(joined, out, options)
                lines.append(row(joined, losses, first))
                first = losses if first is None else first
                print(lines[-1], flush=True)
    if config.write:
        pages.put("distributed.md", "experiments.process_table", "\n".join(lines))


if __name__ == "__main__":
    main()
