"""Strict settings for all tests: no silent promotion, no silent broadcast, several devices."""

import os

# Before JAX is imported: tests of sharding need more than one device.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
