"""Checkpoints: what comes back is what was saved, or the one before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.checkpoint import Checkpoints

# Orbax leaves coroutines unawaited where it cannot read a file.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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


@pytest.fixture
def folder(tmp_path):
    """Of three checkpoints, the third overwritten in memory while it was being written."""
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3, 4):
            held = state(step)
            checkpoints.save(step, held)
            # As a training step does with what it takes over.
            jax.jit(lambda t: jax.tree.map(lambda x: x, t), donate_argnums=0)(held["params"])
    return tmp_path


def test_the_newest_one_comes_back_to_the_bit(folder):
    step, got = restore(folder)
    assert step == 4
    same(got, state(4))
    assert sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) == [2, 3, 4]


def test_no_checkpoint_is_none(tmp_path):
    assert restore(tmp_path) is None


def data_files(folder, step):
    files = [p for p in (folder / str(step) / "state").rglob("*") if p.is_file()]
    return sorted(files, key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "missing", "empty"])
def test_a_damaged_one_gives_way_to_the_one_before(folder, damage):
    largest = data_files(folder, 4)[-1]
    content = bytearray(largest.read_bytes())
    if damage == "cut short":
        largest.write_bytes(content[: len(content) // 2])
    elif damage == "a bit flipped":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif damage == "missing":
        largest.unlink()
    else:
        largest.write_bytes(b"")
    warnings = []
    step, got = restore(folder, warnings)
    assert step == 3
    same(got, state(3))
    assert len(warnings) == 1
    assert warnings[0].startswith("checkpoint 4 cannot be used (")


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
        checkpoints.save(4, state(40))
    step, got = restore(folder)
    assert step == 4
    same(got, state(40))


def test_another_model_is_no_checkpoint_of_this_one(folder):
    warnings = []
    with Checkpoints(folder, keep=3) as checkpoints:
        other = {"params": {"w": jnp.zeros((3, 3))}}
        assert checkpoints.restore(other, warnings.append) is None
    assert len(warnings) == 3
    assert restore(folder)[0] == 4  # and nothing is lost by asking
