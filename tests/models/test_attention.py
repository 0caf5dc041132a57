"""Grouped-query attention against numpy, head by head."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax.models.attention import Attention


def reference(x, layer, num_heads, num_kv_heads, head_dim):
    """The layer in double precision, one query head and one position at a time."""
    q, k, v, o = (
        np.asarray(getattr(layer, f"{name}_proj").kernel[...], np.float64) for name in "qkvo"
    )
    heads = []
    for i in range(num_heads):
        mine = slice(i * head_dim, (i + 1) * head_dim)
        group = i // (num_heads // num_kv_heads)
        shared = slice(group * head_dim, (group + 1) * head_dim)
        queries, keys, values = x @ q[:, mine], x @ k[:, shared], x @ v[:, shared]
        out = np.zeros_like(queries)
        for t in range(x.shape[1]):
            scores = np.einsum("bd,bjd->bj", queries[:, t], keys[:, : t + 1]) / head_dim**0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[:, t] = np.einsum("bj,bjd->bd", weights, values[:, : t + 1])
        heads.append(out)
    return np.concatenate(heads, axis=-1) @ o


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_attention(num_heads, num_kv_heads, dtype, tolerance):
    layer = Attention(
        24,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    x = np.random.default_rng(0).standard_normal((2, 11, 24)).astype(np.float32)
    got = layer(jnp.asarray(x, dtype))
    assert got.dtype == dtype
    want = reference(x.astype(np.float64), layer, num_heads, num_kv_heads, 8)
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < tolerance


def test_scores_and_softmax_are_float32():
    """Scores of about 300 that differ by little: bfloat16 would round the differences away."""
    layer = Attention(
        16, num_heads=1, num_kv_heads=1, head_dim=16, dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    for name in "qkvo":
        getattr(layer, f"{name}_proj").kernel[...] = jnp.eye(16)
    x = np.zeros((1, 4, 16), np.float32)
    x[..., 0] = 32.0
    x[:, :, 1] = [0.125, 0.25, 0.5, 1.0]  # exact in bfloat16, as are all products
    got = layer(jnp.asarray(x, "bfloat16"))
    want = reference(x.astype(np.float64), layer, 1, 1, 16)
    np.testing.assert_allclose(np.asarray(got[..., 1], np.float64), want[..., 1], rtol=1e-2)
