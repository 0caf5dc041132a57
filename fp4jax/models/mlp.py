"""The MLP mixer with a squared ReLU."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fp4jax.models.layers import projection

Array = jax.Array


class MLP(nnx.Module):
    """Two projections with a squared ReLU (arXiv:2109.08668) between them.

    Args:
      d_model: width of the residual stream.
      hidden: width between the two projections.
      out_variance: see ``projection``; for the layer that writes to the residual stream.
      dtype: dtype of the activations.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        out_variance: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.up_proj = projection(d_model, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = projection(hidden, d_model, variance=out_variance, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(..., d_model)`` to the same shape."""
        return self.down_proj(jnp.square(jax.nn.relu(self.up_proj(x))))
