"""Grouped-query attention, causal or not, with rotary positions or none."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fp4jax.models.layers import projection
from fp4jax.models.rope import rotate

Array = jax.Array


def attend(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """Softmax attention of every position to all, or to itself and the positions before it.

    Scores and softmax are float32; the two products take operands of the inputs' dtype.

    Args:
      q: queries, ``(batch, length, kv_heads, queries_per_kv_head, head_dim)``.
      k: keys, ``(batch, length, kv_heads, head_dim)``.
      v: values, of the keys' shape.
      causal: whether later positions are hidden.

    Returns:
      Array of the queries' shape and dtype.
    """
    # Axes: b batch, g kv head, r query head within the group, i and j the querying and the read
    # position, d head_dim. Heads go first: a CPU then runs the products without more copies.
    q, k, v = jnp.moveaxis(q, 1, 3), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    scores = jnp.einsum("bgrid,bgjd->bgrij", q, k, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        length = q.shape[3]
        visible = jnp.tri(length, dtype=bool).reshape(1, 1, 1, length, length)
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.moveaxis(jnp.einsum("bgrij,bgjd->bgrid", weights, v), 3, 1)


class Attention(nnx.Module):
    """Self-attention whose query heads share fewer key and value heads.

    Query head ``i`` reads key and value head ``i // (num_heads // num_kv_heads)``
    (arXiv:2305.13245). By default it is causal and there is no positional encoding: in the hybrid,
    the Mamba-2 blocks carry position. Scores and softmax are float32 whatever ``dtype`` is.

    Args:
      d_model: width of the residual stream.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads; divides ``num_heads``.
      head_dim: width of one head.
      causal: whether a position sees only itself and those before it.
      rope_theta: base of the rotary frequencies (see ``rotate``); None for no rotation.
      use_bias: whether the projections have biases.
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
        causal: bool = True,
        rope_theta: float | None = None,
        use_bias: bool = False,
        out_variance: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.q_shape = (num_kv_heads, num_heads // num_kv_heads, head_dim)
        self.kv_shape = (num_kv_heads, head_dim)
        self.causal = causal
        self.rope_theta = rope_theta
        linear = functools.partial(projection, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.q_proj = linear(d_model, num_heads * head_dim)
        self.k_proj = linear(d_model, num_kv_heads * head_dim)
        self.v_proj = linear(d_model, num_kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, d_model, variance=out_variance)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(batch, length, d_model)`` to the same shape."""
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, *self.q_shape)
        k = self.k_proj(x).reshape(batch, length, *self.kv_shape)
        v = self.v_proj(x).reshape(batch, length, *self.kv_shape)
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        y = attend(q, k, v, causal=self.causal)
        return self.o_proj(y.reshape(batch, length, math.prod(self.q_shape)))
