"""What quantization did to a tensor, in numbers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Damage(NamedTuple):
    """How an approximation differs from the original; float32 scalars over the whole tensor.

    Attributes:
      relative_error: ``|xq - x| / |x|`` in the 2-norm.
      sqnr_db: signal to quantization noise ratio in decibels, ``-20 log10(relative_error)``.
      bias: ``<xq - x, x> / <x, x>``: 0 if the error is unrelated to the signal, negative if the
        tensor shrank.
      underflow: share of the non-zero elements that became zero.
    """

    relative_error: Array
    sqnr_db: Array
    bias: Array
    underflow: Array


@jax.jit
def damage(x: Array, approximation: Array) -> Damage:
    """Compares a tensor with its approximation, of the same shape.

    Args:
      x: the original, not all zero.
      approximation: such as ``fp4jax.fake_quantize(x, ...)``.
    """
    # Sums of squares of tiny gradients would underflow: measure in units of the largest element.
    unit = jnp.max(jnp.abs(x)).astype(jnp.float32)
    x = x.astype(jnp.float32)
    signal, noise = x / unit, (approximation.astype(jnp.float32) - x) / unit
    power = jnp.sum(jnp.square(signal))
    error = jnp.sqrt(jnp.sum(jnp.square(noise)) / power)
    nonzero = x != 0
    lost = jnp.sum(nonzero & (approximation == 0)) / jnp.sum(nonzero)
    return Damage(error, -20 * jnp.log10(error), jnp.sum(noise * signal) / power, lost)
