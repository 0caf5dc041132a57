"""Recipes: the presets, and any mix of them, against products of each operand taken by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reference import integers

import fp4jax as fp4

MATRIX = (((1,), (0,)), ((), ()))
F32 = fp4.Cast(np.dtype(np.float32))
PLAIN = fp4.Gemm(F32, F32)
RHT = fp4.Hadamard(16)
ROW, SQUARE = fp4.Quantizer(fp4.NVFP4), fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
MX8 = fp4.Quantizer(fp4.MXFP8_E4M3, scale_rule=fp4.PowerOfTwo("rceil"))
SR = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic())
FLOAT32 = fp4.Recipe("f32", PLAIN, PLAIN, PLAIN)


def run(recipe, x, w, dy, key=None):
    y, vjp = jax.vjp(
        lambda x, w: fp4.dot_general(x, w, MATRIX, recipe=recipe, key=key),
        *map(jnp.asarray, (x, w)),
    )
    return y, *vjp(jnp.asarray(dy))


def decode(x, rule, axis):
    """One operand by itself, in float64, the transform not undone (both sides share it)."""
    if isinstance(rule, fp4.Cast):
        values = np.float64(x)
        if rule.hadamard is None:
            return values
        exact = fp4.Quantizer(fp4.FP8_TENSOR, hadamard=rule.hadamard)  # only for its transform
        return transformed(values, exact.hadamard, axis)
    q = fp4.quantize(x, rule, axis=axis)
    operand = q.operand()
    values = np.float64(operand.values)
    if operand.scale is not None:
        values = values * np.float64(operand.scale)
    return np.moveaxis(values, -1, axis)


def transformed(x, hadamard, axis):
    x = np.moveaxis(x, axis, -1)
    x = np.pad(x, [(0, 0), (0, -x.shape[-1] % hadamard.size)])
    h = np.array([[1.0]])
    while len(h) < hadamard.size:
        h = np.block([[h, h], [h, -h]])
    matrix = np.diag(np.float64(hadamard.signs)) @ h / np.sqrt(hadamard.size)
    groups = x.reshape(x.shape[0], -1, hadamard.size) @ matrix
    return np.moveaxis(groups.reshape(x.shape), -1, axis)


def expected_products(recipe, x, w, dy):
    fprop, dgrad, wgrad = recipe.gemms
    return (
        decode(x, fprop.lhs, 1) @ decode(w, fprop.rhs, 0),
        decode(dy, dgrad.lhs, 1) @ decode(w, dgrad.rhs, 1).T,
        decode(x, wgrad.lhs, 0).T @ decode(dy, wgrad.rhs, 0),
    )


MIXES = {
    "nvfp4 forward, mxfp8 backward": fp4.Recipe(
        "a", fp4.Gemm(ROW, SQUARE), fp4.Gemm(MX8, MX8), fp4.Gemm(MX8, MX8)
    ),
    "nvfp4 forward, float32 backward": fp4.Recipe("b", fp4.Gemm(ROW, SQUARE), PLAIN, PLAIN),
    "float32 forward, nvfp4 backward": fp4.Recipe(
        "c", PLAIN, fp4.Gemm(ROW, SQUARE), fp4.Gemm(ROW, ROW)
    ),
    **{
        f"{name}.{side} alone": FLOAT32.replace(**{name: dataclasses.replace(PLAIN, **{side: ROW})})
        for name in ("fprop", "dgrad", "wgrad")
        for side in ("lhs", "rhs")
    },
    **{
        f"RHT in {name}": FLOAT32.replace(**{name: fp4.Gemm(ROW, ROW).with_hadamard(RHT)})
        for name in ("fprop", "dgrad", "wgrad")
    },
    **{
        f"RHT in {name}, one side quantized": FLOAT32.replace(
            **{name: fp4.Gemm(ROW, F32).with_hadamard(RHT)}
        )
        for name in ("fprop", "dgrad", "wgrad")
    },
    "weights 1x16": fp4.recipes.nvfp4(rounding=fp4.Nearest(), square_weights=False),
    "weights 1x16 in fprop, 16x16 in dgrad": fp4.Recipe(
        "d", fp4.Gemm(ROW, ROW), fp4.Gemm(ROW, SQUARE), PLAIN
    ),
    "square activations": fp4.Recipe(
        "e", fp4.Gemm(SQUARE, SQUARE), fp4.Gemm(SQUARE, SQUARE), fp4.Gemm(SQUARE, SQUARE)
    ),
    "four over six": fp4.recipes.nvfp4(rounding=fp4.Nearest(), scale_rule=fp4.FourOverSix()),
    "headroom": fp4.recipes.nvfp4(
        rounding=fp4.Nearest(), gradient_scale_rule=fp4.AmaxScale(headroom=17 / 16)
    ),
    "row scales": fp4.recipes.nvfp4(
        rounding=fp4.Nearest(), scale_rule=fp4.RowScaled(), square_weights=False
    ),
    "mxfp8": fp4.recipes.mxfp8(),
    "mxfp4": fp4.recipes.mxfp4(rounding=fp4.Nearest()),
    "fp8_tensor": fp4.recipes.fp8_tensor(),
    "fp8_block": fp4.recipes.fp8_block(),
}


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_is_the_product_of_its_operands(name):
    x, w, dy = integers((37, 21), 0, 1), integers((21, 50), 1, 0), integers((37, 50), 2, 1)
    got = run(MIXES[name], x, w, dy)
    for mine, exact in zip(got, expected_products(MIXES[name], x, w, dy), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-4, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_stochastic_rounding_of_any_operand(name, side):
    """It changes that product alone, with the key alone, and is unbiased without clipping."""
    x, w, dy = (
        np.float32(np.random.default_rng(i).standard_normal(s))
        for i, s in enumerate([(32, 32), (32, 32), (32, 32)])
    )
    rounded = dataclasses.replace(SR, scale_rule=fp4.AmaxScale(headroom=17 / 16))
    recipe = FLOAT32.replace(**{name: dataclasses.replace(PLAIN, **{side: rounded})})
    keys = jax.random.split(jax.random.key(0), 400)
    draws = lax.map(lambda key: run(recipe, x, w, dy, key), keys, batch_size=100)
    exact = run(FLOAT32, x, w, dy)
    for product, got, want in zip(("fprop", "dgrad", "wgrad"), draws, exact, strict=True):
        if product != name:
            np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))
            continue
        error = np.std(got, 0, ddof=1) / np.sqrt(len(keys))
        z = (np.mean(got, 0) - np.asarray(want)) / error
        assert np.abs(z).max() < 6
        assert 0.5 < (z**2).mean() < 1.5


def test_the_presets_are_what_their_sources_say():
    formats = {
        name: [
            rule.format.name
            for gemm in getattr(fp4.recipes, name)().gemms
            for rule in (gemm.lhs, gemm.rhs)
        ]
        for name in ("fp8_block", "fp8_tensor", "mxfp8", "mxfp4", "nvfp4")
    }
    gradients = ["fp8_tensor", "fp8_tensor", "fp8_tensor_e5m2", "fp8_tensor"]
    assert formats == {
        "fp8_block": ["fp8_block"] * 6,
        "fp8_tensor": [*gradients, "fp8_tensor", "fp8_tensor_e5m2"],
        "mxfp8": ["mxfp8_e4m3"] * 6,
        "mxfp4": ["mxfp4"] * 6,
        "nvfp4": ["nvfp4"] * 6,
    }
    nvfp4 = fp4.recipes.nvfp4()
    assert [gemm.rhs.tile for gemm in nvfp4.gemms] == [(16, 16), (16, 16), (1, 16)]
    stochastic = [
        isinstance(r.rounding, fp4.Stochastic) for g in nvfp4.gemms for r in (g.lhs, g.rhs)
    ]
    assert stochastic == [False, False, True, False, False, True]
    assert [gemm.lhs.hadamard for gemm in nvfp4.gemms] == [None, None, RHT]
    assert fp4.recipes.mxfp4().fprop.rhs.tile == (32, 32)


@pytest.mark.parametrize("power", [-20, -40])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_tensor"])
def test_a_smaller_loss_gives_the_same_gradients_smaller(name, power):
    x, w, dy = (np.float32(np.random.default_rng(i).standard_normal((32, 32))) for i in range(3))
    recipe, key = getattr(fp4.recipes, name)(), jax.random.key(0)
    base = run(recipe, x, w, dy, key)[1:]
    small = run(recipe, x, w, np.ldexp(dy, power), key)[1:]
    for a, b in zip(base, small, strict=True):
        np.testing.assert_array_equal(np.ldexp(np.asarray(a), power), b)


@pytest.mark.parametrize("factor", [1e-6, 1e-12])
def test_relative_errors_do_not_depend_on_the_size_of_the_loss(factor):
    """Factors that are no power of two round differently; the error stays the same to 2%."""
    x, w, dy = (np.float32(np.random.default_rng(i).standard_normal((128, 128))) for i in range(3))

    def errors(dy):
        got = run(fp4.recipes.nvfp4(), x, w, dy, jax.random.key(0))[1:]
        exact = np.float64(dy) @ np.float64(w).T, np.float64(x).T @ np.float64(dy)
        return [
            np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)
            for a, b in zip(got, exact, strict=True)
        ]

    np.testing.assert_allclose(errors(dy), errors(np.float32(dy * np.float64(factor))), rtol=0.02)
