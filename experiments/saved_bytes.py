"""What one layer keeps in memory from its forward pass for its backward pass."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

# Calls that a jaxpr has as one equation, and the parameter that holds what is called.
CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}


def saved_bytes(layer: nnx.Module, x: jax.ShapeDtypeStruct) -> int:
    """Bytes that the layer's backward pass reads besides the layer's own parameters.

    These are the residuals of JAX's own reverse mode: what its vjp function closes over, found by
    tracing it, without running anything. An array that is kept twice counts once; a parameter
    that is kept as it is costs nothing, a quantized or cast copy of one does.

    Args:
      layer: called with one array.
      x: shape and dtype of that array.
    """
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)  # type: ignore[misc]

    def residuals(params: nnx.State, x: jax.Array) -> list[Any]:
        def forward(params: nnx.State, x: jax.Array) -> Any:
            return nnx.merge(graphdef, params, rest, copy=True)(x)

        return jax.tree.leaves(jax.vjp(forward, params, x)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, x).jaxpr
    passed_on = _passed_on(jaxpr)
    kept = {passed_on.get(var, var) for var in jaxpr.outvars if isinstance(var, core.Var)}
    own = jaxpr.invars[: len(jax.tree.leaves(params))]
    return sum(_bits(var.aval) for var in kept.difference(own)) // 8


def _passed_on(jaxpr: core.Jaxpr) -> dict[core.Var, core.Var]:
    """For each output of a call that only hands on an input of the call: that input."""
    found: dict[core.Var, core.Var] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            inner = eqn.params[CALLS[eqn.primitive.name]].jaxpr
            inside = _passed_on(inner)
            pairs = zip(inner.invars, eqn.invars, strict=True)
            outer = {var: given for var, given in pairs if isinstance(given, core.Var)}
            for result, var in zip(eqn.outvars, inner.outvars, strict=True):
                if isinstance(var, core.Var) and (given := inside.get(var, var)) in outer:
                    found[result] = found.get(outer[given], outer[given])
    return found


def _bits(aval: Any) -> int:
    return math.prod(aval.shape) * _bits_per_element(aval.dtype)


def _bits_per_element(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.floating):  # also those of 4 bits, for which itemsize says 1 byte
        return jnp.finfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return 8 * dtype.itemsize
