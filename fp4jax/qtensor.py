"""QTensor: a quantized array as it is kept in memory, and how to read it back."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax import blocks
from fp4jax.formats import ElementType, Format
from fp4jax.quantizer import Quantizer
from fp4jax.rounding import bits_float, code_value, steps_code, to_steps


class Operand(NamedTuple):
    """A quantized array as a matrix product consumes it: ``values * scale``.

    Attributes:
      values: elements times block scales, exact in ``Format.operand_dtype``.
      scale: the tensor scale (float32 scalar), to be applied to the product; None for 1.
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
        before it is divided too.
      tensor_scale: float32 scalar that decodes, or None if the format has none.
      quantizer: how it was made.
      axis: the block axis of the original array, counted from the end.
      length: K.
      dtype: of the original array.
    """

    codes: Array
    block_scales: Array
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
        scales = self.block_scales.size * self.format.scale.bits // 8
        return self.codes.size + scales + (0 if self.tensor_scale is None else 4)

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

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(1, int(np.prod(self.shape)))
        return (
            f"QTensor({self.format!r}, shape={self.shape}, axis={self.axis}, dtype={self.dtype}, "
            f"{self.nbytes} bytes, {bits:.2f} bits/element)"
        )


def decode_operand(
    values: Operand, quantizer: Quantizer, axis: int, length: int, dtype: np.dtype[Any]
) -> Array:
    """The array of ``dtype`` that ``values`` stand for: scaled, transform undone, cut to length."""
    x = values.values.astype(jnp.float32)
    if values.scale is not None:  # a scalar, or one for each array of a vmapped stack
        scale = values.scale
        x = x * scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))
    if quantizer.hadamard is not None:
        x = quantizer.hadamard.inverse(x, axis)
    return lax.slice_in_dim(x, 0, length, axis=axis).astype(dtype)


def pack_elements(codes: Array, bits: int, axis: int) -> Array:
    """uint8 codes, one an element, packed along ``axis`` (of even length) and that axis moved last.

    ``axis`` is -1 or -2.
    """
    if bits == 4:
        before = codes.ndim + axis
        *outer, n = codes.shape[: before + 1]
        pairs = codes.reshape(*outer, n // 2, 2, *codes.shape[before + 1 :])
        shift = lax.broadcasted_iota(jnp.uint8, pairs.shape, before + 1) << jnp.uint8(2)
        # As a reduction, since compilers would compute the codes twice for two slices, and fuse
        # the packing into whatever reads it: into the backward pass, which would then keep the
        # unpacked array.
        codes = lax.reduce(pairs << shift, np.uint8(0), lax.bitwise_or, (before + 1,))
    return codes if axis == -1 else jnp.swapaxes(codes, -1, -2)


def pack_scales(block: Array, scale: ElementType) -> Array:
    """Block scales (float32, on the grid of ``scale``, or NaN) in the dtype that stores them."""
    if scale.dtype == np.float32:
        return block
    codes = jnp.where(jnp.isnan(block), jnp.uint8(0x7F), steps_code(to_steps(block, scale), scale))
    return lax.bitcast_convert_type(codes, scale.dtype)


@jax.jit
def _operand(q: QTensor) -> Operand:
    assert q.quantizer.tile is not None
    across, along = q.quantizer.tile
    element = q.format.element
    codes, scales = q.codes, q.block_scales.astype(jnp.float32)
    if q.ndim == 1:
        codes, scales = codes[None], scales[None]
    if element.bits == 4:
        codes = jnp.stack([codes & jnp.uint8(0xF), codes >> jnp.uint8(4)], axis=-1)
        codes = codes.reshape(*codes.shape[:-2], -1)
    # Scales cover whole blocks, codes may end inside one.
    scales = blocks.expand(scales, (across, along))[..., : codes.shape[-2], : codes.shape[-1]]
    half = jnp.uint8(1 << (element.bits - 1))
    magnitude = code_value(codes & (half - jnp.uint8(1)), element) * scales
    sign = (codes & half).astype(jnp.uint32) << (32 - element.bits)
    values = bits_float(lax.bitcast_convert_type(magnitude, jnp.uint32) | sign)
    values = values.astype(q.format.operand_dtype)
    if q.quantizer.hadamard is None:
        values = values[..., : q.length]
    return Operand(values[0] if q.ndim == 1 else values, q.tensor_scale)


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(q: QTensor, dtype: np.dtype[Any]) -> Array:
    x = decode_operand(q.operand(), q.quantizer, -1, q.length, dtype)
    return jnp.moveaxis(x, -1, q.axis)
