"""One optimizer step as a pure function, and what it is compiled to."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from experiments.mesh import lay, lay_parts, mesh_of
from experiments.objective import Batch, Measures, measure
from experiments.optimization import Training, optimizer


class State(NamedTuple):
    """All that a step changes.

    Attributes:
      params: the parameters.
      opt_state: what the optimizer remembers.
      rest: what the model has besides parameters: random streams.
      average: the moving average of the parameters; None where there is none.
    """

    params: nnx.State
    opt_state: optax.OptState
    rest: nnx.State
    average: nnx.State | None

    @property
    def measured(self) -> nnx.State:
        """The parameters that are evaluated."""
        return self.params if self.average is None else self.average


def first_state(model: Any, training: Training) -> State:
    """The state before the first step, which takes the model's arrays."""
    _, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    average = jax.tree.map(jnp.copy, params) if training.ema else None
    return State(params, optimizer(training).init(params), rest, average)


def take_step(
    graphdef: Any, training: Training, state: State, batch: Batch
) -> tuple[State, jax.Array, jax.Array]:
    """The state after an optimizer step; the loss before it and the gradient's global norm."""

    def add_part(carry: tuple[nnx.State, nnx.State], part: Any) -> tuple[Any, jax.Array]:
        total, rest = carry
        grads, (loss, rest) = gradients(graphdef, state.params, rest, part)
        return (jax.tree.map(jnp.add, total, grads), rest), loss

    count = training.accumulate
    if count == 1:
        grads, (loss, rest) = gradients(graphdef, state.params, state.rest, batch)
    else:
        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        parts = lay_parts(parts)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        (total, rest), losses = lax.scan(add_part, (zeros, state.rest), parts)
        grads, loss = jax.tree.map(lambda x: x / count, total), jnp.mean(losses)
    updates, opt_state = optimizer(training).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if average is not None:
        average = optax.incremental_update(params, average, 1 - training.ema)
    return State(params, opt_state, rest, average), loss, optax.tree.norm(grads)


def gradients(
    graphdef: Any, params: nnx.State, rest: nnx.State, batch: Batch
) -> tuple[nnx.State, tuple[Any, nnx.State]]:
    """The gradient of what training lowers; the loss, and what is left of ``rest``."""

    def lowered(params: nnx.State) -> tuple[jax.Array, tuple[Any, nnx.State]]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        value, found = measure(model, batch)
        # The random streams have moved on: the next step draws other bits.
        return value, (found.loss, nnx.state(model, nnx.Not(nnx.Param)))

    grads, aux = jax.grad(lowered, has_aux=True)(params)
    return lay(grads), aux


def measures(graphdef: Any, params: nnx.State, rest: nnx.State, batch: Batch) -> Measures:
    """What the model's predictions for a batch are worth."""
    return measure(nnx.merge(graphdef, params, rest, copy=True), batch)[1]


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether every element of every array is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def traced_step(graphdef: Any, training: Training, state: State, batch: Any) -> jax.stages.Traced:
    """``take_step`` traced for a state and a batch of these shapes on their mesh."""
    return _traced(take_step, (graphdef, training), True, (state, batch))


def compiled_step(
    graphdef: Any, training: Training, state: State, batch: Any
) -> Callable[..., Any]:
    """``take_step`` for a state and a batch of these shapes on their mesh.

    It takes the state's memory, and leaves the new one where the old one lay.
    """
    return _compiled(take_step, (graphdef, training), True, *_shapes(state, batch))


def compiled_measures(graphdef: Any, state: State, batch: Any) -> Callable[..., Any]:
    """``measures`` for parameters, the rest of the model and a batch of these shapes."""
    return _compiled(measures, (graphdef,), False, *_shapes(state.measured, state.rest, batch))


@functools.lru_cache(maxsize=16)
def _compiled(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    in_place: bool,
    structure: Any,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
) -> Callable[..., Any]:
    """The function after its static arguments, compiled for arguments of these shapes.

    In place, the first result lies where the first argument does, and takes its memory.
    Runs that differ in their numbers only, as by another seed, share it.
    """
    args = jax.tree.unflatten(structure, leaves)
    return _traced(function, static, in_place, args).lower().compile()


def _traced(
    function: Callable[..., Any], static: tuple[Any, ...], in_place: bool, args: tuple[Any, ...]
) -> jax.stages.Traced:
    program = jax.jit(
        functools.partial(function, *static),
        donate_argnums=0 if in_place else None,
        out_shardings=(_shardings(args[0]), None, None) if in_place else None,
    )
    with jax.set_mesh(mesh_of(args)):
        return program.trace(*args)


def _shapes(*args: Any) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves
    )


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
