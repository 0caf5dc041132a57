"""Strict settings for all tests: no silent promotion, no silent broadcast, several devices."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before JAX is imported: tests of sharding need more than one device.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Forgets compiled programs after a file, once there are very many.

    Each takes memory maps, of which Linux gives a process 65,530: beyond them XLA crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()


@pytest.fixture
def lenient_promotion() -> Iterator[None]:
    """For tests that train: Optax raises a float to an integer power, which strict mode refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# JAX does not know programs that were compiled with few optimizations from others; by this it does.
_compiled_fast = jax.make_user_context(default_value=False)


@pytest.fixture
def compile_fast() -> Iterator[None]:
    """For tests whose time is XLA's compilation of what then runs a few times.

    Not for tests of bits, which must hold however much the compiler optimizes.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    with _compiled_fast(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
