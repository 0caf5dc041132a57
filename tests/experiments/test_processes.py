"""Several processes on loopback: the losses of one, and what happens when one of them is gone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments import processes
from experiments.metrics import read
from experiments.process_table import free_port
from experiments.processes import Processes, ProcessesError

ROOT = Path(__file__).parents[2]
TINY = (
    "--model nano --data digits --steps 8 --batch 8 --evals 1 --validation 8 "
    "--checkpoint-every 2 --no-tensorboard --mesh.fsdp 4"
).split()


def start(
    out: Path, of: int, devices: int, *options: str, log: Path, odd: Sequence[str] = ()
) -> list[subprocess.Popen]:
    """Starts processes that train as one, each with so many devices; the last has odd options."""
    joined = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(of)]
    joined += ["--cpu-devices", str(devices)]
    # A model smaller than those of the zoo; compiled with few optimizations, as it runs briefly.
    program = (
        "import sys; from experiments import pretrain, zoo; from nano import SHARDED_VIT;"
        "zoo.MODELS['nano'] = SHARDED_VIT; sys.exit(pretrain.main())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    # Compiled once for runs on the same devices.
    environment |= {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_COMPILATION_CACHE_DIR": str(out.parents[1] / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", program, *TINY, "--out", str(out), *joined, *options]
    started = []
    for i in range(of):
        with (log / f"{i}.txt").open("w") as said:
            more = ["--process", str(i), *(odd if i == of - 1 else ())]
            started.append(
                subprocess.Popen(
                    [*command, *more], env=environment, stdout=subprocess.DEVNULL, stderr=said
                )
            )
    return started


def finished(started: list[subprocess.Popen]) -> list[int]:
    try:
        return [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()


def numbers(out: Path) -> list[tuple]:
    """What a run has reported that does not depend on the clock."""
    names = ("step", "loss", "gradient_norm", "validation_loss", "validation_accuracy")
    return [tuple(line.get(name) for name in names) for line in read(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The numbers of a run in one process with four devices."""
    folder = tmp_path_factory.mktemp("alone")
    assert finished(start(folder / "run", 1, 4, log=folder)) == [0]
    return numbers(folder / "run")


def test_four_processes_have_the_losses_of_one_with_four_devices(tmp_path, alone):
    assert finished(start(tmp_path / "run", 4, 1, log=tmp_path)) == [0] * 4
    assert [line[0] for line in alone] == list(range(1, 9))
    assert numbers(tmp_path / "run") == alone


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_the_run_resumes(tmp_path, alone, victim):
    out = tmp_path / "run"
    started = start(out, 2, 2, log=tmp_path)
    deadline = time.monotonic() + 240
    while not (out / "checkpoints" / "2").exists():
        assert time.monotonic() < deadline and started[0].poll() is None
        time.sleep(0.02)
    started[victim].send_signal(signal.SIGKILL)
    assert started[victim].wait() == -signal.SIGKILL
    survivor = started[1 - victim]
    survivor.wait(timeout=60)
    said = (tmp_path / f"{1 - victim}.txt").read_text()
    if survivor.returncode == -signal.SIGABRT:  # JAX itself was the first to notice
        assert "another task died" in said
    else:
        assert survivor.returncode == 5
        assert f"process {1 - victim}: stopped: another process of the run has ended" in said
    assert len(numbers(out)) < 8, "it was not killed in time"
    if victim == 1:
        assert finished(start(out, 2, 2, log=tmp_path)) == [0, 0]
        assert numbers(out) == alone


@pytest.mark.parametrize(
    ("odd", "said_by_0", "said_by_1"),
    [
        (
            ["--seed", "5"],
            "error: processes [1] differ from process 0 in seed",
            "error: processes [1] differ from process 0 in seed",
        ),
        (
            ["--data", "none.npz"],
            "error: another process could not start: what it printed says why",
            "error: cannot read the images in 'none.npz'",
        ),
        (
            ["--cpu-devices", "1"],
            "error: each process must have as many devices as the others",
            "error: each process must have as many devices as the others",
        ),
    ],
)
def test_processes_that_do_not_agree_do_not_start(tmp_path, odd, said_by_0, said_by_1):
    started = start(tmp_path / "run", 2, 2, log=tmp_path, odd=odd)
    assert finished(started) == [2, 2]
    for i, said in enumerate((said_by_0, said_by_1)):
        assert said in (tmp_path / f"{i}.txt").read_text()
    assert not (tmp_path / "run").exists(), "nothing is claimed"


def test_a_port_that_is_in_use_is_named():
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        port = used.getsockname()[1]
        with pytest.raises(ProcessesError, match=f"cannot listen at port {port}"):
            processes.join(Processes(coordinator=f"127.0.0.1:{port}", processes=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "processes must be at least 1, not 0"),
        ({"cpu_devices": 0}, "cpu_devices must be at least 1, not 0"),
        (
            {"coordinator": "h:1", "processes": 2, "process": 2},
            "process must be from 0 to processes - 1 = 1, not 2",
        ),
        ({"process": -1}, "process must be from 0 to processes - 1 = 0, not -1"),
        ({"processes": 2}, "coordinator must be HOST:PORT for 2 processes, not None"),
        (
            {"coordinator": "auto", "processes": 2},
            "coordinator must be HOST:PORT for 2 processes, not auto",
        ),
        ({"coordinator": "localhost"}, "coordinator must be HOST:PORT or auto, not localhost"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Processes(**options)


def test_one_process_agrees_with_itself():
    with processes.starting():
        pass
    with pytest.raises(KeyError), processes.starting():
        raise KeyError
    assert processes.largest(3) == 3
    assert processes.leave(7) == 7
    processes.refuse_differences({"a": 1})
    assert processes.why_lost(RuntimeError("Gloo all-reduce failed")) is None
