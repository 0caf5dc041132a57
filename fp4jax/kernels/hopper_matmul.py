"""The product of two packed NVFP4 matrices on Hopper: decoded on their way to its 16-bit `wgmma`.

A CTA computes one tile of the result. One warpgroup fetches packed codes and scales; two others
decode them to shared memory, each half of either operand, and multiply, each half of the rows of
``a`` with all of ``b``. While the tensor cores work on one part of K the next one is decoded.

**Numbers.** float16 holds every E2M1 times E4M3 exactly, as bfloat16 does, and has the better bits:
an E2M1 pattern moved to float16's exponent and upper mantissa bit is the element times 2**-14, its
subnormal included. A scale times 2**7, still a float16, turns that into the product times 2**-7.
So decoding is one exact multiplication, without a flush of subnormals to fear, and what it leaves,
2**-14 of the sum, is taken back exactly. The sums are those of a bfloat16 product.

**Order.** A sum over k does not depend on which of its terms is called first, so codes are used in
the order in which their bits lie: the i-th codes of all words of a tile, for i from 0 to 7. Both
operands agree on it, and nothing needs to be interleaved.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp4jax.kernels.packed import Packed

EFFECTS = True
_PER_WORD = 8  # codes in 32 bits
_BLOCK = 16  # codes that share a scale
_PART = 64  # of K: decoded at a time, a row of 128 bytes, the widest that wgmma reads
_PARTS = 2  # of one fetch: its scales, 16 bytes a row, are the least that TMA copies
_DECODERS = 2  # warpgroups
_FETCHER_REGISTERS = 40
_STAGED = 64  # columns of the result that are stored at a time

_ELEMENT_EXPONENT = -14  # of two, by which a moved E2M1 pattern is too small
_SCALE_EXPONENT = 7  # 448 * 2**7 still is a float16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What a CTA works on.

    Attributes:
      m: rows of the result.
      n: columns of the result.
      k: of the contraction, fetched at a time.
      stages: fetches under way or not yet decoded.
    """

    m: int
    n: int
    k: int
    stages: int


# What `python -m experiments.gpu_check` times.
CANDIDATES = tuple(
    Tiles(m, n, _PARTS * _PART, stages)
    for m, n, stages in ((128, 128, 4), (128, 128, 2), (128, 256, 3), (128, 256, 2))
)
# From which M and N on, the largest first. Chosen by what the compiler says: registers, shared
# memory, the absence of spills, how much is multiplied per decoded element, and, at 2048 x 2048,
# enough tiles for the 132 multiprocessors of an H200. Not tuned on a card yet.
_TABLE = ((2048, 2048, CANDIDATES[2]),)
_SMALL = CANDIDATES[0]


def tiles_for(m: int, n: int, k: int) -> Tiles:
    """The tiles for a product [m, k] x [n, k].

    Padding the operands to multiples of them does not change the answer.
    """
    # Of the shape padded for the smallest tiles: what is padded to these must not meet others then.
    m, n = -(-m // _SMALL.m) * _SMALL.m, -(-n // _SMALL.n) * _SMALL.n
    tiles = next((t for from_m, from_n, t in _TABLE if m >= from_m and n >= from_n), _SMALL)
    return dataclasses.replace(tiles, stages=max(1, min(tiles.stages, -(-k // tiles.k))))


def matmul(a: Packed, b: Packed, out_dtype: Any, *, interpret: bool = False) -> Array:
    """``a @ b.T`` as an array [M, N] of ``out_dtype``, accumulated in float32.

    The float32 sum is multiplied by one tensor scale after the other, then rounded.

    Args:
      a: [M, K], each extent a multiple of that of ``tiles_for(M, N, K)``.
      b: [N, K].
      out_dtype: floating, of 16 or 32 bits.
      interpret: run on any machine, slowly, instead of compiling for the GPU.

    Raises:
      ValueError: if the extents do not fit.
    """
    (m, n), k = (p.codes.shape[0] for p in (a, b)), 2 * a.codes.shape[1]
    return tiled_matmul(a, b, out_dtype, tiles_for(m, n, k), interpret=interpret)


def tiled_matmul(
    a: Packed, b: Packed, out_dtype: Any, tiles: Tiles, *, interpret: bool = False
) -> Array:
    """`matmul` with given tiles."""
    for name, operand, extent in (("a", a, tiles.m), ("b", b, tiles.n)):
        rows, k = operand.codes.shape[0], 2 * operand.codes.shape[1]
        if rows % extent or k % tiles.k or operand.scales.shape != (rows, k // _BLOCK):
            raise ValueError(
                f"{name} must have [r, k/2] codes and [r, k/{_BLOCK}] scales, r a multiple of "
                f"{extent} and k of {tiles.k}, not {operand.codes.shape} and {operand.scales.shape}"
            )
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(
            f"a and b must have equally many columns, not {a.codes.shape} and {b.codes.shape}"
        )
    m, n = a.codes.shape[0], b.codes.shape[0]
    steps = a.codes.shape[1] * 2 // tiles.k
    words = tiles.k // _PER_WORD
    own_rows, own_columns = tiles.m // _DECODERS, tiles.n // _DECODERS

    def kernel(
        a_words: Any, a_scales: Any, a_tensor: Any, b_words: Any, b_scales: Any, b_tensor: Any,
        result: Any, a_decoded: Any, b_decoded: Any, staged: Any, decoded: Any,
    ) -> None:  # fmt: skip
        row, column = lax.axis_index("row"), lax.axis_index("column")
        me = lax.axis_index("warpgroup")
        my_rows, my_columns = (pl.ds(me * own, own) for own in (own_rows, own_columns))

        def accumulate(
            _: Any, a_words: Any, a_scales: Any, b_words: Any, b_scales: Any, sums: Any
        ) -> Any:
            mine = [
                (plgpu.load(w.at[my], layout=plgpu.Layout.WGMMA), _scales(s.at[my]), to, my)
                for w, s, to, my in (
                    (b_words, b_scales, b_decoded, my_columns),
                    (a_words, a_scales, a_decoded, my_rows),
                )
            ]
            for part in range(_PARTS):
                of_part = slice(part * _PART // _PER_WORD, (part + 1) * _PART // _PER_WORD)
                # Nobody reads this buffer any more: both warpgroups have waited for the product
                # before the last one, which did, when they met below for the last one.
                for codes, scales, to, my in mine:
                    to[part, my] = _decode(codes[:, of_part], scales[:, of_part])
                plgpu.commit_smem()
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive_and_wait(decoded)
                plgpu.wgmma(sums, a_decoded.at[part, my_rows], b_decoded.at[part].transpose((1, 0)))
            return sums

        def finish(accumulated: Any) -> None:
            def scoped(sums: Any) -> None:
                accumulated(sums)
                unscaled = sums[...] * jnp.float32(
                    2.0 ** (-2 * (_ELEMENT_EXPONENT + _SCALE_EXPONENT))
                )
                # One scale after the other: their product could underflow.
                scaled = (unscaled * a_tensor[0] * b_tensor[0]).astype(out_dtype)
                mine = result.at[
                    pl.ds(row * tiles.m + me * own_rows, own_rows), pl.ds(column * tiles.n, tiles.n)
                ]
                for start in range(0, tiles.n, _STAGED):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staged[me] = scaled[:, start : start + _STAGED]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staged.at[me], mine.at[:, pl.ds(start, _STAGED)])

            pl.run_scoped(scoped, plgpu.ACC((own_rows, tiles.n), jnp.float32))

        def block(extent: int, transforms: tuple[Any, ...]) -> Any:
            return plgpu.BlockSpec(
                (extent, words),
                lambda step: (0, step),
                transforms=transforms,
                memory_space=plgpu.SMEM,
            )

        rows, columns = pl.ds(row * tiles.m, tiles.m), pl.ds(column * tiles.n, tiles.n)
        plgpu.emit_pipeline_warp_specialized(
            accumulate,
            grid=(steps,),
            in_specs=[
                block(extent, transforms)
                for extent in (tiles.m, tiles.n)
                for transforms in (_swizzled(words, jnp.uint32), ())
            ],
            max_concurrent_steps=min(tiles.stages, steps),
            wg_axis="warpgroup",
            num_compute_wgs=_DECODERS,
            memory_registers=_FETCHER_REGISTERS,
            compute_context=finish,
        )(a_words.at[rows], a_scales.at[rows], b_words.at[columns], b_scales.at[columns])
        plgpu.wait_smem_to_gmem(0)

    half = _swizzled(_PART, jnp.float16)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(m // tiles.m, n // tiles.n),
        grid_names=("row", "column"),
        num_threads=_DECODERS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((_PARTS, tiles.m, _PART), jnp.float16, transforms=half),
            plgpu.SMEM((_PARTS, tiles.n, _PART), jnp.float16, transforms=half),
            plgpu.SMEM(
                (_DECODERS, own_rows, _STAGED), out_dtype, transforms=_swizzled(_STAGED, out_dtype)
            ),
            plgpu.Barrier(num_arrivals=_DECODERS),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else False,
    )(*_by_word(a), *_by_word(b))


def _by_word(operand: Packed) -> tuple[Array, Array, Array]:
    """uint32 words of 8 codes, a scale for each of them, and the tensor scale as a vector.

    A block is two words. Mosaic cannot repeat a scale within a row of registers, so the scales are
    written out twice: an eighth more to fetch, and each thread's two words are of one block.
    """
    codes = operand.codes.reshape(operand.codes.shape[0], -1, 4)
    scales = jnp.repeat(operand.scales, _BLOCK // _PER_WORD, axis=1)
    return lax.bitcast_convert_type(codes, jnp.uint32), scales, operand.tensor.reshape(1)


def _scales(stored: Any) -> Array:
    """The scales in a piece of shared memory, in float16, times two to the ``_SCALE_EXPONENT``."""
    scales = plgpu.load(stored, layout=plgpu.Layout.WGMMA).astype(jnp.float16)
    return scales * jnp.float16(2.0**_SCALE_EXPONENT)


def _decode(words: Array, scales: Array) -> Array:
    """The scaled elements in words [r, w], [r, 8 w]: the first ones of all words, then the second.

    ``scales`` [r, w] are those of `_scales`.
    """
    values = {}
    for i in range(_PER_WORD // 2):
        # The i-th code in either half of a word at once: sign to bit 15, magnitude to bits 9 to 11.
        magnitude = _shifted(words, 9 - 4 * i) & jnp.uint32(0x0E000E00)
        pair = magnitude | _shifted(words, 12 - 4 * i) & jnp.uint32(0x80008000)
        for half in range(2):
            bits = (pair >> jnp.uint32(16 * half)).astype(jnp.uint16)
            element = lax.bitcast_convert_type(bits, jnp.float16)
            values[half * _PER_WORD // 2 + i] = element * scales
    return jnp.concatenate([values[i] for i in range(_PER_WORD)], axis=1)


def _shifted(words: Array, left: int) -> Array:
    """uint32 ``words`` shifted by ``left`` bits, to the right if negative."""
    return words << jnp.uint32(left) if left >= 0 else words >> jnp.uint32(-left)


def _swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """How rows of ``columns`` elements lie in shared memory so that banks do not collide."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)
