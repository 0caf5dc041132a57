"""Division of float32 that rounds to nearest on every platform.

XLA divides approximately on NVIDIA GPUs (``div.full.f32``, ``rcp.approx.f32``: up to two units in
the last place off), and a scale that is off by one unit changes codes.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fp4jax.rounding import bits_float, float_bits

_FRACTION = 23  # bits of a float32's fraction


def divide(a: ArrayLike, b: ArrayLike) -> Array:
    """``a / b``, correctly rounded, for float32 numbers that are not negative.

    Subnormal numbers count as zero and are not returned, as on XLA's CPUs; ``0 / 0`` is NaN.
    """
    a, b = jnp.broadcast_arrays(a, b)
    return lax.platform_dependent(a, b, cuda=corrected, default=lax.div)


def corrected(a: Array, b: Array, approximate: Callable[..., Array] = lax.div) -> Array:
    """`divide` by a division that is up to two units off, put right by its exact remainder."""
    a_fraction, a_exponent = _parts(a)
    b_fraction, b_exponent = _parts(b)
    # quotient = fraction / 2**23 * 2**exponent, with a fraction of 24 bits
    below_one = (a_fraction < b_fraction).astype(jnp.int32)
    exponent = a_exponent - b_exponent - below_one
    near = approximate(a_fraction.astype(jnp.float32), b_fraction.astype(jnp.float32))
    scale = jnp.where(below_one == 1, jnp.float32(2.0**24), jnp.float32(2.0**23))
    fraction = (near * scale).astype(jnp.int32)
    # Modulo 2**32, of which the remainder is far less.
    shifted = a_fraction << (_FRACTION + below_one).astype(jnp.uint32)
    product = fraction.astype(jnp.uint32) * b_fraction
    remainder = 2 * lax.bitcast_convert_type(shifted - product, jnp.int32)
    # How many halves of the divisor are passed; a quotient never lies halfway between two floats.
    halves = [n * b_fraction.astype(jnp.int32) for n in (1, 3, 5, 7)]
    more = sum((remainder > half).astype(jnp.int32) for half in halves)
    less = sum((remainder < -half).astype(jnp.int32) for half in halves)
    value = (fraction + more - less).astype(jnp.float32) * jnp.float32(2.0**-23)
    # In two steps: a power of two beyond the largest number may still give a number.
    first = exponent // 2
    value = value * _power_of_two(first) * _power_of_two(exponent - first)
    smallest = jnp.float32(np.finfo(np.float32).tiny)
    value = jnp.where(value < smallest, 0, value)
    # Zeros, infinities and NaNs take no rounding; a factor of zero makes subnormal numbers zeros.
    special = (
        (a_exponent == -127) | (b_exponent == -127) | (a_exponent == 128) | (b_exponent == 128)
    )
    return jnp.where(special, _flushed(a) / _flushed(b), value)


def _parts(x: Array) -> tuple[Array, Array]:
    """The 24 bits (uint32) and the exponent (int32) of a normal number."""
    bits = float_bits(x)
    fraction = (bits & jnp.uint32((1 << _FRACTION) - 1)) | jnp.uint32(1 << _FRACTION)
    return fraction, (bits >> jnp.uint32(_FRACTION)).astype(jnp.int32) - 127


def _power_of_two(exponent: Array) -> Array:
    return bits_float(((exponent + 127) << _FRACTION).astype(jnp.uint32))


def _flushed(x: Array) -> Array:
    return jnp.where(x < jnp.float32(np.finfo(np.float32).tiny), 0, x)
