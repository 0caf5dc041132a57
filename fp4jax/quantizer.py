"""Quantizer: everything that says how an array becomes a `QTensor`, as one value."""

import dataclasses

from fp4jax.formats import Format
from fp4jax.hadamard import Hadamard
from fp4jax.rounding import Nearest, Rounding
from fp4jax.scaling import AmaxScale


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A format and the way to reach it.

    Attributes:
      format: such as ``fp4jax.NVFP4``.
      tile: extent of a block across and along the block axis; by default (1, format.block). With
        (16, 16) a matrix and its transpose have the same codes.
      rounding: of the elements; scales are always rounded to nearest.
      scale_rule: from block maxima to scales.
      hadamard: a transform of the block axis before anything else, or None.

    Raises:
      ValueError: if the tile does not fit the format.
    """

    format: Format
    tile: tuple[int, int] | None = None
    rounding: Rounding = Nearest()
    scale_rule: AmaxScale = AmaxScale()
    hadamard: Hadamard | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise TypeError(f"format must be a Format such as fp4jax.NVFP4, not {self.format!r}")
        block = self.format.block
        tile = (1, block) if self.tile is None else tuple(self.tile)
        if len(tile) != 2 or tile[0] not in (1, block) or tile[1] != block:
            raise ValueError(
                f"tile must be (1, {block}) or ({block}, {block}) for {self.format!r}, "
                f"not {self.tile}"
            )
        object.__setattr__(self, "tile", tile)

    @property
    def square(self) -> bool:
        """Whether a matrix and its transpose quantize to the same numbers."""
        assert self.tile is not None
        return self.tile[0] == self.tile[1] and self.hadamard is None

    def window(self, axis: int) -> tuple[int, int]:
        """The block's extent over the last two axes when ``axis`` (-1 or -2) is the block axis."""
        assert self.tile is not None
        across, along = self.tile
        return (across, along) if axis == -1 else (along, across)


def as_quantizer(format_or_quantizer: Format | Quantizer) -> Quantizer:
    """A bare format means nearest rounding, its own block size and no transform."""
    if isinstance(format_or_quantizer, Quantizer):
        return format_or_quantizer
    if isinstance(format_or_quantizer, Format):
        return Quantizer(format_or_quantizer)
    raise TypeError(
        "format_or_quantizer must be a Format such as fp4jax.NVFP4 or a Quantizer, "
        f"not {format_or_quantizer!r}"
    )
