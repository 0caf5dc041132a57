"""Quantizer: everything that says how an array becomes a `QTensor`, as one value."""

import dataclasses

from fp4jax.formats import Format
from fp4jax.hadamard import Hadamard
from fp4jax.rounding import Nearest, Rounding
from fp4jax.scaling import ScaleRule, default_rule
from fp4jax.watch import Watch


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A format and the way to reach it.

    Attributes:
      format: such as ``fp4jax.NVFP4``.
      tile: extent of a block across and along the block axis; by default (1, format.block). With
        (16, 16) a matrix and its transpose have the same codes. None for a format without blocks.
      rounding: of the elements.
      scale_rule: from blocks to scales; by default `AmaxScale`, for MX formats
        ``PowerOfTwo("floor")``, for a format with two grids `BetterElement`.
      hadamard: a transform of the block axis before anything else, or None.
      watch: reports non-finite elements (see `fp4jax.checked`); or None.

    Raises:
      ValueError: if the tile or the scale rule does not fit the format.
    """

    format: Format
    tile: tuple[int, int] | None = None
    rounding: Rounding = Nearest()
    scale_rule: ScaleRule | None = None
    hadamard: Hadamard | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise TypeError(f"format must be a Format such as fp4jax.NVFP4, not {self.format!r}")
        if not isinstance(self.rounding, Rounding):
            raise TypeError(f"rounding must be Nearest() or Stochastic(...), not {self.rounding!r}")
        if not isinstance(self.hadamard, Hadamard | None):
            raise TypeError(f"hadamard must be Hadamard(...) or None, not {self.hadamard!r}")
        if not hasattr(self.scale_rule, "check") and self.scale_rule is not None:
            raise TypeError(f"scale_rule must be one such as AmaxScale(), not {self.scale_rule!r}")
        object.__setattr__(self, "tile", _checked_tile(self.tile, self.format))
        if self.scale_rule is None:
            object.__setattr__(self, "scale_rule", default_rule(self.format))
        self.rule.check(self.format, self.tile)

    @property
    def rule(self) -> ScaleRule:
        """The scale rule, never None."""
        assert self.scale_rule is not None
        return self.scale_rule

    @property
    def needs_key(self) -> bool:
        """Whether it draws random bits."""
        return self.rounding.needs_key or self.rule.needs_key

    @property
    def square(self) -> bool:
        """Whether a matrix and its transpose quantize to the same numbers."""
        same_blocks = self.tile is None or self.tile[0] == self.tile[1]
        return same_blocks and self.hadamard is None and not self.needs_key

    def window(self, axis: int) -> tuple[int, int] | None:
        """The block's extent over the last two axes when ``axis`` (-1 or -2) is the block axis."""
        return self.tile if self.tile is None or axis == -1 else self.tile[::-1]


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


def _checked_tile(tile: tuple[int, int] | None, format: Format) -> tuple[int, int] | None:
    block = format.block
    if block is None:
        if tile is not None:
            raise ValueError(f"tile must be None for {format!r}, which has no blocks, not {tile}")
        return None
    allowed = [(1, block), (block, block)]
    if tile is None:
        return allowed[0]
    for pair in allowed:
        if tile == pair:
            return pair
    raise ValueError(f"tile must be {allowed[0]} or {allowed[1]} for {format!r}, not {tile}")
