"""QTensor: a quantized array as it is kept in memory, and how to read it back."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax import blocks
from fp4jax.formats import E2M1, E8M0, ElementType, Format
from fp4jax.parts import Axis, per
from fp4jax.quantizer import Quantizer
from fp4jax.rounding import (
    bits_float,
    code_value,
    float_bits,
    narrowed,
    once,
    signed_value,
    steps_code,
    to_steps,
)

_PER_WORD = 8  # 4-bit elements in 32 bits


class Operand(NamedTuple):
    """A quantized array as a matrix product consumes it: ``values * scale``.

    Attributes:
      values: elements times block scales, exact in ``Format.operand_dtype``.
      scale: the tensor scale (float32), to be applied to the product: a scalar, or one per row
        with length 1 along the block axis; None for 1.
    """

    values: Array
    scale: Array | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "block_scales", "tensor_scale"],
    meta_fields=["quantizer", "axis", "length", "dtype"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class QTensor:
    """Packed codes with their scales: 4.5 bits per element for NVFP4. A pytree.

    The block axis, of original length ``K``, comes last in every array here; the others keep
    their order. A Hadamard-transformed tensor holds the transformed numbers, whole groups of them.

    Attributes:
      codes: uint8 [..., ceil(K/2)], two elements a byte, the even index in the low nibble; one
        element a byte for 8-bit elements.
      block_scales: [..., ceil(K/block)] in the format's scale dtype; for square tiles the axis
        before it is divided too. None if the format has none.
      tensor_scale: float32 that decodes: a scalar, with `RowScaled` an array [...]; None if the
        format has none.
      quantizer: how it was made.
      axis: the block axis of the original array, counted from the end.
      length: of that axis, K.
      dtype: of the original array.
    """

    codes: Array
    block_scales: Array | None
    tensor_scale: Array | None
    quantizer: Quantizer
    axis: int
    length: int
    dtype: np.dtype[Any]

    @property
    def format(self) -> Format:
        return self.quantizer.format

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The original array's shape."""
        shape = list(self.codes.shape[:-1])
        shape.insert(self.ndim + self.axis, self.length)
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def operand(self) -> Operand:
        """The elements times their block scales, block axis last (whole groups if transformed)."""
        return _operand(self)

    def dequantize(self, dtype: Any = None) -> Array:
        """The array that this stands for, in its original shape and axis order.

        A Hadamard transform is undone, so that the result approximates the original array.

        Args:
          dtype: of the result; by default the original one. Numbers are computed in float32.
        """
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype must be floating, not {dtype}")
        return _dequantize(self, dtype)

    def float4(self) -> Array:
        """The elements as a ``float4_e2m1fn`` array [..., K], block axis last, scales left out.

        Raises:
          ValueError: if the elements are not E2M1.
        """
        if self.format.element != E2M1 or self.format.alternative:
            raise ValueError(f"float4 needs E2M1 elements; {self.format!r} has other ones")
        pairs = lax.bitcast_convert_type(self.codes, jnp.float4_e2m1fn)
        elements = pairs.reshape(*self.codes.shape[:-1], -1)
        return elements if self.quantizer.hadamard else elements[..., : self.length]

    def __getitem__(self, index: Any) -> "QTensor":
        """A part of the tensor, in the original axis order, where its blocks stay whole.

        Axes across the blocks take integers and slices; the block axis, and both axes of square
        blocks, take slices that start at a block's first element and end at a block's last or the
        tensor's. Steps are 1.

        Raises:
          IndexError: for any other index.
        """
        return _part(self, index if isinstance(index, tuple) else (index,))

    def __eq__(self, other: object) -> bool:
        """Whether all bytes and all that describes them are equal."""
        if not isinstance(other, QTensor):
            return NotImplemented
        mine, theirs = ((q.quantizer, q.axis, q.length, q.dtype) for q in (self, other))
        pairs = zip(jax.tree.leaves(self), jax.tree.leaves(other), strict=True)
        return mine == theirs and all(
            a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()
            for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(1, int(np.prod(self.shape)))
        return (
            f"QTensor({self.format!r}, shape={self.shape}, axis={self.axis}, dtype={self.dtype}, "
            f"{self.nbytes} bytes, {bits:.2f} bits/element)"
        )


def decode_operand(
    operand: Operand, quantizer: Quantizer, axis: int, length: int, dtype: np.dtype[Any]
) -> Array:
    """The array of ``dtype`` that ``operand`` stands for: scaled, transform undone, cut."""
    x = operand.values.astype(jnp.float32)
    # Undone before the scale multiplies: no product then meets a sum, which compilers fuse into
    # one rounding here and not there.
    if quantizer.hadamard is not None:
        x = quantizer.hadamard.inverse(x, axis)
    if (scale := operand.scale) is not None:
        # One for all, one per row, or one for each array of a vmapped stack.
        x = x * scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))
    return lax.slice_in_dim(x, 0, length, axis=axis).astype(dtype)


def pack_elements(codes: Array, bits: int, axis: int) -> Array:
    """uint8 codes, one an element, packed along ``axis`` and that axis moved last.

    ``axis`` is -1 or -2; zeros are appended to whole words of 32 bits.
    """
    if bits == 8:
        return codes if axis == -1 else jnp.swapaxes(codes, -1, -2)
    codes = blocks.pad(codes, (1, _PER_WORD) if axis == -1 else (_PER_WORD, 1))
    at = codes.ndim + axis
    groups = codes.reshape(*codes.shape[:at], -1, _PER_WORD, *codes.shape[at + 1 :])
    shift = lax.broadcasted_iota(jnp.uint32, groups.shape, at + 1) << jnp.uint32(2)
    # As a reduction, since compilers would compute the codes again for every slice, and fuse the
    # packing into whatever reads it: into the backward pass, which would then keep the unpacked
    # array. In words, which CPUs transpose and unpack several times faster than bytes. A sum, which
    # devices that hold parts of a word can share out, where the bitwise "or" is not implemented.
    words = jnp.sum(groups.astype(jnp.uint32) << shift, at + 1, dtype=jnp.uint32)
    words = words if axis == -1 else jnp.swapaxes(words, -1, -2)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)


def _unpack_elements(codes: Array) -> Array:
    """uint8 codes, one an element, of those that `pack_elements` packed by the last axis."""
    length = 2 * codes.shape[-1]
    codes = blocks.pad(codes, (1, 4))
    words = lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 4), jnp.uint32)
    groups = (*words.shape, _PER_WORD)
    shift = lax.broadcasted_iota(jnp.uint32, groups, words.ndim) << jnp.uint32(2)
    codes = ((words[..., None] >> shift) & jnp.uint32(0xF)).astype(jnp.uint8)
    return codes.reshape(*codes.shape[:-2], -1)[..., :length]


def pack_scales(block: Array, alternative: Array | None, scale: ElementType) -> Array:
    """Block scales (float32, on the grid of ``scale``, or NaN) in the dtype that stores them."""
    if scale.dtype == np.float32:
        return block
    codes = steps_code(to_steps(block, scale), scale)
    codes = jnp.where(jnp.isnan(block), jnp.uint8(scale.nan_code), codes)
    if alternative is not None:
        codes = codes | (alternative.astype(jnp.uint8) << jnp.uint8(7))
    # Else compilers compute them again for every element that is read with them.
    return lax.bitcast_convert_type(once(codes), scale.dtype)


def scale_elements(values: Array, scales: Array, scale: ElementType) -> Array:
    """Elements times their block scales, both float32 of the same shape."""
    if scale == E8M0:
        # 2**-127 in two factors, behind a choice each, or compilers would multiply them to 0.
        smallest = scales == 0
        values = jnp.where(smallest, values * jnp.float32(0.5), values)
        scales = jnp.where(smallest, jnp.float32(2.0**-126), scales)
    return values * scales


def _unpack_scales(stored: Array, format: Format) -> tuple[Array, Array | None]:
    """The block scales in float32, and which blocks use the format's alternative grid."""
    scale = format.scale
    assert scale is not None
    if scale.dtype == np.float32:
        return stored, None
    codes = lax.bitcast_convert_type(stored, jnp.uint8)
    alternative = None
    if format.alternative is not None:
        alternative = codes >= jnp.uint8(128)
        codes = codes & jnp.uint8(127)
    bad = codes == jnp.uint8(scale.nan_code)
    scales = jnp.where(bad, jnp.float32(np.nan), code_value(codes, scale))
    return bits_float(once(float_bits(scales))), alternative


@jax.jit
def _operand(q: QTensor) -> Operand:
    format, element = q.format, q.format.element
    codes, stored, tensor = q.codes, q.block_scales, q.tensor_scale
    if q.ndim == 1:
        codes, stored = codes[None], None if stored is None else stored[None]
    if element.bits == 4:
        codes = _unpack_elements(codes)
    values = signed_value(codes, element)
    if stored is not None:
        assert q.quantizer.tile is not None
        scales, alternative = _unpack_scales(stored, format)

        def per_element(per_block: Array) -> Array:
            # Blocks are whole, codes may end inside one.
            wide = blocks.expand(per_block, q.quantizer.tile)
            return wide[..., : codes.shape[-2], : codes.shape[-1]]

        if alternative is not None:
            assert format.alternative is not None
            other = signed_value(codes, format.alternative)
            values = jnp.where(per_element(alternative), other, values)
        assert format.scale is not None
        values = scale_elements(values, per_element(scales), format.scale)
    values = narrowed(values, format.operand_dtype)
    if q.quantizer.hadamard is None:
        values = values[..., : q.length]
    values = values[0] if q.ndim == 1 else values
    if tensor is not None and q.quantizer.rule.per_row:
        tensor = tensor[..., None]
    return Operand(values, tensor)


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(q: QTensor, dtype: np.dtype[Any]) -> Array:
    x = decode_operand(q.operand(), q.quantizer, -1, q.length, dtype)
    return jnp.moveaxis(x, -1, q.axis)


def _part(q: QTensor, given: tuple[Any, ...]) -> QTensor:
    if len(given) > q.ndim:
        raise IndexError(f"index has {len(given)} entries for {q.ndim} axes")
    given += (slice(None),) * (q.ndim - len(given))
    block_axis = q.ndim + q.axis
    per_byte = 8 // q.format.element.bits
    across, along = q.quantizer.tile or (1, per_byte)
    # In stored order, the block axis last; a transform ties its whole length together.
    order = [*(a for a in range(q.ndim) if a != block_axis), block_axis]
    together = [1] * (q.ndim - 2) + [across] * (q.ndim > 1)
    together.append(q.length if q.quantizer.hadamard else along)
    index = [
        Axis(axis, q.shape[axis], block).checked(given[axis])
        for axis, block in zip(order, together, strict=True)
    ]
    *others, last = index
    assert isinstance(last, slice)
    codes_last = slice(None) if q.quantizer.hadamard else per(last, per_byte)
    scales, tensor = q.block_scales, q.tensor_scale
    if scales is not None:
        scales_last = slice(None) if q.quantizer.hadamard else per(last, along)
        blocks_index = [*map(per, others, together), scales_last]
        scales = scales[tuple(blocks_index)]
    if tensor is not None:  # one for all, per row, or per array of a vmapped stack
        tensor = tensor[tuple(others[: tensor.ndim])]
    # An integer removes its axis; the block axis is counted from the end.
    removed_behind = sum(isinstance(i, int) for i in given[block_axis + 1 :])
    return dataclasses.replace(
        q,
        codes=q.codes[(*others, codes_last)],
        block_scales=scales,
        tensor_scale=tensor,
        axis=q.axis + removed_behind,
        length=last.stop - last.start,
    )
