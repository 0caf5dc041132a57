"""Causal grouped-query attention without positional encoding."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fp4jax.models.layers import projection

Array = jax.Array


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of every position to itself and the positions before it.

    Scores and softmax are float32; the two products take operands of the inputs' dtype.

    Args:
      q: queries, ``(batch, length, kv_heads, queries_per_kv_head, head_dim)``.
      k: keys, ``(batch, length, kv_heads, head_dim)``.
      v: values, of the keys' shape.

    Returns:
      Array of the queries' shape and dtype.
    """
    # Axes: b batch, g kv head, r query head within the group, i and j the querying and the read
    # position, d head_dim. Heads go first: a CPU then runs the products without more copies.
    q, k, v = jnp.moveaxis(q, 1, 3), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    scores = jnp.einsum("bgrid,bgjd->bgrij", q, k, preferred_element_type=jnp.float32)
    length = q.shape[3]
    causal = jnp.tri(length, dtype=bool).reshape(1, 1, 1, length, length)
    scores = jnp.where(causal, scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.moveaxis(jnp.einsum("bgrij,bgjd->bgrid", weights, v), 3, 1)


class Attention(nnx.Module):
    """Causal self-attention whose query heads share fewer key and value heads.

    Query head ``i`` reads key and value head ``i // (num_heads // num_kv_heads)``
    (arXiv:2305.13245). There is no rotary or other positional encoding: in the hybrid, the
    Mamba-2 blocks carry position. Scores and softmax are float32 whatever ``dtype`` is.

    Args:
      d_model: width of the residual stream.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads; divides ``num_heads``.
      head_dim: width of one head.
      out_variance: see ``projection``; for the layer that writes to the residual stream.
      dtype: dtype of the activations.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        out_variance: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.q_shape = (num_kv_heads, num_heads // num_kv_heads, head_dim)
        self.kv_shape = (num_kv_heads, head_dim)
        self.q_proj = projection(d_model, num_heads * head_dim, dtype=dtype, rngs=rngs)
        self.k_proj = projection(d_model, num_kv_heads * head_dim, dtype=dtype, rngs=rngs)
        self.v_proj = projection(d_model, num_kv_heads * head_dim, dtype=dtype, rngs=rngs)
        self.o_proj = projection(
            num_heads * head_dim, d_model, variance=out_variance, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(batch, length, d_model)`` to the same shape."""
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, *self.q_shape)
        k = self.k_proj(x).reshape(batch, length, *self.kv_shape)
        v = self.v_proj(x).reshape(batch, length, *self.kv_shape)
        y = causal_attention(q, k, v)
        return self.o_proj(y.reshape(batch, length, math.prod(self.q_shape)))
