"""Rotary position embedding."""

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def rotate(x: Array, theta: float) -> Array:
    """Turns pairs of channels by angles that grow with the position (arXiv:2104.09864).

    Channels ``i`` and ``i + width / 2`` are the real and the imaginary part of a number that, at
    position ``p``, is multiplied by ``exp(1j * p * theta ** (-2 * i / width))``: halves of a head
    are paired, as in Llama, not neighbours. Angles and products are float32, so that an angle is
    off by up to ``p / 2 ** 23``.

    Args:
      x: queries or keys, ``(batch, length, ..., width)``; the width is even.
      theta: base of the frequencies.

    Returns:
      Array of ``x``'s shape and dtype.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    frequency = (theta ** (-np.arange(half) / half)).astype(np.float32)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None]
    angle = angle.reshape(1, length, *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    real, imaginary = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [real * cos - imaginary * sin, imaginary * cos + real * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
