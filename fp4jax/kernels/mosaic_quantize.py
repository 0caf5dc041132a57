"""NVFP4 quantization for Hopper and Blackwell in Pallas Mosaic GPU; needs jax 0.12.

A program copies a tile of the array to shared memory and computes everything that is wanted from
there. Several programs share a multiprocessor, so that some compute while others copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp4jax.hadamard import Hadamard
from fp4jax.kernels import tile
from fp4jax.kernels.wanted import Maximum, Numbers, Want, Written
from fp4jax.rounding import Stochastic, element_bits

EFFECTS = True
Ref = Any

# A tile is 4 groups of 16 rows and 2 halves of 8 groups of 16 columns. A plane has an element for
# each of the 128 threads of a program: for blocks along rows one of each of 16 rows and 8 groups
# of columns, for blocks along columns one of each of 8 groups and their 16 columns.
_ROWS, _COLUMNS = 64, 256
_TILE = (4, 16, 2, 8, 16)
_ROW_PLANE, _COLUMN_PLANE = (16, 8), (8, 16)


def maxima(x: Array, wanted: tuple[Maximum, ...], *, interpret: bool = False) -> tuple[Array, ...]:
    """The maxima that are wanted of ``x``.

    Args:
      x: bfloat16 or float32 [M, N], multiples of 16; read once.
      wanted: which.
      interpret: whether to run on a CPU, slowly.
    """

    def body(x_ref: Ref, *refs: Ref) -> None:
        *results, tile_ref, copied = refs
        _copy_tile(x_ref, tile_ref, copied)

        def step(i: Array, _: None) -> None:
            for maximum, result in zip(wanted, results, strict=True):
                _store_maxima(maximum, tile_ref, result, i // 2, i % 2)

        lax.fori_loop(0, 8, step, None)

    rows, columns = x.shape
    x = _tiled(x)
    out = jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:4]), jnp.uint32)
    results = _launch(body, x, (), [out] * len(wanted), interpret)
    return tuple(r.reshape(x.shape[0], -1)[: rows // 16, : columns // 16] for r in results)


def encode(
    x: Array, wants: tuple[Want, ...], numbers: tuple[Numbers, ...], *, interpret: bool = False
) -> tuple[Written, ...]:
    """The operands that are wanted of ``x``.

    Args:
      x: bfloat16 or float32 [M, N], multiples of 16; read once.
      wants: which, in NVFP4.
      numbers: what is to be known for each of them.
      interpret: whether to run on a CPU, slowly.
    """

    def body(x_ref: Ref, given: Any, written: Any, tile_ref: Ref, copied: Ref) -> None:
        _copy_tile(x_ref, tile_ref, copied)
        for want, known, result in zip(wants, given, written, strict=True):
            along = _encode_rows if want.axis == -1 else _encode_columns
            along(want, tile_ref, known, result)

    shape = x.shape
    x = _tiled(x)
    given = tuple(_tiled_numbers(n, want.axis) for want, n in zip(wants, numbers, strict=True))
    out = [_written(want, x.shape) for want in wants]
    (written,) = _launch(body, x, (given,), [out], interpret)
    return tuple(_trimmed(want, w, shape) for want, w in zip(wants, written, strict=True))


def _launch(
    body: Callable[..., None], x: Array, more: tuple[Any, ...], out: Any, interpret: bool
) -> Any:
    """Runs ``body`` as a program for each tile of ``x``."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[plgpu.SMEM(_TILE, x.dtype), plgpu.Barrier()],
        # Tiles below each other one after the other: what they write into one line of memory
        # meets in the cache.
        grid=(x.shape[2] // 2, x.shape[0] // 4),
        grid_names=("column", "row"),
        # Lane semantics, because layout inference refuses refs in five dimensions. No barriers
        # around loads and stores: no thread reads what another wrote.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, *more)


def _place() -> tuple[Array, Array]:
    """The first group of rows and the first half of columns in the program's tile."""
    return lax.axis_index("row") * 4, lax.axis_index("column") * 2


def _copy_tile(x_ref: Ref, tile_ref: Ref, copied: Ref) -> None:
    row, column = _place()
    plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, 4), :, pl.ds(column, 2)], tile_ref, copied)
    plgpu.barrier_wait(copied)


# Planes


def _layout(shape: tuple[int, int]) -> Any:
    """One element per thread, neighbours along the second axis, a quarter of rows for each warp."""
    tiling = plgpu.Tiling((shape, (shape[0] // 4, shape[1]), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _load(ref: Ref, layout: Any) -> Array:
    # Optimized loads and stores are those free of bank conflicts, or else an error.
    return plgpu.load(ref, layout=layout, optimized=False)


def _store(ref: Ref, x: Array) -> None:
    plgpu.store(ref, x, optimized=False)


def _spread(ref: Ref, axis: int, shape: tuple[int, int]) -> Array:
    """A plane of the numbers in a vector, each along the other axis."""
    vector = _load(ref, _layout(shape).reduce(1 - axis))
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), _layout(shape))


def _row_planes(tile_ref: Ref, group: Array, half: Array) -> list[Array]:
    # Loaded as one array, so that the compiler knows that the elements lie side by side.
    last_first = tile_ref.at[group, :, half].transpose((2, 0, 1))
    elements = _load(last_first, _layout(_ROW_PLANE))
    return [elements[j].astype(jnp.float32) for j in range(16)]


def _column_planes(tile_ref: Ref, group: int | Array, half: Array) -> list[Array]:
    rows = (_load(tile_ref.at[group, j, half], _layout(_COLUMN_PLANE)) for j in range(16))
    return [row.astype(jnp.float32) for row in rows]


def _rotated(planes: list[Array], hadamard: Hadamard | None, dtype: Any) -> list[Array]:
    if hadamard is None:
        return planes
    return tile.rotate(planes, hadamard.signs, dtype == jnp.bfloat16)


def _store_words(ref: Ref, words: Sequence[Array]) -> None:
    """Stores planes so that the elements of a thread lie side by side."""
    joined = lax.concatenate([lax.reshape(word, (1, *word.shape)) for word in words], 0)
    _store(ref.transpose((2, 0, 1)), joined)


# Maxima


def _store_maxima(maximum: Maximum, tile_ref: Ref, result: Ref, group: Array, half: Array) -> None:
    # Without a transform either axis will do, and with columns no warp waits for another.
    by_rows = maximum.hadamard is not None and maximum.axis == -1
    planes = (_row_planes if by_rows else _column_planes)(tile_ref, group, half)
    planes = _rotated(planes, maximum.hadamard, tile_ref.dtype)
    of_blocks = tile.finite_amax(planes) if maximum.finite else tile.amax(planes)
    row, column = _place()
    _store(result.at[row + group, column + half], jnp.max(of_blocks, 0 if by_rows else 1))


# Encoding


def _encode_rows(want: Want, tile_ref: Ref, given: Numbers, written: Written) -> None:
    row, column = _place()
    scalars = _scalars(given)

    def step(i: Array, _: None) -> None:
        group, half = i // 2, i % 2
        rows, columns = row + group, column + half
        known = Numbers(
            scalars,
            _if(given.factor, lambda ref: _spread(ref.at[rows, columns], 1, _ROW_PLANE)),
            _if(given.inner, lambda ref: _spread(ref.at[rows], 0, _ROW_PLANE)),
            _if(given.outer, lambda ref: _spread(ref.at[rows], 0, _ROW_PLANE)),
            _if(given.position, lambda ref: _spread(ref.at[columns], 1, _ROW_PLANE)),
        )
        encoded = _encoded(want, _row_planes(tile_ref, group, half), known, tile_ref.dtype)
        _store_words(written.words.at[rows, :, columns], [encoded.low, encoded.high])
        if encoded.scale is not None:
            assert written.scales is not None
            _store(written.scales.at[rows, :, columns], encoded.scale.astype(jnp.uint8))

    lax.fori_loop(0, 8, step, None)


def _encode_columns(want: Want, tile_ref: Ref, given: Numbers, written: Written) -> None:
    row, column = _place()
    scalars = _scalars(given)

    def of_half(half: Array, _: None) -> None:
        columns = column + half
        inner, outer = (
            _if(keys, lambda ref: _load(ref.at[columns], _layout(_COLUMN_PLANE)))
            for keys in (given.inner, given.outer)
        )

        def of_group(group: Array, lines: tuple[Array, ...]) -> tuple[Array, ...]:
            rows = row + group
            known = Numbers(
                scalars,
                _if(given.factor, lambda ref: _spread(ref.at[rows, columns], 0, _COLUMN_PLANE)),
                inner,
                outer,
                _if(given.position, lambda ref: ref[rows]),
            )
            planes = _column_planes(tile_ref, group, half)
            low, high, scale = _encoded(want, planes, known, tile_ref.dtype)
            # What a column has of the tile is stored at once. A loop cannot choose among
            # registers, so that earlier groups move on to make room for the next.
            scales, _, _, *words = lines
            if scale is not None:
                scales = (scales >> jnp.uint32(8)) | (scale << jnp.uint32(24))
            return scales, *words, low, high

        zero = plgpu.layout_cast(jnp.zeros(_COLUMN_PLANE, jnp.uint32), _layout(_COLUMN_PLANE))
        scales, *words = lax.fori_loop(0, 4, of_group, (zero,) * 9)
        at = columns, slice(None), slice(None), row // 4
        _store_words(written.words.at[at], words)
        if written.scales is not None:
            _store(written.scales.at[at], scales)

    lax.fori_loop(0, 2, of_half, None)


def _encoded(want: Want, planes: list[Array], known: Numbers, dtype: Any) -> tile.Encoded:
    """The blocks of these planes; of ``known``, the scalars are a list and the rest are planes."""
    planes = _rotated(planes, want.quantizer.hadamard, dtype)
    pair: tile.Pair = tile.nearest
    rounding = want.quantizer.rounding
    if isinstance(rounding, Stochastic):

        def random(j: int) -> Array:
            return element_bits(known.position + jnp.uint32(j), known.inner, known.outer)

        pair = tile.stochastic(random, rounding.bits)
    if known.factor is not None:
        return tile.Encoded(*tile.pack(planes, known.factor, pair), None)
    ideal, *reciprocals = known.scalars
    return tile.encode(planes, ideal, reciprocals, pair)


def _scalars(given: Numbers) -> Any:
    return _if(given.scalars, lambda ref: [ref[i] for i in range(9)])


def _if(ref: Ref | None, read: Callable[[Ref], Any]) -> Any:
    return None if ref is None else read(ref)


# Shapes in which a program's parts are named by whole numbers


def _padded(x: Array, *size: int) -> Array:
    """``x`` with zeros up to multiples of ``size``."""
    return jnp.pad(x, [(0, -n % m) for n, m in zip(x.shape, size, strict=True)])


def _tiled(x: Array) -> Array:
    x = _padded(x, _ROWS, _COLUMNS)
    return x.reshape(x.shape[0] // 16, 16, x.shape[1] // 128, 8, 16)


def _tiled_numbers(numbers: Numbers, axis: int) -> Numbers:
    scalars, factor, inner, outer, position = numbers
    if factor is not None:
        factor = _padded(factor, _ROWS // 16, _COLUMNS // 16)
        factor = factor.reshape(factor.shape[0], -1, 8)
    lines, blocks = (_ROWS, _COLUMNS // 16) if axis == -1 else (_COLUMNS, _ROWS // 16)
    planes = (-1, 16) if axis == -1 else (-1, 8, 16)
    inner, outer = (
        _if(key, lambda key: _padded(key, lines).reshape(planes)) for key in (inner, outer)
    )
    if position is not None:
        position = _padded(position, blocks)
        position = position.reshape(-1, 8) if axis == -1 else position
    return Numbers(scalars, factor, inner, outer, position)


def _written(want: Want, tiled: tuple[int, ...]) -> Written:
    """What is written of an array of this tiled shape."""
    groups, _, halves, _, _ = tiled
    if want.axis == -1:
        shape, words, dtype = (groups, 16, halves, 8), 2, jnp.uint8
    else:
        # The four blocks that a column has in a tile together.
        shape, words, dtype = (halves, 8, 16, groups // 4), 8, jnp.uint32
    scales = None if want.square else jax.ShapeDtypeStruct(shape, dtype)
    return Written(jax.ShapeDtypeStruct((*shape, words), jnp.uint32), scales)


def _trimmed(want: Want, written: Written, shape: tuple[int, ...]) -> Written:
    """The result for an array of this shape, without padding."""
    lines, length = shape if want.axis == -1 else shape[::-1]
    padded = lines + -lines % (_ROWS if want.axis == -1 else _COLUMNS)
    words = written.words.reshape(padded, -1, 2)[:lines, : length // 16]
    if written.scales is None:
        return Written(words, None)
    scales = lax.bitcast_convert_type(written.scales, jnp.uint8).reshape(padded, -1)
    return Written(words, scales[:lines, : length // 16])
