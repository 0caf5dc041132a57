"""From an array to its quantized operands by a kernel: maxima, tensor scales, codes."""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp4jax import blocks
from fp4jax.formats import NVFP4
from fp4jax.kernels import tile
from fp4jax.kernels.divided import Axes, divided
from fp4jax.kernels.wanted import Maximum, Numbers, Want, Written
from fp4jax.qtensor import QTensor, pack_scales
from fp4jax.rounding import Nearest, bits_float, row_keys
from fp4jax.scaling import AmaxScale, Blocks


class Backend(Protocol):
    """What a backend provides: `fp4jax.kernels.triton_quantize` is one such module.

    Attributes:
      EFFECTS: whether its interpreter has side effects, so that devices cannot share the work.
    """

    EFFECTS: bool

    def maxima(
        self, x: Array, wanted: tuple[Maximum, ...], *, interpret: bool = False
    ) -> tuple[Array, ...]:
        """The maxima of 16x16 patches of ``x`` [M, N], whole blocks along both axes."""

    def encode(
        self,
        x: Array,
        wants: tuple[Want, ...],
        numbers: tuple[Numbers, ...],
        *,
        interpret: bool = False,
    ) -> tuple[Written, ...]:
        """Every operand wanted of ``x`` [M, N], whole blocks along both axes."""


def refusal(x: Array, want: Want) -> str | None:
    """Why the kernels do not serve a quantizer or an array; None if they do."""
    quantizer = want.quantizer
    rule, hadamard = quantizer.rule, quantizer.hadamard
    if quantizer.format != NVFP4:
        return f"format {quantizer.format!r} is not NVFP4"
    if not isinstance(rule, AmaxScale) or not isinstance(rule.rounding, Nearest):
        return f"scale_rule {rule} is not AmaxScale with nearest rounding"
    if hadamard is not None and hadamard.size != tile.BLOCK:
        return f"hadamard has size {hadamard.size}, not {tile.BLOCK}"
    if hadamard is not None and want.square:
        return "hadamard does not go with square blocks"
    if want.square and x.ndim != 2:
        return f"square blocks of an array with {x.ndim} axes, not 2"
    if quantizer.watch is not None:
        return "watch is not None"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the array has dtype {x.dtype}, not bfloat16 or float32"
    return None


def quantize(
    backend: Backend,
    x: Array,
    wants: tuple[Want, ...],
    words: tuple[Array | None, ...],
    *,
    interpret: bool = False,
) -> tuple[QTensor, ...]:
    """The operands wanted of ``x`` [M, N], bit for bit those of `fp4jax.quantize`.

    Args:
      backend: whose kernels run.
      x: bfloat16 or float32.
      wants: those for which there is no `refusal`.
      words: of each operand, uint32[2, 2] from `key_words` if its quantizer needs a key.
      interpret: whether to run the kernels' bodies as plain JAX.
    """
    patches = blocks.pad(x, (tile.BLOCK, tile.BLOCK))
    needed = tuple(dict.fromkeys(maximum for want in wants for maximum in _maxima(want)))
    axes: Axes = ("rows", "columns")
    whole = interpret and backend.EFFECTS

    def maxima(x: Array) -> tuple[Array, ...]:
        return backend.maxima(x, needed, interpret=interpret)

    found = divided(maxima, [axes], [axes] * len(needed), whole)(patches)
    by_maximum = {m: bits_float(amax) for m, amax in zip(needed, found, strict=True)}

    scales = [_scales(want, by_maximum) for want in wants]
    numbers = tuple(
        _numbers(want, scale, patches.shape, streams)
        for want, scale, streams in zip(wants, scales, words, strict=True)
    )
    arrays, structure = jax.tree.flatten((patches, numbers))

    def encode(*arrays: Array) -> list[Array]:
        x, numbers = jax.tree.unflatten(structure, arrays)
        return jax.tree.leaves(backend.encode(x, wants, numbers, interpret=interpret))

    arguments, results = [axes], []
    for want, given in zip(wants, numbers, strict=True):
        number_axes, written_axes = _axes(want)
        arguments += [a for a, number in zip(number_axes, given, strict=True) if number is not None]
        results += written_axes[:1] if want.square else written_axes
    written = iter(divided(encode, arguments, results, whole)(*arrays))
    return tuple(
        _qtensor(want, scale, next(written), None if want.square else next(written), x)
        for want, scale in zip(wants, scales, strict=True)
    )


class _Scale(NamedTuple):
    """An operand's scales, as far as they are known before its elements are looked at again.

    Attributes:
      tensor: the tensor scale.
      scalars: those of `Numbers`; None for square blocks, whose scales are known.
      block: of square blocks, float32 [M/16, N/16]; else None.
      factor: what square blocks' elements are multiplied by; else None.
    """

    tensor: Array
    scalars: Array | None
    block: Array | None
    factor: Array | None


def _maxima(want: Want) -> list[Maximum]:
    """Of which the operand's scales are made."""
    hadamard = want.quantizer.hadamard
    if want.square:
        return [Maximum(None, -1, True), Maximum(None, -1, False)]
    return [Maximum(hadamard, want.axis if hadamard else -1, True)]


def _scales(want: Want, by_maximum: dict[Maximum, Array]) -> _Scale:
    quantizer = want.quantizer
    patches = [by_maximum[maximum] for maximum in _maxima(want)]
    tensor_amax = blocks.largest(patches[0])
    rule = quantizer.rule
    assert isinstance(rule, AmaxScale)
    if not want.square:
        ten_times = jnp.broadcast_to(tensor_amax, 10)
        ideal, tensor = rule.two_level(quantizer.format, ten_times)
        assert tensor is not None
        scalars = tile.scalar_table(ideal, tensor)
        return _Scale(scalars[9], scalars, None, None)
    good = patches[1] < jnp.float32(np.inf)
    amax = jnp.where(good, patches[1], 0)
    window = quantizer.window(want.axis)
    given = Blocks(amax, amax, tensor_amax, window, want.axis, quantizer.format, None)
    block, factor, tensor, _ = rule(given)
    assert block is not None
    assert tensor is not None
    nan = jnp.float32(np.nan)
    return _Scale(tensor, None, jnp.where(good, block, nan), jnp.where(good, factor, 0))


def _numbers(want: Want, scale: _Scale, shape: tuple[int, ...], words: Array | None) -> Numbers:
    rows, length = shape if want.axis == -1 else shape[::-1]
    inner = outer = position = None
    if words is not None:
        inner, outer = row_keys(words[0], jnp.arange(rows, dtype=jnp.uint32))
        position = jnp.arange(0, length, tile.BLOCK, dtype=jnp.uint32)
    return Numbers(scale.scalars, scale.factor, inner, outer, position)


def _axes(want: Want) -> tuple[Numbers, list[Axes]]:
    """Which axes of an operand's numbers and of what is written for it go with the array's."""
    row, along = ("rows", "columns") if want.axis == -1 else ("columns", "rows")
    given = Numbers((None,), ("rows", "columns"), (row,), (row,), (along,))
    return given, [(row, along, None), (row, along)]


def _qtensor(
    want: Want, scale: _Scale, words: Array, scale_bits: Array | None, x: Array
) -> QTensor:
    quantizer, axis = want
    rows, length = x.shape if axis == -1 else x.shape[::-1]
    codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)
    kept = words.shape[1] * tile.BLOCK if quantizer.hadamard else length
    element_scale = quantizer.format.scale
    assert element_scale is not None
    if scale_bits is None:
        assert scale.block is not None
        block = scale.block if axis == -1 else scale.block.T
        stored = pack_scales(block, None, element_scale)
    else:
        stored = lax.bitcast_convert_type(scale_bits[:rows], element_scale.dtype)
    return QTensor(
        codes=codes[:rows, : -(-kept // 2)],
        block_scales=stored,
        tensor_scale=scale.tensor,
        quantizer=quantizer,
        axis=axis,
        length=length,
        dtype=np.dtype(x.dtype),
    )
