"""Reports, at run time, that a named tensor holds a NaN or an inf."""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def report_non_finite(x: Array, name: str) -> None:
    """Makes the computation fail with the name and the number of elements if any is not finite.

    Works under every transformation of JAX, jit included; costs a pass over ``x`` and a call to
    the host. The error is a ``jax.errors.JaxRuntimeError`` that quotes a FloatingPointError.
    """
    count = jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)
    jax.debug.callback(functools.partial(_raise_if_any, name, x.shape), count)


def _raise_if_any(name: str, shape: tuple[int, ...], count: int) -> None:
    if count:
        size = functools.reduce(int.__mul__, shape, 1)
        raise FloatingPointError(f"{name}: {count} of {size} elements are not finite, {shape}")
