"""Rounding to a grid, nearest-even or stochastic, and the counter-based random bits of the latter.

A magnitude ``a`` becomes a whole number ``k`` of grid steps within its binade:

    step = 2**(max(floor(log2 a), min_exponent) - mantissa_bits),    k = round(a / step).

``a / step`` is exact in float32 (a power of two), so all rounding happens in one place, and both
the value ``k * step`` and the bit pattern of the element follow from ``k`` and the exponent.
Exponents are read from the float's bits; nothing here depends on how a backend rounds a product.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax.formats import ElementType

_BIAS = 127  # of float32's exponent field, which starts at bit 23


def float_bits(x: Array) -> Array:
    """The bits of a float32 array as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def bits_float(u: Array) -> Array:
    """The float32 array with the given uint32 bits."""
    return lax.bitcast_convert_type(u, jnp.float32)


def narrowed(x: Array, dtype: np.dtype[Any]) -> Array:
    """float32 ``x`` in float32 or bfloat16, whichever is asked for; it must be exact there.

    The upper half of its bits is the bfloat16 then. To convert it takes CPUs ten instructions.
    """
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    upper = (float_bits(x) >> jnp.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)


def copy_sign(magnitude: Array, sign: Array) -> Array:
    """``magnitude`` (float32, >= 0 or NaN) with the sign bit of ``sign``, of -0.0 too."""
    return bits_float(float_bits(magnitude) | (float_bits(sign) & jnp.uint32(0x80000000)))


def once(u: Array) -> Array:
    """The integers ``u``, which compilers would otherwise compute again for each use of each.

    As a reduction of them and zeros: its result compilers keep. An optimization_barrier XLA
    before jax 0.11 drops on CPUs.
    """
    copy = lax.broadcasted_iota(u.dtype, (2, *u.shape), 0)
    return lax.reduce(jnp.where(copy == 0, u, 0), np.zeros((), u.dtype), lax.bitwise_or, (0,))


class Steps(NamedTuple):
    """A magnitude as a number of grid steps.

    Attributes:
      number: float32, ``a / step``; whole once rounded.
      exponent: uint32, the exponent of the binade in a float32's bit position.
    """

    number: Array
    exponent: Array


def to_steps(x: Array, grid: ElementType) -> Steps:
    """``|x|``, saturated to ``grid.max``, in grid steps; inf and NaN saturate too."""
    # As integers, NaN and inf order above every number: one integer minimum clamps all three.
    largest = jnp.uint32(np.float32(grid.max).view(np.uint32))
    bits = jnp.minimum(float_bits(x) & jnp.uint32(0x7FFFFFFF), largest)
    exponent = jnp.maximum(
        bits & jnp.uint32(0x7F800000), jnp.uint32((grid.min_exponent + _BIAS) << 23)
    )
    per_step = bits_float(jnp.uint32((2 * _BIAS + grid.mantissa_bits) << 23) - exponent)
    return Steps(bits_float(bits) * per_step, exponent)


def steps_value(steps: Steps, grid: ElementType) -> Array:
    """The magnitude (float32) of a whole number of steps."""
    return steps.number * bits_float(steps.exponent - jnp.uint32(grid.mantissa_bits << 23))


def steps_code(steps: Steps, grid: ElementType) -> Array:
    """The element's bit pattern without its sign, uint8.

    ``k`` alone is the pattern in the subnormal range and the first binade; every further binade
    adds ``2**mantissa_bits``, and a ``k`` that rounded up to the next binade carries by itself.
    """
    first = (grid.min_exponent + _BIAS) << grid.mantissa_bits
    binade = steps.exponent >> jnp.uint32(23 - grid.mantissa_bits)
    # The last bits of 2**23 + k are k. A conversion to integers would check the range first.
    whole = float_bits(steps.number + jnp.float32(2.0**23))
    return (whole + binade - jnp.uint32(first)).astype(jnp.uint8)


def code_value(code: Array, grid: ElementType) -> Array:
    """The float32 magnitude of a pattern (uint8) without its sign, the inverse of `steps_code`."""
    wide = code.astype(jnp.uint32)
    m = grid.mantissa_bits
    normal = bits_float((wide << (23 - m)) + jnp.uint32((grid.min_exponent - 1 + _BIAS) << 23))
    subnormal = code.astype(jnp.float32) * jnp.float32(2.0 ** (grid.min_exponent - m))
    return jnp.where(wide < jnp.uint32(1 << m), subnormal, normal)


def signed_code(code: Array, sign: Array, grid: ElementType) -> Array:
    """A magnitude's pattern with the sign of ``sign`` (float32) put in, uint8."""
    negative = (float_bits(sign) >> jnp.uint32(31)).astype(jnp.uint8)
    if grid.twos_complement:
        mask = jnp.uint8((1 << grid.bits) - 1)
        return jnp.where(negative != 0, jnp.uint8(0) - code, code) & mask
    return code | (negative << jnp.uint8(grid.bits - 1))


def signed_value(code: Array, grid: ElementType) -> Array:
    """The float32 number of a signed pattern, uint8."""
    half = jnp.uint8(1 << (grid.bits - 1))
    negative = code & half
    magnitude = code & (half - jnp.uint8(1))
    if grid.twos_complement:
        magnitude = jnp.where(negative != 0, half - magnitude, magnitude)
    sign = negative.astype(jnp.uint32) << (32 - grid.bits)
    return bits_float(float_bits(code_value(magnitude, grid)) | sign)


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Round to nearest, ties to even."""

    needs_key = False

    def __call__(self, steps: Steps, random: Array | None) -> Steps:
        return steps._replace(number=jnp.round(steps.number))


@dataclasses.dataclass(frozen=True)
class Stochastic:
    """Round up with the probability of the fraction that rounding down would drop.

    With ``f`` the fraction, the probability is ``floor(f * 2**bits) / 2**bits``: grid points
    never move, and the mean falls short of the value by less than ``2**-bits`` steps (towards
    zero): at most 1/256 step for 8 bits, the hardware's, and 1.6e-5 for 16. With 32 bits a
    float32 fraction is resolved to 2.4e-10 steps.

    Attributes:
      bits: random bits spent per element, 8, 16 or 32.
    """

    bits: int = 32

    needs_key = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 16, 32):
            raise ValueError(f"bits must be 8, 16 or 32, not {self.bits}")

    def __call__(self, steps: Steps, random: Array | None) -> Steps:
        assert random is not None
        down = jnp.floor(steps.number)
        # Compared as integers: adding a random fraction to `number` in float32 would round, and
        # could move a grid point.
        threshold = ((steps.number - down) * jnp.float32(2.0**self.bits)).astype(jnp.uint32)
        up = (random >> jnp.uint32(32 - self.bits)) < threshold
        return steps._replace(number=down + up.astype(jnp.float32))


Rounding = Nearest | Stochastic


def key_words(key: Array, operands: int) -> Array:
    """uint32[operands, 2, 2]: for each operand of a key, the words that name its random streams.

    An operand has a stream for its elements and one for its scales; two words name a stream.

    Args:
      key: a JAX PRNG key, typed or raw. Under vmap over keys, ``rbg`` keys give other bits than
        one by one, as everywhere in JAX.
      operands: how many there are.
    """
    return jax.random.bits(key, (operands, 2, 2), jnp.uint32)


def random_bits(
    words: Array, shape: Sequence[int], axis: int, unpadded: Sequence[int] | None = None
) -> Array:
    """uint32 random bits, one word per element: a pure function of ``words`` and the index.

    An element's index is its position along ``axis`` (the block axis) and, row-major over all
    other axes, its row. Each row is given two words by a full hash of (row, words); an element
    is then a hash of its position keyed by both. Nothing depends on tile, layout or sharding, and
    no counter wraps: a tensor may have 2**32 rows of 2**32 elements.

    Args:
      words: uint32[2], from `key_words`.
      shape: of the array to fill.
      axis: the block axis.
      unpadded: the extents that rows are numbered by, if the array is padded.

    Raises:
      ValueError: if there are more than 2**32 rows.
    """
    axis = axis % len(shape)
    rows_shape = [1 if i == axis else n for i, n in enumerate(shape)]
    row = jnp.zeros(rows_shape, jnp.uint32)
    rows = 1
    for i in reversed([i for i in range(len(shape)) if i != axis]):
        row = row + lax.broadcasted_iota(jnp.uint32, rows_shape, i) * jnp.uint32(rows)
        rows *= (unpadded or shape)[i]
    if rows > 2**32:
        raise ValueError(f"random bits number at most 2**32 rows; shape {shape} has {rows}")
    # Two hashes a row, not an element.
    inner, outer = (once(key) for key in row_keys(words, row))
    return element_bits(lax.broadcasted_iota(jnp.uint32, tuple(shape), axis), inner, outer)


def row_keys(words: Array, row: Array) -> tuple[Array, Array]:
    """The two words that key a row's elements, for uint32 row numbers and uint32[2] ``words``."""
    return _mix(_mix(row ^ words[0]) + words[1]), _mix(_mix(row ^ words[1]) + words[0])


def element_bits(position: Array, inner: Array, outer: Array) -> Array:
    """The random word of the element at a uint32 position of a row with these `row_keys`."""
    return _mix(position ^ inner, outer)


def _mix(h: Array, late: Array | None = None) -> Array:
    """A bijective 32-bit hash: two multiply-xorshift rounds (constants: C. Wellons' lowbias32).

    ``late`` enters between the rounds, so that two streams coincide only if they share it too.
    """
    h = h ^ (h >> jnp.uint32(16))
    h = h * jnp.uint32(0x7FEB352D)
    h = h ^ (h >> jnp.uint32(15))
    if late is not None:
        h = h ^ late
    h = h * jnp.uint32(0x846CA68B)
    return h ^ (h >> jnp.uint32(16))
