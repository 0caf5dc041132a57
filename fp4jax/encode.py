"""encode: transform, scale, round. The paper's equations in order, in plain JAX."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax import blocks
from fp4jax.formats import ElementType
from fp4jax.hadamard import Hadamard
from fp4jax.qtensor import Operand, QTensor, pack_elements, pack_scales, scale_elements
from fp4jax.quantizer import Quantizer
from fp4jax.rounding import (
    bits_float,
    copy_sign,
    float_bits,
    narrowed,
    random_bits,
    signed_code,
    steps_code,
    steps_value,
    to_steps,
)
from fp4jax.scaling import Blocks, Scales


class Encoded(NamedTuple):
    """A rounded array before it is packed or multiplied: the common part of both ways out.

    Attributes:
      elements: float32, the rounded elements, transformed and padded to whole blocks.
      codes: uint8, the same as bit patterns.
      scales: what the scale rule decided.
      quantizer: what was applied.
      axis: the block axis, -1 or -2.
      shape: of the result: the input's, but for whole groups where a transform mixed them.
    """

    elements: Array
    codes: Array
    scales: Scales
    quantizer: Quantizer
    axis: int
    shape: tuple[int, ...]

    def operand(self) -> Operand:
        """Elements times block scales in the layout of the input."""
        format, values = self.quantizer.format, self.elements
        if format.scale is not None:
            assert self.scales.block is not None
            scales = blocks.expand(self.scales.block, self.quantizer.window(self.axis))
            values = scale_elements(values, scales, format.scale)
        values = narrowed(values, format.operand_dtype)
        return Operand(values[..., : self.shape[-2], : self.shape[-1]], self.scales.tensor)

    def pack(self, length: int, axis: int, dtype: np.dtype[Any]) -> QTensor:
        """The `QTensor` for an original array with this block axis, its length and dtype."""
        format, scales = self.quantizer.format, self.scales
        bits = format.element.bits
        codes = pack_elements(self.codes, bits, self.axis)
        *_, rows, columns = self.shape if self.axis == -1 else _swapped(self.shape)
        block_scales, tensor = None, scales.tensor
        if format.scale is not None:
            assert scales.block is not None
            block_scales = pack_scales(scales.block, scales.alternative, format.scale)
            if self.axis == -2:
                block_scales = jnp.swapaxes(block_scales, -1, -2)
        if self.quantizer.rule.per_row:
            assert tensor is not None
            tensor = jnp.squeeze(tensor, self.axis)[..., :rows]
        elif tensor is not None and tensor.ndim:
            tensor = tensor[:, 0, 0]  # one for each leading entry
        return QTensor(
            codes=codes[..., :rows, : -(-columns * bits // 8)],
            block_scales=block_scales,
            tensor_scale=tensor,
            quantizer=self.quantizer,
            axis=axis,
            length=length,
            dtype=dtype,
        )


def encode(
    x: Array,
    quantizer: Quantizer,
    axis: int,
    words: Array | None,
    groups: Array | None = None,
) -> Encoded:
    """Transforms, scales and rounds ``x`` ([..., M, N], block axis -1 or -2).

    Inside a jitted function only: eager execution may round intermediate sums otherwise.

    Args:
      x: float16, bfloat16, float32 or float64.
      quantizer: what to do.
      axis: the block axis, -1 or -2.
      words: uint32[2, 2] that name the random streams of elements and scales, if it needs a key.
      groups: int32[B] below B, which entries of ``x`` [B, M, N] share a tensor scale; None for one
        scale for all of ``x``.
    """
    if quantizer.watch is not None:
        quantizer.watch.look(x)
    format, hadamard, window = quantizer.format, quantizer.hadamard, quantizer.window(axis)
    y = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    if hadamard is not None:
        y = lax.optimization_barrier(rotate(x, hadamard, axis))
    shape = y.shape
    y = blocks.pad(y, window or (1, 1))
    source = y.astype(jnp.float32)

    # The same magnitudes in the form that costs least to keep at hand: not padded, not widened.
    magnitudes = source if x.dtype == jnp.float64 else y if hadamard is not None else x
    scale_words = None if words is None else words[1]
    scales = _scales(source, magnitudes, quantizer, axis, scale_words, groups)
    factor = blocks.expand(scales.encode, window)
    wide = x.dtype == jnp.float64
    ratio = _to_odd(y * factor.astype(jnp.float64)) if wide else source * factor
    random = None
    if quantizer.rounding.needs_key:
        assert words is not None
        random = random_bits(words[0], y.shape, axis, shape)

    def rounded(element: ElementType) -> tuple[Array, Array]:
        steps = quantizer.rounding(to_steps(ratio, element), random)
        value = copy_sign(steps_value(steps, element), source)
        if element.twos_complement:  # which has no negative zero
            value = jnp.where(value == 0, jnp.float32(0), value)
        return value, signed_code(steps_code(steps, element), source, element)

    elements, codes = rounded(format.element)
    if format.alternative is not None:
        assert scales.alternative is not None
        other = blocks.expand(scales.alternative, window)
        elements, codes = (
            jnp.where(other, a, b)
            for a, b in zip(rounded(format.alternative), (elements, codes), strict=True)
        )
    return Encoded(elements, codes, scales, quantizer, axis, shape)


def rotate(x: Array, hadamard: Hadamard, axis: int) -> Array:
    """The transform of ``x`` along ``axis`` (-1 or -2), padded to whole groups.

    In float32, but for a bfloat16 array in bfloat16, as on tensor cores.
    """
    y = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    y = blocks.pad(y, (1, hadamard.size) if axis == -1 else (hadamard.size, 1))
    return hadamard(y, axis, to_bfloat16=x.dtype == jnp.bfloat16)


def _scales(
    y: Array,
    magnitudes: Array,
    quantizer: Quantizer,
    axis: int,
    words: Array | None,
    groups: Array | None,
) -> Scales:
    """The scale rule's answer; a block with a NaN or inf gets a NaN scale and disturbs no other.

    ``magnitudes`` has the magnitudes of ``y``.
    """
    rule, format, window = quantizer.rule, quantizer.format, quantizer.window(axis)
    infinity = jnp.float32(np.inf)
    if window is None and groups is not None:
        block_amax = blocks.largest(y, -2, -1)[:, None, None]
    else:
        block_amax = blocks.amax(y, window)
    largest = blocks.largest(block_amax)

    def over_tensor(magnitudes: Array) -> Array:
        """The maximum over all blocks, rows or elements that share a tensor scale."""
        if groups is None and not rule.per_row:
            return blocks.largest(magnitudes)
        if groups is None or (rule.per_row and axis == -1):
            return jnp.expand_dims(blocks.largest(magnitudes, axis), axis)
        axes = (-2,) if rule.per_row else (-2, -1)
        per_entry = jnp.expand_dims(blocks.largest(magnitudes, *axes), axes)
        return jax.ops.segment_max(per_entry, groups, groups.size)[groups]

    def finite() -> Scales:
        tensor_amax = largest if not rule.per_row and groups is None else over_tensor(block_amax)
        return rule(Blocks(y, block_amax, tensor_amax, window, axis, format, words))

    def not_finite() -> Scales:
        good = block_amax < infinity
        wide = rule.per_row or groups is not None
        kept = jnp.abs((y if wide else magnitudes).astype(jnp.float32))
        kept = jnp.where(kept < infinity, kept, 0)
        amax = jnp.where(good, block_amax, 0)
        scales = rule(Blocks(y, amax, over_tensor(kept), window, axis, format, words))
        nan = jnp.float32(np.nan)
        if scales.block is None:
            assert scales.tensor is not None
            good = over_tensor(jnp.where(good, jnp.float32(0), jnp.float32(1))) == 0
            return scales._replace(
                tensor=jnp.where(good, scales.tensor, nan), encode=jnp.where(good, scales.encode, 0)
            )
        return scales._replace(
            block=jnp.where(good, scales.block, nan), encode=jnp.where(good, scales.encode, 0)
        )

    # The condition spares the common case a second pass over the elements. It also keeps the
    # scales from being computed again for every element: compilers do not fuse across it, while
    # XLA before jax 0.11 drops an optimization_barrier on CPUs.
    return lax.cond(largest < infinity, finite, not_finite)


def _to_odd(x: Array) -> Array:
    """float64 to float32, rounded to odd: what is rounded again afterwards is rounded once."""
    down = lax.reduce_precision(x, exponent_bits=11, mantissa_bits=23)
    nearest = down.astype(jnp.float32)
    bits = float_bits(nearest)
    too_far = jnp.abs(down) > jnp.abs(x)
    towards_zero = bits - too_far.astype(jnp.uint32)
    # What float32 flushes to zero stays there: one step down from it would be a NaN.
    inexact = (down != x) & (nearest != 0)
    return bits_float(jnp.where(inexact, towards_zero | jnp.uint32(1), bits))


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
