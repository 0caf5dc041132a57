"""Rotary positions against the rotation of complex numbers, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.models.rope import rotate


def turned(x, theta):
    """Halves as real and imaginary parts, times exp(i angle)."""
    length, width = x.shape[1], x.shape[-1]
    numbers = x[..., : width // 2] + 1j * x[..., width // 2 :]
    for p in range(length):
        for i in range(width // 2):
            numbers[:, p, ..., i] *= np.exp(1j * p / theta ** (2 * i / width))
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


@pytest.mark.parametrize("shape", [(2, 37, 3, 8), (1, 5, 2, 3, 16), (2, 1, 4), (0, 3, 2, 4)])
@pytest.mark.parametrize("theta", [100.0, 10000.0])
def test_rotation_is_that_of_complex_numbers(shape, theta):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    got = jax.jit(rotate, static_argnums=1)(jnp.asarray(x), theta)
    np.testing.assert_allclose(got, turned(x.astype(np.float64), theta), rtol=0, atol=2e-5)


def test_far_positions_are_as_exact_as_said():
    x = np.zeros((1, 5000, 8), np.float32)
    x[..., :4] = 1
    error = np.abs(rotate(jnp.asarray(x), 10000.0) - turned(x.astype(np.float64), 10000.0))
    bound = np.arange(5000) / 2**23 + 2e-7  # and the rounding of sine, cosine and product
    assert np.all(error.max(axis=(0, 2)) <= bound)


def test_bfloat16_is_rotated_in_float32_and_returned():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, 2, 8)), jnp.bfloat16)
    got = rotate(x, 100.0)
    assert got.dtype == jnp.bfloat16
    exact = turned(np.asarray(x, np.float64), 100.0)
    np.testing.assert_array_equal(got, jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16))


def test_products_depend_on_distance_only():
    q, k = (np.random.default_rng(i).standard_normal(8).astype(np.float32) for i in range(2))
    q, k = (rotate(jnp.asarray(np.tile(x, (1, 40, 1))), 100.0)[0] for x in (q, k))
    scores = np.asarray(q @ k.T)
    for distance in (-7, 0, 3):
        np.testing.assert_allclose(np.diff(np.diagonal(scores, distance)), 0, atol=2e-5)
    assert np.ptp(scores) > 1
