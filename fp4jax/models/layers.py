"""The layers that mixers share: a projection, RMSNorm and LayerNorm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Array = jax.Array


def projection(
    features_in: int,
    features_out: int,
    *,
    variance: float = 1.0,
    use_bias: bool = False,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A linear layer with a float32 kernel of shape ``(features_in, features_out)``.

    Args:
      features_in: width of the input.
      features_out: width of the output.
      variance: variance of the output for an input of variance one. Layers that write to the
        residual stream pass one over the number of writers, so that the stream's variance at
        initialization does not grow with depth.
      use_bias: whether there is a bias, zero at first.
      dtype: dtype in which the product is computed and returned.
      rngs: source of the initial kernel (stream ``params``).
    """
    init = nnx.initializers.variance_scaling(variance, "fan_in", "truncated_normal")
    return nnx.Linear(
        features_in, features_out, use_bias=use_bias, kernel_init=init, dtype=dtype, rngs=rngs
    )


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last axis (arXiv:1910.07467), times a scale.

    With ``groups`` above one, each of that many equal, contiguous parts of the axis has its own
    root mean square. Computed in float32, returned in ``dtype``.

    Args:
      width: length of the last axis; a multiple of ``groups``.
      groups: number of parts that are normalized apart.
      epsilon: added to the mean square.
      dtype: dtype of the result.
    """

    def __init__(
        self,
        width: int,
        *,
        groups: int = 1,
        epsilon: float = 1e-5,
        dtype: DTypeLike = jnp.float32,
    ):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.groups = groups
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: Array) -> Array:
        """Normalizes ``x`` of shape ``(..., width)``."""
        by_group = (*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
        parts = x.astype(jnp.float32).reshape(by_group)
        mean_square = jnp.mean(jnp.square(parts), axis=-1, keepdims=True)
        normed = parts * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (normed.reshape(x.shape) * scale).astype(self.dtype)


class LayerNorm(nnx.Module):
    """Brings the last axis to mean zero and variance one (arXiv:1607.06450), then scale and bias.

    Computed in float32, returned in ``dtype``.

    Args:
      width: length of the last axis.
      epsilon: added to the variance.
      dtype: dtype of the result.
    """

    def __init__(self, width: int, *, epsilon: float = 1e-6, dtype: DTypeLike = jnp.float32):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(self, x: Array) -> Array:
        """Normalizes ``x`` of shape ``(..., width)``."""
        x = x.astype(jnp.float32)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        shape = (1,) * (x.ndim - 1) + (-1,)
        scale, bias = self.scale[...].reshape(shape), self.bias[...].reshape(shape)
        return (centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(self.dtype)
