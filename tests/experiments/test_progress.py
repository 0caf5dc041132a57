"""What is shown of a run, on a terminal and elsewhere."""

import io

from rich.console import Console

from experiments import progress
from experiments.progress import display
from experiments.train import Progress

RUN = [
    Progress(0, None, 5.5, None),
    Progress(10, 3.25, None, 1234.5),
    Progress(20, 2.5, 2.25, 2345.0),
]


def shown(terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, color_system=None)
    with display(console, "nvfp4, seed 0", steps=20) as show:
        for step in RUN:
            show(step)
    return file.getvalue()


def test_a_bar_with_step_loss_speed_and_time_left():
    last = shown(terminal=True).split("nvfp4, seed 0")[-1]
    for part in ("step 20/20", "loss 2.500", "val 2.250", "2,345 tok/s", "0:00 left"):
        assert part in last


def test_lines_that_are_not_printed_still_count(monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 1.0, 99.0, 99.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    file = io.StringIO()
    with display(Console(file=file), "run", steps=100) as show:
        show(Progress(0, None, 5.0, None))
        show(Progress(10, 4.0, 3.0, 10.0))
        show(Progress(20, 2.0, None, 10.0))
    last = file.getvalue().splitlines()[-1]
    # 99 seconds for 20 of 100 steps: 396 more, and the validation loss is that of step 10.
    assert last == "run: step 20/100  loss 2.000  val 3.000  10 tok/s  6:36 left"


def test_plain_lines_without_control_characters():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "nvfp4, seed 0: compiling"
    assert lines[1] == "nvfp4, seed 0: step 0/20  val 5.500"
    assert lines[-1].startswith("nvfp4, seed 0: step 20/20  loss 2.500  val 2.250  2,345 tok/s")
    assert len(lines) == 3, "lines come now and then, the first and the last always"
    assert all(line.isprintable() for line in lines)
