"""Fixtures for tests that train."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def lenient_promotion() -> Iterator[None]:
    """Optax's bias correction raises a float to an integer power, which strict mode refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def _compile_fast() -> Iterator[None]:
    """Nearly all of these tests' time is XLA's compilation of steps that then run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
