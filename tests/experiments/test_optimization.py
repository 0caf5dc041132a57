"""Learning rate by step, AdamW, and what weight decay reaches."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.optimization import Training, decayed, optimizer, phases, schedule
from fp4jax.models import Hybrid, HybridConfig, MoE, MoEConfig, TransformerConfig, ViT, ViTConfig


def rates(training: Training) -> np.ndarray:
    """Of every step, and the one after the last."""
    return np.array([float(schedule(training)(i)) for i in range(training.steps + 1)])


# Schedule


def test_wsd_warms_up_stays_and_decays():
    training = Training(steps=100, learning_rate=0.5)
    assert phases(training) == (5, 80)
    expected = [0.5 * (i + 1) / 5 for i in range(5)]
    expected += [0.5] * 75
    expected += [0.5 * (1 - 0.99 * i / 20) for i in range(21)]
    np.testing.assert_allclose(rates(training), expected, rtol=1e-5)


@pytest.mark.parametrize(("warmup", "final_rate"), [(0.1, 0.01), (0.0, 0.0), (0.35, 0.5)])
def test_cosine_warms_up_and_falls_by_half_a_cosine(warmup, final_rate):
    training = Training(
        steps=61, learning_rate=0.3, schedule="cosine", warmup=warmup, final_rate=final_rate
    )
    rising = max(1, round(warmup * 61))
    assert phases(training) == (rising, rising)
    expected = [0.3 * (i + 1) / rising for i in range(rising)]
    for i in range(61 - rising + 1):
        cosine = (1 + math.cos(math.pi * i / (61 - rising))) / 2
        expected.append(0.3 * (final_rate + (1 - final_rate) * cosine))
    np.testing.assert_allclose(rates(training), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("lenient_promotion")
def test_the_schedule_is_the_same_under_jit():
    for name in ("wsd", "cosine"):
        training = Training(steps=13, warmup=0.3, schedule=name)
        compiled = jax.jit(schedule(training))
        found = [float(compiled(jnp.int32(i))) for i in range(14)]
        np.testing.assert_allclose(found, rates(training), rtol=1e-5)


@pytest.mark.parametrize("name", ["wsd", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("warmup", "decay"),
    [(0.05, 0.2), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (0.29, 0.71), (0.1, 0.9)],
)
def test_short_runs_rise_to_the_peak_and_fall_from_it(name, steps, warmup, decay):
    training = Training(
        steps=steps, learning_rate=1.0, schedule=name, warmup=warmup, decay=decay, final_rate=0.0
    )
    found = rates(training)
    rising = max(1, round(warmup * steps))
    np.testing.assert_allclose(found[:rising], np.arange(1, rising + 1) / rising, rtol=1e-6)
    assert (np.diff(found[rising - 1 :]) <= 1e-7).all(), "never again upwards"
    assert (found[:-1] > 0).all(), "every step learns"
    assert found[-1] == pytest.approx(0, abs=1e-7)


def test_without_decay_every_step_after_the_warm_up_has_the_peak():
    training = Training(steps=9, learning_rate=0.25, warmup=0, decay=0)
    np.testing.assert_array_equal(rates(training)[:9], 0.25)


def test_decay_all_along_is_a_straight_line():
    training = Training(steps=8, learning_rate=1.0, warmup=0, decay=1, final_rate=0.5)
    np.testing.assert_allclose(rates(training), 1 - np.arange(9) / 16, rtol=1e-6)


# Values


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps must be above zero, not 0"),
        ({"batch": -8}, "batch must be above zero, not -8"),
        ({"sequence": 0}, "sequence must be above zero, not 0"),
        ({"accumulate": 0}, "accumulate must be above zero, not 0"),
        ({"evals": 0}, "evals must be above zero, not 0"),
        ({"validation": 0}, "validation must be above zero, not 0"),
        ({"learning_rate": math.nan}, "learning_rate must be above zero, not nan"),
        ({"learning_rate": math.inf}, "learning_rate must be finite, not inf"),
        ({"clip_norm": 0.0}, "clip_norm must be above zero, not 0.0"),
        ({"warmup": 1.01}, "warmup must be from 0 to 1, not 1.01"),
        ({"decay": -0.1}, "decay must be from 0 to 1, not -0.1"),
        ({"final_rate": math.nan}, "final_rate must be from 0 to 1, not nan"),
        ({"beta1": 1.0}, "beta1 must be from 0 to below 1, not 1.0"),
        ({"beta2": -0.5}, "beta2 must be from 0 to below 1, not -0.5"),
        ({"ema": 1.0}, "ema must be from 0 to below 1, not 1.0"),
        ({"weight_decay": math.inf}, "weight_decay must be from 0 up, not inf"),
        ({"schedule": "linear"}, "schedule must be wsd or cosine, not linear"),
        ({"batch": 9, "accumulate": 2}, "accumulate must divide the batch of 9: 2"),
        ({"decay": 1.0}, "warmup and decay must be at most 1 together"),
        ({"warmup": 0.9}, "warmup and decay must be at most 1 together"),
    ],
)
def test_senseless_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Training(**fields)


def test_cosine_has_no_decay_that_could_be_too_long():
    assert phases(Training(steps=10, schedule="cosine", warmup=0.9, decay=0.5)) == (9, 9)


# Optimizer


@pytest.mark.usefixtures("lenient_promotion")
def test_an_update_is_clipped_adamw():
    """Three steps against the textbook in float64: one parameter decayed and one not."""
    training = Training(
        steps=100, learning_rate=0.1, beta1=0.8, beta2=0.9, weight_decay=0.3, clip_norm=2.0
    )
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 5)), "scale": rng.normal(size=(7,))}
    # Norms above and below the limit: clipping only shows where their ratio changes.
    gradients = [
        {name: size * rng.normal(size=p.shape) for name, p in params.items()}
        for size in (5.0, 0.1, 1.0)
    ]
    tx = optimizer(training)
    new = jax.tree.map(jnp.float32, params)
    state = tx.init(new)
    for gradient in gradients:
        updates, state = tx.update(jax.tree.map(jnp.float32, gradient), state, new)
        new = optax.apply_updates(new, updates)

    norms = [math.sqrt(sum((g**2).sum() for g in gradient.values())) for gradient in gradients]
    assert norms[0] > 2 > norms[1]
    for name, decay in (("kernel", 0.3), ("scale", 0.0)):
        p, m, v = params[name], 0.0, 0.0
        for t, (gradient, norm) in enumerate(zip(gradients, norms, strict=True), start=1):
            g = gradient[name] * min(1, 2 / norm)
            rate = 0.1 * t / 5  # the warm-up's first steps
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            direction = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
            p = p - rate * (direction + decay * p)
        np.testing.assert_allclose(new[name], p, rtol=2e-5, atol=1e-6)


TRANSFORMER = TransformerConfig(
    vocab_size=64, d_model=16, num_blocks=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32
)
HYBRID = dataclasses.replace(HybridConfig.tiny(), pattern="M*-")
VIT = dataclasses.replace(ViTConfig.tiny(), num_blocks=1, pool="token")

ATTENTION = {f"attention.{name}_proj.kernel" for name in "qkvo"}
EXPERTS = {f"mlp.{name}_proj.kernel" for name in ("gate", "up", "down")}
REACHED = {
    "hybrid": {
        *(f"blocks.0.mixer.{name}.kernel" for name in ("in_proj", "out_proj")),
        *(f"blocks.1.mixer.{name}_proj.kernel" for name in "qkvo"),
        *(f"blocks.2.mixer.{name}.kernel" for name in ("up_proj", "down_proj")),
        *("embed.embedding", "head.kernel"),
    },
    "moe": {
        *(f"blocks.{i}.{name}" for i in (0, 1) for name in ATTENTION | EXPERTS),
        *("blocks.1.mlp.router.kernel", "embed.embedding", "head.kernel"),
    },
    "vit": {
        *(f"blocks.0.{name}" for name in ATTENTION),
        *(f"blocks.0.mlp.{name}_proj.kernel" for name in ("up", "down")),
        *("patch_embed.kernel", "head.kernel"),
    },
}
MAKE = {
    "hybrid": lambda rngs: Hybrid(HYBRID, rngs=rngs),
    "moe": lambda rngs: MoE(
        MoEConfig(transformer=TRANSFORMER, num_experts=3, sparse_every=2), rngs=rngs
    ),
    "vit": lambda rngs: ViT(VIT, rngs=rngs),
}


@pytest.mark.parametrize("name", REACHED)
def test_weight_decay_reaches_kernels_and_embeddings_only(name):
    params = nnx.state(nnx.eval_shape(lambda: MAKE[name](nnx.Rngs(0))), nnx.Param)
    found = {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for path, on in jax.tree_util.tree_leaves_with_path(decayed(params))
        if on
    }
    assert found == REACHED[name]
    assert len(found) < len(jax.tree.leaves(params)), "norms and the like are not reached"
