"""einsum and matmul: NumPy's notations, exact on integers, and who is activation and weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import integers

import fp4jax as fp4

PLAIN = fp4.Cast(np.dtype(np.float32))
FLOAT32 = fp4.Recipe("f32", *[fp4.Gemm(PLAIN, PLAIN)] * 3)
NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest())
MATRIX = (((1,), (0,)), ((), ()))


def whole(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), jnp.float32)


def check(mine, theirs, operands):
    """Values and gradients of both are equal: sums of small integers are exact in float32."""
    (y, vjp), (expected, expected_vjp) = jax.vjp(mine, *operands), jax.vjp(theirs, *operands)
    np.testing.assert_array_equal(y, expected)
    dy = whole(expected.shape, 9)
    for a, b in zip(vjp(dy), expected_vjp(dy), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ab,bc->ac", [(3, 4), (4, 5)]),
        ("ab,bc->ca", [(3, 4), (4, 5)]),
        ("ij,jk", [(3, 4), (4, 5)]),
        ("...k,kn->...n", [(2, 3, 4), (4, 5)]),
        ("...ab,...bc->...ac", [(1, 3, 4), (5, 4, 2)]),
        ("abc,cde->abde", [(2, 3, 4), (4, 2, 3)]),
        ("abc,bcd", [(2, 3, 4), (3, 4, 5)]),
        ("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]),
        ("aab,bc->ac", [(3, 3, 4), (4, 5)]),
        ("abz,bc->ac", [(3, 4, 2), (4, 5)]),
        ("ab,cb->ac", [(3, 1), (2, 4)]),
        ("a,b->ab", [(3,), (4,)]),
        ("a,a->", [(3,), (3,)]),
        ("ab,bc,cd->ad", [(3, 4), (4, 5), (5, 6)]),
        ("abc,dc,ed->abe", [(2, 3, 4), (5, 4), (6, 5)]),
        ("ab,b,bc->c", [(3, 4), (4,), (4, 5)]),
        ("ab,bc->ac", [(0, 4), (4, 5)]),
    ],
)
def test_einsum_is_that_of_numpy(subscripts, shapes):
    operands = [whole(shape, seed) for seed, shape in enumerate(shapes)]
    check(
        lambda *a: fp4.einsum(subscripts, *a, recipe=FLOAT32),
        lambda *a: jnp.einsum(subscripts, *a),
        operands,
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 4), (4, 5)),
        ((4,), (4,)),
        ((4,), (4, 5)),
        ((2, 3, 4), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((7, 3, 4), (1, 4, 2)),
        ((4,), (7, 4, 2)),
        ((1, 1), (1, 1)),
    ],
)
def test_matmul_is_that_of_numpy(a, b):
    check(
        lambda *a: fp4.matmul(*a, recipe=FLOAT32),
        lambda *a: jnp.matmul(*a),
        [whole(a, 0), whole(b, 1)],
    )


def products(function, x, w, dy):
    y, vjp = jax.vjp(function, x, w)
    return y, *vjp(dy)


def test_the_first_operand_is_the_activation_whatever_the_order_of_the_result():
    """Weight and activation are blocked apart (16x16, 1x16), so swapping them would show."""
    x, w = jnp.asarray(integers((37, 21), 0, 1)), jnp.asarray(integers((21, 50), 1, 0))
    dy = jnp.asarray(integers((37, 50), 2, 1))
    expected = products(lambda x, w: fp4.dot_general(x, w, MATRIX, recipe=NEAREST), x, w, dy)
    forms = {
        "ab,bc->ac": lambda x, w: fp4.einsum("ab,bc->ac", x, w, recipe=NEAREST),
        "ab,bc->ca": lambda x, w: fp4.einsum("ab,bc->ca", x, w, recipe=NEAREST).T,
        "ba,bc->ac": lambda x, w: fp4.einsum("ba,bc->ac", x.T, w, recipe=NEAREST),
        "matmul": lambda x, w: fp4.matmul(x, w, recipe=NEAREST),
        "hook": lambda x, w: fp4.EinsumOp(NEAREST)("ab,bc->ca", x, w).T,
    }
    for form in forms.values():
        for a, b in zip(products(form, x, w, dy), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    swapped = fp4.einsum("bc,ab->ac", w, x, recipe=NEAREST)
    assert (swapped != expected[0]).any()


def test_a_chain_multiplies_from_the_activation_on():
    x, w, v = (jnp.asarray(integers(s, i, 1)) for i, s in enumerate([(8, 64), (64, 32), (32, 48)]))
    inner = fp4.einsum("ab,bc->ac", x, w, recipe=NEAREST)
    np.testing.assert_array_equal(
        fp4.einsum("ab,bc,cd->ad", x, w, v, recipe=NEAREST),
        fp4.einsum("ac,cd->ad", inner, v, recipe=NEAREST),
    )


def test_products_of_a_chain_share_no_random_bits():
    """Both see one gradient, halfway between grid points; with shared bits they round alike."""
    halfway = np.where(np.arange(1024).reshape(32, 32).T % 16 == 0, 6, 5).astype(np.float32)
    eye, plain = jnp.eye(32), fp4.Gemm(PLAIN, PLAIN)
    recipe = fp4.recipes.nvfp4(hadamard=None).replace(dgrad=plain)
    rounded = recipe.wgrad.rhs
    recipe = recipe.replace(wgrad=fp4.Gemm(PLAIN, rounded))

    def f(x, w, v):
        return fp4.einsum("ab,bc,cd->ad", x, w, v, recipe=recipe, key=jax.random.key(0))

    _, dw, dv = jax.vjp(f, eye, eye, eye)[1](jnp.asarray(halfway))
    alike = np.asarray(dw == dv)[halfway == 5]
    assert abs(alike.mean() - 0.5) < 5 * 0.5 / np.sqrt(alike.size)


def test_result_dtypes():
    x, w = whole((3, 4), 0).astype(jnp.bfloat16), whole((4, 5), 1)
    y, vjp = jax.vjp(lambda x, w: fp4.einsum("ab,bc->ac", x, w, recipe=FLOAT32), x, w)
    assert [a.dtype for a in (y, *vjp(y))] == [jnp.float32, jnp.bfloat16, jnp.float32]
    low = fp4.matmul(x, w, recipe=FLOAT32, preferred_element_type=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: fp4.einsum("ab->ba", x, recipe=FLOAT32), ValueError, "two or more operands"),
        (lambda x: fp4.einsum(x, x, recipe=FLOAT32), TypeError, "subscripts must be a string"),
        (lambda x: fp4.einsum("ab,bc->ac", x, 1.0, recipe=FLOAT32), TypeError, "must be an array"),
        (
            lambda x: fp4.einsum("ab,bc->ac", x, x, recipe=fp4.recipes.nvfp4()),
            ValueError,
            "key is missing",
        ),
        (lambda x: fp4.matmul(x, x[:2], recipe=FLOAT32), ValueError, r"not shapes \(4, 4\), \(2,"),
        (lambda x: fp4.matmul(x, x[0, 0], recipe=FLOAT32), ValueError, "arrays with axes"),
    ],
)
def test_what_cannot_be_honoured_raises(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.ones((4, 4)))
