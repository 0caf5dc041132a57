"""One training run, step by step: a pure function of a model, data, settings and a seed."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from experiments.data import Corpus
from experiments.images import Images
from experiments.mesh import batch_of, batch_shape, make_mesh, place, rows_here, whole_batch
from experiments.objective import Batch, Measures
from experiments.optimization import Training
from experiments.pipeline import batches
from experiments.step import compiled_measures, compiled_step, first_state

REPORT_EVERY = 10  # steps

Data = Corpus | Images


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
      mesh: of the devices to run on, with the axes of `experiments.mesh`; one device unless given.

    Raises:
      MeshError: a batch cannot be divided among the devices.

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
        mesh: Mesh | None = None,
    ) -> None:
        self.training = training
        self._mesh = make_mesh() if mesh is None else mesh
        rows = rows_here(self._mesh, training.batch, training.accumulate)
        self.batches = batches(data.training, seed=seed, size=training.batch, rows=rows)
        self.done = 0
        self._record = data.training[0]
        self._evaluated = set(eval_steps(training))
        self._held_out = [
            whole_batch(batch, self._mesh)
            for batch in _batches(data.validation(training.validation), training.batch)
        ]
        model = model_at(0)
        self._graphs = {0: nnx.graphdef(model)}
        self._graphs |= {start: nnx.graphdef(model_at(start)) for start in starts[1:]}
        self.state = place(first_state(model, training), self._mesh)

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
            step = self._step()  # compiled before the clock starts
            started = time.perf_counter()
            found: list[list[jax.Array]] = []
            while not found or (self.done < until and not asked()):
                batch = batch_of(next(self.batches), self._mesh, self.training.batch)
                self.state, *numbers = step(self.state, batch)
                self.done += 1
                found.append(numbers)
            losses, norms = [list(map(float, numbers)) for numbers in zip(*found, strict=True)]
            seconds = time.perf_counter() - started
            ending = asked()  # once: whoever asks later gets a step and a progress after it
            evaluation = self.evaluate() if self.done in self._evaluated else None
            yield Progress(self.done, losses, norms, evaluation, seconds)
            if ending:
                return

    def evaluate(self) -> Measures:
        """Means over the held-out data, in the precision of the last step."""
        graphdef, state = self._graphs[self._phase(max(self.done - 1, 0))], self.state
        sizes = [len(jax.tree.leaves(batch)[0]) for batch in self._held_out]
        found = [
            compiled_measures(graphdef, state, batch)(state.measured, state.rest, batch)
            for batch in self._held_out
        ]
        return Measures(
            *(float(np.average(values, weights=sizes)) for values in zip(*found, strict=True))
        )

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
        return sorted(stop for stop in stops if self.done < stop <= steps)

    def _step(self) -> Callable[..., Any]:
        """The next step, compiled."""
        size = self.training.batch
        batch = jax.tree.map(
            lambda x: batch_shape((size, *x.shape), x.dtype, self._mesh), self._record
        )
        return compiled_step(self._graphs[self._phase(self.done)], self.training, self.state, batch)


def eval_steps(training: Training) -> list[int]:
    """The steps after which a run is evaluated: none, and `evals` times up to the last."""
    evals = min(training.evals, training.steps)
    return [training.steps * i // evals for i in range(evals + 1)]


def _batches(held_out: Batch, size: int) -> list[Batch]:
    """Cuts held-out data into batches, the last of which may be smaller."""

    def part(start: int) -> Batch:
        return jax.tree.map(lambda x: x[start : start + size], held_out)

    return [part(start) for start in range(0, len(jax.tree.leaves(held_out)[0]), size)]
