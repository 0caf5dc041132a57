"""The formats beyond the reference vectors, against closed forms written here."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from test_quantize import uneven

import fp4jax as fp4

f32 = np.float32
E3M2 = fp4.formats.ElementType("e3m2", 6, 2, -2, 28.0, np.dtype(np.uint8))


def uint8(x):
    return np.asarray(x).view(np.uint8)


def nibbles(q):
    codes = np.asarray(q.codes)
    return np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def int4(x):
    """Round to integers of at most 7, ties to even; a nibble in two's complement."""
    value = np.clip(np.round(x), -7, 7)
    return value.astype(np.int8).astype(np.uint8) & 15, value


def e4m3(x):
    return np.minimum(x, f32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def blocks_of(x, size=16):
    return x.reshape(*x.shape[:-1], -1, size)


def two_level(x, largest):
    """Block scales and multipliers of the two-level scheme for a largest element."""
    S = f32(2688) / np.abs(x).max()
    b = np.abs(blocks_of(x)).max(-1)
    s = e4m3(b * (S * f32(1 / largest)))
    with np.errstate(divide="ignore"):
        e = np.minimum(f32(1) / (s * (f32(1) / S)), np.finfo(np.float32).max)
    return s, e, f32(1) / S


def test_nvint4():
    x = uneven((6, 64))
    S = f32(7 * 448) / np.abs(x).max()
    s = e4m3(np.abs(blocks_of(x)).max(-1) * (S * f32(1 / 7)))
    with np.errstate(divide="ignore"):
        e = np.minimum(f32(1) / (s * (f32(1) / S)), np.finfo(np.float32).max)
    codes, values = int4(blocks_of(x) * e[..., None])
    q = fp4.quantize(x, fp4.NVINT4)
    np.testing.assert_array_equal(nibbles(q), codes.reshape(x.shape))
    np.testing.assert_array_equal(np.float32(q.block_scales), s)
    assert q.tensor_scale == f32(1) / S
    expected = (values * s[..., None]).reshape(x.shape) * (f32(1) / S)
    np.testing.assert_array_equal(np.asarray(q.dequantize()), expected.astype(np.float32))


def test_int4_codes_of_all_integers():
    x = f32([[7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1, 0, -0.0]])
    q = fp4.quantize(x, fp4.NVINT4)
    assert nibbles(q)[0].tolist() == [7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15, 0, 0]
    np.testing.assert_allclose(q.dequantize(), x, rtol=1e-6)


@pytest.mark.parametrize("error", ["mae", "mse"])
def test_if4_takes_the_better_grid_in_each_block(error):
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    x[0, :16] = np.arange(16) - 8  # evenly spaced: INT4's
    x[1, :16] = 2.0 ** -np.arange(16.0)  # geometric: E2M1's
    q = fp4.quantize(x, fp4.Quantizer(fp4.IF4, scale_rule=fp4.BetterElement(error)))
    candidates = []
    for largest in (6, 7):
        s, e, tensor = two_level(x, largest)
        ratio = blocks_of(x) * e[..., None]
        if largest == 7:
            codes, values = int4(ratio)
        else:
            values = np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn)
            codes = values.view(np.uint8) & 15
        decoded = np.float64(values) * s[..., None] * np.float64(tensor)
        distance = np.abs(decoded - blocks_of(x))
        loss = (distance if error == "mae" else distance**2).sum(-1)
        candidates.append((loss, codes, decoded, s))
    (loss6, codes6, decoded6, s6), (loss7, codes7, decoded7, s7) = candidates
    use7 = loss7 < loss6
    assert use7[0, 0]
    assert not use7[1, 0]
    np.testing.assert_array_equal(uint8(q.block_scales) >= 128, use7)
    stored = np.where(use7, -s7, s6)
    np.testing.assert_array_equal(np.float32(q.block_scales), stored)
    codes = np.where(use7[..., None], codes7, codes6).reshape(x.shape)
    np.testing.assert_array_equal(nibbles(q), codes)
    decoded = np.where(use7[..., None], decoded7, decoded6).reshape(x.shape)
    np.testing.assert_allclose(q.dequantize(), decoded, rtol=1e-6)
    loss = np.abs(blocks_of(np.asarray(q.dequantize()) - x))
    assert ((loss if error == "mae" else loss**2).sum(-1) <= np.minimum(loss6, loss7) * 1.001).all()


def ue5m3(x):
    """Nearest-even by listing all 255 finite points: bias 15, 3 mantissa bits, subnormals."""
    code = np.arange(255)
    exponent, mantissa = code >> 3, code & 7
    points = np.where(exponent == 0, mantissa * 2.0**-17, (8 + mantissa) * 2.0 ** (exponent - 18.0))
    assert points.max() == 114688
    distance = np.abs(np.asarray(x, np.float64)[..., None] - points)
    best = distance.min(-1, keepdims=True)
    tied = distance == best
    even = tied & (code % 2 == 0)
    chosen = np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))
    return chosen.astype(np.uint8), points[chosen]


def test_ue5m3_scales_need_no_tensor_scale():
    x = uneven((6, 64), seed=2)
    x[0, :16] *= f32(2e5) / np.abs(x[0, :16]).max()  # near the top of the scale's range
    codes, scales = ue5m3(np.abs(blocks_of(x)).max(-1) * f32(1 / 6))
    q = fp4.quantize(x, fp4.FP4_UE5M3)
    assert q.tensor_scale is None
    np.testing.assert_array_equal(np.asarray(q.block_scales), codes)
    with np.errstate(divide="ignore"):
        e = np.minimum(f32(1) / f32(scales), np.finfo(np.float32).max)
    values = np.clip(blocks_of(x) * e[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    expected = (values.astype(np.float32) * f32(scales)[..., None]).reshape(x.shape)
    np.testing.assert_array_equal(np.asarray(q.dequantize()), expected)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(
    ("format", "largest"), [(fp4.FP8_TENSOR, 448), (fp4.FP8_TENSOR_E5M2, 57344)]
)
def test_fp8_per_tensor(format, largest, axis):
    x = uneven((5, 37))
    q = fp4.quantize(x, format, axis=axis)
    encode = f32(largest) / np.abs(x).max()
    values = np.clip(x * encode, -largest, largest).astype(format.element.dtype)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(q.codes), -1, axis), uint8(values))
    assert q.block_scales is None
    assert q.tensor_scale == f32(1) / encode
    expected = values.astype(np.float32) * (f32(1) / encode)
    np.testing.assert_array_equal(np.asarray(q.dequantize()), expected)
    assert np.isnan(np.asarray(fp4.fake_quantize(np.where(x == x.max(), np.inf, x), format))).all()


def test_row_scales_are_quantization_row_by_row():
    x = uneven((7, 50)) * 10.0 ** np.arange(-9, 5, 2)[:, None].astype(np.float32)
    x[3] = 0
    x[5, 2] = np.nan
    q = fp4.quantize(x, fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled()))
    for i, row in enumerate(x):
        one = fp4.quantize(row, fp4.NVFP4)
        assert np.array_equal(q.codes[i], one.codes)
        assert np.array_equal(uint8(q.block_scales[i]), uint8(one.block_scales))
        assert q.tensor_scale[i] == one.tensor_scale
        np.testing.assert_array_equal(q.dequantize()[i], one.dequantize())
    columns = fp4.quantize(x.T, q.quantizer, axis=0)
    np.testing.assert_array_equal(columns.dequantize(), np.asarray(q.dequantize()).T)
    assert columns.tensor_scale.shape == (7,)


def test_row_scales_in_a_product():
    """Of either operand, in either position: rows of one size multiply rows of another."""
    quantizer = fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled())
    plain = fp4.Cast(np.float32)
    gemm = fp4.Gemm(quantizer, quantizer)
    recipe = fp4.Recipe("rows", fprop=gemm, dgrad=gemm, wgrad=gemm)
    rng = np.random.default_rng(0)
    x, w, dy = (
        f32(rng.standard_normal(s) * 10.0 ** rng.integers(-6, 6, (s[0], 1)))
        for s in ((24, 40), (40, 16), (24, 16))
    )

    def decode(a, axis):
        return np.float64(fp4.quantize(a, quantizer, axis=axis).dequantize())

    y, vjp = jax.vjp(
        lambda x, w: fp4.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=recipe),
        jnp.asarray(x),
        jnp.asarray(w),
    )
    dx, dw = vjp(jnp.asarray(dy))
    for got, a, b in (
        (y, decode(x, -1), decode(w, 0)),
        (dx, decode(dy, -1), decode(w, -1).T),
        (dw, decode(x, 0).T, decode(dy, 0)),
    ):
        tolerance = 1e-6 * (np.abs(a) @ np.abs(b))
        assert (np.abs(np.float64(got) - a @ b) <= tolerance).all()
    assert plain.hadamard is None


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("name", ["MXFP4", "MXFP8_E4M3", "MXFP8_E5M2"])
def test_power_of_two_rules_at_all_magnitudes(name, mode):
    """Exponents in exact arithmetic from the definition, at and beside every power of two."""
    format = getattr(fp4, name)
    emax, m = {"e2m1": (2, 1), "e4m3": (8, 3), "e5m2": (15, 2)}[format.element.name]
    powers = 2.0 ** np.arange(-120.0, 120)
    near = [powers, np.nextafter(f32(powers), f32(0)), np.nextafter(f32(powers), f32(np.inf))]
    near += [powers * factor for factor in (1.25, 1.5, 1.75, 1.874, 1.875, 1.9, 1.99)]
    amax = f32(np.concatenate(near))
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 3] = -amax
    mantissa, exponent = np.frexp(np.float64(amax))  # amax = mantissa * 2**exponent, in [1/2, 1)
    floor = exponent - 1
    if mode == "ceil":
        e = np.where(mantissa == 0.5, floor, floor + 1) - emax
    elif mode == "even":
        up = np.floor(mantissa * 2 * 2**m + 0.5) == 2 ** (m + 1)
        e = floor + up - emax
    elif mode == "rceil":
        mantissa, exponent = np.frexp(np.float64(amax / f32(format.element.max)))
        e = np.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        e = floor - emax
    byte = np.clip(e, -127, 127) + 127
    q = fp4.quantize(x, fp4.Quantizer(format, scale_rule=fp4.PowerOfTwo(mode)))
    np.testing.assert_array_equal(uint8(q.block_scales)[:, 0], byte)
    values = np.clip(x * np.exp2(127.0 - byte)[:, None], -format.element.max, format.element.max)
    values = f32(values).astype(format.element.dtype).astype(np.float64)
    expected = values * np.exp2(byte - 127.0)[:, None]
    keep = np.abs(expected) < 3e38
    np.testing.assert_array_equal(np.float64(q.dequantize())[keep], expected[keep])


def test_mx_nan_block():
    x = uneven((4, 64))
    x[1, 40] = np.inf
    q = fp4.quantize(x, fp4.MXFP4)
    assert (uint8(q.block_scales) == 0xFF).tolist() == [[False, False], [False, True]] + 2 * [
        [False, False]
    ]
    assert np.isnan(np.asarray(q.dequantize())).sum() == 32


def test_headroom_formulas():
    """With 17/16 the tensor scale is that much coarser and no scaled element passes 6."""
    x = uneven((16, 64), seed=4)
    plain = fp4.quantize(x, fp4.NVFP4)
    roomy = fp4.quantize(x, fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.AmaxScale(headroom=17 / 16)))
    np.testing.assert_allclose(
        roomy.tensor_scale, np.asarray(plain.tensor_scale) * 17 / 16, rtol=1e-6
    )
    for q, clips in ((plain, True), (roomy, False)):
        unit = np.float64(q.block_scales) * np.float64(q.tensor_scale)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.abs(blocks_of(np.float64(x))).max(-1) / unit
        normal = np.float32(q.block_scales) >= 2**-6
        assert (scaled[normal] > 6.0001).any() == clips


@pytest.mark.parametrize("hadamard", [None, fp4.Hadamard(16)])
def test_headroom_removes_the_bias_of_stochastic_rounding(hadamard):
    """Sum over all elements, signs aligned: biased without headroom, within 5 errors with it."""
    x = np.abs(np.random.default_rng(0).standard_normal((64, 64))).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 400)

    def z(headroom):
        quantizer = fp4.Quantizer(
            fp4.NVFP4,
            rounding=fp4.Stochastic(),
            scale_rule=fp4.AmaxScale(headroom=headroom),
            hadamard=hadamard,
        )
        draws = jax.lax.map(lambda k: fp4.fake_quantize(x, quantizer, key=k), keys, batch_size=50)
        projection = (np.float64(draws) * x).sum((1, 2)) - (np.float64(x) ** 2).sum()
        return projection.mean() / (projection.std(ddof=1) / np.sqrt(len(keys)))

    assert z(1.0) < -10  # clipping shrinks the largest elements
    assert abs(z(17 / 16)) < 5


def test_stochastic_scales_are_unbiased():
    """E[scale] is the unrounded scale: 2000 keys, z below 5; and scales are their neighbours."""
    rule = fp4.AmaxScale(rounding=fp4.Stochastic())
    quantizer = fp4.Quantizer(fp4.NVFP4, scale_rule=rule)
    x = uneven((4, 64), seed=5)
    keys = jax.random.split(jax.random.key(1), 2000)
    draws = jax.vmap(lambda k: fp4.quantize(x, quantizer, key=k).block_scales.astype(jnp.float32))
    scales = np.float64(draws(keys))
    ideal = np.float64(np.abs(blocks_of(x)).max(-1) * (f32(2688) / np.abs(x).max() * f32(1 / 6)))
    error = scales.std(0, ddof=1) / np.sqrt(len(keys))
    exact = error == 0
    np.testing.assert_allclose(scales.mean(0)[exact], ideal[exact], rtol=1e-6)
    assert (np.abs(scales.mean(0) - ideal)[~exact] / error[~exact] < 5).all()
    assert (~exact).sum() > 4


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("max_scale", [256, 448])
def test_four_over_six_never_has_the_larger_error(tile, error, max_scale):
    """In float64, on fresh data, against both candidates; also rotated and stochastic."""
    x = uneven((64, 96), seed=6)
    rule = fp4.FourOverSix(error, max_scale)

    def loss(candidate):
        d = np.abs(np.float64(candidate) - x)
        d = d if error == "mae" else d**2
        return d.reshape(64 // tile[0], tile[0], 6, 16).sum((1, 3))

    got = loss(fp4.fake_quantize(x, fp4.Quantizer(fp4.NVFP4, tile, scale_rule=rule)))
    S = f32(6 * max_scale) / np.abs(x).max()
    b = np.abs(x.reshape(64 // tile[0], tile[0], 6, 16)).max((1, 3))
    options = []
    for factor in (1, 1.5):
        s = e4m3(b / f32(6) * S * f32(factor))
        unit = (s * (f32(1) / S)).repeat(tile[0], 0).repeat(16, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            q = np.clip(x * np.minimum(1 / unit, np.finfo(np.float32).max), -6, 6)
        options.append(loss(q.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * unit))
    np.testing.assert_allclose(got, np.minimum(*options), rtol=1e-5)
    assert (options[0] < options[1]).any()
    assert (options[1] < options[0]).any()


def test_four_over_six_with_rotation_and_stochastic_rounding():
    x = np.float32(np.random.default_rng(0).integers(-8, 9, (16, 32)))
    rule, rht = fp4.FourOverSix(), fp4.Hadamard(16)
    rotated = fp4.quantize(x, fp4.Quantizer(fp4.NVFP4, scale_rule=rule, hadamard=rht))
    direct = fp4.quantize(f32(reference.rotated(x)), fp4.Quantizer(fp4.NVFP4, scale_rule=rule))
    np.testing.assert_array_equal(rotated.codes, direct.codes)
    stochastic = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic(), scale_rule=rule)
    nearest = fp4.quantize(x, fp4.Quantizer(fp4.NVFP4, scale_rule=rule))
    draw = fp4.quantize(x, stochastic, key=jax.random.key(0))
    # The scale is chosen before the elements are rounded: that keeps the rounding unbiased.
    np.testing.assert_array_equal(uint8(draw.block_scales), uint8(nearest.block_scales))
    assert (draw.codes != nearest.codes).any()


@pytest.mark.parametrize(
    ("format", "arguments", "message"),
    [
        (fp4.MXFP4, {"scale_rule": fp4.AmaxScale()}, "AmaxScale does not serve MXFP4"),
        (fp4.NVFP4, {"scale_rule": fp4.PowerOfTwo()}, "needs a format with E8M0 scales"),
        (fp4.FP8_BLOCK, {"scale_rule": fp4.FourOverSix()}, "FourOverSix serves NVFP4"),
        (fp4.NVFP4, {"scale_rule": fp4.BetterElement()}, "BetterElement needs two grids"),
        (fp4.NVFP4, {"scale_rule": fp4.RowScaled(), "tile": (16, 16)}, "RowScaled needs"),
        (fp4.FP8_TENSOR, {"tile": (1, 16)}, "tile must be None"),
        (
            fp4.FP8_BLOCK,
            {"scale_rule": fp4.AmaxScale(rounding=fp4.Stochastic())},
            "rounding of scales must be Nearest",
        ),
    ],
)
def test_rules_that_do_not_fit_raise(format, arguments, message):
    with pytest.raises(ValueError, match=message):
        fp4.Quantizer(format, **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp4.AmaxScale(headroom=0.5), "headroom must be from 1 to 2"),
        (lambda: fp4.PowerOfTwo("round"), "mode must be 'floor', 'ceil', 'even' or 'rceil'"),
        (lambda: fp4.FourOverSix("rmse"), "error must be 'mae' or 'mse'"),
        (lambda: fp4.FourOverSix(max_scale=300), "max_scale must be 256 or 448"),
        (lambda: fp4.Format("x", fp4.NVFP4.element, 7, fp4.NVFP4.scale, True), "block must be"),
        (lambda: fp4.Format("x", fp4.NVFP4.element, 16, None, True), "go together"),
        (
            lambda: fp4.Format("x", E3M2, 16, fp4.NVFP4.scale, True),
            "element must have 4 or 8 bits to be packed, not 6",
        ),
    ],
)
def test_impossible_choices_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
