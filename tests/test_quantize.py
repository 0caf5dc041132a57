"""quantize, dequantize and fake_quantize against the naive contract, on any shape and value."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference

import fp4jax as fp4

RHT = fp4.Hadamard(16)
ROW, SQUARE = fp4.Quantizer(fp4.NVFP4), fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
STOCHASTIC = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic())


def uneven(shape, seed=0, dtype=np.float32):
    """Blocks of very different size: neighbouring elements share a magnitude from 1e-6 to 1e3."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, 3, -(-np.prod(shape) // 7)).repeat(7)[: np.prod(shape)]
    return (rng.standard_normal(shape) * scale.reshape(shape)).astype(dtype)


def check(q, x, tile, axis):
    """``q`` holds exactly what the naive contract gives for ``x``."""
    moved = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    matrix = moved.reshape(-1, moved.shape[-1])
    codes, scales, tensor, values = reference.nvfp4(matrix, tile)
    np.testing.assert_array_equal(
        np.asarray(q.codes).reshape(len(matrix), -1), reference.packed(codes)
    )
    np.testing.assert_array_equal(
        np.asarray(q.block_scales).reshape(scales.shape).view(np.uint8), scales.view(np.uint8)
    )
    assert q.tensor_scale == tensor
    expected = np.moveaxis((values * tensor).reshape(moved.shape), -1, axis).astype(x.dtype)
    np.testing.assert_array_equal(np.asarray(q.dequantize()), expected)
    assert q.dequantize().dtype == x.dtype
    assert q.shape == x.shape


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((64, 32), -1),
        ((64, 32), 0),
        ((5, 37), 1),
        ((37, 5), 0),
        ((1, 1), 0),
        ((3,), 0),
        ((100,), -1),
        ((2, 17, 19), -1),
        ((2, 17, 19), -2),
        ((17, 2, 19), 0),
        ((2, 3, 18, 4), 1),
    ],
)
def test_row_blocks(shape, axis, dtype):
    x = uneven(shape, dtype=dtype)
    check(fp4.quantize(x, fp4.NVFP4, axis=axis), x, (1, 16), axis)


@pytest.mark.parametrize(
    ("shape", "axis"), [((32, 48), -1), ((32, 48), 0), ((20, 33), 1), ((20, 33), 0), ((5, 3), -1)]
)
def test_square_blocks(shape, axis):
    x = uneven(shape)
    check(fp4.quantize(x, SQUARE, axis=axis), x, (16, 16), axis)


def test_square_blocks_of_a_stack_are_per_matrix():
    x = uneven((2, 24, 40))
    q = fp4.quantize(x, SQUARE)
    assert q.block_scales.shape == (2, 2, 3)
    # The tensor scale spans the stack: quantize the matrices with the larger amax put into both.
    peak = np.abs(x).max()
    for i, matrix in enumerate(x):
        padded = np.concatenate([matrix, np.full((8 + 16, 40), peak, np.float32)])
        padded[24:32] = 0
        codes, scales, _, _ = reference.nvfp4(padded, (16, 16))
        np.testing.assert_array_equal(np.asarray(q.codes)[i], reference.packed(codes[:24]))
        np.testing.assert_array_equal(np.asarray(q.block_scales)[i], scales[:2])


def test_square_codes_are_those_of_the_transpose():
    x = uneven((48, 32))
    rows, columns = fp4.quantize(x, SQUARE, axis=-1), fp4.quantize(x, SQUARE, axis=0)
    np.testing.assert_array_equal(rows.dequantize(), columns.dequantize())
    np.testing.assert_array_equal(np.asarray(rows.block_scales).T, columns.block_scales)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-12, 1, 1e12, 1e30, 1e38])
def test_any_magnitude(scale):
    x = np.float32(np.random.default_rng(1).uniform(-2, 2, (4, 40)) * scale)
    got = np.asarray(fp4.quantize(x, fp4.NVFP4).dequantize())
    assert np.isfinite(got).all()
    if scale < 1e-34:
        # Below 2688 times the smallest normal float32 the tensor scale is flushed to 0.
        np.testing.assert_array_equal(got, 0)
    else:
        # Half of E2M1's widest gap (4 to 6), widened by the scale's own rounding of 1/16.
        block = np.abs(np.pad(x, ((0, 0), (0, 8)))).reshape(4, 3, 16).max(-1).repeat(16, 1)[:, :40]
        assert (np.abs(got - x) <= block * (1 / 6) * (17 / 16) * 1.0001).all()


def test_float32_range_ends():
    x = np.float32([[np.finfo(np.float32).max, -1e38, 1e30, 0]])
    got = np.asarray(fp4.quantize(x, fp4.NVFP4).dequantize())
    np.testing.assert_allclose(got, [[x[0, 0], x[0, 0] / -3, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [0, -1])
def test_non_finite_poisons_its_block_only(bad, axis, tile):
    x = uneven((40, 48), seed=3)
    x[5, 20] = bad
    x[5, 21] = 5e4  # the tensor's amax, in the bad block
    quantizer = fp4.Quantizer(fp4.NVFP4, tile=tile)
    q = fp4.quantize(x, quantizer, axis=axis)
    _, scales, tensor, values = reference.nvfp4(np.moveaxis(x, axis, -1), tile)
    got = np.asarray(q.dequantize())
    np.testing.assert_array_equal(got, np.moveaxis(values * tensor, -1, axis))
    assert (np.asarray(q.block_scales).view(np.uint8) == 0x7F).sum() == 1
    np.testing.assert_array_equal(np.float32(q.block_scales), np.float32(scales))
    np.testing.assert_array_equal(got, fp4.fake_quantize(x, quantizer, axis=axis))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_under_hadamard_poisons_its_group_only(bad):
    x = uneven((48, 3), dtype=ml_dtypes.bfloat16)
    x[20, 1] = bad
    got = np.asarray(fp4.quantize(x, fp4.Quantizer(fp4.NVFP4, hadamard=RHT), axis=0).dequantize())
    expected = np.zeros((48, 3), bool)
    expected[16:32, 1] = True
    np.testing.assert_array_equal(np.isnan(got), expected)


@pytest.mark.parametrize("k", [16, 20, 48])
def test_hadamard_is_quantization_of_the_rotated_tensor(k):
    x = np.float32(np.random.default_rng(0).integers(-8, 8, (3, k)))  # rotates exactly
    q = fp4.quantize(x, fp4.Quantizer(fp4.NVFP4, hadamard=RHT))
    rotated = reference.rotated(x)
    codes, scales, tensor, values = reference.nvfp4(rotated)
    np.testing.assert_array_equal(np.asarray(q.codes), reference.packed(codes))
    np.testing.assert_array_equal(np.asarray(q.block_scales), scales)
    back = np.float64(values) * tensor
    inverse = np.diag(reference.SIGNS) @ reference.sylvester(16)
    expected = (back.reshape(3, -1, 16) @ inverse.T).reshape(3, -1)[:, :k]
    np.testing.assert_allclose(q.dequantize(), expected, atol=1e-5)
    assert q.shape == x.shape


QUANTIZERS = {
    "row": ROW,
    "square": SQUARE,
    "rht": fp4.Quantizer(fp4.NVFP4, hadamard=RHT),
    "stochastic": STOCHASTIC,
    "stochastic rht": fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic(8), hadamard=RHT),
    "fp8": fp4.Quantizer(fp4.FP8_BLOCK),
    "fp8 square": fp4.Quantizer(fp4.FP8_BLOCK, tile=(128, 128)),
    "fp8 stochastic": fp4.Quantizer(fp4.FP8_BLOCK, rounding=fp4.Stochastic(16)),
}


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_fake_quantize_is_the_round_trip_to_the_bit(name, axis, dtype):
    quantizer = QUANTIZERS[name]
    key = jax.random.key(0) if quantizer.rounding.needs_key else None
    x = uneven((3, 21, 150), dtype=dtype)
    fake = np.asarray(fp4.fake_quantize(x, quantizer, axis=axis, key=key))
    real = np.asarray(fp4.quantize(x, quantizer, axis=axis, key=key).dequantize())
    assert fake.dtype == x.dtype
    np.testing.assert_array_equal(fake.view(np.uint8), real.view(np.uint8))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_same_bytes_jitted_vmapped_and_without_jit(name):
    quantizer = QUANTIZERS[name]
    key = jax.random.key(0) if quantizer.rounding.needs_key else None
    x = jnp.asarray(uneven((19, 150)))

    def run(x):
        return fp4.quantize(x, quantizer, axis=0, key=key)

    plain = jax.tree.leaves(run(x))
    jitted = jax.tree.leaves(jax.jit(run)(x))
    mapped = jax.tree.leaves(jax.vmap(run)(jnp.stack([x, 2 * x])))
    with jax.disable_jit():
        eager = jax.tree.leaves(run(x))
    for a, b, c, d in zip(plain, jitted, mapped, eager, strict=True):
        for other in (b, c[0], d):
            assert np.asarray(a).tobytes() == np.asarray(other).tobytes()


def test_vmapped_qtensor_knows_its_shape():
    x = jnp.asarray(uneven((4, 5, 18)))
    q = jax.vmap(lambda x: fp4.quantize(x, fp4.NVFP4, axis=0))(x)
    assert q.shape == (4, 5, 18)
    for one, whole in zip(x, q.dequantize(), strict=True):
        np.testing.assert_array_equal(fp4.quantize(one, fp4.NVFP4, axis=0).dequantize(), whole)


@pytest.mark.parametrize("tile", [(1, 128), (128, 128)])
@pytest.mark.parametrize(("shape", "axis"), [((3, 300), -1), ((300, 130), 0)])
def test_fp8_block(tile, shape, axis):
    x = uneven(shape)
    x[0, :130] = 0
    q = fp4.quantize(x, fp4.Quantizer(fp4.FP8_BLOCK, tile=tile), axis=axis)
    moved = np.moveaxis(x, axis, -1)
    scales = np.asarray(q.block_scales)
    assert q.tensor_scale is None
    got = np.zeros_like(moved)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        amax = np.abs(moved[block]).max()
        encode = np.float32(448) / amax if amax else np.float32(0)
        scale = np.float32(1) / encode if amax else np.float32(0)
        assert scales[i, j] == scale
        codes = np.clip(moved[block] * encode, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(np.asarray(q.codes)[block], codes.view(np.uint8))
        got[block] = codes.astype(np.float32) * scale
    np.testing.assert_array_equal(np.moveaxis(np.asarray(q.dequantize()), axis, -1), got)


def test_nbytes_and_repr_tell_true_bytes():
    q = fp4.quantize(np.ones((32, 64), np.float32), fp4.NVFP4)
    assert q.nbytes == 32 * 64 // 2 + 32 * 4 + 4
    assert q.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(q))
    assert repr(q) == (
        "QTensor(NVFP4, shape=(32, 64), axis=-1, dtype=float32, 1156 bytes, 4.52 bits/element)"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.ones((4, 4), np.int32), fp4.NVFP4), TypeError, r"x must be .* not int32\[4, 4\]"),
        ((np.ones((4, 4), np.complex64), fp4.NVFP4), TypeError, "x must be"),
        ((np.float32(1), fp4.NVFP4), ValueError, r"x must have .* not shape \(\)"),
        ((np.ones((4, 0), np.float32), fp4.NVFP4), ValueError, r"x must have .* \(4, 0\)"),
        ((np.ones((4, 4), np.float32), "nvfp4"), TypeError, "format_or_quantizer must be"),
        ((np.ones((4, 4), np.float32), fp4.NVFP4, 2), ValueError, "axis must be from -2 to 1"),
        ((np.ones((4, 4), np.float32), fp4.NVFP4, 1.0), TypeError, "axis must be an integer"),
        ((np.ones(4, np.float32), SQUARE), ValueError, r"tile \(16, 16\) needs two axes"),
        ((np.ones((4, 4), np.float32), STOCHASTIC), ValueError, "key is missing"),
        (
            (np.ones((4, 4), np.float32), fp4.NVFP4, -1, jax.random.key(0)),
            ValueError,
            "key must be None",
        ),
    ],
)
def test_what_cannot_be_honoured_raises(arguments, error, message):
    for function in (fp4.quantize, fp4.fake_quantize):
        with pytest.raises(error, match=message):
            function(*arguments)


@pytest.mark.parametrize("tile", [(1, 32), (16, 1), (2, 16), (16,), 3])
def test_tile_must_fit_the_format(tile):
    with pytest.raises(ValueError, match=r"tile must be \(1, 16\) or \(16, 16\)"):
        fp4.Quantizer(fp4.NVFP4, tile=tile)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounding": "nearest"}, r"rounding must be Nearest\(\) or Stochastic"),
        ({"hadamard": 16}, r"hadamard must be Hadamard\(...\) or None, not 16"),
        ({"scale_rule": "amax"}, "scale_rule must be one such as"),
    ],
)
def test_parts_of_another_kind_raise(arguments, message):
    with pytest.raises(TypeError, match=message):
        fp4.Quantizer(fp4.NVFP4, **arguments)


def test_random_bits_do_not_depend_on_the_tile():
    """Also with batch axes and rows that are no multiple of 16."""
    x = np.full((2, 17, 32), 1.8, np.float32)
    x[..., ::16] = 6  # all block scales are then equal
    key = jax.random.key(0)
    rows, squares = (
        fp4.fake_quantize(x, fp4.Quantizer(fp4.NVFP4, tile, rounding=fp4.Stochastic()), key=key)
        for tile in ((1, 16), (16, 16))
    )
    np.testing.assert_array_equal(rows, squares)


def test_negative_zero_of_integers_is_zero_both_ways():
    x = np.float32([[-0.0, -1e-9, 1, -1]])
    for format in (fp4.NVINT4, fp4.IF4):
        fake = np.asarray(fp4.fake_quantize(x, format))
        assert fake.tobytes() == np.asarray(fp4.quantize(x, format).dequantize()).tobytes()


def test_derivatives_are_refused():
    x = jnp.ones((2, 16))
    for function in (jax.grad, jax.jacfwd):
        with pytest.raises(NotImplementedError, match="fake_quantize has no derivative"):
            function(lambda x: fp4.fake_quantize(x, fp4.NVFP4).sum())(x)


def test_quantizers_are_values():
    a, b = fp4.Quantizer(fp4.NVFP4), fp4.Quantizer(fp4.NVFP4, tile=(1, 16))
    assert a == b
    assert hash(a) == hash(b)
    names = itertools.combinations(QUANTIZERS.values(), 2)
    assert all(a != b for a, b in names)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("quantizer", "block"),
    [
        (fp4.Quantizer(fp4.NVFP4), (1, 16)),
        (fp4.Quantizer(fp4.NVFP4, tile=(16, 16)), (16, 16)),
        (fp4.Quantizer(fp4.NVFP4, hadamard=fp4.Hadamard(16)), (1, 16)),
        (fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled()), (1, 16)),
        (fp4.Quantizer(fp4.MXFP4), (1, 32)),
        (fp4.Quantizer(fp4.FP8_BLOCK), (1, 128)),
        (fp4.Quantizer(fp4.FP8_TENSOR), (512, 1024)),
    ],
    ids=str,
)
def test_a_bad_element_of_a_large_array_makes_its_block_nan_and_no_other(quantizer, block, bad):
    """Large, since XLA's own maximum on CPUs loses a NaN only along long axes."""
    x = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    x[300, 700] = bad
    expected = np.zeros(x.shape, bool)
    row, column = 300 // block[0] * block[0], 700 // block[1] * block[1]
    expected[row : row + block[0], column : column + block[1]] = True
    for y in (
        fp4.fake_quantize(x, quantizer),
        fp4.quantize(x, quantizer).dequantize(),
        fp4.fake_quantize(x.T, quantizer, axis=0).T,
    ):
        np.testing.assert_array_equal(np.isnan(y), expected)
