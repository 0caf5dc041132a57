"""From block maxima to block scales."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fp4jax.formats import FP32, Format
from fp4jax.rounding import Nearest, steps_value, to_steps

_FLT_MAX = float(np.finfo(np.float32).max)


class Scales(NamedTuple):
    """What a scale rule decides; all float32.

    Attributes:
      block: the block scales, on the grid of the format's scale type.
      encode: what elements are multiplied by before they are rounded.
      tensor: the scale that all block scales share (it decodes), or None.
    """

    block: Array
    encode: Array
    tensor: Array | None


@dataclasses.dataclass(frozen=True)
class AmaxScale:
    """The block's largest magnitude lands on the element type's largest number.

    With a tensor scale this is NVIDIA's two-level scheme (arXiv 2509.25149, appendix C), in the
    order of operations of TransformerEngine's reference: with ``A`` the tensor's and ``b`` the
    block's amax, ``S = 2688 / A``, ``s = E4M3(b * (S * fl(1/6)))``, ``e = 1 / (s * (1/S))``.
    """

    def __call__(self, block_amax: Array, tensor_amax: Array, format: Format) -> Scales:
        """The scales for finite maxima ``block_amax`` (any shape) and ``tensor_amax`` (scalar)."""
        if format.tensor_scale:
            return _two_level(block_amax, tensor_amax, format)
        if format.scale == FP32:
            return _one_level(block_amax, format)
        raise ValueError(f"AmaxScale has no rule for format {format!r} without a tensor scale")


def _two_level(block_amax: Array, tensor_amax: Array, format: Format) -> Scales:
    element, scale = format.element, format.scale
    S = jnp.minimum(jnp.float32(element.max * scale.max) / tensor_amax, jnp.float32(_FLT_MAX))
    ideal = block_amax * (S * jnp.float32(1 / element.max))
    block = steps_value(Nearest()(to_steps(ideal, scale), None), scale)
    tensor = 1 / S
    return Scales(block, jnp.minimum(1 / (block * tensor), jnp.float32(_FLT_MAX)), tensor)


def _one_level(block_amax: Array, format: Format) -> Scales:
    encode = jnp.minimum(jnp.float32(format.element.max) / block_amax, jnp.float32(_FLT_MAX))
    return Scales(jnp.where(block_amax > 0, 1 / encode, jnp.float32(0)), encode, None)
