"""Grids, nearest and stochastic rounding, and the generator behind the latter."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax as fp4
from fp4jax import formats, rounding

GRIDS = [formats.E2M1, formats.E4M3, formats.E5M2, formats.INT4]


def all_codes(grid):
    """The patterns of all finite magnitudes; E4M3 has one NaN above them, E5M2 inf and NaNs."""
    return np.arange(
        2 ** (grid.bits - 1) - {"e4m3": 1, "e5m2": 4}.get(grid.name, 0), dtype=np.uint8
    )


def points(grid):
    if grid.bits == 4:
        return np.float32(range(8) if grid.name == "int4" else [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return all_codes(grid).view(grid.dtype).astype(np.float32)


@pytest.mark.parametrize("grid", GRIDS)
def test_grid_points_are_those_of_the_dtype(grid):
    values = rounding.code_value(jnp.asarray(all_codes(grid)), grid)
    np.testing.assert_array_equal(values, points(grid))
    steps = rounding.to_steps(values, grid)
    np.testing.assert_array_equal(rounding.steps_code(steps, grid), all_codes(grid))
    np.testing.assert_array_equal(rounding.steps_value(steps, grid), values)


@pytest.mark.parametrize("grid", GRIDS)
def test_nearest_is_the_cast_of_ml_dtypes(grid):
    middles = (points(grid)[1:] + points(grid)[:-1]) / 2
    near = np.concatenate([points(grid), middles])
    x = np.concatenate([np.nextafter(near, 0), near, np.nextafter(near, np.float32(1e9))])
    x = np.concatenate([x, np.random.default_rng(0).uniform(0, grid.max, 10_000)]).astype(
        np.float32
    )
    steps = rounding.Nearest()(rounding.to_steps(jnp.asarray(x), grid), None)
    clipped = np.minimum(x, np.float32(grid.max))
    expected = np.round(clipped) if grid.name == "int4" else clipped.astype(grid.dtype)
    np.testing.assert_array_equal(rounding.steps_value(steps, grid), expected.astype(np.float32))
    if grid.bits == 8:
        np.testing.assert_array_equal(rounding.steps_code(steps, grid), expected.view(np.uint8))


@pytest.mark.parametrize("x", [np.nan, np.inf, -np.inf, 1e30])
def test_beyond_the_grid_saturates(x):
    for grid in GRIDS:
        steps = rounding.to_steps(jnp.float32(x), grid)
        assert rounding.steps_value(steps, grid) == grid.max


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("grid", GRIDS)
def test_stochastic_probability_is_exact(grid, bits):
    """Feeding every random word of a coarse set gives each neighbour exactly its share."""
    stochastic = fp4.Stochastic(bits)
    # 256 equally spaced words, in the middle of their cells: shares are resolved to 1/256.
    words = (np.arange(256, dtype=np.uint32) << 24) + np.uint32(1 << 23)
    rng = np.random.default_rng(bits)
    low, high = points(grid)[:-1], points(grid)[1:]
    pick = rng.integers(0, len(low), 200)
    fraction = rng.integers(0, 256, 200) / 256
    x = (low[pick] + (high[pick] - low[pick]) * fraction).astype(np.float32)
    steps = rounding.to_steps(jnp.asarray(x[:, None]), grid)
    values = np.asarray(rounding.steps_value(stochastic(steps, jnp.asarray(words[None])), grid))
    up = values == high[pick][:, None]
    assert (up | (values == low[pick][:, None])).all()
    np.testing.assert_array_equal(up.sum(1), fraction * 256)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_grid_points_never_move(bits):
    extremes = jnp.asarray(np.uint32([0, 1, 2**31, 2**32 - 1])[None])
    for grid in GRIDS:
        x = points(grid)
        steps = fp4.Stochastic(bits)(rounding.to_steps(jnp.asarray(x[:, None]), grid), extremes)
        expected = np.broadcast_to(x[:, None], (len(x), 4))
        np.testing.assert_array_equal(rounding.steps_value(steps, grid), expected)


@pytest.mark.parametrize("bits", [8, 16])
def test_worst_bias_is_one_part_in_two_to_the_bits(bits):
    """Just below 1 the share is floor(f * 2**bits) / 2**bits, not 1."""
    below_one = jnp.float32(np.nextafter(np.float32(1.5), np.float32(1)))  # 1.5 less an ulp, E2M1
    words = jnp.arange(2**bits, dtype=jnp.uint32) << (32 - bits)
    steps = fp4.Stochastic(bits)(rounding.to_steps(below_one, formats.E2M1), words)
    assert int((rounding.steps_value(steps, formats.E2M1) == 1.5).sum()) == 2**bits - 1


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_rounds_up_for_exactly_floor_of_f_times_two_to_the_bits_words(bits):
    """The last word that rounds up and the first that does not, for fractions of 23 bits."""
    fraction = np.random.default_rng(bits).integers(1, 2**22, 500) / 2**22
    x = np.float32(2 + fraction)  # between 2 and 3 on E2M1's grid
    threshold = np.floor((np.float64(x) - 2) * 2.0**bits).astype(np.int64)
    for offset, up in ((-1, True), (0, False)):
        word = threshold + offset
        kept = (word >= 0) & (word < 2**bits)
        words = jnp.asarray((word[kept] << (32 - bits)).astype(np.uint32))
        steps = rounding.to_steps(jnp.asarray(x[kept]), formats.E2M1)
        values = rounding.steps_value(fp4.Stochastic(bits)(steps, words), formats.E2M1)
        assert (np.asarray(values) == (3 if up else 2)).all()
        assert kept.sum() > 400


def test_stochastic_takes_8_16_or_32_bits():
    with pytest.raises(ValueError, match="bits must be 8, 16 or 32, not 4"):
        fp4.Stochastic(4)


def generate(seed, shape, axis=-1, operand=0):
    words = rounding.key_words(jax.random.key(seed), operand + 1)[operand, 0]
    return np.asarray(rounding.random_bits(words, shape, axis))


def naive_bits(words, row, position):
    """The generator for one element in Python integers."""

    def mix(h, late=0):
        h ^= h >> 16
        h = h * 0x7FEB352D & 0xFFFFFFFF
        h ^= h >> 15
        h = (h ^ late) * 0x846CA68B & 0xFFFFFFFF
        return h ^ h >> 16

    a, b = (int(word) for word in words)
    inner = mix((mix(row ^ a) + b) & 0xFFFFFFFF)
    outer = mix((mix(row ^ b) + a) & 0xFFFFFFFF)
    return mix(position ^ inner, outer)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_bits_are_a_function_of_row_and_position(axis):
    words = np.uint32([0x12345678, 0x9ABCDEF0])
    shape = (3, 5, 7)
    got = np.moveaxis(rounding.random_bits(jnp.asarray(words), shape, axis), axis, -1)
    for row, line in enumerate(got.reshape(-1, shape[axis])):
        assert line.tolist() == [naive_bits(words, row, i) for i in range(shape[axis])]


# With z-scores of at most 5, a sound generator fails one of these about once in a million runs;
# the keys are fixed, so that each run is the same.
LIMIT = 5


def z_of_mean(samples, mean, variance):
    return abs(samples.mean() - mean) / np.sqrt(variance / samples.size)


def test_bytes_are_uniform():
    bits = generate(0, (512, 512))
    for shift in (0, 8, 16, 24):
        counts = np.bincount((bits.ravel() >> shift & 255), minlength=256)
        expected = bits.size / 256
        chi2 = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi2 - 255) / np.sqrt(2 * 255) < LIMIT


@pytest.mark.parametrize("distance", [(0, 1), (0, 2), (0, 16), (1, 0), (1, 1), (16, 0)])
def test_neighbours_are_uncorrelated(distance):
    u = generate(1, (512, 512)) / 2.0**32 - 0.5
    dy, dx = distance
    product = u[dy:, dx:] * u[: 512 - dy, : 512 - dx]
    assert z_of_mean(product, 0, 1 / 144) < LIMIT


def test_streams_of_keys_and_operands_are_uncorrelated():
    u = [generate(seed, (256, 512), operand=i) / 2.0**32 - 0.5 for seed in range(3) for i in (0, 5)]
    for i in range(len(u)):
        for j in range(i):
            assert z_of_mean(u[i] * u[j], 0, 1 / 144) < LIMIT


def test_streams_share_no_run_of_words():
    """Not even at shifted positions; 2**17 words each share 2**34 / 2**32 = 4 by chance."""
    streams = [set(generate(seed, (256, 512)).ravel().tolist()) for seed in range(4)]
    for i in range(4):
        for j in range(i):
            assert len(streams[i] & streams[j]) < 4 + LIMIT * 2


def test_one_input_bit_flips_half_of_the_output():
    words = np.uint32([123, 456])
    base = generate_from(words)
    for bit in range(32):
        for which in (0, 1):
            changed = words.copy()
            changed[which] ^= np.uint32(1 << bit)
            flips = np.bitwise_count(base ^ generate_from(changed))
            assert z_of_mean(flips, 16, 8) < LIMIT
    for bit in range(9):
        index = np.arange(512) ^ 1 << bit
        assert z_of_mean(np.bitwise_count(base ^ base[:, index]), 16, 8 * 2) < LIMIT


def generate_from(words):
    return np.asarray(rounding.random_bits(jnp.asarray(words), (64, 512), 1))


def test_two_keys_round_differently_and_one_key_the_same():
    quantizer = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic())
    x = np.float32(np.random.default_rng(0).standard_normal((64, 64)))
    a, b, c = (fp4.quantize(x, quantizer, key=jax.random.key(s)).codes for s in (0, 1, 0))
    assert (a != b).mean() > 0.3
    assert (a == c).all()


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_mean_over_keys_is_the_value(bits):
    """Over 4000 keys, per element, within 5 standard errors plus the bound that `bits` states."""
    # Rows of amax from 6 down to 0.006: block scales from 448 to 0.44.
    size = 10.0 ** np.linspace(0, -3, 8)[:, None]
    x = np.float32(np.random.default_rng(0).uniform(-5.9, 5.9, (8, 16)) * size)
    x[:, :1] = 6 * size
    quantizer = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic(bits))
    keys = jax.random.split(jax.random.key(bits), 4000)
    draws = np.asarray(jax.vmap(lambda k: fp4.fake_quantize(x, quantizer, key=k))(keys), np.float64)
    nearest = fp4.quantize(x, fp4.NVFP4)
    step = np.asarray(nearest.block_scales).astype(np.float32) * float(nearest.tensor_scale)
    inside = np.abs(x) < 6 * step  # beyond, values clip
    bound = LIMIT * draws.std(0) / np.sqrt(4000) + 2 * step * 2.0**-bits + np.abs(x) * 1e-6
    assert (np.abs(draws.mean(0) - x) <= bound)[inside].all()
    assert inside.mean() > 0.9
    assert nearest.block_scales.dtype == ml_dtypes.float8_e4m3fn
