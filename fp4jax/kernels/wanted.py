"""What a quantize kernel is asked for: the operands that are wanted of one array.

Training wants two of most arrays: one with blocks along each axis, the second one transformed. A
kernel reads the array [M, N], whole blocks of 16 along both axes, once and writes all of them.
"""

from typing import Any, NamedTuple

from fp4jax.hadamard import Hadamard
from fp4jax.quantizer import Quantizer


class Want(NamedTuple):
    """One operand: how it is quantized, and along which axis (-1 or -2) its blocks run."""

    quantizer: Quantizer
    axis: int

    @property
    def square(self) -> bool:
        """Whether a block spans sixteen of both axes."""
        assert self.quantizer.tile is not None
        return self.quantizer.tile[0] > 1


class Maximum(NamedTuple):
    """Largest magnitudes of an array's 16x16 patches, as kernels give them: uint32 [M/16, N/16].

    Attributes:
      hadamard: of the transform before it, or None.
      axis: that it runs along.
      finite: whether over finite elements alone; else at least infinity's bits where one is not.
    """

    hadamard: Hadamard | None
    axis: int
    finite: bool


class Numbers(NamedTuple):
    """What a kernel has to know of an operand beside the array itself; or what describes that.

    ``rows`` are the array's lines across the blocks, as many as its other axis is long.

    Attributes:
      scalars: float32[10], see `tile.scalar_table`; None for square blocks.
      factor: float32 [M/16, N/16], what elements of a square block are multiplied by; else None.
      inner: uint32[rows], the first of the rows' keys (`rounding.row_keys`); None for nearest
        rounding, and so the next two.
      outer: uint32[rows], the second.
      position: uint32[blocks], the position of each block's first element in its row.
    """

    scalars: Any
    factor: Any
    inner: Any
    outer: Any
    position: Any


class Written(NamedTuple):
    """What a kernel writes for an operand, the block axis last; or what describes that.

    Attributes:
      words: uint32 [rows, blocks, 2], eight codes each.
      scales: uint8 [rows, blocks], E4M3 bits; None for square blocks.
    """

    words: Any
    scales: Any
