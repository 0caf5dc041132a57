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
    kept = kept_besides(jaxpr, len(jax.tree.leaves(params)))
    return sum(bits_of(var.aval) for var in kept) // 8


def kept_besides(jaxpr: core.Jaxpr, parameters: int) -> dict[core.Var, int]:
    """What a jaxpr of residuals returns, each array once, and at which place.

    What follows from no array that is at hand, as a causal mask, is not kept but made again.

    Args:
      jaxpr: returns residuals.
      parameters: how many of its first arguments are none, where it only hands them on.
    """
    passed_on, own = _passed_on(jaxpr), set(jaxpr.invars[:parameters])
    follows = _following(jaxpr, [True] * len(jaxpr.invars))
    kept: dict[core.Var, int] = {}
    for i, (var, real) in enumerate(zip(jaxpr.outvars, follows, strict=True)):
        if isinstance(var, core.Var) and real and (first := passed_on.get(var, var)) not in own:
            kept.setdefault(first, i)
    return kept


def _following(jaxpr: core.Jaxpr, given: list[bool]) -> list[bool]:
    """Which results follow from arrays at hand, given which arguments do."""
    follow = {var for var, does in zip(jaxpr.invars, given, strict=True) if does}
    follow.update(jaxpr.constvars)  # arrays that were at hand when it was traced

    def read(vars: list[Any]) -> list[bool]:
        return [isinstance(var, core.Var) and var in follow for var in vars]

    for eqn in jaxpr.eqns:
        does = read(eqn.invars)
        if eqn.primitive.name in CALLS:
            found = _following(eqn.params[CALLS[eqn.primitive.name]].jaxpr, does)
        else:
            found = [any(does)] * len(eqn.outvars)
        follow.update(var for var, does in zip(eqn.outvars, found, strict=True) if does)
    return read(jaxpr.outvars)


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


def bits_of(array: Any) -> int:
    """Bits of an array, or of what has its shape and dtype."""
    return math.prod(array.shape) * _bits_per_element(array.dtype)


def _bits_per_element(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.floating):  # also those of 4 bits, for which itemsize says 1 byte
        return jnp.finfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return 8 * dtype.itemsize
