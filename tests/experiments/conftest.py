"""Fixtures for tests that train."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def lenient_promotion() -> Iterator[None]:
    """Optax's bias correction raises a float to an integer power, which strict mode refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield
