"""MLP mixers: two projections with a nonlinearity between them, and the gated one of Llama."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fp4jax.models.layers import projection

Array = jax.Array


def squared_relu(x: Array) -> Array:
    """The square of the positive part (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


class MLP(nnx.Module):
    """Two projections with a nonlinearity between them.

    Args:
      d_model: width of the residual stream.
      hidden: width between the two projections.
      activation: the nonlinearity.
      use_bias: whether the projections have biases.
      out_variance: see ``projection``; for the layer that writes to the residual stream.
      dtype: dtype of the activations.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        activation: Callable[[Array], Array] = squared_relu,
        use_bias: bool = False,
        out_variance: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.up_proj = projection(d_model, hidden, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.down_proj = projection(
            hidden, d_model, variance=out_variance, use_bias=use_bias, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(..., d_model)`` to the same shape."""
        return self.down_proj(self.activation(self.up_proj(x)))


class SwiGLU(nnx.Module):
    """The gated MLP of Llama: ``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202).

    Args:
      d_model: width of the residual stream.
      hidden: width of the gate and of what it gates.
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
        self.gate_proj = projection(d_model, hidden, dtype=dtype, rngs=rngs)
        self.up_proj = projection(d_model, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = projection(hidden, d_model, variance=out_variance, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(..., d_model)`` to the same shape."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
