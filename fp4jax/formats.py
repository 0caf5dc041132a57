"""Number formats: the grid an element is rounded to, and the scale that a block shares."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ElementType:
    """A grid of small floating-point numbers, symmetric about zero.

    From ``2**min_exponent`` upwards the grid has ``2**mantissa_bits`` points per binade; below
    it the points are evenly spaced (subnormals) down to zero.

    Attributes:
      name: the field's name for it, such as ``e2m1``.
      bits: storage bits of one element, sign included.
      mantissa_bits: explicit mantissa bits.
      min_exponent: exponent of the smallest normal number.
      max: the largest finite magnitude; larger inputs saturate to it.
      dtype: the numpy dtype that has this bit layout.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float
    dtype: np.dtype[Any]

    def __repr__(self) -> str:
        return self.name.upper()


E2M1 = ElementType("e2m1", 4, 1, 0, 6.0, np.dtype(jnp.float4_e2m1fn))
E4M3 = ElementType("e4m3", 8, 3, -6, 448.0, np.dtype(jnp.float8_e4m3fn))
FP32 = ElementType("fp32", 32, 23, -126, float(np.finfo(np.float32).max), np.dtype(np.float32))


@dataclasses.dataclass(frozen=True)
class Format:
    """A block format: ``block`` elements of one type share a scale; blocks may share another.

    Attributes:
      name: as used in tables and recipes.
      element: the grid of the elements.
      block: elements per scale along the contraction axis.
      scale: the grid of the block scales.
      tensor_scale: whether one float32 scale per tensor multiplies the block scales.
    """

    name: str
    element: ElementType
    block: int
    scale: ElementType
    tensor_scale: bool

    def __post_init__(self) -> None:
        if self.block < 2 or self.block % 2:
            raise ValueError(f"block must be an even number of at least 2, not {self.block}")

    @property
    def operand_dtype(self) -> np.dtype[Any]:
        """The dtype that holds element times block scale exactly.

        E2M1 times E4M3 has at most 6 significant bits, so bfloat16 does. A float32 scale fills
        float32 by itself: there the product is rounded once, to float32.
        """
        significant = self.element.mantissa_bits + self.scale.mantissa_bits + 2
        return np.dtype(jnp.bfloat16 if significant <= 8 else jnp.float32)

    def __repr__(self) -> str:
        return self.name.upper()


NVFP4 = Format("nvfp4", E2M1, block=16, scale=E4M3, tensor_scale=True)
FP8_BLOCK = Format("fp8_block", E4M3, block=128, scale=FP32, tensor_scale=False)
