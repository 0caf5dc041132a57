"""The product of two packed NVFP4 matrices on Blackwell, whose `tcgen05` takes them as they are.

One CTA computes a tile of the result. One warp fetches packed codes and scales ahead, another hands
them to the tensor core, which adds up the tile in its own memory; then all four warps scale and
store it. JAX's interpreter of Mosaic GPU does not know block scales: with a model of those two
instructions it runs the rest, and they have been compiled, not run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp4jax.kernels.packed import Packed

EFFECTS = False
_BLOCK = 16  # elements that share a scale
_LANES, _GROUP = 128, 4  # rows and blocks of a tile of scales
_STAGED = 64  # columns of the result that are stored at a time
_FETCHER, _MULTIPLIER = 0, 1  # warps


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What a CTA works on.

    Attributes:
      m: rows of the result.
      n: columns of the result.
      k: of the contraction, fetched at a time.
      stages: fetches under way or not yet multiplied.
    """

    m: int
    n: int
    k: int
    stages: int


# What `python -m experiments.gpu_check` times.
CANDIDATES = tuple(
    Tiles(128, *others)
    for others in ((128, 256, 5), (128, 256, 3), (256, 256, 3), (128, 128, 8), (256, 128, 6))
)
# From which M and N on, the largest first. Chosen by what fits: shared memory, and enough tiles for
# the 148 multiprocessors of a B200. Not tuned on a card yet.
_TABLE = ((2048, 2048, CANDIDATES[2]),)
_SMALL = CANDIDATES[0]


def tiles_for(m: int, n: int, k: int) -> Tiles:
    """The tiles for a product [m, k] x [n, k]; those of the padded extents are the same."""
    m, n = (-(-extent // _LANES) * _LANES for extent in (m, n))
    return next((tiles for rows, columns, tiles in _TABLE if m >= rows and n >= columns), _SMALL)


def matmul(a: Packed, b: Packed, out_dtype: Any) -> Array:
    """``a @ b.T`` as an array [M, N] of ``out_dtype``, floating, of 16 or 32 bits.

    Extents are multiples of those of ``tiles_for(M, N, K)``.
    """
    (m, half), n = a.codes.shape, b.codes.shape[0]
    return tiled_matmul(a, b, out_dtype, tiles_for(m, n, 2 * half))


def tiled_matmul(a: Packed, b: Packed, out_dtype: Any, tiles: Tiles) -> Array:
    """`matmul` with given tiles."""
    (m, half), n = a.codes.shape, b.codes.shape[0]
    steps = 2 * half // tiles.k
    groups = tiles.k // (_BLOCK * _GROUP)

    def kernel(
        a_codes: Any, a_scales: Any, a_tensor: Any, b_codes: Any, b_scales: Any, b_tensor: Any,
        result: Any, stage: Any, sums: Any, a_factors: Any, b_factors: Any, staged: Any,
        fetched: Any, multiplied: Any, finished: Any,
    ) -> None:  # fmt: skip
        row, column = lax.axis_index("row"), lax.axis_index("column")
        rows, columns = pl.ds(row * tiles.m, tiles.m), pl.ds(column * tiles.n, tiles.n)

        def fetch(step: Array, slot: int) -> None:
            @pl.when(step >= tiles.stages)
            def wait_for_room() -> None:
                plgpu.barrier_wait(multiplied.at[slot])

            part, scales = pl.ds(step * tiles.k, tiles.k), pl.ds(step * groups, groups)
            of_a, of_b = (
                pl.ds(i * extent // _LANES, extent // _LANES)
                for i, extent in ((row, tiles.m), (column, tiles.n))
            )
            for source, to in zip(
                (
                    a_codes.at[rows, part],
                    b_codes.at[columns, part],
                    a_scales.at[of_a, scales],
                    b_scales.at[of_b, scales],
                ),
                stage,
                strict=True,
            ):
                plgpu.copy_gmem_to_smem(source, to.at[slot], fetched.at[slot])

        def multiply(step: Array, slot: int) -> None:
            plgpu.barrier_wait(fetched.at[slot])
            a_part, b_part, a_scaled, b_scaled = (ref.at[slot] for ref in stage)
            # Each stage has its own place for scales, since a copy may overtake a product. What
            # read this place last is done, or nothing would have been fetched.
            plgpu.async_copy_scales_to_tmem(a_scaled, a_factors[slot])
            plgpu.async_copy_scales_to_tmem(b_scaled, b_factors[slot])
            plgpu.tcgen05_mma(
                sums,
                a_part,
                b_part.transpose((1, 0)),
                multiplied.at[slot],
                a_scale=a_factors[slot],
                b_scale=b_factors[slot],
                accumulate=step > 0,
            )

        def each_step(do: Callable[[Array, int], None]) -> None:
            def turn(i: Array, _: None) -> None:
                for slot in range(tiles.stages):
                    step = i * tiles.stages + slot
                    pl.when(step < steps)(functools.partial(do, step, slot))

            lax.fori_loop(0, pl.cdiv(steps, tiles.stages), turn, None)

        @plgpu.warp_map
        def by_warp(warp: Array) -> None:
            @pl.when(warp == _FETCHER)
            def fetch_all() -> None:
                each_step(fetch)

            @pl.when(warp == _MULTIPLIER)
            def multiply_all() -> None:
                each_step(multiply)
                plgpu.tcgen05_commit_arrive(finished)

        plgpu.barrier_wait(finished)
        for start in range(0, tiles.n, _STAGED):
            part = plgpu.async_load_tmem(sums.at[:, pl.ds(start, _STAGED)])
            # One scale after the other: their product could underflow.
            scaled = (part * a_tensor[0] * b_tensor[0]).astype(out_dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = scaled
            plgpu.commit_smem()
            to = result.at[rows, pl.ds(column * tiles.n + start, _STAGED)]
            plgpu.copy_smem_to_gmem(staged, to)
        plgpu.wait_smem_to_gmem(0)

    def codes(extent: int) -> Any:
        shape = (tiles.stages, extent, tiles.k)
        return plgpu.SMEM(shape, jnp.float4_e2m1fn, transforms=_swizzled(tiles.k, 4))

    def scales(extent: int) -> Any:
        shape = (tiles.stages, extent // _LANES, groups, 32, 4 * _GROUP)
        return plgpu.SMEM(shape, jnp.float8_e4m3fn)

    def factors(extent: int) -> Any:
        shape, layout = (extent, tiles.k // _BLOCK), plgpu.TMEMLayout.SCALES_LAYOUT
        return [plgpu.TMEM(shape, jnp.float8_e4m3fn, layout=layout) for _ in range(tiles.stages)]

    bits = 8 * jnp.dtype(out_dtype).itemsize
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(m // tiles.m, n // tiles.n),
        grid_names=("row", "column"),
        scratch_types=[
            tuple(part(extent) for part in (codes, scales) for extent in (tiles.m, tiles.n)),
            plgpu.TMEM((tiles.m, tiles.n), jnp.float32),
            factors(tiles.m),
            factors(tiles.n),
            plgpu.SMEM((tiles.m, _STAGED), out_dtype, transforms=_swizzled(_STAGED, bits)),
            plgpu.Barrier(num_arrivals=4, num_barriers=tiles.stages),
            plgpu.Barrier(num_barriers=tiles.stages, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="fp4jax_blackwell_matmul",
    )(*_arranged(a), *_arranged(b))


def arranged_scales(scales: Array) -> Array:
    """Scales [rows, blocks] as the tensor core wants them: [rows/128, blocks/4, 32, 16].

    In a tile of 128 rows and 4 blocks, row r has its four scales side by side in line r % 32, at
    position r // 32 (PTX ISA, scale factors of ``scale_vec::4X``).
    """
    rows, blocks = scales.shape
    tiles = scales.reshape(rows // _LANES, 4, 32, blocks // _GROUP, _GROUP)
    tiles = tiles.transpose(0, 3, 2, 1, 4)
    return tiles.reshape(rows // _LANES, blocks // _GROUP, 32, 4 * _GROUP)


def _arranged(operand: Packed) -> tuple[Array, Array, Array]:
    """Codes as float4, which takes no pass over them; scales turned, which does; the scale."""
    codes = lax.bitcast_convert_type(operand.codes, jnp.float4_e2m1fn)
    codes = codes.reshape(operand.codes.shape[0], -1)
    return codes, arranged_scales(operand.scales), operand.tensor.reshape(1)


def _swizzled(columns: int, bits: int) -> tuple[Any, ...]:
    """How rows of ``columns`` elements lie in shared memory so that banks do not collide."""
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)
