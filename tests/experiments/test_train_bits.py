"""Runs to the last bit: repeated, stopped elsewhere, gone on with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import SHORT, Bigram, bits, fresh, rising, table_of
from flax import nnx

from experiments import step as step_module
from experiments.optimization import Training
from experiments.pipeline import batches
from experiments.step import first_state, take_step
from experiments.train import Run

pytestmark = pytest.mark.usefixtures("lenient_promotion")


@pytest.fixture
def text(tmp_path):
    return rising(tmp_path)


def results(run: Run, **how):
    """All that a run reports step by step, its evaluations, and the bits of its last state."""
    found = list(run.go(**how))
    losses = [loss for p in found for loss in p.losses]
    norms = [norm for p in found for norm in p.gradient_norms]
    evaluations = [p.evaluation for p in found if p.evaluation]
    return losses, norms, evaluations, bits(run.state)


def test_runs_repeat_bit_for_bit_wherever_they_stop_and_depend_on_the_seed(text):
    first = results(fresh(text, noise=0.5))
    assert first == results(fresh(text, noise=0.5), every=1)
    other = results(fresh(text, noise=0.5, seed=1))
    assert first[2][0] == other[2][0], "the same weights, before any batch"
    assert all(a != b for a, b in zip(first[0], other[0], strict=True))


def test_one_part_is_no_accumulation(text, monkeypatch):
    training = Training(batch=3, accumulate=1, sequence=16)
    monkeypatch.setattr(step_module, "optimizer", lambda training: optax.sgd(1.0))
    batch = next(batches(text.training, seed=0, size=3))

    @jax.jit
    def by_hand(model):
        def loss(model):
            logits = model(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        params = nnx.state(model, nnx.Param)
        return value, jax.tree.map(lambda p, g: p - g, params, nnx.state(grads))

    state = first_state(Bigram(), training)
    step = jax.jit(lambda *args: take_step(nnx.graphdef(Bigram()), training, *args))
    state, loss, _ = step(state, batch)
    expected, params = by_hand(Bigram())
    assert loss == expected
    np.testing.assert_array_equal(table_of(state.params), table_of(params))


def test_a_run_that_goes_on_gives_the_same_bits(text):
    """From within a phase, from where the second begins, and from within that one."""
    training = Training(**vars(SHORT) | {"ema": 0.9, "accumulate": 2})
    how = {"starts": (0, 5), "scales": (1.0, 3.0), "noise": 0.5}
    whole, kept, found = fresh(text, training, **how), [], []
    for progress in whole.go(every=1):
        found.append(progress[:4])
        if progress.step in (3, 5, 8):
            kept.append(
                (whole.done, jax.tree.map(jnp.copy, whole.state), whole.batches.get_state())
            )
    rest = fresh(text, training, **how)
    for done, state, position in kept:
        rest.done, rest.state = done, state
        rest.batches.set_state(position)
        assert [p[:4] for p in rest.go(every=1)] == found[done + 1 :]
        assert bits(rest.state) == bits(whole.state)
