"""Metrics: one line per step, whenever the run was killed; TensorBoard; the table."""

import itertools
import struct
import time

import numpy as np
from tensorboardX.proto.event_pb2 import Event

from experiments.metrics import Metrics, TensorBoard, read, table


def lines(*steps):
    return [{"step": step, "loss": 1 / step} for step in steps]


def test_lines_come_back_in_full_precision(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, True, 0) as metrics:
        metrics.write(lines(1, 2))
        assert read(path) == lines(1, 2)  # on the disk before the file is closed
        metrics.write(lines(3))
    assert read(path) == lines(1, 2, 3)


def test_steps_after_the_checkpoint_are_done_again_and_stand_there_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, True, 0) as metrics:
        metrics.write(lines(1, 2, 3, 4, 5))
    with Metrics(path, True, 3) as metrics:
        assert read(path) == lines(1, 2, 3)
        metrics.write(lines(4, 5, 6))
    assert read(path) == lines(1, 2, 3, 4, 5, 6)


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, True, 0) as metrics:
        metrics.write(lines(1, 2))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert read(path) == lines(1, 2)
    with Metrics(path, True, 9) as metrics:
        metrics.write(lines(3))
    assert read(path) == lines(1, 2, 3)


def test_no_file_has_no_lines(tmp_path):
    assert read(tmp_path / "metrics.jsonl") == []


# TensorBoard


def records(path):
    """The payloads of a TFRecord file: length, its CRC, payload, its CRC."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + length]
        at += 12 + length + 4


def events(folder):
    """By name and step, what TensorBoard shows: a new start drops what was from its step on."""
    files, found = sorted(folder.iterdir()), {}
    for event in map(Event.FromString, itertools.chain.from_iterable(map(records, files))):
        if event.WhichOneof("what") == "session_log":
            assert event.session_log.status == event.session_log.START
            found = {key: value for key, value in found.items() if key[1] < event.step}
        for value in event.summary.value:
            assert (value.tag, event.step) not in found, "once"
            found[value.tag, event.step] = value.simple_value
    return found


def scalars(lines):
    """What is expected of TensorBoard, which keeps float32."""
    return {
        (name, line["step"]): float(np.float32(value))
        for line in lines
        for name, value in line.items()
        if name != "step"
    }


def test_tensorboard_has_the_same_numbers(tmp_path):
    written = [*lines(1, 2), {"step": 3, "loss": 0.1, "validation_loss": 1e-3, "tokens": 12345.6}]
    with TensorBoard(tmp_path, True, after=0) as board:
        board.write(written[:2])
        board.write(written[2:])
    assert events(tmp_path) == scalars(written)


def test_tensorboard_drops_the_steps_that_are_done_again(tmp_path):
    with TensorBoard(tmp_path, True, after=0) as board:
        board.write(lines(1, 2, 3, 4, 5))
    with TensorBoard(tmp_path, True, after=3) as board:
        board.write([{"step": step, "loss": 100 + step} for step in (4, 5, 6)])
    again = [{"step": step, "loss": 100 + step} for step in (4, 5, 6)]
    assert events(tmp_path) == scalars([*lines(1, 2, 3), *again])


def test_tensorboard_has_them_though_the_run_is_killed(tmp_path):
    """Soon after they were written, not when it ends: the writer's own habit is two minutes."""
    with TensorBoard(tmp_path, True, after=0) as board:
        board.write(lines(1))
        time.sleep(0.2)  # the first event is flushed by itself
        board.write(lines(2, 3))
        until = time.monotonic() + 10
        while events(tmp_path) != scalars(lines(1, 2, 3)) and time.monotonic() < until:
            time.sleep(0.1)
        assert events(tmp_path) == scalars(lines(1, 2, 3))


def test_tensorboard_is_only_written_if_wanted(tmp_path):
    with TensorBoard(tmp_path / "none", False, after=0) as board:
        board.write(lines(1))
    assert not (tmp_path / "none").exists()


# The table


def test_the_table_has_the_evaluations():
    rows = [
        {"step": 999, "loss": 9.0},
        {
            **{
                "step": 1000,
                "loss": 2.34567,
                "validation_loss": 2.2,
                "validation_accuracy": 0.4567,
            },
            **{"bits_per_byte": 3.17392, "tokens_per_second": 12345.6, "learning_rate": 1e-3},
        },
        {
            **{"step": 20000, "loss": 1.0, "validation_loss": 1.05, "validation_accuracy": 1.0},
            **{"bits_per_byte": 0.5, "tokens_per_second": 9.4},
        },
    ]
    assert table(rows).splitlines() == [
        "| step | loss | held out | bits/byte | accuracy | tokens/s |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1,000 | 2.3457 | 2.2000 | 3.1739 | 45.67% | 12,346 |",
        "| 20,000 | 1.0000 | 1.0500 | 0.5000 | 100.00% | 9 |",
    ]


def test_the_table_has_only_columns_of_which_there_is_something():
    row = {"step": 3, "loss": 0.5, "validation_loss": 0.75, "images_per_second": 1234.0}
    assert table([row]).splitlines() == [
        "| step | loss | held out | images/s |",
        "| --- | --- | --- | --- |",
        "| 3 | 0.5000 | 0.7500 | 1,234 |",
    ]
