"""The quantize kernels by Pallas' Triton backend, for any NVIDIA GPU from Ampere on.

JAX has deprecated that backend: this file, and its entry in `fp4jax.kernels.registry`, can go.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from fp4jax import blocks
from fp4jax.kernels import tile
from fp4jax.kernels.device import compute_capability
from fp4jax.kernels.wanted import Maximum, Numbers, Want, Written
from fp4jax.rounding import Stochastic, element_bits

EFFECTS = False
_TILE = 64  # rows and columns of a program's part of the array
_PATCHES = _TILE // tile.BLOCK
_WARPS = 4
_CONVERTS = 10  # the compute capability from which on an instruction rounds to E2M1


def maxima(x: Array, wanted: tuple[Maximum, ...], *, interpret: bool = False) -> tuple[Array, ...]:
    """The maxima of 16x16 patches of ``x`` [M, N], whole blocks along both axes."""
    rows, columns = _patches(x.shape)
    x = blocks.pad(x, (_TILE, _TILE))
    # As signed numbers, whose order is the same: none is negative.
    shape = jax.ShapeDtypeStruct(_patches(x.shape), jnp.int32)
    spec = pl.BlockSpec((_PATCHES, _PATCHES), lambda i, j: (i, j))

    def patch_maxima(x_ref: Any, _: Any, *results: Any) -> None:
        for (hadamard, axis, finite), result in zip(wanted, results, strict=True):
            planes = _planes(x_ref, axis)
            if hadamard is not None:
                planes = tile.rotate(planes, hadamard.signs, x.dtype == jnp.bfloat16)
            largest = tile.finite_amax(planes) if finite else tile.amax(planes)
            across = 0 if axis == -1 else 1  # the axis that the blocks do not run along
            result[...] = jnp.max(_grouped(largest.astype(jnp.int32), across), axis=across + 1)

    shapes, specs = (shape,) * len(wanted), (spec,) * len(wanted)
    results = _call(patch_maxima, x, (), (), shapes, specs, interpret)
    return tuple(
        lax.bitcast_convert_type(result[:rows, :columns], jnp.uint32) for result in results
    )


def encode(
    x: Array, wants: tuple[Want, ...], numbers: tuple[Numbers, ...], *, interpret: bool = False
) -> tuple[Written, ...]:
    """Every operand wanted of ``x`` [M, N], whole blocks along both axes, in one kernel."""
    unpadded = [_written(want, x.shape) for want in wants]
    x = blocks.pad(x, (_TILE, _TILE))
    numbers = tuple(
        _padded(want, given, x.shape) for want, given in zip(wants, numbers, strict=True)
    )

    converts = not interpret and (compute_capability() or (0, 0))[0] >= _CONVERTS

    def quantize(x_ref: Any, given: Any, *results: Any) -> None:
        for want, refs, result in zip(wants, given, results, strict=True):
            _encode(x_ref, want, refs, result, x.dtype == jnp.bfloat16, converts)

    results = _call(
        quantize,
        x,
        numbers,
        tuple(map(_numbers_spec, wants, numbers)),
        tuple(_written(want, x.shape) for want in wants),
        tuple(map(_written_spec, wants)),
        interpret,
    )
    return tuple(
        jax.tree.map(lambda a, b: a[: b.shape[0], : b.shape[1]], result, wanted)
        for result, wanted in zip(results, unpadded, strict=True)
    )


def _encode(
    x_ref: Any, want: Want, given: Any, result: Any, to_bfloat16: bool, converts: bool
) -> None:
    """Encodes a tile and stores it with the blocks of a row side by side."""
    quantizer, axis = want
    planes = _planes(x_ref, axis)
    if quantizer.hadamard is not None:
        planes = tile.rotate(planes, quantizer.hadamard.signs, to_bfloat16)
    pair: tile.Pair = _converted if converts else tile.nearest
    if isinstance(quantizer.rounding, Stochastic):
        pair = tile.stochastic(_random(axis, given), quantizer.rounding.bits)
    if want.square:
        factor = _repeated(given.factor[...], 0 if axis == -1 else 1)
        low, high = tile.pack(planes, factor, pair)
    else:
        reciprocals = [given.scalars[i] for i in range(1, 9)]
        low, high, scale = tile.encode(planes, given.scalars[0], reciprocals, pair)
        assert scale is not None
        result.scales[...] = (scale if axis == -1 else scale.T).astype(jnp.uint8)
    words = jnp.stack([low, high], axis=-1)
    # Turned together: turned one by one they keep the compiler of jax 0.10.2 busy forever.
    result.words[...] = words if axis == -1 else jnp.transpose(words, (1, 0, 2))


def _random(axis: int, given: Any) -> Callable[[int], Array]:
    """The random words of a plane, by its number."""
    across, along = (1, 0) if axis == -1 else (0, 1)  # axes that rows and blocks lack
    inner, outer = (jnp.expand_dims(ref[...], across) for ref in (given.inner, given.outer))
    position = jnp.expand_dims(given.position[...], along)
    return lambda j: element_bits(position + jnp.uint32(j), inner, outer)


def _converted(_: int, first: Array, second: Array) -> Array:
    """`tile.nearest` by the instruction that Blackwell has for it."""
    (pair,) = plt.elementwise_inline_asm(
        "{ .reg .b8 p; cvt.rn.satfinite.e2m1x2.f32 p, $2, $1; mov.b32 $0, {p, p, p, p}; }",
        args=(first, second),
        constraints="=r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(first.shape, jnp.int32)],
    )
    return (pair & 0xFF).astype(jnp.uint32)


def _planes(x_ref: Any, axis: int) -> list[Array]:
    """The planes of a tile that is laid out as [patches, 16, columns]."""
    if axis == -2:
        return [x_ref[:, j, :].astype(jnp.float32) for j in range(tile.BLOCK)]
    x = x_ref[...].astype(jnp.float32).reshape(_TILE, _PATCHES, tile.BLOCK)
    return _split(x)


def _split(x: Array) -> list[Array]:
    """The parts of ``x`` along its last axis, by halves: Triton splits into two alone."""
    *rest, size = x.shape
    if size == 1:
        return [x.reshape(rest)]
    even, odd = (_split(part) for part in jnp.unstack(x.reshape(*rest, size // 2, 2), axis=-1))
    return [part for pair in zip(even, odd, strict=True) for part in pair]


def _grouped(x: Array, axis: int) -> Array:
    return x.reshape(*x.shape[:axis], _PATCHES, tile.BLOCK, *x.shape[axis + 1 :])


def _repeated(patches: Array, axis: int) -> Array:
    """Each entry sixteen times along ``axis``."""
    shape = list(patches.shape)
    shape.insert(axis + 1, tile.BLOCK)
    wide = jnp.broadcast_to(jnp.expand_dims(patches, axis + 1), shape)
    shape[axis : axis + 2] = [_TILE]
    return wide.reshape(shape)


def _patches(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0] // tile.BLOCK, shape[1] // tile.BLOCK


def _written(want: Want, shape: tuple[int, ...]) -> Written:
    """The results of an operand of an array of this shape."""
    rows, length = shape if want.axis == -1 else shape[::-1]
    along = length // tile.BLOCK
    scales = None if want.square else jax.ShapeDtypeStruct((rows, along), jnp.uint8)
    return Written(jax.ShapeDtypeStruct((rows, along, 2), jnp.uint32), scales)


def _written_spec(want: Want) -> Written:
    def index(i: Any, j: Any) -> tuple[Any, Any]:
        return (i, j) if want.axis == -1 else (j, i)

    scales = None if want.square else pl.BlockSpec((_TILE, _PATCHES), index)
    return Written(pl.BlockSpec((_TILE, _PATCHES, 2), lambda i, j: (*index(i, j), 0)), scales)


def _padded(want: Want, given: Numbers, shape: tuple[int, ...]) -> Numbers:
    """The numbers of an array that is padded to this shape."""
    rows, length = shape if want.axis == -1 else shape[::-1]
    extents = Numbers(None, _patches(shape), (rows,), (rows,), (length // tile.BLOCK,))

    def pad(array: Array | None, extent: tuple[int, ...] | None) -> Array | None:
        if array is None or extent is None or array.shape == extent:
            return array
        return jnp.pad(array, [(0, n - m) for n, m in zip(extent, array.shape, strict=True)])

    return Numbers(*map(pad, given, extents))


def _numbers_spec(want: Want, given: Numbers) -> Numbers:
    """Which part of its numbers a program sees."""
    across, along = (0, 1) if want.axis == -1 else (1, 0)
    row = pl.BlockSpec((_TILE,), lambda *program: (program[across],))
    specs = Numbers(
        scalars=pl.BlockSpec((10,), lambda i, j: (0,)),
        factor=pl.BlockSpec((_PATCHES, _PATCHES), lambda i, j: (i, j)),
        inner=row,
        outer=row,
        position=pl.BlockSpec((_PATCHES,), lambda *program: (program[along],)),
    )
    return Numbers(*(None if g is None else s for g, s in zip(given, specs, strict=True)))


def _call(
    kernel: Callable[..., None],
    x: Array,
    numbers: tuple[Numbers, ...],
    number_specs: tuple[Numbers, ...],
    shapes: Any,
    specs: Any,
    interpret: bool,
) -> Any:
    """Runs ``kernel`` over the tiles of ``x``."""
    rows, columns = x.shape
    x_spec = pl.BlockSpec((_PATCHES, tile.BLOCK, _TILE), lambda i, j: (i, 0, j))
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(rows // _TILE, columns // _TILE),
        in_specs=(x_spec, number_specs),
        out_specs=specs,
        compiler_params=plt.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name=f"fp4jax_{kernel.__name__}",
    )(x.reshape(-1, tile.BLOCK, columns), numbers)
