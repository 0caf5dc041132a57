"""Checkpoints: what comes back is what was saved, or the one before it."""

import asyncio
import errno
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import checkpoint
from experiments.checkpoint import Checkpoints, NotSavedError


def state(seed):
    key = jax.random.key(seed)
    return {
        "params": {"w": jax.random.normal(key, (300, 70)), "b": jnp.full(3, seed, jnp.bfloat16)},
        "count": jnp.int32(seed),
        "stream": jax.random.split(key, 2),
        "many": [jnp.int32(100 * seed + i) for i in range(12)],  # 10 sorts before 2 as text
    }


def same(a, b):
    def equal(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert x.dtype == y.dtype
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)

    jax.tree.map(equal, a, b)


def restore(folder, warnings=None):
    with Checkpoints(folder, keep=3) as checkpoints:
        return checkpoints.restore(state(0), [].append if warnings is None else warnings.append)


def steps(folder):
    return sorted(int(path.name) for path in folder.iterdir())


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Three of four checkpoints, each overwritten in memory while it was being written."""
    folder = tmp_path_factory.mktemp("four")
    with Checkpoints(folder, keep=3) as checkpoints:
        for step in (1, 2, 3, 4):
            held = state(step)
            checkpoints.save(step, held, {"position": 10 * step})
            # As a training step does with what it takes over.
            jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(held["params"])
    return folder


@pytest.fixture
def folder(four, tmp_path):
    """The same in a folder that may be damaged."""
    return shutil.copytree(four, tmp_path / "checkpoints")


def test_the_newest_one_comes_back_to_the_bit(folder):
    step, got, notes = restore(folder)
    assert (step, notes) == (4, {"position": 40})
    same(got, state(4))
    assert steps(folder) == [2, 3, 4]


def test_no_checkpoint_is_none(tmp_path):
    assert restore(tmp_path) is None


def data_files(folder, step):
    files = [p for p in (folder / str(step) / "state").rglob("*") if p.is_file()]
    return sorted(files, key=lambda p: p.stat().st_size)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def unraisable(monkeypatch):
    """What was raised where nobody can catch it, such as in coroutines that nobody awaited."""
    gc.collect()
    found = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    yield found
    gc.collect()
    assert not found


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "missing", "empty", "one more"])
def test_a_damaged_one_gives_way_to_the_one_before(folder, damage, unraisable):
    largest = data_files(folder, 4)[-1]
    if damage == "cut short":
        content = largest.read_bytes()
        largest.write_bytes(content[: len(content) // 2])
    elif damage == "a bit flipped":
        flip_a_bit(largest)
    elif damage == "missing":
        largest.unlink()
    elif damage == "empty":
        largest.write_bytes(b"")
    else:
        largest = largest.with_name("one_more")
        largest.write_bytes(b"more")
    warnings = []
    step, got, notes = restore(folder, warnings)
    assert (step, notes) == (3, {"position": 30})
    same(got, state(3))
    name = largest.relative_to(folder / "4")
    assert warnings == [
        f"checkpoint 4 cannot be used (../{name} is not what was written); trying the one before it"
    ]


def test_a_bit_in_any_file_is_noticed_unless_nothing_depends_on_it(folder, unraisable):
    of_orbax = {"_CHECKPOINT_METADATA", "commit_success.txt", "about/commit_success.txt"}
    files = {p.relative_to(folder / "4").as_posix(): p for p in (folder / "4").rglob("*.*")}
    files |= {p.relative_to(folder / "4").as_posix(): p for p in (folder / "4").rglob("*")}
    seen = set()
    for name, path in files.items():
        if path.is_file():
            content = path.read_bytes()
            flip_a_bit(path)
            step, got, notes = restore(folder)
            expected = 4 if name in of_orbax else 3
            assert (name, step, notes) == (name, expected, {"position": 10 * expected})
            same(got, state(expected))
            path.write_bytes(content)
            seen.add(name)
    assert of_orbax | {"about/seal", "about/about.json", "state/_METADATA"} <= seen
    assert restore(folder)[0] == 4


@pytest.mark.parametrize("lost", ["about", "state", "about/seal", "."])
def test_half_a_checkpoint_is_damaged(folder, lost):
    """As when a process is killed while it deletes one."""
    path = folder / "4" / lost
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    (folder / "4").mkdir(exist_ok=True)
    assert restore(folder)[0] == 3


def test_all_damaged_is_none(folder):
    for step in (2, 3, 4):
        for path in data_files(folder, step):
            path.write_bytes(b"")
    warnings = []
    assert restore(folder, warnings) is None
    assert len(warnings) == 3


def test_a_damaged_one_is_replaced_when_its_step_comes_again(folder):
    data_files(folder, 4)[-1].write_bytes(b"")
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.restore(state(0), [].append)[0] == 3
        checkpoints.save(4, state(40), {"again": [True]})
    step, got, notes = restore(folder)
    assert (step, notes) == (4, {"again": [True]})
    same(got, state(40))


def test_damaged_ones_take_no_good_one_s_place(folder):
    for step in (3, 4):
        flip_a_bit(data_files(folder, step)[-1])
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.restore(state(0), [].append)[0] == 2
        checkpoints.save(5, state(5), {})
    assert steps(folder) == [2, 3, 4, 5]
    flip_a_bit(data_files(folder, 5)[-1])
    step, got, _ = restore(folder)
    assert step == 2
    same(got, state(2))


def other_shape(good):
    return {**good, "params": {**good["params"], "w": jnp.zeros((3, 3))}}


def other_dtype(good):
    return {**good, "count": jnp.float32(0)}


def other_keys(good):
    return {**good, "stream": jax.random.split(jax.random.key(0, impl="rbg"), 2)}


def fewer(good):
    return {"params": good["params"]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_shape, "params.w is float32[300,70] there and float32[3,3] here"),
        (other_dtype, "count is int32[] there and float32[] here"),
        (other_keys, "stream is key<fry>[2] there and key<rbg>[2] here"),
        (fewer, "count is int32[] there and missing here, and 13 more"),
        (lambda good: {**good, "new": jnp.int32(1)}, "new is missing there and int32[] here"),
    ],
)
def test_another_model_is_no_checkpoint_of_this_one(folder, change, says, unraisable):
    warnings = []
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.restore(change(state(0)), warnings.append) is None
    assert warnings == [
        f"checkpoint {step} cannot be used ({says}); trying the one before it" for step in (4, 3, 2)
    ]
    assert restore(folder)[0] == 4  # and nothing is lost by asking


def test_who_only_restores_leaves_all_as_it_is(folder):
    """As the owner may be at work: what is half-written stays."""
    writing = folder / "5.orbax-checkpoint-tmp"
    shutil.copytree(folder / "4", writing)
    before = sorted(folder.rglob("*"))
    with Checkpoints(folder, keep=1, owner=False) as checkpoints:
        step, got, _ = checkpoints.restore(state(0), [].append)
    assert step == 4
    same(got, state(4))
    assert sorted(folder.rglob("*")) == before
    with Checkpoints(folder, keep=3):
        assert not writing.exists()


@pytest.mark.parametrize("notes", [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}])
def test_notes_that_json_would_change_are_refused(tmp_path, notes):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(ValueError, match="notes must come back from JSON as they are"):
            checkpoints.save(1, state(1), notes)
        with pytest.raises(TypeError):
            checkpoints.save(1, state(1), {"a": object()})
    assert steps(tmp_path) == []


@pytest.fixture
def full(monkeypatch):
    """Steps for which the disk is full when their checkpoint is nearly complete."""
    found_full = set()
    finalize = checkpoint._Sealing.finalize

    def fail(handler, directory):
        if int(directory.parent.name.partition(".")[0]) in found_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        finalize(handler, directory)

    monkeypatch.setattr(checkpoint._Sealing, "finalize", fail)
    return found_full


def test_what_was_not_saved_is_said_by_the_next_save(tmp_path, full):
    full |= {1, 4}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {})
        with pytest.raises(NotSavedError) as none_before:
            checkpoints.save(2, state(2), {})
        checkpoints.save(2, state(2), {})
        checkpoints.save(3, state(3), {})
        checkpoints.save(4, state(4), {})
        with pytest.raises(NotSavedError) as three_before:
            checkpoints.save(4, state(4), {})
        assert steps(tmp_path) == [3]
        full.clear()
        checkpoints.save(4, state(4), {})  # which was not taken for one that is there
    said = f"could not be written to {tmp_path} (OSError: [Errno 28] No space left on device);"
    assert str(none_before.value) == f"checkpoint 1 {said} there is none before it"
    assert str(three_before.value) == f"checkpoint 4 {said} the newest good one is 3"
    same(restore(tmp_path)[1], state(4))
    assert steps(tmp_path) == [4]


def test_a_damaged_one_is_not_said_to_be_good(folder, full):
    flip_a_bit(data_files(folder, 4)[-1])
    full.add(5)
    checkpoints = Checkpoints(folder, keep=3)
    checkpoints.save(5, state(5), {})
    with pytest.raises(NotSavedError, match=r"the newest good one is 3$"):
        checkpoints.__exit__(None, None, None)
    assert steps(folder) == [2, 3, 4]


def test_the_failure_of_one_writer_is_not_the_end_of_the_others(tmp_path, monkeypatch):
    """They are waited for, or they might write into the next attempt's folder."""
    written = []

    async def slow():
        await asyncio.sleep(0.3)
        written.append(True)

    async def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    begin = ocp.future.CommitFutureAwaitingContractedSignals

    async def async_save(handler, directory, args):
        return [begin(fail()), begin(slow())]

    monkeypatch.setattr(checkpoint._Sealing, "async_save", async_save)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1), {})
        with pytest.raises(NotSavedError):
            checkpoints.save(1, state(1), {})
    assert written == [True]


def save_then(folder, step, error):
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(step, state(step), {})
        if error is not None:
            raise error


def test_what_was_not_saved_is_said_at_the_end_or_added_to_what_went_wrong(tmp_path, full):
    full |= {1, 2}
    with pytest.raises(NotSavedError, match="checkpoint 1 could not be written"):
        save_then(tmp_path, 1, None)
    with pytest.raises(ZeroDivisionError) as other:
        save_then(tmp_path, 2, ZeroDivisionError())
    (note,) = other.value.__notes__
    assert note.startswith("checkpoint 2 could not be written")
    assert list(tmp_path.iterdir()) == []


# From here on with real faults.


def big(step):
    """4 MB that cannot be compressed."""
    return {"w": np.random.default_rng(step).standard_normal(1_000_000, np.float32)}


def save_big(checkpoints, step):
    checkpoints.save(step, jax.tree.map(jnp.asarray, big(step)), {"step": step})


def save_twice(checkpoints, step):
    """The second one does nothing but say what happened to the first."""
    save_big(checkpoints, step)
    save_big(checkpoints, step)


def check_big(checkpoints):
    """The newest one is found whole and its content right; returns its step."""
    warnings = []
    step, got, notes = checkpoints.restore(jax.tree.map(jnp.asarray, big(0)), warnings.append)
    np.testing.assert_array_equal(got["w"], big(step)["w"])
    assert (notes, warnings) == ({"step": step}, [])
    return step


def fill_and_free(folder, fill, free):
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2):
            save_big(checkpoints, step)
        assert check_big(checkpoints) == 2
        fill()
        with pytest.raises(NotSavedError, match=r"^checkpoint 3 .*the newest good one is 2$"):
            save_twice(checkpoints, 3)
        assert steps(folder) == [1, 2]
        assert check_big(checkpoints) == 2
    with Checkpoints(folder, keep=2) as checkpoints:
        assert check_big(checkpoints) == 2
    free()
    with Checkpoints(folder, keep=2) as checkpoints:
        save_big(checkpoints, 3)
    with Checkpoints(folder, keep=2) as checkpoints:
        assert check_big(checkpoints) == 3
    assert steps(folder) == [2, 3]


@pytest.fixture
def small_disk(tmp_path):
    """Of 24 MB, six checkpoints."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", tmp_path]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("left", [0, 0.5, "all but a page"])
def test_a_full_disk(small_disk, left):
    """With room for a part of a checkpoint: for nothing, half the array, all but the last file."""
    folder, ballast = small_disk / "checkpoints", small_disk / "ballast"

    def fill():
        size = sum(p.stat().st_blocks * 512 for p in (folder / "2").rglob("*") if p.is_file())
        room = size - 4096 if left == "all but a page" else left * size
        disk = os.statvfs(small_disk)
        ballast.write_bytes(bytes(disk.f_bavail * disk.f_bsize - int(room)))

    fill_and_free(folder, fill, ballast.unlink)


def files_limited(folder):
    """In a process of its own: files may have 100 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill_and_free(
        folder,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard)),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
    )


def save_until_killed(folder):
    with Checkpoints(folder, keep=2) as checkpoints:
        first = check_big(checkpoints) if steps(folder) else 0
        for step in range(first + 1, 10_000):
            save_big(checkpoints, step)


def started(function, folder):
    """A process that calls one of the functions here."""
    tests = Path(__file__).parent
    code = f"import {Path(__file__).stem} as t; t.{function.__name__}(t.Path({str(folder)!r}))"
    paths = [str(tests.parents[1]), str(tests), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE)


def test_files_may_not_grow(tmp_path):
    child = started(files_limited, tmp_path)
    _, stderr = child.communicate(timeout=120)
    assert child.returncode == 0, stderr.decode()


def finished(folder):
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


def unfinished(folder):
    return [name for name in os.listdir(folder) if not name.isdigit()]


def test_killed_while_writing(tmp_path):
    hits = 0
    for delay in (0, 0.002, 0.01, 0.03):
        before = max(steps(tmp_path), default=0)
        with started(save_until_killed, tmp_path) as child:
            deadline = time.monotonic() + 60
            while not (unfinished(tmp_path) and max(finished(tmp_path), default=0) > before):
                assert child.poll() is None, child.stderr.read().decode()
                assert time.monotonic() < deadline
            time.sleep(delay)
            child.kill()
        hits += bool(unfinished(tmp_path))
        newest = max(finished(tmp_path))
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            assert unfinished(tmp_path) == []
            assert check_big(checkpoints) == newest
    assert hits > 0
