"""Number formats: the grid an element is rounded to, and the scale that a block shares."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ElementType:
    """A grid of numbers, symmetric about zero, and the bit patterns that stand for them.

    From ``2**min_exponent`` upwards the grid has ``2**mantissa_bits`` points per binade; below
    it the points are evenly spaced (subnormals) down to zero. With the maximum inside the first
    binade the whole grid is evenly spaced: so integers are described.

    Attributes:
      name: the field's name for it, such as ``e2m1``.
      bits: storage bits of one element.
      mantissa_bits: explicit mantissa bits.
      min_exponent: exponent of the smallest normal number.
      max: the largest finite magnitude; larger inputs saturate to it.
      dtype: the numpy dtype of the stored pattern, where one exists with this layout; else uint8.
      signed: whether the top bit is a sign. Scales need none.
      twos_complement: whether a negative number is stored as ``2**bits`` less its magnitude.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: np.dtype[Any]
    signed: bool = True
    twos_complement: bool = False

    @property
    def nan_code(self) -> int:
        """The pattern that means NaN in a scale, all bits set but the sign."""
        return (1 << (self.bits - self.signed)) - 1

    def __repr__(self) -> str:
        return self.name.upper()


E2M1 = ElementType("e2m1", 4, 1, 0, 6.0, np.dtype(jnp.float4_e2m1fn))
E4M3 = ElementType("e4m3", 8, 3, -6, 448.0, np.dtype(jnp.float8_e4m3fn))
E5M2 = ElementType("e5m2", 8, 2, -14, 57344.0, np.dtype(jnp.float8_e5m2))
INT4 = ElementType("int4", 4, 2, 2, 7.0, np.dtype(jnp.int4), twos_complement=True)
FP32 = ElementType("fp32", 32, 23, -126, float(np.finfo(np.float32).max), np.dtype(np.float32))
# Powers of two. Byte 0 means 2**-127, below the smallest normal float32: it is handled as 0.0 until
# it multiplies an element (`fp4jax.qtensor.scale_elements`).
E8M0 = ElementType("e8m0", 8, 0, -126, 2.0**127, np.dtype(jnp.float8_e8m0fnu), signed=False)
# E5M3 without a sign: enough range to do without a tensor scale.
UE5M3 = ElementType("ue5m3", 8, 3, -14, 114688.0, np.dtype(np.uint8), signed=False)


@dataclasses.dataclass(frozen=True)
class Format:
    """A block format: ``block`` elements of one type share a scale; blocks may share another.

    Attributes:
      name: as used in tables and recipes.
      element: the grid of the elements.
      block: elements per scale along the contraction axis; None for one scale per tensor.
      scale: the grid of the block scales; None if ``block`` is.
      tensor_scale: whether one float32 scale per tensor multiplies the block scales.
      alternative: a second grid that single blocks may use instead of ``element``; the sign bit
        of the block's scale tells.
    """

    name: str
    element: ElementType
    block: int | None
    scale: ElementType | None
    tensor_scale: bool
    alternative: ElementType | None = None

    def __post_init__(self) -> None:
        if self.element.bits not in (4, 8):
            raise ValueError(f"element must have 4 or 8 bits to be packed, not {self.element.bits}")
        if (self.block is None) != (self.scale is None):
            raise ValueError(f"block and scale go together, not {self.block} and {self.scale}")
        if self.block is None and not self.tensor_scale:
            raise ValueError("tensor_scale must be True where there are no block scales")
        if self.block is not None and (self.block < 2 or self.block % 2):
            raise ValueError(f"block must be an even number of at least 2, not {self.block}")
        if self.alternative and not (self.scale and self.scale.signed):
            raise ValueError(f"scale must have a sign bit to mark alternatives, not {self.scale}")

    @property
    def operand_dtype(self) -> np.dtype[Any]:
        """The dtype that holds element times block scale exactly.

        E2M1 times E4M3 has at most 6 significant bits, so bfloat16 does. A float32 scale fills
        float32 by itself: there the product is rounded once, to float32.
        """
        significant = self.element.mantissa_bits + 1
        if self.scale is not None:
            significant += self.scale.mantissa_bits + 1
        return np.dtype(jnp.bfloat16 if significant <= 8 else jnp.float32)

    def __repr__(self) -> str:
        return self.name.upper()


NVFP4 = Format("nvfp4", E2M1, block=16, scale=E4M3, tensor_scale=True)
NVINT4 = Format("nvint4", INT4, block=16, scale=E4M3, tensor_scale=True)
IF4 = Format("if4", E2M1, block=16, scale=E4M3, tensor_scale=True, alternative=INT4)
FP4_UE5M3 = Format("fp4_ue5m3", E2M1, block=16, scale=UE5M3, tensor_scale=False)
MXFP4 = Format("mxfp4", E2M1, block=32, scale=E8M0, tensor_scale=False)
MXFP8_E4M3 = Format("mxfp8_e4m3", E4M3, block=32, scale=E8M0, tensor_scale=False)
MXFP8_E5M2 = Format("mxfp8_e5m2", E5M2, block=32, scale=E8M0, tensor_scale=False)
FP8_BLOCK = Format("fp8_block", E4M3, block=128, scale=FP32, tensor_scale=False)
FP8_TENSOR = Format("fp8_tensor", E4M3, block=None, scale=None, tensor_scale=True)
FP8_TENSOR_E5M2 = Format("fp8_tensor_e5m2", E5M2, block=None, scale=None, tensor_scale=True)
