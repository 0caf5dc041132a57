"""Metrics: one line per step, whenever the run was killed."""

from experiments.metrics import Metrics, read


def lines(*steps):
    return [{"step": step, "loss": 1 / step} for step in steps]


def test_lines_come_back_in_full_precision(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, after=0) as metrics:
        metrics.write(lines(1, 2))
        assert read(path) == lines(1, 2)  # on the disk before the file is closed
        metrics.write(lines(3))
    assert read(path) == lines(1, 2, 3)


def test_steps_after_the_checkpoint_are_done_again_and_stand_there_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, after=0) as metrics:
        metrics.write(lines(1, 2, 3, 4, 5))
    with Metrics(path, after=3) as metrics:
        assert read(path) == lines(1, 2, 3)
        metrics.write(lines(4, 5, 6))
    assert read(path) == lines(1, 2, 3, 4, 5, 6)


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, after=0) as metrics:
        metrics.write(lines(1, 2))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert read(path) == lines(1, 2)
    with Metrics(path, after=9) as metrics:
        metrics.write(lines(3))
    assert read(path) == lines(1, 2, 3)


def test_no_file_has_no_lines(tmp_path):
    assert read(tmp_path / "metrics.jsonl") == []
