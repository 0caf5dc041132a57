"""The training loop: losses, gradients, accumulation, averages, evaluation, phases."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import SHORT, VOCABULARY, Bigram, Counting, corpus, fresh, rising, table_of, worth
from flax import nnx

from experiments import step as step_module
from experiments import train
from experiments.optimization import Training
from experiments.pipeline import batches
from experiments.step import all_finite, first_state, take_step
from experiments.train import Run, eval_steps

pytestmark = pytest.mark.usefixtures("lenient_promotion", "compile_fast")


@pytest.fixture
def text(tmp_path):
    return rising(tmp_path)


@pytest.fixture
def monotonous(tmp_path):
    return corpus(tmp_path, np.ones(3000))


# What a run gives


def test_a_run_learns_and_says_where_it_stands(text):
    training = Training(
        steps=25, batch=4, sequence=16, evals=2, validation=4, learning_rate=0.1, warmup=0.1
    )
    found = list(fresh(text, training).go())
    assert [p.step for p in found] == [0, 10, 12, 20, 25]
    assert [len(p.losses) for p in found] == [0, 10, 2, 8, 5]
    assert [len(p.gradient_norms) for p in found] == [0, 10, 2, 8, 5]
    assert [p.step for p in found if p.evaluation] == [0, 12, 25]
    first, last = found[0].evaluation, found[-1].evaluation
    assert first.loss == pytest.approx(math.log(VOCABULARY), rel=0.02), "chance level"
    assert last.loss < first.loss / 2
    assert first.accuracy < 0.2 < 0.35 < last.accuracy
    assert found[0].seconds == 0 and all(p.seconds > 0 for p in found[1:])


def test_stops_are_at_multiples_of_every_too(text):
    training = Training(steps=13, batch=2, sequence=16, evals=2, validation=4)
    assert [p.step for p in fresh(text, training).go(every=4)] == [0, 4, 6, 8, 10, 12, 13]


def test_evaluations_begin_before_the_first_step_and_end_after_the_last():
    assert eval_steps(Training(steps=200, evals=10)) == list(range(0, 201, 20))
    assert eval_steps(Training(steps=7, evals=3)) == [0, 2, 4, 7]
    assert eval_steps(Training(steps=3, evals=3)) == [0, 1, 2, 3]
    assert eval_steps(Training(steps=2, evals=10)) == [0, 1, 2]


def test_losses_norms_and_evaluations_are_those_of_the_equations(text):
    """Of every step: with its batch, on the parameters before it, and before clipping."""
    run = fresh(text, Training(**vars(SHORT) | {"clip_norm": 0.01}))
    source = batches(text.training, seed=0, size=SHORT.batch)
    held_out, before = text.validation(SHORT.validation), None
    for progress in run.go(every=1):
        table = table_of(run.state.params)
        if before is not None:
            loss, _, gradient = worth(before, next(source))
            assert progress.losses == [pytest.approx(loss, rel=1e-5)]
            norm = np.sqrt((gradient**2).sum())
            assert norm > 0.05 and progress.gradient_norms == [pytest.approx(norm, rel=1e-4)]
        if progress.evaluation is not None:
            assert progress.evaluation == pytest.approx(worth(table, held_out)[:2], rel=1e-5)
        before = table


def test_an_evaluation_is_the_mean_over_all_windows(text):
    """Of seven in threes the last batch has one, which weighs as much as the others."""
    training = Training(steps=1, batch=3, sequence=16, evals=1, validation=7)
    run = fresh(text, training)
    held_out = text.validation(7)
    assert len(held_out) == 7
    expected = worth(table_of(run.state.params), held_out)[:2]
    assert run.evaluate() == pytest.approx(expected, rel=1e-5)


def test_fewer_held_out_windows_than_a_batch_are_one_batch(text):
    training = Training(steps=1, batch=8, sequence=16, evals=1, validation=5)
    run = fresh(text, training)
    expected = worth(table_of(run.state.params), text.validation(5))[:2]
    assert run.evaluate() == pytest.approx(expected, rel=1e-5)


# Randomness


def test_random_streams_move_on_with_every_step_and_none_with_an_evaluation(monotonous):
    training = Training(steps=6, batch=2, sequence=16, evals=3, validation=6)
    run = Run(lambda step: Counting(), (0,), monotonous, training, seed=0)
    found = list(run.go())
    losses = [loss for p in found for loss in p.losses]
    assert losses == pytest.approx([Counting.loss(i) for i in range(6)], rel=1e-4)
    evaluations = [p.evaluation.loss for p in found if p.evaluation]
    # All three batches of an evaluation take the streams as the last step has left them.
    assert evaluations == pytest.approx([Counting.loss(i) for i in (0, 2, 4, 6)], rel=1e-4)


def test_every_step_draws_other_noise(monotonous):
    still = Training(steps=6, batch=2, sequence=16, evals=1, validation=4, learning_rate=1e-30)
    run = fresh(monotonous, still, noise=1.0)
    losses = [loss for p in run.go() for loss in p.losses]
    assert len(set(losses)) == 6, "text and weights are the same, only the noise differs"


def test_random_streams_move_on_within_accumulated_parts(monotonous):
    training = Training(steps=2, batch=6, accumulate=3, sequence=16, evals=1, validation=4)
    run = Run(lambda step: Counting(), (0,), monotonous, training, seed=0)
    losses = [loss for p in run.go() for loss in p.losses]
    expected = [np.mean([Counting.loss(i) for i in parts]) for parts in ((0, 1, 2), (3, 4, 5))]
    assert losses == pytest.approx(expected, rel=1e-5)


# Steps


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_are_those_of_the_whole_batch(text, monkeypatch, accumulate):
    """Up to float32's rounding of sums: 1e-6 of a gradient whose elements are up to 1."""
    training = Training(batch=6, accumulate=accumulate, sequence=16)
    before = table_of(nnx.state(Bigram(), nnx.Param))
    batch = next(batches(text.training, seed=0, size=6))
    monkeypatch.setattr(step_module, "optimizer", lambda training: optax.sgd(1.0))
    state = first_state(Bigram(), training)
    step = jax.jit(lambda *args: take_step(nnx.graphdef(Bigram()), training, *args))
    state, loss, norm = step(state, batch)
    expected, _, gradient = worth(before, batch)
    np.testing.assert_allclose(before - table_of(state.params), gradient, atol=1e-6)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(norm) == pytest.approx(np.sqrt((gradient**2).sum()), rel=1e-5)


def test_the_average_is_an_exponential_one_and_is_what_is_evaluated(text):
    training = Training(**vars(SHORT) | {"ema": 0.7})
    run = fresh(text, training)
    average, evaluated = table_of(run.state.params), 0
    for progress in run.go(every=1):
        if progress.step:
            average = 0.7 * average + 0.3 * table_of(run.state.params)
        np.testing.assert_allclose(table_of(run.state.average), average, rtol=1e-5, atol=1e-6)
        if progress.evaluation is not None:
            expected = worth(average, text.validation(SHORT.validation))[:2]
            assert progress.evaluation == pytest.approx(expected, rel=1e-5)
            evaluated += 1
    assert evaluated == 4
    np.testing.assert_array_equal(
        run.model.table.embedding[...], jax.tree.leaves(run.state.average)[0]
    )
    assert not np.allclose(average, table_of(run.state.params), atol=1e-3)


def test_without_an_average_there_is_none(text):
    run = fresh(text)
    assert run.state.average is None
    assert run.state.measured is run.state.params


# Ends and phases


@pytest.mark.parametrize(("at", "steps"), [(0, [0, 1]), (3, [0, 3]), (9, [0, 4, 8, 9])])
def test_a_run_that_is_asked_to_ends_after_that_step(text, at, steps):
    run = fresh(text)
    assert [p.step for p in run.go(asked=lambda: run.done >= at)] == steps
    assert run.done == steps[-1]


def test_who_asks_between_two_steps_gets_one_more_and_its_progress(text):
    """So that nobody ends a run whose last progress was taken for one among many."""
    run, asked, steps = fresh(text), [], []
    for progress in run.go(asked=lambda: bool(asked)):
        steps.append(progress.step)
        if progress.step == 4:
            asked.append(True)
    assert steps == [0, 4, 5]


def test_phases_begin_at_their_steps_and_are_evaluated_as_they_were_trained(text):
    """Another model from step 5 on; evaluations after 4 and 8, and one on request after 5."""
    run = fresh(text, starts=(0, 5), scales=(1.0, 3.0))
    source = batches(text.training, seed=0, size=SHORT.batch)
    held_out = text.validation(SHORT.validation)
    before, losses, seen = table_of(run.state.params), [], []
    for progress in run.go(every=1):
        table = table_of(run.state.params)
        if progress.step:
            scale = 1.0 if progress.step <= 5 else 3.0
            losses.append(worth(before, next(source), scale)[0])
            assert progress.losses == [pytest.approx(losses[-1], rel=1e-5)]
            expected = worth(table, held_out, scale)[:2]
            assert run.evaluate() == pytest.approx(expected, rel=1e-5)
            assert run.model.scale == scale
            if progress.evaluation is not None:
                assert progress.evaluation == pytest.approx(expected, rel=1e-5)
                seen.append(progress.step)
        before = table
    assert seen == [4, 8, 12]


def test_phases_after_the_end_do_not_prolong_a_run(text):
    run = fresh(text, starts=(0, 12, 50), scales=(1.0, 2.0, 3.0))
    assert [p.step for p in run.go()] == [0, 4, 8, 10, 12]


def test_compilation_and_evaluation_are_off_the_clock(text, monkeypatch):
    """Each tracing takes 100 seconds, an evaluation 1000, and a batch one."""
    now = [0.0]

    def passes(seconds):
        now[0] += seconds

    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    evaluate = Run.evaluate
    monkeypatch.setattr(Run, "evaluate", lambda run: (passes(1000.0), evaluate(run))[1])
    run = fresh(text, starts=(0, 5), scales=(1.0, 3.0), traced=lambda: passes(100.0))
    source = run.batches

    class Slow:
        def __next__(self):
            passes(1.0)
            return next(source)

    run.batches = Slow()
    found = [(p.step, p.seconds) for p in run.go()]
    # A stop at 5 too, between the two phases.
    assert found == [(0, 0), (4, 4), (5, 1), (8, 3), (10, 2), (12, 2)]
    assert now[0] >= 4000 + 4 * 100 + 12, "both programs of both phases were traced"


# Going on


def test_the_model_is_a_copy(text):
    run = fresh(text)
    model = run.model
    model.table.embedding[...] = jnp.zeros((VOCABULARY, VOCABULARY))
    assert np.abs(table_of(run.state.params)).max() > 0


def test_numbers_that_are_not_finite_are_found():
    tree = {"a": jnp.ones((3, 5)), "b": [jnp.zeros(7, jnp.bfloat16), jnp.arange(3)]}
    assert all_finite(tree)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not all_finite(tree | {"a": tree["a"].at[2, 4].set(bad)})
        assert not all_finite(tree | {"b": [tree["b"][0].at[6].set(bad), tree["b"][1]]})
