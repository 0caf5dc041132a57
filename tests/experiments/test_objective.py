"""What training lowers and what is reported, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.objective import measure
from fp4jax.models import MoE, MoEConfig, TransformerConfig


class Table(nnx.Module):
    """Logits of the next token, by the last one."""

    def __init__(self, table):
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    def __call__(self, tokens):
        return self.table[...][tokens]


class Flat(nnx.Module):
    """Logits of a label: a linear function of all pixels."""

    def __init__(self, kernel):
        self.kernel = nnx.Param(jnp.asarray(kernel, jnp.float32))

    def __call__(self, images):
        return images.reshape(len(images), -1) @ self.kernel[...]


def expected(logits: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """Mean negative log likelihood in nats, and the fraction predicted."""
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -np.take_along_axis(log_p, targets[..., None], axis=-1).mean()
    return loss, (logits.argmax(-1) == targets).mean()


def check(model, batch, logits, targets):
    for run in (measure, nnx.jit(measure)):
        lowered, found = run(model, batch)
        loss, accuracy = expected(logits, targets)
        assert 0 < accuracy < 1, "a case that says something"
        np.testing.assert_allclose(found, (loss, accuracy), rtol=1e-5)
        assert float(lowered) == float(found.loss)


def test_a_text_is_measured_by_the_next_tokens():
    rng = np.random.default_rng(1)
    table = 2 * rng.normal(size=(7, 7))
    windows = rng.integers(0, 7, (5, 12), dtype=np.int32)
    check(Table(table), windows, table[windows[:, :-1]], windows[:, 1:])


def test_images_are_measured_by_their_labels():
    rng = np.random.default_rng(2)
    images = rng.normal(size=(11, 3, 3, 2)).astype(np.float32)
    kernel = rng.normal(size=(18, 4)).astype(np.float32)
    labels = rng.integers(0, 4, 11, dtype=np.int32)
    check(Flat(kernel), (images, labels), images.reshape(11, -1) @ kernel, labels)


@pytest.mark.usefixtures("compile_fast")
def test_mixtures_lower_their_balance_too_but_report_the_loss_alone():
    dense = TransformerConfig(
        vocab_size=13, d_model=8, num_blocks=2, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8
    )
    model = MoE(MoEConfig(transformer=dense, num_experts=3, top_k=2), rngs=nnx.Rngs(0))
    windows = np.random.default_rng(3).integers(0, 13, (2, 6), dtype=np.int32)
    lowered, found = nnx.jit(measure)(model, windows)
    logits, balance = nnx.jit(MoE.with_balance)(model, windows[:, :-1])
    loss, accuracy = expected(np.asarray(logits), windows[:, 1:])
    np.testing.assert_allclose(found, (loss, accuracy), rtol=1e-5)
    assert float(balance) > 1e-3
    assert float(lowered) - loss == pytest.approx(0.01 * float(balance), rel=1e-3)
