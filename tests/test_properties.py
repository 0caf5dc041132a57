"""Properties that hold for any input, searched with hypothesis."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4jax as fp4

# Few shapes, since each is compiled once; all are odd in some way.
SHAPES = [(3, 50), (1, 16), (17, 1), (20, 33)]
NEAREST = {
    "nvfp4": fp4.Quantizer(fp4.NVFP4),
    "nvfp4 16x16": fp4.Quantizer(fp4.NVFP4, tile=(16, 16)),
    "nvfp4 rows": fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled()),
    "nvfp4 4/6": fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.FourOverSix("mse", 256)),
    "mxfp4": fp4.Quantizer(fp4.MXFP4),
    "mxfp4 rceil": fp4.Quantizer(fp4.MXFP4, scale_rule=fp4.PowerOfTwo("rceil")),
    "mxfp8": fp4.Quantizer(fp4.MXFP8_E4M3),
    "fp8 block": fp4.Quantizer(fp4.FP8_BLOCK),
    "fp8 tensor": fp4.Quantizer(fp4.FP8_TENSOR),
    "nvint4": fp4.Quantizer(fp4.NVINT4),
    "if4": fp4.Quantizer(fp4.IF4),
}
TWO_LEVEL = ["nvfp4", "nvfp4 16x16", "nvfp4 rows", "nvfp4 4/6", "nvint4", "if4"]

search = settings(max_examples=40, deadline=None, derandomize=True)
quantizers = st.sampled_from(sorted(NEAREST))


@st.composite
def arrays(draw, low=-38, high=38):
    """float32, any overall size from 10**low to 10**high, neighbouring blocks far apart or not."""
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.floats(low, high)) + rng.uniform(-draw(st.floats(0, 6)), 0, shape)
    kind = draw(st.sampled_from(["normal", "grid", "sparse"]))
    x = rng.standard_normal(shape)
    if kind == "grid":
        x = rng.integers(-12, 13, shape) / 2
    if kind == "sparse":
        x = np.where(rng.random(shape) < 0.2, x, 0)
    return np.clip(x * 10.0**size, -3e38, 3e38).astype(np.float32)


def unpacked(q):
    codes = np.asarray(q.codes)
    if q.format.element.bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


@search
@given(arrays(), quantizers)
def test_sign_symmetry(x, name):
    a, b = (np.asarray(fp4.fake_quantize(v, NEAREST[name])) for v in (x, -x))
    np.testing.assert_array_equal(a, -b)
    element = NEAREST[name].format.element
    if name not in ("nvint4", "if4"):
        sign = 1 << (element.bits - 1)
        codes, flipped = (unpacked(fp4.quantize(v, NEAREST[name])) for v in (x, -x))
        width = x.shape[-1]
        np.testing.assert_array_equal(codes[..., :width] ^ sign, flipped[..., :width])


@search
@given(arrays(-8, 8), quantizers, st.integers(-40, 40))
def test_powers_of_two_change_the_scale_only(x, name, power):
    """By up to 2**40 either way, far from the ends of float32."""
    a = fp4.quantize(x, NEAREST[name])
    b = fp4.quantize(np.ldexp(x, power), NEAREST[name])
    np.testing.assert_array_equal(a.codes, b.codes)
    if name in TWO_LEVEL:
        np.testing.assert_array_equal(
            np.asarray(a.block_scales).view(np.uint8), np.asarray(b.block_scales).view(np.uint8)
        )
        np.testing.assert_array_equal(np.ldexp(np.asarray(a.tensor_scale), power), b.tensor_scale)
    np.testing.assert_array_equal(np.ldexp(np.asarray(a.dequantize()), power), b.dequantize())


@search
@given(arrays(), quantizers, st.integers(1, 40))
def test_zeros_behind_change_no_byte(x, name, more):
    a = fp4.quantize(x, NEAREST[name])
    b = fp4.quantize(np.pad(x, ((0, 0), (0, 48 - x.shape[1] % 16))), NEAREST[name])
    width, blocks = x.shape[1], 0 if a.block_scales is None else a.block_scales.shape[-1]
    np.testing.assert_array_equal(unpacked(a)[:, :width], unpacked(b)[:, :width])
    if blocks:
        np.testing.assert_array_equal(
            np.asarray(a.block_scales), np.asarray(b.block_scales)[:, :blocks]
        )
    np.testing.assert_array_equal(a.dequantize(), np.asarray(b.dequantize())[:, :width])


@search
@given(arrays(-30, 30), quantizers)
def test_order_within_a_block_is_kept(x, name):
    """Equal scales: of two elements of a row's block the larger never becomes the smaller."""
    q = NEAREST[name]
    y = np.asarray(fp4.fake_quantize(x, q))
    block = q.format.block or x.shape[1]
    for start in range(0, x.shape[1], block):
        order = np.argsort(x[:, start : start + block], axis=1, kind="stable")
        ordered = np.take_along_axis(y[:, start : start + block], order, axis=1)
        assert (np.diff(ordered, axis=1) >= 0).all()


# Half the widest gap of the grid in units of its largest number, times what the rounding of the
# scale can add to it; for floor, saturation: up to 8/6 of the largest number clips to it.
BOUNDS = {
    "nvfp4": 1 / 6 * 17 / 16,
    "nvfp4 4/6": 1 / 6 * 17 / 16,
    "nvint4": 1 / 14 * 17 / 16,
    "if4": 1 / 6 * 17 / 16,
    "mxfp4": 1 / 4,
    "mxfp4 rceil": 1 / 3,
    "mxfp8": 1 / 8,
    "fp8 block": 1 / 28,
    "fp8 tensor": 1 / 28,
}


@search
@given(arrays(-25, 30), st.sampled_from(sorted(BOUNDS)))
def test_error_is_bounded_by_the_blocks_amax(x, name):
    q = NEAREST[name]
    error = np.abs(np.float64(fp4.fake_quantize(x, q)) - x)
    block = q.format.block or x.shape[1]
    padded = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % block)))
    amax = padded.reshape(len(x), -1, block).max(-1).repeat(block, 1)[:, : x.shape[1]]
    bound = BOUNDS[name] * 1.0001 * np.float64(amax)
    if name in TWO_LEVEL:
        # A block scale below E4M3's normals is off by up to 2**-10, one below them is lost.
        bound = bound + 6 * 2.0**-10 / 2688 * 1.1 * np.abs(x).max()
    elif name == "fp8 tensor":
        bound = BOUNDS[name] * 1.0001 * np.abs(x).max()
    assert (error <= bound).all()


@search
@given(arrays(-20, 20), st.sampled_from(["nvfp4", "mxfp4", "mxfp8", "fp8 tensor"]))
def test_quantizing_again_changes_nothing(x, name):
    """For NVFP4 in blocks whose scale is a normal E4M3 number: its amax then lands on 6 again."""
    q = fp4.quantize(x, NEAREST[name])
    again = fp4.quantize(q.dequantize(), NEAREST[name])
    same = unpacked(q) == unpacked(again)
    if name == "nvfp4":
        normal = (np.float32(q.block_scales) >= 2**-6).repeat(16, axis=1)[:, : same.shape[1]]
        assert same[normal].all()
    else:
        assert same.all()


@search
@given(arrays(-30, 30), quantizers)
def test_bfloat16_numbers_have_one_encoding(x, name):
    """The same numbers in bfloat16 and in float32 have the same bytes."""
    low = x.astype(ml_dtypes.bfloat16)
    a, b = (fp4.quantize(v, NEAREST[name]) for v in (low, low.astype(np.float32)))
    np.testing.assert_array_equal(a.codes, b.codes)
    if a.block_scales is not None:
        assert np.asarray(a.block_scales).tobytes() == np.asarray(b.block_scales).tobytes()


@search
@given(arrays(), st.sampled_from([n for n in sorted(NEAREST) if "16x16" not in n]))
def test_rows_are_quantized_apart(x, name):
    """Reversed rows have reversed codes, whatever lies beside them."""
    a, b = fp4.quantize(x, NEAREST[name]), fp4.quantize(x[::-1].copy(), NEAREST[name])
    np.testing.assert_array_equal(np.asarray(a.codes)[::-1], b.codes)
    assert jnp.array_equal(a.dequantize()[::-1], b.dequantize())


@pytest.mark.parametrize("name", sorted(NEAREST))
def test_the_largest_float_and_the_smallest_normal_survive(name):
    ends = np.float32([[3.4028235e38, 1.17549435e-38, -3.4028235e38, 0]])
    y = np.asarray(fp4.fake_quantize(ends, NEAREST[name]))
    assert not np.isnan(y).any()
    assert y[0, 0] == -y[0, 2] > 1e38
