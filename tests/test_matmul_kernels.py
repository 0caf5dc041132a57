"""Kernels of scaled_matmul: Hopper's by its interpreter, and the scales that Blackwell's gets."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax as fp4
from fp4jax.kernels import registry
from fp4jax.kernels.packed import Packed

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="Mosaic's interface of JAX 0.12"
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MATRIX = (((1,), (0,)), ((), ()))
hopper = functools.partial(fp4.scaled_matmul, implementation="hopper:interpret")


def packed(codes, scales, tensor=1.0):
    """Of codes 0 to 15 and bytes of E4M3."""
    codes = np.asarray(codes, np.uint8)
    return Packed(
        jnp.asarray(codes[:, ::2] | codes[:, 1::2] << 4),
        jnp.asarray(np.asarray(scales, np.uint8).view(ml_dtypes.float8_e4m3fn)),
        jnp.float32(tensor),
    )


def decoded(codes, scales):
    values = np.asarray(scales, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return E2M1[codes] * values.repeat(16, 1)


def matmul(a, b, dtype=jnp.float32):
    body = registry.choose(
        registry.SCALED_MATMUL,
        "hopper:interpret",
        fp4.Quantizer(fp4.NVFP4),
        fp4.Quantizer(fp4.NVFP4),
    ).body
    return np.asarray(jax.jit(lambda a, b: body.matmul(a, b, dtype, interpret=True))(a, b))


def test_every_element_and_scale_is_exact():
    # Row r has scale r in all blocks; b picks one column each.
    codes = np.tile(np.arange(16), (128, 8))
    scales = np.tile(np.arange(128)[:, None], 8)
    identity = np.where(np.eye(128, dtype=bool), 2, 0)  # the code of 1
    ones = np.full((128, 8), 0x38)
    y = matmul(packed(codes, scales), packed(identity, ones))
    expected = decoded(codes, scales)
    np.testing.assert_array_equal(y[:127], expected[:127])
    assert np.isnan(y[127]).all()
    assert expected[1, 1] == 2.0**-10  # the smallest one
    np.testing.assert_array_equal(matmul(packed(identity, ones), packed(codes, scales)), y.T)


def test_sums_that_are_exact():
    rng = np.random.default_rng(0)
    codes = [rng.integers(0, 16, (128, 256)) for _ in range(2)]
    # Powers of two up to 2**9 apart: with 256 products of at most 5 bits each, 24 bits hold all.
    scales = [rng.integers(4, 9, (128, 16)) << 3 for _ in range(2)]
    tensors = 2.0**-100, 2.0**-40  # their product would be no float32
    a, b = (packed(*of, t) for of, t in zip(zip(codes, scales, strict=True), tensors, strict=True))
    y = matmul(a, b._replace(tensor=jnp.float32(2.0**90)))
    left, right = (decoded(*of) for of in zip(codes, scales, strict=True))
    np.testing.assert_array_equal(y, left @ right.T * 2.0**-10)
    assert not matmul(a, b).any()
    half = matmul(a, b._replace(tensor=jnp.float32(2.0**90)), jnp.bfloat16)
    np.testing.assert_array_equal(half, y.astype(jnp.bfloat16))


def uneven(shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    exponents = rng.integers(-10, 11, -(-size // 7)).repeat(7)[:size].reshape(shape)
    return jnp.asarray(np.ldexp(rng.standard_normal(shape), exponents), dtype)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 3, 5), (130, 40, 300), (64, 200, 128)])
def test_odd_shapes(m, n, k):
    a, b = (
        fp4.quantize(uneven((rows, k), seed), fp4.Quantizer(fp4.NVFP4, tile=tile))
        for seed, (rows, tile) in enumerate([(m, (1, 16)), (n, (16, 16))])
    )
    assert_product(hopper(a, b), a, b)


def assert_product(y, a, b):
    """Against float64, within what float32 sums may be off by."""
    left, right = (np.asarray(q.operand().values, np.float64) for q in (a, b))
    scale = float(a.tensor_scale) * float(b.tensor_scale)
    bound = 2.0**-24 * (a.length + 4) * (np.abs(left) @ np.abs(right).T) * scale
    error = np.abs(np.asarray(y, np.float64) - left @ right.T * scale)
    np.testing.assert_array_less(error, bound + 1e-300)


def test_a_nan_reaches_its_row_alone():
    a = fp4.quantize(uneven((4, 32)).at[2, 5].set(jnp.nan), fp4.NVFP4)
    y = np.asarray(hopper(a, fp4.quantize(uneven((6, 32), 1), fp4.NVFP4)))
    assert np.isnan(y).sum() == 6
    assert np.isnan(y[2]).all()


def test_large_tiles():
    """From 2048 on they are others; K stays small, or the interpreter would take minutes."""
    from fp4jax.kernels import hopper_matmul

    tiles = hopper_matmul.tiles_for(2048, 2048, 128)
    assert (tiles.m, tiles.n) == (128, 256)
    a, b = (fp4.quantize(uneven((rows, 128), rows), fp4.NVFP4) for rows in (128, 256))
    operands = (Packed(q.codes, q.block_scales, q.tensor_scale) for q in (a, b))
    y = jax.jit(lambda a, b: hopper_matmul.tiled_matmul(a, b, jnp.float32, tiles, interpret=True))(
        *operands
    )
    assert_product(y, a, b)


def test_layer_by_both_kernels():
    x, w, dy = uneven((40, 70), dtype=jnp.bfloat16), uneven((70, 50), 1), uneven((40, 50), 2)
    key = jax.random.key(2)

    @functools.partial(jax.jit, static_argnums=0)
    def run(kernels, x, w):
        def product(x, w):
            recipe = fp4.recipes.nvfp4()
            return fp4.dot_general(
                x, w, MATRIX, recipe=recipe, key=key, kernels=kernels,
                preferred_element_type=jnp.float32,
            )  # fmt: skip

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    kernel = run(fp4.Kernels("mosaic:interpret", "hopper:interpret"), x, w)
    for got, wanted in zip(kernel, run(fp4.Kernels("xla", "xla"), x, w), strict=True):
        assert got.dtype == wanted.dtype
        got, wanted = (np.asarray(a, np.float64) for a in (got, wanted))
        assert np.linalg.norm(got - wanted) < 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("what", ["product", "quantizer"])
def test_no_thread_reads_what_another_still_writes(what, monkeypatch):
    """By the interpreter's own record of who waited for whom."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu

    params = mosaic_gpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(mosaic_gpu, "InterpretGPUParams", lambda: params)
    a, b = (fp4.quantize(uneven((rows, 640), rows), fp4.NVFP4) for rows in (256, 128))
    if what == "product":
        hopper(a, b).block_until_ready()
    else:
        both = fp4.Quantizer(fp4.NVFP4, hadamard=fp4.Hadamard(16))
        x = uneven((128, 512))
        fp4.quantize(x, both, 0, implementation="mosaic:interpret").codes.block_until_ready()
    assert not interpret_pallas_call.get_races().races_found


def test_scales_lie_as_blackwell_wants_them():
    from fp4jax.kernels.blackwell_matmul import arranged_scales

    scales = np.arange(256 * 8, dtype=np.uint16).reshape(256, 8)
    arranged = np.asarray(arranged_scales(jnp.asarray(scales)))
    assert arranged.shape == (2, 2, 32, 16)
    for row in range(256):
        for block in range(8):
            # In its tile of 128 rows and 4 blocks, byte 16 (r mod 32) + 4 (r div 32) + b.
            tile, r = divmod(row, 128)
            group, b = divmod(block, 4)
            flat = arranged[tile, group].reshape(-1)
            assert flat[16 * (r % 32) + 4 * (r // 32) + b] == scales[row, block]


class Modelled:
    """Mosaic GPU with models, for its interpreter, of two instructions that it does not know.

    The copy of scales to tensor memory, whose place is in shared memory here, and the product with
    block scales. Both are done when they return, which the real ones are not.
    """

    def __init__(self):
        from jax.experimental.pallas import mosaic_gpu

        self.real = mosaic_gpu

    def __getattr__(self, name):
        return getattr(self.real, name)

    def kernel(self, *args, **options):
        params = self.real.InterpretGPUParams(detect_races=True)
        return self.real.kernel(*args, **options, interpret=params)

    def TMEM(self, shape, dtype, layout=None):
        if layout is None:
            return self.real.TMEM(shape, dtype)
        rows, blocks = shape
        return self.real.SMEM((rows // 128, blocks // 4, 32, 16), dtype)

    def async_copy_scales_to_tmem(self, source, to):
        to[...] = source[...]

    def tcgen05_mma(self, sums, a, b, barrier, *, a_scale, b_scale, accumulate):
        left, right = self.decoded(a[...], a_scale), self.decoded(b[...].T, b_scale)
        product = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision="highest")
        before = self.real.async_load_tmem(sums)
        self.real.wait_load_tmem()
        self.real.async_store_tmem(sums, jnp.where(accumulate, before, 0) + product)
        self.real.commit_tmem()
        self.real.commit_smem()  # a tensor core reads as the fetches write, this model does not
        self.real.barrier_arrive(barrier)

    def tcgen05_commit_arrive(self, barrier):
        self.real.barrier_arrive(barrier)

    def decoded(self, elements, scales):
        tiles, groups, *_ = scales.shape
        lines = scales[...].reshape(tiles, groups, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        per_block = lines.reshape(128 * tiles, 4 * groups).astype(jnp.float32)
        blocks = elements.astype(jnp.float32).reshape(len(elements), -1, 16)
        return (blocks * per_block[:, :, None]).reshape(elements.shape)


@pytest.mark.parametrize(
    ("m", "n", "k", "tiles"),
    [(256, 128, 1280, (128, 128, 256, 3)), (128, 512, 512, (128, 256, 256, 3))],
)
def test_blackwell_but_for_two_instructions(m, n, k, tiles, monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    from fp4jax.kernels import blackwell_matmul

    monkeypatch.setattr(blackwell_matmul, "plgpu", Modelled())
    rng = np.random.default_rng(m)
    codes = [rng.integers(0, 16, (rows, k)) for rows in (m, n)]
    # From 1/2 to 8, and 0: sums are exact in float32. One is NaN.
    choices = [0, 0x30, 0x38, 0x40, 0x48, 0x50]
    scales = [rng.choice(choices, (rows, k // 16)) for rows in (m, n)]
    scales[0][5, 3] = 0x7F
    a, b = (packed(*of, t) for of, t in zip(zip(codes, scales, strict=True), (0.5, 4), strict=True))
    y = blackwell_matmul.tiled_matmul(a, b, jnp.float32, blackwell_matmul.Tiles(*tiles))
    left, right = (decoded(*of) for of in zip(codes, scales, strict=True))
    np.testing.assert_array_equal(np.asarray(y), left @ right.T * 2)
    assert np.isnan(np.asarray(y)).sum() == n
    assert not interpret_pallas_call.get_races().races_found


def test_blackwell_is_not_interpreted():
    a = fp4.quantize(uneven((4, 32)), fp4.NVFP4)
    with pytest.raises(ValueError, match="not 'blackwell:interpret'"):
        fp4.scaled_matmul(a, a, implementation="blackwell:interpret")
    with pytest.raises(ValueError, match="'blackwell' needs a GPU of compute capability 10"):
        fp4.scaled_matmul(a, a, implementation="blackwell")
