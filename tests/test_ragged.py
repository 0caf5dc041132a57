"""ragged_dot: each group as if it were alone, and nothing of one in another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reference import integers, nearest_products

import fp4jax as fp4

NVFP4 = fp4.recipes.nvfp4()
NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest())
PLAIN = fp4.Cast(np.dtype(np.float32))
FLOAT32 = fp4.Recipe("f32", *[fp4.Gemm(PLAIN, PLAIN)] * 3)
MATRIX = (((1,), (0,)), ((), ()))


def run(recipe, x, w, dy, sizes, key=None):
    y, vjp = jax.vjp(
        lambda x, w: fp4.ragged_dot(x, w, jnp.asarray(sizes), recipe=recipe, key=key),
        jnp.asarray(x),
        jnp.asarray(w),
    )
    return y, *vjp(jnp.asarray(dy))


def parts(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (100, [10, 0, 33, 57]),
        (300, [130, 100, 70]),
        (5, [1, 1]),
        (64, [64]),
        (128, [64, 64]),
        (3, [0, 0, 0]),
        (9, [1] * 9),
    ],
)
def test_plain_products_are_those_of_lax(rows, sizes):
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.integers(-4, 5, shape), jnp.float32)
        for shape in [(rows, 20), (len(sizes), 20, 7), (rows, 7)]
    )
    expected, vjp = jax.vjp(lambda x, w: lax.ragged_dot(x, w, jnp.asarray(sizes)), x, w)
    for a, b in zip(run(FLOAT32, x, w, dy, sizes), (expected, *vjp(dy)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_each_group_in_float64():
    """Groups of very different size of number, and none a multiple of a block."""
    sizes = [37, 0, 1, 90]
    x, dy = integers((128, 21), 0, 1), integers((128, 50), 2, 1)
    w = integers((4, 21, 50), 1, 1)
    for i, part in enumerate(parts(sizes)):
        x[part] *= 2.0 ** (20 * i)
        dy[part] *= 2.0 ** (-15 * i)
        w[i] *= 2.0 ** (-10 * i)
    y, dx, dw = run(NEAREST, x, w, dy, sizes)
    for i, part in enumerate(parts(sizes)):
        if not sizes[i]:
            assert not np.asarray(dw[i]).any()
            continue
        exact, magnitude = nearest_products(x[part], w[i], dy[part])
        for mine, value, size in zip((y[part], dx[part], dw[i]), exact, magnitude, strict=True):
            assert (np.abs(np.float64(mine) - value) <= 1e-6 * (size + np.abs(value))).all()


@pytest.mark.parametrize(
    "recipe",
    [
        fp4.recipes.fp8_block(),
        fp4.recipes.fp8_tensor(),
        fp4.recipes.mxfp8(),
        fp4.recipes.mxfp4(rounding=fp4.Nearest()),
        fp4.recipes.nvfp4(rounding=fp4.Nearest(), scale_rule=fp4.RowScaled(), square_weights=False),
        fp4.recipes.bf16(),
    ],
    ids=lambda recipe: recipe.name,
)
def test_every_recipe_does_to_a_group_what_dot_general_does(recipe):
    sizes = [37, 91]
    x, dy = integers((128, 40), 0, 1), integers((128, 50), 2, 1)
    w = integers((2, 40, 50), 1, 1)
    x[:37] *= 2.0**9
    got = run(recipe, x, w, dy, sizes)
    for i, part in enumerate(parts(sizes)):
        expected, vjp = jax.vjp(
            lambda x, w: fp4.dot_general(x, w, MATRIX, recipe=recipe), x[part], w[i]
        )
        alone = (expected, *vjp(jnp.asarray(dy[part])))
        for mine, other in zip((got[0][part], got[1][part], got[2][i]), alone, strict=True):
            # Tiles of a group are summed one after the other.
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("recipe", [NVFP4, fp4.recipes.fp8_tensor(), fp4.recipes.fp8_block()])
@pytest.mark.parametrize("bad", ["x", "w", "dy"])
def test_a_nan_stays_in_its_group(recipe, bad):
    sizes = [37, 50, 41]
    given = {
        "x": integers((128, 48), 0, 1),
        "w": integers((3, 48, 50), 1, 1),
        "dy": integers((128, 50), 2, 1),
    }
    key = jax.random.key(0)
    clean = run(recipe, **given, sizes=sizes, key=key)
    given[bad][1 if bad == "w" else 60, 3] = np.nan
    spoilt = run(recipe, **given, sizes=sizes, key=key)
    first, second, third = parts(sizes)
    for a, b in zip(clean[:2], spoilt[:2], strict=True):
        np.testing.assert_array_equal(a[first], b[first])
        np.testing.assert_array_equal(a[third], b[third])
    np.testing.assert_array_equal(clean[2][0], spoilt[2][0])
    np.testing.assert_array_equal(clean[2][2], spoilt[2][2])
    reached = {"x": (0, 2), "w": (0, 1), "dy": (1, 2)}[bad]
    for i in reached:
        group = spoilt[i][1] if i == 2 else spoilt[i][second]
        assert np.isnan(group).any()


def test_rows_after_the_last_group_are_zero():
    x, w, dy = integers((50, 16), 0, 1), integers((2, 16, 16), 1, 1), integers((50, 16), 2, 1)
    x[30:] = np.nan
    y, dx, dw = run(NEAREST, x, w, dy, [10, 20])
    assert not np.asarray(y[30:]).any()
    assert not np.asarray(dx[30:]).any()
    assert np.isfinite(dw).all()


def test_gradients_are_unbiased():
    """The mean over 400 keys, against the products of what is not rounded stochastically."""
    sizes, count = [20, 44], 400
    rng = np.random.default_rng(0)
    x, w, dy = (np.float32(rng.standard_normal(s)) for s in [(64, 32), (2, 32, 32), (64, 32)])
    headroom = fp4.AmaxScale(headroom=17 / 16)  # without it clipping biases
    recipe = fp4.recipes.nvfp4(hadamard=None, gradient_scale_rule=headroom)
    keys = jax.random.split(jax.random.key(1), count)
    draws = lax.map(lambda key: run(recipe, x, w, dy, sizes, key)[1:], keys, batch_size=20)
    high = recipe.replace(
        dgrad=fp4.Gemm(PLAIN, recipe.dgrad.rhs), wgrad=fp4.Gemm(recipe.wgrad.lhs, PLAIN)
    )
    for got, expected in zip(draws, run(high, x, w, dy, sizes)[1:], strict=True):
        error = np.std(got, 0, ddof=1) / np.sqrt(count)
        z = (np.mean(got, 0) - np.asarray(expected)) / error
        assert np.abs(z).max() < 6
        assert 0.5 < (z**2).mean() < 1.5


def test_no_two_rows_share_random_bits():
    """All gradients halfway between two grid points: groups and rows must round independently."""
    halfway = np.full((128, 16), 5, np.float32)
    halfway[:, 0] = 6
    eye = np.broadcast_to(np.eye(16, dtype=np.float32), (2, 16, 16))
    x = np.zeros((128, 16), np.float32)
    _, dx, _ = run(NVFP4, x, eye, halfway, [64, 64], jax.random.key(0))
    up = np.asarray(dx)[:, 1:] > 5
    error = 0.5 / np.sqrt(up[:64].size)
    assert abs((up[:64] == up[64:]).mean() - 0.5) < 5 * error
    assert abs((up[:-1] == up[1:]).mean() - 0.5) < 5 * error


def test_under_jit_with_traced_sizes_and_under_vmap():
    x, w = integers((2, 96, 24), 0, 2), integers((3, 24, 16), 1, 1)
    sizes = np.array([[20, 41, 35], [0, 96, 0]])

    def loss(x, w, sizes):
        return (fp4.ragged_dot(x, w, sizes, recipe=NEAREST) ** 2).sum()

    gradient = jax.grad(loss, argnums=(0, 1))
    one_by_one = [gradient(jnp.asarray(x[i]), jnp.asarray(w), sizes[i]) for i in range(2)]
    mapped = jax.jit(jax.vmap(gradient, in_axes=(0, None, 0)))(x, w, sizes)
    for i in range(2):
        for a, b in zip(one_by_one[i], mapped, strict=True):
            np.testing.assert_allclose(a, b[i], rtol=1e-5, atol=1e-5 * np.abs(a).max())


def test_the_backward_pass_keeps_packed_operands():
    rows, groups, k, n = 4096, 8, 256, 128
    x, w = jnp.ones((rows, k), jnp.bfloat16), jnp.ones((groups, k, n))
    sizes = jnp.full(groups, rows // groups)

    def residuals(x, w, sizes):
        def f(x, w):
            return fp4.ragged_dot(x, w, sizes, recipe=NVFP4, key=jax.random.key(0))

        return jax.vjp(f, x, w)[1]

    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.jit(residuals)(x, w, sizes)))
    # One more tile of 64 rows for each group, and a little for places and random words.
    most = 4.5 / 8 * (rows + 64 * groups) * k + 4.1 / 8 * groups * k * n + 8 * (rows + 1024)
    assert kept < most


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"recipe": NVFP4}, ValueError, "key is missing"),
        ({"group_sizes": [3, 6]}, ValueError, r"sum to at most 8 rows, not \[3, 6\]"),
        ({"group_sizes": [9, -1]}, ValueError, "must be 0 or more"),
        ({"group_sizes": [8]}, ValueError, r"shape \(2,\)"),
        ({"group_sizes": [4.0, 4.0]}, TypeError, "must be integers, not float32"),
        ({"rhs": jnp.ones((2, 15, 4))}, ValueError, r"\[M, K\] and \[G, K, N\]"),
        ({"lhs": jnp.ones((8, 16), int)}, TypeError, "lhs must be floating-point"),
    ],
)
def test_what_cannot_be_honoured_raises(change, error, message):
    given = {
        "lhs": jnp.ones((8, 16)),
        "rhs": jnp.ones((2, 16, 4)),
        "group_sizes": [4, 4],
        "recipe": NEAREST,
    } | change
    with pytest.raises(error, match=message):
        fp4.ragged_dot(
            given["lhs"], given["rhs"], jnp.asarray(given["group_sizes"]), recipe=given["recipe"]
        )
