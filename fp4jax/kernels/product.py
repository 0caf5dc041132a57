"""The product of two `QTensor`s by a kernel: padded to its tiles, divided among devices."""

from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax import blocks
from fp4jax.formats import NVFP4
from fp4jax.kernels.divided import divided
from fp4jax.kernels.packed import Packed
from fp4jax.qtensor import QTensor
from fp4jax.quantizer import Quantizer

_BLOCK = 16


class Tiles(Protocol):
    """What a kernel's extents along M, N and K must be multiples of."""

    m: int
    n: int
    k: int


class Backend(Protocol):
    """What a backend provides: `fp4jax.kernels.hopper_matmul` is one such module.

    Attributes:
      EFFECTS: whether its interpreter has side effects, so that devices cannot share the work.
    """

    EFFECTS: bool

    def tiles_for(self, m: int, n: int, k: int) -> Tiles:
        """The tiles for a product of these extents."""

    def matmul(self, a: Packed, b: Packed, out_dtype: Any, *, interpret: bool = False) -> Array:
        """The product [M, N] of operands that are whole tiles."""


def refusal(a: Quantizer, b: Quantizer) -> str | None:
    """Why the kernels do not multiply what these made; None if they do."""
    for name, quantizer in (("a", a), ("b", b)):
        if quantizer.format != NVFP4:
            return f"{name} has format {quantizer.format!r}, not NVFP4"
        if quantizer.rule.per_row:
            return f"{name} has a tensor scale for each row"
    return None


def multiply(
    backend: Backend, a: QTensor, b: QTensor, out_dtype: np.dtype[Any], *, interpret: bool = False
) -> Array:
    """[M, N] for operands that are contracted over their block axes, for which is no `refusal`."""

    def run(*arrays: Array) -> tuple[Array]:
        left, right = Packed(*arrays[:3]), Packed(*arrays[3:])
        (m, half), n = left.codes.shape, right.codes.shape[0]
        tiles = backend.tiles_for(m, n, 2 * half)
        left, right = _padded(left, tiles.m, tiles.k), _padded(right, tiles.n, tiles.k)
        options = {"interpret": True} if interpret else {}
        return (backend.matmul(left, right, out_dtype, **options)[:m, :n],)

    arguments = [("m", None), ("m", None), (), ("n", None), ("n", None), ()]
    (y,) = divided(run, arguments, [("m", "n")], whole=interpret and backend.EFFECTS)(
        *packed(a), *packed(b)
    )
    return y


def packed(q: QTensor) -> Packed:
    """The arrays of ``q``, whole blocks, with a scale for each row."""
    assert q.block_scales is not None
    assert q.tensor_scale is not None
    codes = blocks.pad(q.codes, (1, _BLOCK // 2))
    scales = q.block_scales
    if q.quantizer.tile == (_BLOCK, _BLOCK):
        scales = jnp.repeat(scales, _BLOCK, 0)[: codes.shape[0]]
    # What the backward pass keeps has them as bytes.
    return Packed(codes, lax.bitcast_convert_type(scales, jnp.float8_e4m3fn), q.tensor_scale)


def _padded(operand: Packed, rows: int, length: int) -> Packed:
    """With rows and blocks of zeros until whole tiles are full."""
    return operand._replace(
        codes=blocks.pad(operand.codes, (rows, length // 2)),
        scales=blocks.pad(operand.scales, (rows, length // _BLOCK)),
    )
