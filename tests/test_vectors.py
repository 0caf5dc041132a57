"""Byte equality with TransformerEngine's reference quantizer and the contract's worked examples."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax as fp4

VECTORS = np.load(pathlib.Path(__file__).parent / "data" / "nvfp4_mx.npz")
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
CASES = [key.removesuffix("_codes").split("/") for key in VECTORS.files if key.endswith("_codes")]


def quantizer_of(kind):
    """The Quantizer that an entry's name stands for, such as nvfp4_1x16_4over6_mae_256."""
    family, *details = kind.split("_")
    if family == "mxfp8":
        family += "_" + details.pop(0)
    tile = tuple(int(n) for n in details[0].split("x"))
    match details[1:]:
        case []:
            rest = {}
        case ["rht"]:
            rest = {"hadamard": fp4.Hadamard(16)}
        case ["rowscaled"]:
            rest = {"scale_rule": fp4.RowScaled()}
        case ["4over6", error, max_scale]:
            rest = {"scale_rule": fp4.FourOverSix(error, int(max_scale))}
        case [mode]:
            rest = {"scale_rule": fp4.PowerOfTwo(mode)}
    return fp4.Quantizer(getattr(fp4, family.upper()), tile=tile, **rest)


def without_zero_signs(codes, bits=4):
    """The reference gives code 0 for -0.0, where this project keeps the sign."""
    if bits == 8:
        return np.where(codes == 0x80, 0, codes)
    low, high = codes & 15, codes >> 4
    return np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4


def test_all_entries_are_covered():
    # Each of 9 cases has 2 tiles in 2 directions and 2 dtypes, the transform for bfloat16, and
    # for float32 8 of four-over-six, one row-scaled and 3 MX formats by 4 rules.
    assert len(CASES) == 9 * (2 * 2 * 2 + 1 + 8 + 1 + 3 * 4)


@functools.cache
def runner(kind, axis, jitted):
    def run(x):
        return fp4.quantize(x, quantizer_of(kind), axis=axis)

    return jax.jit(run) if jitted else run


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("case", "dtype", "kind", "way"), CASES)
def test_reference(case, dtype, kind, way, jitted):
    x = jnp.asarray(VECTORS[f"{case}/{dtype}/x"], DTYPES[dtype])
    q = runner(kind, -1 if way == "row" else 0, jitted)(x)
    entry = f"{case}/{dtype}/{kind}/{way}"
    scales = np.asarray(q.block_scales).view(np.uint8)
    if "16x16" in kind:
        scales = np.repeat(scales, 16, axis=0)
    np.testing.assert_array_equal(scales, VECTORS[f"{entry}_scales"])
    bits = q.format.element.bits
    np.testing.assert_array_equal(
        without_zero_signs(np.asarray(q.codes), bits),
        without_zero_signs(VECTORS[f"{entry}_codes"], bits),
    )
    if f"{entry}_amax" in VECTORS:
        with np.errstate(divide="ignore"):
            S = np.minimum(np.float32(2688) / VECTORS[f"{entry}_amax"], np.finfo(np.float32).max)
        expected = np.float32(1) / S
        # Where all is zero: 1 / FLT_MAX is subnormal, which XLA flushes.
        expected = np.where(expected < np.finfo(np.float32).tiny, 0, expected)
        np.testing.assert_array_equal(np.atleast_1d(q.tensor_scale), expected)


def blocks(*rows):
    return np.concatenate([np.pad(np.float32(row), (0, 16 - len(row))) for row in rows])[None]


QUADRANTS = np.kron(np.float32([[1, 10], [100, 50]]), np.ones((16, 16), np.float32))
SMALL = {
    "grid": (
        blocks([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6]),
        "00212243446566f7",
        "7e",
    ),
    "order of S/6": (
        blocks([1.015625], [0.76171875, 0.5, -0.25]),
        "07" + "00" * 7 + "670c",
        "7e7b",
    ),
    "reciprocal of scale": (blocks([1], [0.82421875, 0.5]), "07" + "00" * 7 + "57", "7e7c"),
    "scale at its minimum": (blocks([1], [2**-18] * 16), "07" + "00" * 7 + "77" * 8, "7e01"),
}


@pytest.mark.parametrize("name", SMALL)
def test_worked_example(name):
    x, codes, scales = SMALL[name]
    q = fp4.quantize(x, fp4.NVFP4)
    assert np.asarray(q.codes).tobytes().hex().startswith(codes)
    assert np.asarray(q.block_scales).tobytes().hex() == scales


def test_worked_example_square_quadrants():
    q = fp4.quantize(QUADRANTS, fp4.Quantizer(fp4.NVFP4, tile=(16, 16)))
    assert np.asarray(q.codes).tobytes() == b"\x77" * 512
    assert np.asarray(q.block_scales).tobytes().hex() == "4963" + "7e76"
    assert q.block_scales.shape == (2, 2)


def test_worked_example_hadamard():
    x = jnp.ones((16, 3), jnp.bfloat16)
    q = fp4.quantize(x, quantizer_of("nvfp4_1x16_rht"), axis=0)
    column = [-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2]
    values, scale = q.operand()
    np.testing.assert_array_equal(np.asarray(values, np.float32) * np.asarray(scale), [column] * 3)
    assert without_zero_signs(np.asarray(q.codes)).tobytes().hex() == "0d05050d750505f5" * 3
    assert np.asarray(q.block_scales).tobytes().hex() == "7e" * 3
    assert q.tensor_scale == np.float32(1) / (np.float32(2688) / np.float32(2))


@pytest.mark.parametrize("error", ["mae", "mse"])
def test_worked_example_four_over_six(error):
    x = blocks([10, 20, 30, 40])
    q = fp4.quantize(x, fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.FourOverSix(error, 256)))
    assert np.asarray(q.codes).tobytes().hex().startswith("4265")
    assert np.asarray(q.block_scales).tobytes().hex() == "7c"
    plain = fp4.quantize(x, fp4.NVFP4)
    assert np.asarray(plain.codes).tobytes().hex().startswith("5376")
    assert np.asarray(plain.block_scales).tobytes().hex() == "7e"


def test_negative_zero_keeps_its_sign():
    q = fp4.quantize(np.float32([-0.0, 0.0, 1, -0.0]), fp4.NVFP4)
    assert np.asarray(q.codes)[:2].tolist() == [0x08, 0x87]
    assert np.signbit(np.asarray(q.dequantize())).tolist() == [True, False, False, True]
    assert q.block_scales.dtype == ml_dtypes.float8_e4m3fn
