"""The training loop: schedule, weight decay, clipping, random streams, reproducibility."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments import data
from experiments import train as train_module
from experiments.train import Training, decayed, eval_steps, phases, schedule, train
from fp4jax.models import Hybrid, HybridConfig

SHORT = Training(steps=12, batch=2, sequence=16, evals=3, validation=4)


class Bigram(nnx.Module):
    """The smallest language model: logits of the next byte from the last one."""

    def __init__(self, seed: int = 0):
        self.table = nnx.Embed(256, 256, rngs=nnx.Rngs(seed))

    def __call__(self, tokens):
        return self.table(tokens)


class Noise(nnx.Module):
    """Logits that are pure noise, fresh with every call; the parameter does nothing."""

    def __init__(self, seed: int = 0):
        self.scale = nnx.Param(jnp.zeros(()))
        self.rngs = nnx.Rngs(noise=seed)

    def __call__(self, tokens):
        noise = jax.random.normal(self.rngs.noise(), (*tokens.shape, 256))
        return noise + jnp.broadcast_to(self.scale[...], noise.shape)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return data.load([str(path)], SHORT.sequence)


@pytest.fixture
def monotonous(tmp_path):
    path = tmp_path / "aaa.txt"
    path.write_bytes(b"a" * 5000)
    return data.load([str(path)], SHORT.sequence)


# Schedule


def test_schedule_warms_up_stays_and_decays():
    training = Training(steps=100, learning_rate=0.5)
    rate = schedule(training)
    assert phases(training) == (5, 80)
    for step in range(100):
        if step < 5:
            expected = 0.5 * (step + 1) / 5
        elif step < 80:
            expected = 0.5
        else:
            expected = 0.5 * (1 - 0.99 * (step - 80) / 20)
        assert float(rate(step)) == pytest.approx(expected, rel=1e-5), step
    assert float(rate(100)) == pytest.approx(0.005, rel=1e-4), "1% of the peak at the end"


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_schedule_of_very_short_runs_stays_within_bounds(steps):
    training = Training(steps=steps, evals=1, learning_rate=1.0)
    rates = [float(schedule(training)(step)) for step in range(steps)]
    assert max(rates) == pytest.approx(1.0)
    assert min(rates) > 0


def test_evaluations_begin_before_the_first_step_and_end_after_the_last():
    assert eval_steps(Training(steps=200, evals=10)) == list(range(0, 201, 20))
    assert eval_steps(Training(steps=7, evals=3)) == [0, 2, 4, 7]
    assert eval_steps(Training(steps=3, evals=3)) == [0, 1, 2, 3]
    assert eval_steps(Training(steps=2, evals=10)) == [0, 1, 2]


@pytest.mark.parametrize("field", ["steps", "batch", "sequence", "learning_rate", "evals"])
def test_senseless_values_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be above zero, not 0"):
        Training(**{field: 0})


# Optimizer


def small_hybrid() -> Hybrid:
    config = HybridConfig(
        vocab_size=256,
        d_model=32,
        pattern="M*-",
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_dim=64,
        mamba_heads=4,
        mamba_head_dim=16,
        mamba_groups=2,
        mamba_state=16,
        chunk=8,
    )
    return Hybrid(config, rngs=nnx.Rngs(0))


def test_weight_decay_reaches_kernels_and_embeddings_only():
    params = nnx.state(small_hybrid(), nnx.Param)
    reached = {
        jax.tree_util.keystr(path)
        for path, on in jax.tree_util.tree_leaves_with_path(decayed(params))
        if on
    }
    expected = {
        *(f"['blocks'][0]['mixer']['{name}']['kernel']" for name in ("in_proj", "out_proj")),
        *(f"['blocks'][1]['mixer']['{name}_proj']['kernel']" for name in "qkvo"),
        *(f"['blocks'][2]['mixer']['{name}']['kernel']" for name in ("up_proj", "down_proj")),
        "['embed']['embedding']",
        "['head']['kernel']",
    }
    assert {name.removesuffix(".value") for name in reached} == expected


@pytest.mark.usefixtures("lenient_promotion")
def test_an_update_is_clipped_adamw():
    """Two steps against the textbook in numpy, one parameter decayed and one not."""
    training = Training(steps=100, learning_rate=0.1)
    params = {"kernel": np.full((2, 2), 3.0), "scale": np.full((2,), 3.0)}
    gradient = {"kernel": np.full((2, 2), 4.0), "scale": np.full((2,), -2.0)}
    norm = np.sqrt(4 * 16 + 2 * 4)

    tx = train_module.optimizer(training)
    as_jax = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, gradient))
    new, grads = as_jax
    state = tx.init(new)
    for _ in range(2):
        updates, state = tx.update(grads, state, new)
        new = optax.apply_updates(new, updates)

    for name, decay in (("kernel", 0.1), ("scale", 0.0)):
        p, g = params[name], gradient[name] / norm
        m = v = 0.0
        for t in (1, 2):
            rate = 0.1 * t / 5  # the warm-up's first steps
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            direction = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
            p = p - rate * (direction + decay * p)
        np.testing.assert_allclose(new[name], p, rtol=1e-5)


# Runs


@pytest.mark.usefixtures("lenient_promotion")
def test_a_run_learns_and_reports(corpus):
    training = Training(steps=30, batch=4, sequence=16, evals=2, validation=4, learning_rate=0.1)
    progress = list(train(Bigram(), corpus, training, seed=0))
    assert [p.step for p in progress] == [0, 10, 15, 20, 30]
    assert [p.step for p in progress if p.validation_loss is not None] == [0, 15, 30]
    first, last = progress[0].validation_loss, progress[-1].validation_loss
    assert first == pytest.approx(np.log(256), rel=0.02), "chance level"
    assert last < first / 2
    assert progress[0].tokens_per_second is None
    assert all(p.tokens_per_second > 0 for p in progress[1:])


def test_the_loss_is_the_mean_negative_log_likelihood_in_nats(corpus):
    model = Bigram()
    windows = corpus.batch(0, 0, 3)
    table = np.asarray(model.table.embedding[...], np.float64)
    logits = table[windows[:, :-1]]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, windows[:, 1:, None], axis=-1).mean()
    assert float(train_module.next_byte_loss(model, windows)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("lenient_promotion")
def test_runs_repeat_bit_for_bit_and_depend_on_the_seed(corpus):
    def losses(seed):
        progress = train(Bigram(), corpus, SHORT, seed)
        return [(p.step, p.train_loss, p.validation_loss) for p in progress]

    assert losses(0) == losses(0)
    assert losses(0)[0] == losses(1)[0], "the same weights, before any batch"
    assert losses(0)[1:] != losses(1)[1:]


@pytest.mark.usefixtures("lenient_promotion")
def test_every_step_draws_fresh_random_bits_and_evaluation_takes_none(monotonous):
    def train_losses(evals):
        training = Training(steps=6, batch=2, sequence=16, evals=evals, validation=4)
        return {p.step: p.train_loss for p in train(Noise(), monotonous, training, 0) if p.step}

    every_step = train_losses(evals=6)
    assert len(set(every_step.values())) == 6, "text and weights are the same, only noise differs"
    assert train_losses(evals=2) == {step: every_step[step] for step in (3, 6)}
