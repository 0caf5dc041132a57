"""The transform against the matrix product in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference

import fp4jax as fp4


def test_signs_are_transformer_engines():
    assert fp4.Hadamard(16).signs == tuple(reference.SIGNS)
    assert fp4.Hadamard(16).signs == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 128])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_is_the_matrix_product(size, axis):
    rng = np.random.default_rng(size)
    signs = tuple(rng.choice([-1, 1], size).tolist())
    transform = fp4.Hadamard(size, signs)
    shape = [3, 2, 5]
    shape[axis] = 2 * size
    x = np.float32(rng.standard_normal(shape))
    y = np.asarray(transform(jnp.asarray(x), axis))
    np.testing.assert_allclose(y, reference.rotated(x, axis, np.array(signs)), atol=2e-6)
    np.testing.assert_allclose(transform.inverse(jnp.asarray(y), axis), x, atol=2e-6)


def test_group_of_sixteen_is_exact_on_integers():
    x = np.float32(np.random.default_rng(0).integers(-100, 100, (4, 48)))
    np.testing.assert_array_equal(fp4.Hadamard(16)(jnp.asarray(x), 1), reference.rotated(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12,), "size must be"),
        ((1,), "size must be"),
        ((8,), "signs must be 8"),
        ((2, (1, 2)), "+1"),
    ],
)
def test_impossible_transforms_raise(arguments, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        fp4.Hadamard(*arguments)
