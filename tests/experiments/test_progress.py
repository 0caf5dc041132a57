"""What is shown of a run, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from experiments import progress
from experiments.objective import Measures
from experiments.progress import display
from experiments.train import Progress


def at(step, losses=(), evaluation=None, seconds=0.0):
    loss = None if evaluation is None else Measures(evaluation, 0.5)
    return Progress(step, list(losses), [1.0] * len(losses), loss, seconds)


RUN = [
    at(0, evaluation=5.5),
    at(10, [4.0] * 9 + [3.25], seconds=4.0),
    at(20, [3.0] * 9 + [2.5], evaluation=2.25, seconds=2.0),
]


def shown(terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, color_system=None)
    with display(console, "nvfp4, seed 0", steps=20, per_step=469) as show:
        for step in RUN:
            show(step)
    return file.getvalue()


@pytest.fixture
def lines(monkeypatch):
    """The lines for a run's progresses, each shown at a time of its own."""

    def show_all(shows, **how):
        # The display reads the clock twice each time: for the time left, and for the line.
        clock = iter([time for when, _ in shows for time in (when, when)])
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        file = io.StringIO()
        with display(Console(file=file), "run", **how) as show:
            for _, step in shows:
                show(step)
        return file.getvalue().splitlines()

    return show_all


def test_a_bar_with_step_loss_speed_and_time_left():
    last = shown(terminal=True).split("nvfp4, seed 0")[-1]
    # 10 steps of 469 tokens in 2 seconds
    for part in ("step 20/20", "loss 2.500", "val 2.250", "2,345 tok/s", "0:00 left"):
        assert part in last


def test_plain_lines_without_control_characters():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "nvfp4, seed 0: starting"
    assert lines[1] == "nvfp4, seed 0: step 0/20  val 5.500"
    assert lines[-1] == ("nvfp4, seed 0: step 20/20  loss 2.500  val 2.250  2,345 tok/s  0:00 left")
    assert len(lines) == 3, "lines come now and then, the first and the last always"
    assert all(line.isprintable() for line in lines)


def test_lines_that_are_not_printed_still_count(lines):
    found = lines(
        [
            (0.0, at(0, evaluation=5.0)),
            (1.0, at(10, [4.0] * 10, evaluation=3.0, seconds=10.0)),
            (99.0, at(20, [2.0] * 10, seconds=10.0)),
        ],
        steps=100,
        per_step=10,
    )
    # The first steps began at -9: 108 seconds for 20 of 100, 432 more. The validation loss is that
    # of step 10.
    assert found[2:] == ["run: step 20/100  loss 2.000  val 3.000  10 tok/s  7:12 left"]


def test_the_time_left_of_a_run_that_goes_on_is_reckoned_from_there(lines):
    found = lines(
        [
            (1000.0, at(60, [2.0] * 10, seconds=5.0)),
            (1015.0, at(70, [1.5] * 10, seconds=8.0)),
        ],
        steps=100,
        per_step=4,
        counted="images",
    )
    assert found[1:] == [
        # From step 50 on: 5 seconds for 10 steps, then 5 + 15 for 20.
        "run: step 60/100  loss 2.000  8 images/s  0:20 left",
        "run: step 70/100  loss 1.500  5 images/s  0:30 left",
    ]


def test_the_rate_is_that_of_the_last_steps_alone(lines):
    found = lines(
        [(0.0, at(0)), (50.0, at(3, [1.0] * 3, seconds=6.0)), (90.0, at(4, [1.0], seconds=0.5))],
        steps=9,
        per_step=1000,
    )
    assert ["500 tok/s" in found[2], "2,000 tok/s" in found[3]] == [True, True]
