"""Tasks with a loss that nothing gets below without learning what the task is about."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Batch = tuple[jax.Array, jax.Array]


class Task(NamedTuple):
    """Batches, a loss, and a loss that is known in closed form.

    Attributes:
      batch: a random batch.
      loss: of a model's output and a batch's targets.
      baseline: what is reached without what the task asks for.
    """

    batch: Callable[[np.random.Generator], Batch]
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    baseline: float

    def batches(self, count: int, seed: int = 0) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        for _ in range(count):
            yield self.batch(rng)


def squared_error(y, target):
    return ((y - target) ** 2).mean()


def cross_entropy(logits, labels):
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -right.mean()


def rectified_teacher(features: int = 32, outputs: int = 8, size: int = 128) -> Task:
    """Absolute values of orthogonal projections of a normal vector.

    ``|u|`` is uncorrelated with ``u`` and has variance 1 - 2 / pi, the least squared error of a
    linear model.
    """
    teacher = _orthogonal(features, 1)[:, :outputs]

    def batch(rng):
        x = rng.standard_normal((size, features))
        return _float(x), _float(abs(x @ teacher))

    return Task(batch, squared_error, 1 - 2 / math.pi)


def previous_token(vocab: int = 16, length: int = 16, size: int = 16) -> Task:
    """Say the token before; tokens are independent, so it cannot be known from this one.

    Without attention no model gets below the logarithm of the vocabulary. The token before the
    first is agreed to be the first.
    """

    def batch(rng):
        tokens = rng.integers(vocab, size=(size, length))
        before = np.concatenate([tokens[:, :1], tokens[:, :-1]], 1)
        return jnp.asarray(tokens, jnp.int32), jnp.asarray(before, jnp.int32)

    # The first position can be known without attention.
    return Task(batch, cross_entropy, math.log(vocab) * (length - 1) / length)


def shapes(side: int = 16, size: int = 32) -> Task:
    """Name the shape drawn in a noisy image: bar, post, cross or frame, anywhere, 7 pixels wide.

    Each is as frequent as the others: a guess costs log 4.
    """
    drawn = np.zeros((4, 7, 7))
    drawn[0, 3, :] = drawn[1, :, 3] = drawn[2, 3, :] = drawn[2, :, 3] = 1
    drawn[3] = 1
    drawn[3, 1:-1, 1:-1] = 0

    def batch(rng):
        labels = rng.integers(4, size=size)
        images = 0.1 * rng.standard_normal((size, side, side, 1))
        for image, label in zip(images, labels, strict=True):
            top, left = rng.integers(side - 6, size=2)
            image[top : top + 7, left : left + 7, 0] += drawn[label]
        return _float(images), jnp.asarray(labels, jnp.int32)

    return Task(batch, cross_entropy, math.log(4))


def quadrants(features: int = 16, size: int = 256) -> Task:
    """A normal vector times one of four matrices, chosen by the signs of its first two entries.

    The matrices are orthogonal and opposite in opposite quadrants, so targets are uncorrelated
    with inputs: constants and linear models have a squared error of 1, the targets' variance.
    """
    one, other = _orthogonal(features, 2), _orthogonal(features, 3)
    matrices = np.stack([one, other, -other, -one])

    def batch(rng):
        x = rng.standard_normal((size, features))
        quadrant = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
        return _float(x), _float(np.einsum("td,tde->te", x, matrices[quadrant]))

    return Task(batch, squared_error, 1.0)


def _orthogonal(n: int, seed: int) -> Any:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]


def _float(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)
