"""divide: the rounded quotient, also where the hardware's division is a little off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp4jax.division import corrected, divide

TINY = np.finfo(np.float32).tiny


def numbers(seed, low=0, high=0x7F800000, size=1 << 18):
    """Float32 numbers of every exponent, subnormal ones too."""
    return np.random.default_rng(seed).integers(low, high, size, np.uint32).view(np.float32)


def flushed(x):
    return np.where(x < TINY, np.float32(0), x)


def expected(a, b):
    with np.errstate(all="ignore"):
        return flushed(flushed(a) / flushed(b))


def off_by(units):
    """A division whose result is so many units in the last place off."""

    def approximate(a, b):
        bits = lax.bitcast_convert_type(lax.div(a, b), jnp.int32)
        return lax.bitcast_convert_type(bits + jnp.int32(units), jnp.float32)

    return approximate


PAIRS = {
    "any": (numbers(0), numbers(1)),
    "one binade": (numbers(2, 0x3F800000, 0x40000000), numbers(3, 0x3F800000, 0x40000000)),
    "reciprocals": (np.ones(1 << 18, np.float32), numbers(4)),
    "tensor scales": (np.full(1 << 18, 2688, np.float32), numbers(5)),
    "quotients near halves": (
        numbers(6, 0x3F800000, 0x3F800040),
        numbers(7, 0x3F800000, 0x3F800040),
    ),
    "special": tuple(
        np.array(pairs, np.float32)
        for pairs in zip(
            *[(a, b) for a in (0, 1e-40, 1, np.inf, np.nan) for b in (0, 1e-40, 3, np.inf, np.nan)],
            strict=True,
        )
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("units", [-2, -1, 0, 1, 2])
def test_an_approximate_quotient_is_put_right(name, units):
    a, b = PAIRS[name]
    got = jax.jit(corrected, static_argnums=2)(a, b, off_by(units))
    np.testing.assert_array_equal(np.asarray(got), expected(a, b))


@pytest.mark.parametrize("name", PAIRS)
def test_division_on_this_platform(name):
    a, b = PAIRS[name]
    np.testing.assert_array_equal(np.asarray(jax.jit(divide)(a, b)), expected(a, b))
