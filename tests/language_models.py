"""What every language model is held to: other implementations' numbers, and causality."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

DATA = Path(__file__).parent / "data"


def load(name):
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


def named(state):
    """Parameters, or what has their paths, by dotted name."""
    return {".".join(map(str, path)): value for path, value in nnx.to_flat_state(state)}


def set_parameters(model, arrays):
    """Gives the model exactly these parameters."""
    state = nnx.state(model, nnx.Param)
    assert named(state).keys() == arrays.keys()
    flat = []
    for path, value in nnx.to_flat_state(state):
        array = arrays[".".join(map(str, path))]
        assert value.shape == array.shape, path
        flat.append((path, value.replace(jnp.asarray(array))))
    nnx.update(model, nnx.from_flat_state(flat))


def next_token_loss(logits, tokens):
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))


def relative_error(got, want):
    want = np.asarray(want, np.float64)
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def shapes_of(make):
    """Shapes of the parameters of the model that ``make`` returns; nothing is allocated."""
    parameters = named(nnx.state(nnx.eval_shape(make), nnx.Param))
    assert all(value.dtype == jnp.float32 for value in parameters.values())
    return {name: value.shape for name, value in parameters.items()}


def count_of(make):
    return sum(int(np.prod(shape)) for shape in shapes_of(make).values())


def check_causality(model, vocab_size, length=24, places=(1, 11, 23)):
    """A token changes what follows it and nothing before."""
    logits_of = nnx.jit(lambda model, tokens: model(tokens))
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, vocab_size)
    before = logits_of(model, tokens)
    for t in places:
        after = logits_of(model, tokens.at[:, t].add(1) % vocab_size)
        np.testing.assert_allclose(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
        changed = np.abs(after - before).max(axis=(0, 2))
        assert np.all(changed[t:] > 1e-6)  # and that token does reach all that follow


def check_causality_of_gradients(model, vocab_size, length=None, places=None):
    """The logits at a position depend on the tokens up to it, and on all of them."""
    graph, state = nnx.split(model)
    length = length or vocab_size - 1
    tokens = jnp.arange(length)[None]  # each once: its embedding row stands for its position

    @jax.jit
    def reached(state, t):
        weights = jax.random.normal(jax.random.key(0), (vocab_size,))
        gradient = jax.grad(lambda state: nnx.merge(graph, state)(tokens)[0, t] @ weights)(state)
        return jnp.any(gradient["embed"]["embedding"][...] != 0, axis=-1)

    for t in places or (0, 1, length // 2, length - 1):
        np.testing.assert_array_equal(reached(state, t)[:length], np.arange(length) <= t)


def run(model, *inputs):
    """The model's result, compiled."""
    return nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)


def train(model, loss, steps, rate):
    """The losses of some steps of gradient descent with momentum."""
    optimizer = nnx.Optimizer(model, optax.sgd(rate, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer)) for _ in range(steps)]
