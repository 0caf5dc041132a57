"""One training run, step by step: a pure function of a model, data, settings and a seed."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from experiments.data import Corpus
from experiments.images import Images
from experiments.objective import Batch, Measures, measure
from experiments.optimization import Training, optimizer
from experiments.pipeline import batches

REPORT_EVERY = 10  # steps

Data = Corpus | Images


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


class Progress(NamedTuple):
    """Where a run stands.

    Attributes:
      step: steps done.
      losses: of the batches since the last progress, each before its update, in nats per token or
        image.
      gradient_norms: of the same steps, before clipping.
      evaluation: on held-out data, where this was a step to evaluate.
      seconds: that these steps took, without compilation and evaluation.
    """

    step: int
    losses: list[float]
    gradient_norms: list[float]
    evaluation: Measures | None
    seconds: float


class Run:
    """A run between two steps, and how to go on.

    Args:
      model_at: gives the model that makes a step of this number, counted from 0.
      starts: the numbers, 0 first, from which it gives another one: of the same parameters and
        random streams, with other recipes.
      data: what to train and evaluate on.
      training: how.
      seed: of the order of the data.

    Attributes:
      state: after the steps done.
      done: how many.
      batches: Grain's iterator, which knows its position.
    """

    def __init__(
        self,
        model_at: Callable[[int], Any],
        starts: tuple[int, ...],
        data: Data,
        training: Training,
        seed: int,
    ) -> None:
        self.training = training
        self.batches = batches(data.training, seed=seed, size=training.batch)
        self.done = 0
        self._record = data.training[0]
        self._evaluated = set(eval_steps(training))
        self._held_out = _batches(data.validation(training.validation), training.batch)
        self._tx = optimizer(training)
        self._graphs = {start: nnx.graphdef(model_at(start)) for start in starts}
        self.state = first_state(model_at(0), training)
        self._compiled: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def go(
        self, *, every: int | None = None, asked: Callable[[], bool] = bool
    ) -> Iterator[Progress]:
        """Trains to the end; yields now and then, while ``state``, ``done`` and ``batches`` agree.

        Args:
          every: steps, to stop at their multiples too.
          asked: whether to end at once; read after every step.
        """
        if not self.done:
            yield Progress(0, [], [], self.evaluate(), 0.0)
        for until in self._stops(every):
            step, _ = self._programs(self.done)  # compiled before the clock starts
            started = time.perf_counter()
            found: list[list[jax.Array]] = []
            while not found or (self.done < until and not asked()):
                self.state, *numbers = step(self.state, next(self.batches))
                self.done += 1
                found.append(numbers)
            losses, norms = [list(map(float, numbers)) for numbers in zip(*found, strict=True)]
            seconds = time.perf_counter() - started
            evaluation = self.evaluate() if self.done in self._evaluated else None
            yield Progress(self.done, losses, norms, evaluation, seconds)
            if asked():
                return

    def evaluate(self) -> Measures:
        """Means over the held-out data, in the precision of the last step."""
        _, program = self._programs(max(self.done - 1, 0))
        found = [program(self.state.measured, self.state.rest, batch) for batch in self._held_out]
        return Measures(*(float(np.mean(values)) for values in zip(*found, strict=True)))

    @property
    def model(self) -> Any:
        """The model as it is now, by the recipe of the last step; a copy."""
        graphdef = self._graphs[self._phase(max(self.done - 1, 0))]
        return nnx.merge(graphdef, self.state.measured, self.state.rest, copy=True)

    def _phase(self, number: int) -> int:
        return max(start for start in self._graphs if start <= number)

    def _stops(self, every: int | None) -> list[int]:
        steps = self.training.steps
        regular = {i for n in (REPORT_EVERY, every or steps) for i in range(n, steps, n)}
        # A phase begins between two reports: what is compiled for it is compiled off the clock.
        stops = regular | self._evaluated | {*self._graphs, steps}
        return sorted(stop for stop in stops if stop > self.done)

    def _programs(self, number: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The step of this number and the evaluation of its model, compiled."""
        start = self._phase(number)
        if start not in self._compiled:
            graphdef, training = self._graphs[start], self.training
            step = functools.partial(take_step, graphdef, self._tx, training)
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((training.batch, *x.shape), x.dtype), self._record
            )
            held_out = (self.state.params, self.state.rest, self._held_out[0])
            self._compiled[start] = (
                jax.jit(step, donate_argnums=0).lower(self.state, batch).compile(),
                jax.jit(functools.partial(measures, graphdef)).lower(*held_out).compile(),
            )
        return self._compiled[start]


def first_state(model: Any, training: Training) -> State:
    """The state before the first step, which takes the model's arrays."""
    _, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    average = jax.tree.map(jnp.copy, params) if training.ema else None
    return State(params, optimizer(training).init(params), rest, average)


def take_step(
    graphdef: Any, tx: optax.GradientTransformation, training: Training, state: State, batch: Batch
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
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        (total, rest), losses = lax.scan(add_part, (zeros, state.rest), parts)
        grads, loss = jax.tree.map(lambda x: x / count, total), jnp.mean(losses)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
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

    return jax.grad(lowered, has_aux=True)(params)


def measures(graphdef: Any, params: nnx.State, rest: nnx.State, batch: Batch) -> Measures:
    """What the model's predictions for a batch are worth."""
    return measure(nnx.merge(graphdef, params, rest, copy=True), batch)[1]


def eval_steps(training: Training) -> list[int]:
    """The steps after which a run is evaluated: none, and `evals` times up to the last."""
    evals = min(training.evals, training.steps)
    return [training.steps * i // evals for i in range(evals + 1)]


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether every element of every array is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _batches(held_out: Batch, size: int) -> list[Batch]:
    """Cuts held-out data into batches of one shape, leaving out what does not fill the last."""
    count = len(jax.tree.leaves(held_out)[0])
    size = min(size, count)
    starts = range(0, count - size + 1, size)
    return [jax.tree.map(lambda x: x[i : i + size], held_out) for i in starts]  # noqa: B023
