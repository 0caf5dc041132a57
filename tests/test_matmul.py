"""dot_general: its products against float64, unbiasedness, residuals, dimension numbers."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from reference import SIGNS, decoded, integers, nearest_products, rotated, sylvester

import fp4jax as fp4

MATRIX = (((1,), (0,)), ((), ()))
NVFP4 = fp4.recipes.nvfp4()
RHT = fp4.Hadamard(16)
ROW, SQUARE = fp4.Quantizer(fp4.NVFP4), fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
ROTATED = fp4.Quantizer(fp4.NVFP4, hadamard=RHT)
# The paper's recipe with nearest rounding throughout: a function of its inputs alone.
NEAREST = NVFP4.replace(dgrad=fp4.Gemm(ROW, SQUARE), wgrad=fp4.Gemm(ROTATED, ROTATED))
PLAIN = fp4.Cast(np.float32)
FLOAT32 = fp4.Recipe("f32", *[fp4.Gemm(PLAIN, PLAIN)] * 3)


def run(recipe, x, w, dy, key=None):
    y, vjp = jax.vjp(
        lambda x, w: fp4.dot_general(
            x, w, MATRIX, recipe=recipe, key=key, preferred_element_type=jnp.float32
        ),
        jnp.asarray(x),
        jnp.asarray(w),
    )
    return y, *vjp(jnp.asarray(dy))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(32, 48, 16), (37, 21, 50), (5, 3, 1), (1, 1, 1)])
def test_three_products_in_float64(m, k, n, dtype):
    x, w, dy = integers((m, k), 0, 1), integers((k, n), 1, 0), integers((m, n), 2, 1)
    got = run(NEAREST, x.astype(dtype), w, dy)
    expected, magnitude = nearest_products(x, w, dy)
    assert [a.dtype for a in got] == [jnp.float32, dtype, jnp.float32]
    for result, value, size in zip(got, expected, magnitude, strict=True):
        # float32 accumulation; a bfloat16 cotangent is rounded once more.
        tolerance = size * 1e-6 + np.abs(value) * (2**-8 if result.dtype == dtype else 1e-6)
        assert (np.abs(np.float64(result) - value) <= tolerance + 1e-30).all()


def test_every_part_of_the_recipe_matters():
    x, w, dy = integers((48, 32), 0, 1), integers((32, 48), 1, 0), integers((48, 48), 2, 1)
    base = run(NEAREST, x, w, dy)
    changes = {
        "2d": NEAREST.replace(fprop=fp4.Gemm(ROW, ROW), dgrad=fp4.Gemm(ROW, ROW)),
        "rht": NEAREST.replace(wgrad=NEAREST.wgrad.without_hadamard()),
    }
    differ = {
        name: [bool((a != b).any()) for a, b in zip(base, run(recipe, x, w, dy), strict=True)]
        for name, recipe in changes.items()
    }
    assert differ == {"2d": [True, True, False], "rht": [False, False, True]}


def with_peaks(shape, seed):
    """Gaussian, with +-4 once in each block of 16 of a row: all block scales are then exact.

    With a block scale that rounds down, the block's largest elements clip, which biases
    stochastic rounding; NVIDIA's scheme accepts that. Here nothing clips.
    """
    rng = np.random.default_rng(seed)
    x = np.clip(rng.standard_normal(shape), -3, 3)
    blocks = x.reshape(shape[0], -1, 16)
    where = rng.integers(0, 16, blocks.shape[:2])
    np.put_along_axis(
        blocks, where[..., None], rng.choice([-4.0, 4.0], blocks.shape[:2])[..., None], 2
    )
    return np.float32(x)


def draws_of(recipe, x, w, dy, which, count):
    keys = jax.random.split(jax.random.key(7), count)
    step = jax.jit(lambda key: run(recipe, x, w, dy, key)[which])
    return np.asarray(lax.map(step, keys, batch_size=50), np.float64)


@pytest.mark.parametrize("product", ["dgrad", "wgrad"])
def test_stochastic_gradients_are_unbiased(product):
    """2000 keys: per-element z-scores below 5.5, and their mean square within 5 errors of 1."""
    m, k, n, count = 32, 16, 32, 2000
    x, w = (
        np.float32(np.random.default_rng(i).standard_normal(s))
        for i, s in enumerate([(m, k), (k, n)])
    )
    if product == "dgrad":
        dy = with_peaks((m, n), 2)
        expected = np.float64(dy) @ decoded(w.T, (16, 16))
    else:
        turned = with_peaks((n, m), 2)
        # dy is what the transform turns into `turned`.
        inverse = (np.diag(SIGNS) @ sylvester(16)).T
        dy = np.float32((turned.reshape(n, -1, 16) @ inverse).reshape(n, m).T)
        expected = decoded(rotated(x.T)) @ np.float64(turned.T)
    draws = draws_of(NVFP4, x, w, dy, 1 if product == "dgrad" else 2, count)
    error = draws.std(0, ddof=1) / np.sqrt(count)
    z = (draws.mean(0) - expected) / error
    assert np.abs(z).max() < 5.5
    # Elements of one row or column share rounding errors: count one per row as independent.
    assert abs((z**2).mean() - 1) < 5 * np.sqrt(2 / min(z.shape))


def test_gradient_rounding_is_stochastic_and_forward_is_not():
    x, w, dy = (np.float32(np.random.default_rng(i).standard_normal((32, 32))) for i in range(3))
    a, b, c = (run(NVFP4, x, w, dy, jax.random.key(s)) for s in (0, 1, 0))
    assert [bool((p != q).any()) for p, q in zip(a, b, strict=True)] == [False, True, True]
    assert [bool((p != q).any()) for p, q in zip(a, c, strict=True)] == [False, False, False]


def test_dgrad_and_wgrad_share_no_random_bits():
    """A gradient halfway between two grid points everywhere rounds apart in the two products."""
    recipe = NVFP4.replace(wgrad=NVFP4.wgrad.without_hadamard())
    # 5 of 6, with the 6 that sets the scale once in each block of a row and of a column.
    halfway = np.add.outer(np.arange(64), np.arange(64)) % 16 != 0
    dy = np.where(halfway, 5, 6).astype(np.float32)
    _, dx, dw = run(
        recipe, np.eye(64, dtype=np.float32), np.eye(64, dtype=np.float32), dy, jax.random.key(0)
    )
    ups = [np.asarray(g)[halfway] > 5 for g in (dx, dw)]
    error = 0.5 / np.sqrt(halfway.sum())
    for share in (ups[0].mean(), ups[1].mean(), (ups[0] == ups[1]).mean()):
        assert abs(share - 0.5) < 5 * error


@pytest.mark.parametrize("power", [-20, -40, -60])
def test_gradients_scale_exactly_with_the_loss(power):
    x, w, dy = (np.float32(np.random.default_rng(i).standard_normal((32, 32))) for i in range(3))
    base = run(NVFP4, x, w, dy, jax.random.key(0))
    small = run(NVFP4, x, w, np.ldexp(dy, power), jax.random.key(0))
    for a, b in zip(base[1:], small[1:], strict=True):
        np.testing.assert_array_equal(np.ldexp(np.asarray(a), power), b)


def test_backward_keeps_packed_operands_only():
    m, k, n = 256, 128, 64
    x, w = jnp.ones((m, k), jnp.bfloat16), jnp.ones((k, n))

    def f(x, w):
        return fp4.dot_general(x, w, MATRIX, recipe=NVFP4, key=jax.random.key(0))

    kept = jax.tree.leaves(jax.vjp(f, x, w)[1])
    activation = m * k // 2 + m * k // 16 + 4
    weight = k * n // 2 + k * n // 256 + 4
    random_words = 6 * 2 * 2 * 4
    assert sum(leaf.nbytes for leaf in kept) == activation + weight + random_words


DIMENSIONS = [
    ((4, 6), (6, 5), MATRIX),
    ((3, 4, 6), (6, 5), (((2,), (0,)), ((), ()))),
    ((6, 4), (5, 6), (((0,), (1,)), ((), ()))),
    ((2, 4, 6), (2, 6, 5), (((2,), (1,)), ((0,), (0,)))),
    ((4, 2, 6), (6, 5, 2), (((2,), (0,)), ((1,), (2,)))),
    ((4, 6, 3), (3, 6, 5), (((1, 2), (1, 0)), ((), ()))),
    ((2, 3, 4, 6), (3, 2, 6), (((3,), (2,)), ((0, 1), (1, 0)))),
    ((6,), (6,), (((0,), (0,)), ((), ()))),
    ((6,), (6, 5), (((0,), (0,)), ((), ()))),
    ((4,), (5,), (((), ()), ((), ()))),
    ((0, 6), (6, 5), MATRIX),
    ((4, 0), (0, 5), MATRIX),
]


@pytest.mark.parametrize(("lhs", "rhs", "dimensions"), DIMENSIONS)
def test_dimension_numbers_are_those_of_lax(lhs, rhs, dimensions):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in (lhs, rhs))
    expected, expected_vjp = jax.vjp(lambda a, b: lax.dot_general(a, b, dimensions), a, b)
    got, vjp = jax.vjp(lambda a, b: fp4.dot_general(a, b, dimensions, recipe=FLOAT32), a, b)
    np.testing.assert_array_equal(got, expected)
    dy = jnp.asarray(rng.integers(-4, 5, got.shape), jnp.float32)
    for mine, theirs in zip(vjp(dy), expected_vjp(dy), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_permuted_axes_give_the_same_products():
    x, w, dy = integers((37, 21), 0, 1), integers((21, 50), 1, 0), integers((37, 50), 2, 1)
    y, dx, dw = run(NEAREST, x, w, dy)
    got, vjp = jax.vjp(
        lambda a, b: fp4.dot_general(a, b, (((0,), (1,)), ((), ())), recipe=NEAREST),
        jnp.asarray(x.T),
        jnp.asarray(w.T),
    )
    np.testing.assert_array_equal(got, y)
    for mine, theirs in zip(vjp(jnp.asarray(dy)), (dx.T, dw.T), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_bf16_recipe_is_the_bf16_product():
    x, w, dy = (np.float32(np.random.default_rng(i).standard_normal((20, 20))) for i in range(3))
    got = run(fp4.recipes.bf16(), x, w, dy)
    x, w, dy = (np.float64(a.astype(ml_dtypes.bfloat16)) for a in (x, w, dy))
    for mine, exact in zip(got, (x @ w, dy @ w.T, x.T @ dy), strict=True):
        np.testing.assert_allclose(mine, exact, atol=1e-5)


def test_fp8_block_recipe_in_float64():
    x, w, dy = integers((140, 150), 0, 1), integers((150, 130), 1, 0), integers((140, 130), 2, 1)

    def decode(a, tile=(1, 128)):
        return np.float64(fp4.quantize(a, fp4.Quantizer(fp4.FP8_BLOCK, tile=tile)).dequantize())

    qw = decode(w, (128, 128))
    expected = (decode(x) @ qw, decode(dy) @ qw.T, decode(x.T) @ decode(dy.T).T)
    for mine, exact in zip(run(fp4.recipes.fp8_block(), x, w, dy), expected, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("recipe", [NVFP4, fp4.recipes.fp8_block(), fp4.recipes.bf16()])
def test_under_jit_vmap_scan_and_remat(recipe):
    x = jnp.asarray(integers((3, 20, 16), 0, 2))
    w = jnp.asarray(integers((16, 16), 1, 0))
    key = jax.random.key(0)

    def layer(x, w):
        return fp4.dot_general(x, w, MATRIX, recipe=recipe, key=key)

    def loss(transform):
        def f(w):
            return (transform(w) ** 2).mean()

        return jax.jit(jax.value_and_grad(f))(w)

    direct = loss(lambda w: jnp.stack([layer(x[i], w) for i in range(3)]))
    forms = [
        lambda w: jax.vmap(lambda x: layer(x, w))(x),
        lambda w: lax.scan(lambda c, x: (c, layer(x, w)), None, x)[1],
        lambda w: jnp.stack([jax.checkpoint(layer)(x[i], w) for i in range(3)]),
    ]
    for form in forms:
        value, gradient = loss(form)
        np.testing.assert_allclose(value, direct[0], rtol=1e-5)
        np.testing.assert_allclose(gradient, direct[1], rtol=1e-5, atol=1e-6)


def test_higher_and_forward_derivatives_are_refused():
    x, w = jnp.ones((4, 16)), jnp.ones((16, 4))

    def f(x):
        return fp4.dot_general(x, w, MATRIX, recipe=NEAREST).sum()

    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (x,), (x,))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"recipe": NVFP4}, ValueError, "key is missing: recipe 'nvfp4'"),
        ({"recipe": "nvfp4"}, TypeError, "recipe must be a Recipe"),
        ({"lhs": jnp.ones((4, 16), jnp.int32)}, TypeError, r"lhs must be .* int32\[4, 16\]"),
        ({"rhs": jnp.ones((16, 4), bool)}, TypeError, "rhs must be floating-point"),
        ({"rhs": jnp.ones((15, 4))}, TypeError, "contracting dimension"),
        ({"lhs": [[1.0] * 16]}, TypeError, "lhs must be an array, not list"),
    ],
)
def test_what_cannot_be_honoured_raises(change, error, message):
    arguments = {"lhs": jnp.ones((4, 16)), "rhs": jnp.ones((16, 4)), "recipe": NEAREST} | change
    with pytest.raises(error, match=message):
        fp4.dot_general(arguments["lhs"], arguments["rhs"], MATRIX, recipe=arguments["recipe"])


def test_one_sided_transform_raises():
    with pytest.raises(ValueError, match="lhs and rhs must share one Hadamard transform"):
        fp4.Gemm(ROTATED, ROW)


def test_recipes_are_values():
    assert fp4.recipes.nvfp4() == NVFP4
    assert hash(fp4.recipes.nvfp4()) == hash(NVFP4)
    assert NVFP4.replace(wgrad=NVFP4.wgrad.without_hadamard()) != NVFP4
    assert NVFP4.replace(dgrad=NVFP4.dgrad).name == "nvfp4*"
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVFP4.name = "other"


def test_float64_arrays_of_numpy_count_as_what_jax_makes_of_them():
    x, w = (np.random.default_rng(0).standard_normal(shape) for shape in ((4, 5), (5, 6)))
    recipe = fp4.recipes.nvfp4(rounding=fp4.Nearest())

    def all_three(x, w):
        stack = w[None]
        return (
            fp4.matmul(x, w, recipe=recipe),
            fp4.ragged_dot(x, stack, np.array([4]), recipe=recipe),
            fp4.einsum("ab,bc,c->a", x, w, w[0], recipe=recipe),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns where float64 is asked for and not enabled
        got = all_three(x, w)
        jax.grad(lambda x: sum(y.sum() for y in all_three(x, w)))(jnp.asarray(x))
    expected = all_three(*(jnp.asarray(a) for a in (x, w)))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_an_empty_product_varies_over_the_mesh_as_its_factors_do():
    recipe = fp4.recipes.nvfp4(rounding=fp4.Nearest())
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, x, w = jax.sharding.PartitionSpec("d"), jnp.ones((4, 0)), jnp.ones((0, 6))
    sizes = jnp.array([4])

    def products(x):
        for y in (
            fp4.matmul(x, w, recipe=recipe),
            fp4.ragged_dot(x, w[None], sizes, recipe=recipe),
        ):
            assert jax.typeof(y).manual_axis_type.varying == {"d"}
        return x

    jax.shard_map(products, mesh=mesh, in_specs=spec, out_specs=spec)(x)
