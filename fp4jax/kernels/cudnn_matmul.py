"""The product of two packed NVFP4 matrices by `jax.nn.scaled_matmul`: cuDNN, on Blackwell.

It takes no tensor scales: they multiply the float32 result.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp4jax.kernels.packed import Packed

EFFECTS = False


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What extents must be multiples of: whole scale tiles of 128 x 4 blocks."""

    m: int = 128
    n: int = 128
    k: int = 64


def tiles_for(m: int, n: int, k: int) -> Tiles:
    """The same for all shapes."""
    return Tiles()


def matmul(a: Packed, b: Packed, out_dtype: Any) -> Array:
    """``a @ b.T`` as an array [M, N] of ``out_dtype``."""
    (y,) = jax.nn.scaled_matmul(
        _float4(a), _float4(b), a.scales[None], b.scales[None], preferred_element_type=jnp.float32
    )
    # One scale after the other: their product could underflow.
    return (y * a.tensor * b.tensor).astype(out_dtype)


def _float4(operand: Packed) -> Array:
    """The codes as ``float4_e2m1fn`` [1, rows, K]."""
    pairs = lax.bitcast_convert_type(operand.codes, jnp.float4_e2m1fn)
    return pairs.reshape(1, operand.codes.shape[0], -1)
