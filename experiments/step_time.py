"""One training step of a model, beside the same step written by hand in plain JAX and Optax."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax

from experiments import zoo
from experiments.mesh import make_mesh, place, whole_batch
from experiments.optimization import Training, optimizer
from experiments.step import compiled_step, first_state

VOCABULARY = {"vocab_size": 256}


def contenders(
    name: str, recipes: dict[str, Any], training: Training
) -> dict[str, Callable[[], Array]]:
    """By name, functions that take a step and return its loss; all see the same batch.

    Args:
      name: of a language model in the zoo.
      recipes: by name.
      training: how.
    """
    preset, shape = zoo.MODELS[name], (training.batch, training.sequence + 1)
    batch = np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)
    found: dict[str, Callable[[], Array]] = {
        "plain JAX": _by_hand(zoo.plain_model(preset, VOCABULARY, seed=0), training, batch)
    }
    mesh = make_mesh()
    placed = whole_batch(batch, mesh)
    for recipe, make in recipes.items():
        model = zoo.make_model(preset, VOCABULARY, make(), seed=0)
        graphdef, state = nnx.graphdef(model), place(first_state(model, training), mesh)
        step = compiled_step(graphdef, training, state, placed)
        found[recipe] = _taking_steps(step, state, placed)
    return found


def _taking_steps(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[], Array]:
    def run() -> Array:
        nonlocal state
        state, loss, _ = step(state, batch)
        return loss

    return run


def _by_hand(model: Any, training: Training, batch: np.ndarray) -> Callable[[], Array]:
    """Linear layers in bfloat16 with float32 accumulation, differentiated by JAX; AdamW."""
    for _, layer in nnx.iter_modules(model.blocks):
        if isinstance(layer, nnx.Linear):
            layer.dot_general = _bfloat16_product
    graphdef, params = nnx.split(model)
    tx = optimizer(training)

    def loss_of(params: Any, batch: Array) -> Array:
        logits = nnx.merge(graphdef, params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss, None

    return _taking_steps(step, (params, tx.init(params)), batch)


def _bfloat16_product(
    x: Array, w: Array, dimensions: Any, *, precision: Any = None, **unused: Any
) -> Array:
    low = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return lax.dot_general(*low, dimensions, preferred_element_type=jnp.float32)
