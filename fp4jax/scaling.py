"""Scale rules: from the blocks of a tensor to their scales.

A rule is a frozen dataclass that maps `Blocks` to `Scales` and checks which formats it serves. To
add one, write such a class; nothing else needs to know of it (docs/adding-a-format.md).
"""

import dataclasses
from typing import Literal, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from fp4jax import blocks
from fp4jax.division import divide
from fp4jax.formats import E8M0, FP32, ElementType, Format
from fp4jax.rounding import (
    Nearest,
    Rounding,
    bits_float,
    float_bits,
    random_bits,
    steps_value,
    to_steps,
)

_FLT_MAX = float(np.finfo(np.float32).max)
_ONE = np.float32(1)


class Blocks(NamedTuple):
    """What a rule may look at. Maxima are finite, whatever the elements are.

    Attributes:
      elements: float32 [..., M, N], transformed and padded.
      amax: each block's largest magnitude, [..., M/h, N/w] for a window (h, w).
      tensor_amax: that of the tensor, a scalar; of each row (block axis of length 1) for a rule
        that asks for it.
      window: extent of a block over the last two axes.
      axis: the block axis, -1 or -2.
      format: to scale for.
      words: uint32[2] that name the random stream of the scales, if the rule needs a key.
    """

    elements: Array
    amax: Array
    tensor_amax: Array
    window: blocks.Window | None
    axis: int
    format: Format
    words: Array | None


class Scales(NamedTuple):
    """What a scale rule decides; float32.

    Attributes:
      block: the block scales, on the grid of the format's scale type; None for a format without.
      encode: what elements are multiplied by before they are rounded, per block or a scalar.
      tensor: the scale that all block scales share (it decodes), or None.
      alternative: bool per block, whether it uses the format's alternative grid, or None.
    """

    block: Array | None
    encode: Array
    tensor: Array | None
    alternative: Array | None = None


class ScaleRule(Protocol):
    """What `Quantizer.scale_rule` must be."""

    @property
    def needs_key(self) -> bool:
        """Whether it draws random bits."""

    @property
    def per_row(self) -> bool:
        """Whether `Blocks.tensor_amax` is wanted per row."""

    def check(self, format: Format, tile: tuple[int, int] | None) -> None:
        """Raises ValueError if the rule does not serve this format and tile."""

    def __call__(self, blocks: Blocks) -> Scales:
        """The scales."""


@dataclasses.dataclass(frozen=True)
class AmaxScale:
    """The block's largest magnitude lands on the element type's largest number.

    With a tensor scale this is NVIDIA's two-level scheme (arXiv 2509.25149, appendix C), in the
    order of operations of TransformerEngine's reference: with ``A`` the tensor's and ``b`` the
    block's amax, ``S = 2688 / A``, ``s = E4M3(b * (S * fl(1/6)))``, ``e = 1 / (s * (1/S))``.
    Where a scale would be no normal float32 (``A`` below 3.2e-35 for NVFP4, a block's amax below
    5.3e-36 for FP8_BLOCK) everything decodes to 0.

    Attributes:
      headroom: the amax lands on the largest number divided by this. A block scale that E4M3
        rounds down, by up to 1/17, lets scaled elements reach 17/16 of the largest number, where
        they clip: stochastic rounding is then biased. With 17/16 nothing clips, but in blocks
        whose scale is a subnormal E4M3 number (amax below 3.5e-5 of the tensor's), which rounding
        changes by more than that.
      rounding: of the block scales.
    """

    headroom: float = 1.0
    rounding: Rounding = Nearest()

    per_row = False

    def __post_init__(self) -> None:
        if not 1 <= self.headroom <= 2:
            raise ValueError(f"headroom must be from 1 to 2, not {self.headroom}")

    @property
    def needs_key(self) -> bool:
        return self.rounding.needs_key

    def check(self, format: Format, tile: tuple[int, int] | None) -> None:
        if format.scale == E8M0 or format.alternative:
            raise ValueError(f"scale_rule AmaxScale does not serve {format!r}")
        if self.needs_key and (format.scale is None or format.scale == FP32):
            raise ValueError(f"rounding of scales must be Nearest for {format!r}")

    def __call__(self, blocks: Blocks) -> Scales:
        format = blocks.format
        largest = format.element.max / self.headroom
        if format.scale is None:
            encode = _at_most_flt_max(divide(jnp.float32(largest), blocks.tensor_amax))
            return Scales(None, encode, divide(_ONE, encode))
        if format.scale == FP32:
            encode = _at_most_flt_max(divide(jnp.float32(largest), blocks.amax))
            return Scales(jnp.where(blocks.amax > 0, divide(_ONE, encode), 0), encode, None)
        ideal, tensor = self.two_level(format, blocks.tensor_amax)
        random = None
        if blocks.words is not None:
            random = random_bits(blocks.words, blocks.amax.shape, blocks.axis)
        block = _rounded(blocks.amax * ideal, format.scale, self.rounding, random)
        return Scales(block, _encode(block, tensor), tensor)

    def two_level(self, format: Format, tensor_amax: Array) -> tuple[Array, Array | None]:
        """What a block's amax times gives its scale before rounding, and the tensor scale."""
        assert format.scale is not None
        largest = format.element.max / self.headroom
        ideal = jnp.float32(1 / largest)
        if not format.tensor_scale:
            return ideal, None
        S = _at_most_flt_max(divide(jnp.float32(largest * format.scale.max), tensor_amax))
        return S * ideal, divide(_ONE, S)


@dataclasses.dataclass(frozen=True)
class RowScaled:
    """`AmaxScale` with a tensor scale for each row instead of one for all."""

    needs_key = False
    per_row = True

    def check(self, format: Format, tile: tuple[int, int] | None) -> None:
        AmaxScale().check(format, tile)
        if not format.tensor_scale or tile is None or tile[0] != 1:
            raise ValueError(
                "scale_rule RowScaled needs a format with block and tensor scales and a tile of "
                f"one row, not {format!r} with tile {tile}"
            )

    def __call__(self, blocks: Blocks) -> Scales:
        return AmaxScale()(blocks)


@dataclasses.dataclass(frozen=True)
class PowerOfTwo:
    """The MX formats' scales, powers of two (OCP Microscaling Formats 1.0, and three variants).

    With ``emax`` the exponent of the element type's largest number, the exponent is

    - ``floor``: ``floor(log2 amax) - emax``, the OCP's: up to the next power of two clips;
    - ``ceil``: ``ceil(log2 amax) - emax``;
    - ``even``: floor's, after ``amax`` is rounded half up to the element's mantissa bits;
    - ``rceil``: ``ceil(log2(amax / largest))``, the smallest that lets nothing clip,

    clipped to [-127, 127]. Exponents come from the float's bits, not from a logarithm.
    """

    mode: Literal["floor", "ceil", "even", "rceil"] = "floor"

    needs_key = False
    per_row = False

    def __post_init__(self) -> None:
        if self.mode not in ("floor", "ceil", "even", "rceil"):
            raise ValueError(f"mode must be 'floor', 'ceil', 'even' or 'rceil', not {self.mode!r}")

    def check(self, format: Format, tile: tuple[int, int] | None) -> None:
        if format.scale != E8M0:
            raise ValueError(f"scale_rule {self} needs a format with E8M0 scales, not {format!r}")

    def __call__(self, blocks: Blocks) -> Scales:
        element = blocks.format.element
        bits, emax = float_bits(blocks.amax), int(np.floor(np.log2(element.max)))
        lowered: Array | int = emax
        if self.mode == "rceil":
            # Small maxima are raised by 2**24, so that the quotient is no subnormal number.
            small = blocks.amax < jnp.float32(1)
            raised = jnp.where(small, blocks.amax * jnp.float32(2.0**24), blocks.amax)
            bits = float_bits(divide(raised, _each(element.max, raised)))
            lowered = jnp.where(small, jnp.int32(24), jnp.int32(0))
        if self.mode == "even":
            bits = bits + jnp.uint32(1 << (22 - element.mantissa_bits))
        elif self.mode in ("ceil", "rceil"):
            bits = bits + jnp.uint32(0x7FFFFF)
        # The scale's exponent field; 0 stands for 2**-127, which is no normal float32.
        field = jnp.clip((bits >> jnp.uint32(23)).astype(jnp.int32) - lowered, 0, 254)
        shifted = field.astype(jnp.uint32) << jnp.uint32(23)
        return Scales(bits_float(shifted), bits_float(jnp.uint32(254 << 23) - shifted), None)


@dataclasses.dataclass(frozen=True)
class FourOverSix:
    """Lets a block's amax land on 4 instead of 6 where that makes its error smaller.

    Between 4 and 6 E2M1 has no point. Two scales are tried, ``E4M3(s)`` and ``E4M3(1.5 s)``; the
    one with the lower error under nearest rounding is kept, the first if equal (arXiv
    2512.02010). Order and grouping of operations are those of TransformerEngine's reference, and
    so is this: where squared errors leave float32's range (elements beyond about 1e18 or below
    1e-18), they tie and the amax lands on 6.

    Attributes:
      error: ``mae`` or ``mse``, summed over the block.
      max_scale: the tensor's amax gets this block scale: 256, which leaves 1.5 times it
        representable, or 448.
    """

    error: Literal["mae", "mse"] = "mae"
    max_scale: Literal[256, 448] = 256

    needs_key = False
    per_row = False

    def __post_init__(self) -> None:
        if self.error not in ("mae", "mse"):
            raise ValueError(f"error must be 'mae' or 'mse', not {self.error!r}")
        if self.max_scale not in (256, 448):
            raise ValueError(f"max_scale must be 256 or 448, not {self.max_scale}")

    def check(self, format: Format, tile: tuple[int, int] | None) -> None:
        if format.element.name != "e2m1" or not format.tensor_scale or format.alternative:
            raise ValueError(f"scale_rule FourOverSix serves NVFP4 and the like, not {format!r}")

    def __call__(self, blocks: Blocks) -> Scales:
        element, scale = blocks.format.element, blocks.format.scale
        assert scale is not None
        amax = blocks.tensor_amax
        S = _at_most_flt_max(divide(jnp.float32(element.max * self.max_scale), amax))
        tensor = divide(_ONE, S)
        base = divide(blocks.amax, _each(element.max, blocks.amax)) * S
        candidates = []
        for factor in (1.0, 1.5):
            block = _rounded(base * jnp.float32(factor), scale, Nearest(), None)
            encode = _encode(block, tensor)
            # The reference decodes with another grouping here than everywhere else.
            decoded = _magnitude(blocks, block, encode, element) * amax
            decoded = divide(decoded, _each(element.max * self.max_scale, decoded))
            error = _block_error(blocks, decoded, self.error)
            candidates.append((error, block, encode))
        (error6, block6, encode6), (error4, block4, encode4) = candidates
        use4 = error4 < error6
        return Scales(jnp.where(use4, block4, block6), jnp.where(use4, encode4, encode6), tensor)


@dataclasses.dataclass(frozen=True)
class BetterElement:
    """For a format with an alternative grid: each block takes the grid with the lower error.

    Both grids use the same tensor scale, that of the format's own element type; their block
    scales put the block's amax on their own largest number.

    Attributes:
      error: ``mae`` or ``mse``, summed over the block, under nearest rounding; the format's own
        element type if equal.
    """

    error: Literal["mae", "mse"] = "mse"

    needs_key = False
    per_row = False

    def check(self, format: Format, tile: tuple[int, int] | None) -> None:
        if format.alternative is None or not format.tensor_scale:
            raise ValueError(f"scale_rule BetterElement needs two grids; {format!r} has one")

    def __call__(self, blocks: Blocks) -> Scales:
        format = blocks.format
        assert format.scale is not None
        assert format.alternative is not None
        S = _at_most_flt_max(
            divide(jnp.float32(format.element.max * format.scale.max), blocks.tensor_amax)
        )
        tensor = divide(_ONE, S)
        candidates = []
        for element in (format.element, format.alternative):
            ideal = blocks.amax * (S * jnp.float32(1 / element.max))
            block = _rounded(ideal, format.scale, Nearest(), None)
            encode = _encode(block, tensor)
            decoded = _magnitude(blocks, block, encode, element) * tensor
            error = _block_error(blocks, decoded, self.error)
            candidates.append((error, block, encode))
        (own_error, own_block, own_encode), (other_error, other_block, other_encode) = candidates
        other = other_error < own_error
        return Scales(
            jnp.where(other, other_block, own_block),
            jnp.where(other, other_encode, own_encode),
            tensor,
            other,
        )


def default_rule(format: Format) -> ScaleRule:
    """The rule for a format that is named without one."""
    if format.scale == E8M0:
        return PowerOfTwo("floor")
    return BetterElement() if format.alternative else AmaxScale()


def _at_most_flt_max(x: Array) -> Array:
    return jnp.minimum(x, jnp.float32(_FLT_MAX))


def _rounded(x: Array, grid: ElementType, rounding: Rounding, random: Array | None) -> Array:
    return steps_value(rounding(to_steps(x, grid), random), grid)


def _encode(block: Array, tensor: Array | None) -> Array:
    return _at_most_flt_max(divide(_ONE, block if tensor is None else block * tensor))


def _each(constant: float, x: Array) -> Array:
    """A float32 array of ``x``'s shape full of a constant, to divide by; ``x`` is not negative.

    XLA turns a division by a constant, or by a broadcast scalar, into a multiplication by its
    rounded reciprocal. That the sign bits of ``x`` are never set it cannot know.
    """
    return bits_float(float_bits(jnp.float32(constant)) | (float_bits(x) >> jnp.uint32(31)))


def _magnitude(given: Blocks, block: Array, encode: Array, element: ElementType) -> Array:
    """Nearest-rounded elements times block scales, without signs and tensor scale."""
    ratio = given.elements * blocks.expand(encode, given.window)
    steps = Nearest()(to_steps(ratio, element), None)
    return steps_value(steps, element) * blocks.expand(block, given.window)


def _block_error(given: Blocks, decoded: Array, error: Literal["mae", "mse"]) -> Array:
    """Each block's summed error where its elements decode to the magnitudes ``decoded``.

    Sums run along the block axis in order and then, for square blocks, pairwise over the rows:
    sums of floats depend on it, and near ties decide by the last bit.
    """
    # The maxima change nothing. They keep product and sum apart, which compilers fuse into one
    # rounding on one machine and not on another.
    difference = jnp.abs(jnp.maximum(decoded, 0) - jnp.abs(given.elements))
    if error == "mse":
        difference = jnp.maximum(difference * difference, 0)
    assert given.window is not None
    height, width = given.window
    along, across = (width, height) if given.axis == -1 else (height, width)
    total = blocks.sum_in_order(difference, along, given.axis)
    return blocks.sum_pairwise(total, across, -3 - given.axis)
