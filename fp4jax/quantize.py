"""quantize and fake_quantize: transform, scale, round, pack. The paper's equations in order."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fp4jax import blocks
from fp4jax.formats import Format
from fp4jax.qtensor import Operand, QTensor, decode_operand, pack_elements, pack_scales
from fp4jax.quantizer import Quantizer, as_quantizer
from fp4jax.refuse import refuse_derivative
from fp4jax.rounding import (
    Steps,
    copy_sign,
    float_bits,
    key_words,
    random_bits,
    steps_code,
    steps_value,
    to_steps,
)
from fp4jax.scaling import Scales


def quantize(
    x: ArrayLike,
    format_or_quantizer: Format | Quantizer,
    axis: int = -1,
    key: Array | None = None,
) -> QTensor:
    """Quantizes an array in blocks along one axis.

    The bits are the same eager and jitted, on every backend and under every sharding.

    Args:
      x: float32, bfloat16 or float16 array of any shape but 0-d or empty.
      format_or_quantizer: a `Format` (nearest rounding, its own blocks) or a `Quantizer`.
      axis: the block axis: the contraction axis of the product that ``x`` is meant for.
      key: a JAX PRNG key, for stochastic rounding only.

    Returns:
      A `QTensor`; ``.dequantize()`` gives the approximation of ``x``.

    Raises:
      TypeError: if ``x`` is not a floating-point array.
      ValueError: if ``x`` is 0-d or empty, ``axis`` is out of range, a key is missing for
        stochastic rounding, or one is given where none is used.
    """
    x, quantizer, axis, words = _checked(x, format_or_quantizer, axis, key)
    return _quantize(quantizer, axis, x, words)


def fake_quantize(
    x: ArrayLike,
    format_or_quantizer: Format | Quantizer,
    axis: int = -1,
    key: Array | None = None,
) -> Array:
    """``quantize(...).dequantize()`` to the bit, without packing: faster, same shape and dtype.

    Arguments and errors as `quantize`. Not differentiable: `fp4jax.dot_general` is.
    """
    x, quantizer, axis, words = _checked(x, format_or_quantizer, axis, key)
    return _fake_quantize(quantizer, axis, x, words)


class Encoded(NamedTuple):
    """A rounded array before it is packed or multiplied: the common part of both ways out.

    Attributes:
      source: float32, transformed and padded to whole blocks; its signs are the result's.
      steps: the rounded magnitudes.
      scales: per block.
      quantizer: what was applied.
      axis: the block axis, -1 or -2.
      shape: of the result: the input's, but for whole groups where a transform mixed them.
    """

    source: Array
    steps: Steps
    scales: Scales
    quantizer: Quantizer
    axis: int
    shape: tuple[int, ...]

    def operand(self) -> Operand:
        """Elements times block scales in the layout of the input."""
        format = self.quantizer.format
        block = blocks.expand(self.scales.block, self.quantizer.window(self.axis))
        values = copy_sign(steps_value(self.steps, format.element) * block, self.source)
        return Operand(self._cut(values.astype(format.operand_dtype)), self.scales.tensor)

    def pack(self, length: int, axis: int, dtype: np.dtype[Any]) -> QTensor:
        """The `QTensor` for an original array with this block axis, its length and dtype."""
        format = self.quantizer.format
        bits = format.element.bits
        sign = (float_bits(self.source) >> jnp.uint32(31)).astype(jnp.uint8)
        codes = steps_code(self.steps, format.element) | (sign << jnp.uint8(bits - 1))
        codes = pack_elements(codes, bits, self.axis)
        *_, rows, columns = self.shape if self.axis == -1 else _swapped(self.shape)
        block_scales = pack_scales(self.scales.block, format.scale)
        return QTensor(
            codes=codes[..., :rows, : -(-columns * bits // 8)],
            block_scales=block_scales if self.axis == -1 else jnp.swapaxes(block_scales, -1, -2),
            tensor_scale=self.scales.tensor,
            quantizer=self.quantizer,
            axis=axis,
            length=length,
            dtype=dtype,
        )

    def _cut(self, values: Array) -> Array:
        return values[..., : self.shape[-2], : self.shape[-1]]


def encode(x: Array, quantizer: Quantizer, axis: int, words: Array | None) -> Encoded:
    """Transforms, scales and rounds ``x`` ([..., M, N], block axis -1 or -2).

    Inside a jitted function only: eager execution may round intermediate sums otherwise.

    Args:
      x: float32, bfloat16 or float16.
      quantizer: what to do.
      axis: the block axis, -1 or -2.
      words: uint32[2] that name the random stream, for stochastic rounding.
    """
    window = quantizer.window(axis)
    hadamard = quantizer.hadamard
    shape = list(x.shape)
    y = x.astype(jnp.float32)
    if hadamard is not None:
        shape[axis] = blocks.ceil_to(shape[axis], hadamard.size)
        y = blocks.pad(y, (1, hadamard.size) if axis == -1 else (hadamard.size, 1))
        y = hadamard(y, axis)
        if x.dtype == jnp.bfloat16:
            # Not astype and back, which compilers drop.
            y = lax.reduce_precision(y, exponent_bits=8, mantissa_bits=7)
        y = lax.optimization_barrier(y)
    y = blocks.pad(y, window)

    scales = _scales(y, x if hadamard is None else y, quantizer, window)
    steps = to_steps(y * blocks.expand(scales.encode, window), quantizer.format.element)
    random = None if words is None else random_bits(words, y.shape, axis)
    steps = quantizer.rounding(steps, random)
    return Encoded(y, steps, scales, quantizer, axis, tuple(shape))


def _scales(y: Array, source: Array, quantizer: Quantizer, window: blocks.Window) -> Scales:
    """The scale rule's answer; a block with a NaN or inf gets a NaN scale and disturbs no other.

    ``source`` has the magnitudes of ``y``, in the form that costs least to keep at hand.
    """
    rule, format = quantizer.scale_rule, quantizer.format
    infinity = jnp.float32(np.inf)
    block_amax = blocks.amax(y, window)
    largest = jnp.max(block_amax)

    def finite() -> Scales:
        return rule(block_amax, largest, format)

    def not_finite() -> Scales:
        good = block_amax < infinity
        magnitude = jnp.abs(source.astype(jnp.float32))
        tensor_amax = jnp.max(jnp.where(magnitude < infinity, magnitude, 0))
        scales = rule(jnp.where(good, block_amax, 0), tensor_amax, format)
        return scales._replace(
            block=jnp.where(good, scales.block, jnp.float32(np.nan)),
            encode=jnp.where(good, scales.encode, 0),
        )

    # The condition spares the common case a second pass over the elements. It also keeps the
    # scales from being computed again for every element: compilers do not fuse across it, while
    # XLA before jax 0.11 drops an optimization_barrier on CPUs.
    return lax.cond(largest < infinity, finite, not_finite)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _checked(
    x: ArrayLike, format_or_quantizer: Format | Quantizer, axis: int, key: Array | None
) -> tuple[Array, Quantizer, int, Array | None]:
    quantizer = as_quantizer(format_or_quantizer)
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"x must be float32, bfloat16 or float16, not {x.dtype}{list(x.shape)}")
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"x must have at least one axis and one element, not shape {x.shape}")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be from {-x.ndim} to {x.ndim - 1} for {x.shape}, not {axis}")
    needs_key = quantizer.rounding.needs_key
    if needs_key and key is None:
        raise ValueError(f"key is missing: {quantizer.rounding} needs a JAX PRNG key")
    if key is not None and not needs_key:
        raise ValueError(f"key must be None: {quantizer.rounding} uses no random bits")
    words = None if key is None else key_words(key, 1)[0]
    return x, quantizer, axis % x.ndim - x.ndim, words


def _encode_any(
    x: Array, quantizer: Quantizer, axis: int, words: Array | None
) -> tuple[Encoded, int]:
    """`encode` for any rank and axis; also the axis (-1 or -2) that it worked along."""
    if x.ndim == 1:
        x = x[None]
    if axis < -2:
        x, axis = jnp.moveaxis(x, axis, -1), -1
    return encode(x, quantizer, axis, words), axis


@refuse_derivative("fp4jax.quantize has no derivative; differentiate fp4jax.dot_general", 2)
@functools.partial(jax.jit, static_argnums=(0, 1))
def _quantize(quantizer: Quantizer, axis: int, x: Array, words: Array | None) -> QTensor:
    encoded, _ = _encode_any(x, quantizer, axis, words)
    q = encoded.pack(x.shape[axis], axis, np.dtype(x.dtype))
    return jax.tree.map(lambda a: a[0] if a.ndim == 2 else a, q) if x.ndim == 1 else q


@refuse_derivative("fp4jax.fake_quantize has no derivative; differentiate fp4jax.dot_general", 2)
@functools.partial(jax.jit, static_argnums=(0, 1))
def _fake_quantize(quantizer: Quantizer, axis: int, x: Array, words: Array | None) -> Array:
    encoded, working = _encode_any(x, quantizer, axis, words)
    length = x.shape[axis]
    y = decode_operand(encoded.operand(), quantizer, working, length, np.dtype(x.dtype))
    return y[0] if x.ndim == 1 else y if working == axis else jnp.moveaxis(y, -1, axis)
