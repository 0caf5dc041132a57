"""Batches: each record once an epoch, the same whoever reads which rows, resumable anywhere."""

import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from experiments import data, images
from experiments.pipeline import batches

ROOT = Path(__file__).parents[2]


def numbers(count: int, **options) -> list[list[int]]:
    """The first `count` batches of a source whose records are their own numbers."""
    options = {"length": 23, "seed": 0, "size": 4} | options
    iterator = batches(range(options.pop("length")), **options)
    return [batch.tolist() for batch in itertools.islice(iterator, count)]


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


# The order


@pytest.mark.parametrize(("length", "size"), [(23, 4), (24, 4), (7, 7), (5, 8), (1, 3)])
def test_every_epoch_has_each_record_once_in_an_order_of_its_own(length, size):
    seen = flat(numbers(-(-6 * length // size), length=length, size=size))
    orders = [tuple(seen[i * length : (i + 1) * length]) for i in range(6)]
    for order in orders:
        assert sorted(order) == list(range(length))
    if length > 5:  # by chance, two of few records may be in one order
        assert len(set(orders)) == len(orders)


def test_the_order_is_a_function_of_the_seed():
    assert numbers(20, seed=3) == numbers(20, seed=3)
    firsts = [numbers(6, seed=seed) for seed in (0, 1, 2, 2**32 - 1)]
    assert all(a != b for a, b in itertools.combinations(firsts, 2))
    # Nor do two seeds share epochs: the second of one is not the first of the next.
    assert flat(numbers(46, size=1, seed=0))[23:] != flat(numbers(23, size=1, seed=1))


def test_the_order_does_not_depend_on_the_size_of_batches():
    assert flat(numbers(12, size=5)) == flat(numbers(20, size=3)) == flat(numbers(60, size=1))


def test_the_order_looks_random():
    epochs = np.reshape(numbers(20, length=1000, size=1000), (20, 1000))
    in_order = np.arange(1000)
    for i, order in enumerate(epochs):
        # With the place in the epoch, with the next record, and with the other epochs' orders.
        others = [in_order, np.roll(order, 1), *epochs[:i]]
        correlations = [np.corrcoef(order, other)[0, 1] for other in others]
        # Of 230 correlations, each of deviation 1/sqrt(999), none is so large, with odds of 6e-4.
        assert np.abs(correlations).max() < 4.7 / np.sqrt(999)


def test_the_order_is_the_same_everywhere():
    # Grain's order. Should a new version change it, runs before and after it are not comparable.
    assert numbers(6, length=10, seed=0) == [
        [1, 2, 4, 5],
        [9, 7, 8, 6],
        [0, 3, 9, 6],
        [1, 8, 2, 0],
        [3, 5, 4, 7],
        [7, 8, 2, 4],
    ]
    assert numbers(2, length=10, seed=1) == [[6, 5, 7, 3], [8, 4, 9, 2]]


# Rows of a batch


@pytest.mark.parametrize("length", [23, 24, 7])
@pytest.mark.parametrize("rows", [slice(0, 2), slice(6, 8), slice(3, 4), slice(0, 8)])
def test_rows_are_those_of_the_whole_batches(length, rows):
    steps = 4 * length // 8 + 2  # some epochs, the last of them in part
    whole = numbers(steps, length=length, size=8)
    assert numbers(steps, length=length, size=8, rows=rows) == [batch[rows] for batch in whole]


def test_a_position_means_the_same_for_other_rows():
    one = batches(range(23), seed=0, size=4)
    for _ in range(9):
        next(one)
    half = batches(range(23), seed=0, size=4, rows=slice(2, 4))
    half.set_state(json.loads(json.dumps(one.get_state())))
    for _ in range(9):
        np.testing.assert_array_equal(next(half), next(one)[2:])


# The position


@pytest.mark.parametrize("done", [0, 1, 4, 5, 6, 11, 12, 40])  # an epoch has 5 3/4 batches
def test_a_position_resumes_exactly(done):
    one = batches(range(23), seed=5, size=4)
    for _ in range(done):
        next(one)
    state = json.loads(json.dumps(one.get_state()))
    expected = [next(one) for _ in range(15)]
    fresh = batches(range(23), seed=5, size=4)
    fresh.set_state(state)
    assert fresh.get_state() == state
    np.testing.assert_array_equal([next(fresh) for _ in range(15)], expected)
    one.set_state(state)  # back again, with batches read ahead
    np.testing.assert_array_equal([next(one) for _ in range(15)], expected)


# What is in a batch


def test_windows_of_a_corpus(tmp_path):
    (tmp_path / "numbers.txt").write_bytes(b"".join(b"%07d\n" % i for i in range(2000)))
    corpus = data.load([str(tmp_path)], sequence=32)
    windows = [corpus.training[i] for i in range(len(corpus.training))]
    iterator = batches(corpus.training, seed=0, size=3)
    seen = []
    for _ in range(len(windows) // 3):
        batch = next(iterator)
        assert batch.shape == (3, 33)
        assert batch.dtype == np.int32
        seen += [window.tobytes() for window in batch]
    assert len(set(seen)) == len(seen) >= len(windows) - 2
    assert set(seen) <= {window.tobytes() for window in windows}
    # The first ones, as they are on any machine.
    firsts = [np.frombuffer(window, np.int32)[:9].astype(np.uint8).tobytes() for window in seen[:3]]
    assert firsts == [b"0001317\n0", b"0001613\n0", b"0000936\n0"]


def test_images_with_their_labels():
    digits = images.load(["digits"])
    pixels, labels = next(batches(digits.training, seed=0, size=6))
    assert pixels.shape == (6, 8, 8, 1)
    assert pixels.dtype == np.float32
    assert labels.shape == (6,)
    assert labels.dtype == np.int32
    for image, label in zip(pixels, labels, strict=True):
        same = (digits.images == image).all((1, 2, 3))
        assert label in digits.labels[same]


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size .*, not 0"),
        ({"size": -2}, "size .*, not -2"),
        ({"rows": slice(4, 6)}, r"rows must be some of a batch of 4, not slice\(4, 6, None\)"),
        ({"seed": -1}, "seed must be from 0 to 4294967295, not -1"),
        ({"seed": 2**32}, "seed .* not 4294967296"),
        ({"length": 0}, "source has no records"),
    ],
)
def test_arguments_outside_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        numbers(1, **options)


class Broken:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        raise RuntimeError(f"record {index} is broken")


def test_an_error_in_the_source_is_raised():
    with pytest.raises(RuntimeError, match="is broken"):
        next(batches(Broken(), seed=0, size=2))


# Threads


def test_no_thread_outlives_its_iterator():
    before = set(threading.enumerate())
    closed, dropped = batches(range(9), seed=0, size=2), batches(range(9), seed=0, size=2)
    next(closed), next(dropped)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    closed.close()
    del dropped
    for thread in started:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_a_program_ends_in_silence_with_an_iterator_open():
    program = "from experiments.pipeline import batches\nb = batches(range(9), seed=0, size=2)\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program + "print(next(b).tolist())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == numbers(1, length=9, size=2)[0]
