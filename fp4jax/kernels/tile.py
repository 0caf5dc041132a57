"""The arithmetic of NVFP4 blocks in registers, the same in every quantize kernel.

A tile is held as sixteen float32 arrays of one shape, the `Planes`: the j-th elements of all its
blocks. Transform, maxima, rounding and packing are then elementwise, whatever the layout of an
array over threads is, and no element leaves its thread. Only operations that Triton, Mosaic GPU
and XLA all have are used; what the XLA body (`fp4jax.quantize`) computes otherwise, such as
divisions, is computed here with the same result to the bit. Only exact products meet a sum: Mosaic
rounds the two together.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax.division import divide
from fp4jax.formats import E2M1, E4M3, ElementType
from fp4jax.rounding import Steps, bits_float, float_bits, steps_value, to_steps

Planes = Sequence[Array]

BLOCK = 16
_INFINITY = 0x7F800000  # as bits; NaNs have larger ones
_SMALLEST_NORMAL = 0x00800000
_SIGN = 0x80000000


class Encoded(NamedTuple):
    """Blocks that are rounded and packed; all arrays have the shape of one plane.

    Attributes:
      low: uint32, the codes of elements 0 to 7, the first in the lowest bits.
      high: uint32, those of elements 8 to 15.
      scale: uint32, the E4M3 bits of the block scale, or None where the scales were given.
    """

    low: Array
    high: Array
    scale: Array | None


def rotate(planes: Planes, signs: tuple[int, ...], to_bfloat16: bool) -> list[Array]:
    """`fp4jax.Hadamard` of size 16 with these signs: the same additions in the same order."""
    planes = [plane if sign > 0 else -plane for plane, sign in zip(planes, signs, strict=True)]
    stride = 1
    while stride < BLOCK:
        turned = list(planes)
        for i in range(BLOCK):
            if not i & stride:
                a, b = planes[i], planes[i + stride]
                turned[i], turned[i + stride] = a + b, a - b
        planes, stride = turned, 2 * stride
    planes = [plane * jnp.float32(0.25) for plane in planes]
    return [_to_bfloat16(plane) for plane in planes] if to_bfloat16 else planes


def amax(planes: Planes) -> Array:
    """The largest magnitude of each block as bits, at least infinity's if one is not finite."""
    return functools.reduce(jnp.maximum, map(_magnitude, planes))


def finite_amax(planes: Planes) -> Array:
    """The same over the finite elements alone."""
    magnitudes = map(_magnitude, planes)
    zero = jnp.uint32(0)
    finite = [jnp.where(m < jnp.uint32(_INFINITY), m, zero) for m in magnitudes]
    return functools.reduce(jnp.maximum, finite)


# The codes of two neighbours, the first in the low nibble: of their plane's number, which is even,
# and of both, scaled and without their signs.
Pair = Callable[[int, Array, Array], Array]


def nearest(_: int, first: Array, second: Array) -> Array:
    """The `Pair` of codes by rounding to nearest."""
    low, high = (to_steps(x, E2M1) for x in (first, second))
    high_code = _code(_nearest(high.number), high, E2M1)
    return _code(_nearest(low.number), low, E2M1) | (high_code << jnp.uint32(4))


def stochastic(random: Callable[[int], Array], bits: int) -> Pair:
    """The `Pair` of codes by stochastic rounding.

    Args:
      random: gives the uint32 random words of a plane by its number.
      bits: random bits spent per element.
    """

    def pair(j: int, first: Array, second: Array) -> Array:
        codes = []
        for i, x in ((j, first), (j + 1, second)):
            steps = to_steps(x, E2M1)
            codes.append(_code(_stochastic(steps.number, random(i), bits), steps, E2M1))
        return codes[0] | (codes[1] << jnp.uint32(4))

    return pair


def encode(planes: Planes, ideal: Array, reciprocals: Sequence[Array], pair: Pair) -> Encoded:
    """Scales each block by its own amax, rounds and packs it.

    Args:
      planes: transformed.
      ideal: float32 scalar, what the amax is multiplied by to give the block scale.
      reciprocals: eight float32 scalars (`scalar_table`).
      pair: how elements are rounded.
    """
    largest = amax(planes)
    good = largest < jnp.uint32(_INFINITY)
    largest = jnp.where(good, largest, jnp.uint32(0))
    steps = to_steps(bits_float(largest) * ideal, E4M3)
    number = _nearest(steps.number)
    value = steps_value(steps._replace(number=number.astype(jnp.int32).astype(jnp.float32)), E4M3)
    factor = jnp.where(good, _encode_factor(value, reciprocals), jnp.float32(0))
    scale = jnp.where(good, _code(number, steps, E4M3), jnp.uint32(E4M3.nan_code))
    return Encoded(*pack(planes, factor, pair), scale)


def pack(planes: Planes, factor: Array, pair: Pair) -> tuple[Array, Array]:
    """The codes of elements times ``factor`` (float32, per block), eight in a uint32."""

    def signed(j: int) -> Array:
        # Compilers flush subnormal numbers on one machine and not on another.
        first, second = (bits_float(_magnitude(planes[i])) * factor for i in (j, j + 1))
        signs = (float_bits(planes[i]) & jnp.uint32(_SIGN) for i in (j, j + 1))
        sign, next_sign = (s >> jnp.uint32(n) for s, n in zip(signs, (28, 24), strict=True))
        return pair(j, first, second) | sign | next_sign

    words = []
    for start in (0, BLOCK // 2):
        bytes_ = [signed(start + 2 * i) << jnp.uint32(8 * i) for i in range(4)]
        words.append(functools.reduce(jnp.bitwise_or, bytes_))
    return words[0], words[1]


def scalar_table(ideal: Array, tensor: Array) -> Array:
    """float32[10]: `encode`'s ``ideal``, its eight ``reciprocals``, and the tensor scale.

    A block scale is one of eight mantissas, 1 to 15/8, times a power of two, and so its product
    with the tensor scale and the reciprocal of that are one of eight numbers times a power of two.

    Args:
      ideal: ten times the same, so that each entry is made by itself, and all by one kernel.
      tensor: the tensor scale, ten times.
    """
    position = lax.iota(jnp.float32, 10)
    mantissa = (position + jnp.float32(7)) * jnp.float32(1 / 8)
    reciprocal = divide(jnp.float32(1), mantissa * tensor)
    return jnp.where(position == 0, ideal, jnp.where(position == 9, tensor, reciprocal))


def _encode_factor(scale: Array, reciprocals: Sequence[Array]) -> Array:
    """``min(1 / (scale * tensor_scale), FLT_MAX)`` for E4M3 numbers ``scale``."""
    bits = float_bits(scale)
    index = (bits >> jnp.uint32(20)) & jnp.uint32(7)
    mantissa = reciprocals[0]
    for i in range(1, 8):
        mantissa = jnp.where(index == jnp.uint32(i), reciprocals[i], mantissa)
    power = jnp.uint32(254 << 23) - (bits & jnp.uint32(_INFINITY))
    factor = mantissa * bits_float(power)
    # Where the product is below the normal numbers, XLA flushes it and divides by zero.
    in_range = (bits != jnp.uint32(0)) & (factor <= jnp.float32(2.0**126))
    return jnp.where(in_range, factor, jnp.float32(np.finfo(np.float32).max))


def _magnitude(x: Array) -> Array:
    """The bits of ``|x|``, zero for subnormal numbers."""
    bits = float_bits(x) & jnp.uint32(_SIGN - 1)
    return jnp.where(bits < jnp.uint32(_SMALLEST_NORMAL), jnp.uint32(0), bits)


def _to_bfloat16(x: Array) -> Array:
    """float32 rounded to the nearest bfloat16. By bits: compilers drop a cast there and back."""
    bits = float_bits(x)
    magnitude = jnp.minimum(bits & jnp.uint32(_SIGN - 1), jnp.uint32(_INFINITY))
    odd = (magnitude >> jnp.uint32(16)) & jnp.uint32(1)
    rounded = (magnitude + jnp.uint32(0x7FFF) + odd) & jnp.uint32(0xFFFF0000)
    return bits_float(rounded | (bits & jnp.uint32(_SIGN)))


def _nearest(number: Array) -> Array:
    """`fp4jax.Nearest` of a number of steps, as uint32, where there is no operation that rounds."""
    # The sum with 2**23 is rounded to whole numbers, which its last bits are.
    base = np.float32(2.0**23)
    return float_bits(number + base) - base.view(np.uint32)


def _stochastic(number: Array, random: Array, bits: int) -> Array:
    """`fp4jax.Stochastic` of a number of steps, as uint32."""
    # Conversions to signed integers, the only ones everywhere, in two halves of 16 bits.
    down = number.astype(jnp.int32)
    fraction = (number - down.astype(jnp.float32)) * jnp.float32(2.0**16)
    upper = fraction.astype(jnp.int32)
    lower = ((fraction - upper.astype(jnp.float32)) * jnp.float32(2.0**16)).astype(jnp.int32)
    threshold = ((upper << 16) | lower).astype(jnp.uint32)
    unused = jnp.uint32(32 - bits)
    up = (random >> unused) < (threshold >> unused)
    return down.astype(jnp.uint32) + jnp.where(up, jnp.uint32(1), jnp.uint32(0))


def _code(number: Array, steps: Steps, grid: ElementType) -> Array:
    """`fp4jax.rounding.steps_code` of the rounded ``number`` of these steps, as uint32."""
    m = grid.mantissa_bits
    first = (grid.min_exponent + 127) << m
    return number + (steps.exponent >> jnp.uint32(23 - m)) - jnp.uint32(first)
