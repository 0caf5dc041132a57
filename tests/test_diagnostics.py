"""Damage of made-up approximations with known errors."""

import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax as fp4


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_known_damage(scale):
    x = jnp.asarray(np.float32([3, -4, 0, 12]) * np.float32(scale))
    halved = fp4.diagnostics.damage(x, x / 2)
    np.testing.assert_allclose(halved, [0.5, 20 * np.log10(2), -0.5, 0], rtol=1e-5)
    lost = fp4.diagnostics.damage(x, x * jnp.asarray([1.0, 0, 1, 1]))
    error = 4 / 13
    np.testing.assert_allclose(lost, [error, -20 * np.log10(error), -(error**2), 1 / 3], rtol=1e-5)
    sideways = fp4.diagnostics.damage(x, x + jnp.asarray(np.float32([4, 3, 0, 0]) * scale))
    np.testing.assert_allclose(sideways, [5 / 13, 20 * np.log10(13 / 5), 0, 0], atol=1e-6)


def test_low_precision_inputs_are_compared_in_float32():
    x = jnp.asarray([1.0, 2.0, 4.0], jnp.bfloat16)
    np.testing.assert_allclose(fp4.diagnostics.damage(x, x * 0)[0], 1)
