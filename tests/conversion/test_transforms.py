"""Converted models under the transformations of Flax and JAX."""

import functools

import flax_models as fm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fp4jax as fp4

NVFP4 = fp4.recipes.nvfp4()
NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest())
LAYERS, WIDTH = 3, 16


def inputs(seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((24, WIDTH)), jnp.float32)


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_trees_close(a, b):
    """To float32's rounding: programs that differ may sum a bias's gradient in another order."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), a, b)


def layer_of(stacked, i):
    return jax.tree.map(lambda leaf: leaf[i], stacked)


def all_like_first(leaf):
    return jnp.broadcast_to(leaf[:1], leaf.shape)


def mean_square(y):
    return (y**2).mean()


def both(recipe):
    return fp4.Policy((fp4.Rule("*blocks*.up", recipe), fp4.Rule("*blocks*.down", recipe)))


# NNX


class Stack(nnx.Module):
    """Blocks made by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return fm.NnxFeedForward(WIDTH, rngs)

        self.blocks = make(rngs)

    def __call__(self, x, remat=False):
        def block(x, block):
            return x + block(x)

        body = nnx.remat(block) if remat else block
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)

    def apart(self, x):
        """Each block's mean square for the same input."""

        def block(block, x):
            return mean_square(block(x))

        return nnx.scan(block, in_axes=(0, None), out_axes=0)(self.blocks, x)


def stack(recipe):
    return fp4.nnx.quantize_model(Stack(nnx.Rngs(0)), both(recipe), rngs=nnx.Rngs(quantize=0))


@functools.partial(nnx.jit, static_argnums=2)
def loss_and_gradients(model, x, remat=False):
    return nnx.value_and_grad(lambda model: mean_square(model(x, remat=remat)))(model)


def test_nnx_scan_is_a_loop_over_its_layers():
    loss, gradients = loss_and_gradients(stack(NEAREST), inputs())
    stacked = nnx.state(Stack(nnx.Rngs(0)).blocks, nnx.Param)
    slices = nnx.List([fm.NnxFeedForward(WIDTH, nnx.Rngs(0)) for _ in range(LAYERS)])
    for i, block in enumerate(slices):
        nnx.update(block, layer_of(stacked, i))
    fp4.nnx.quantize_model(slices, fp4.Policy((fp4.Rule("*", NEAREST),)))

    def looped(slices):
        x = inputs()
        for block in slices:
            x = x + block(x)
        return mean_square(x)

    one_by_one, of_slices = nnx.jit(nnx.value_and_grad(looped))(slices)
    np.testing.assert_array_equal(loss, one_by_one)
    for i in range(LAYERS):
        layer = layer_of(nnx.to_pure_dict(gradients)["blocks"], i)
        assert_trees_close(layer, nnx.to_pure_dict(of_slices)[i])


@pytest.mark.parametrize("recipe", [NVFP4, NEAREST])
def test_nnx_scan_rounds_each_layer_with_bits_of_its_own(recipe):
    model = stack(recipe)
    # Gradients of equal layers that see the same differ by their random bits alone.
    nnx.update(model.blocks, jax.tree.map(all_like_first, nnx.state(model.blocks, nnx.Param)))
    gradient = nnx.jit(nnx.grad(lambda model: model.apart(inputs()).sum()))
    gradients = nnx.to_pure_dict(gradient(model))["blocks"]
    for name in ("up", "down"):
        one, other, third = np.asarray(gradients[name]["kernel"])
        random = recipe is NVFP4
        assert (one != other).any() == (one != third).any() == (other != third).any() == random


def test_nnx_remat_changes_nothing():
    with_remat = loss_and_gradients(stack(NVFP4), inputs(), True)
    assert_trees_equal(with_remat, loss_and_gradients(stack(NVFP4), inputs(), False))


def test_a_pure_step_does_what_an_nnx_step_does():
    model, optimizer = stack(NVFP4), optax.sgd(0.1)
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    state = optimizer.init(parameters)

    @jax.jit
    def pure_step(parameters, rest, state, x):
        def loss(parameters):
            model = nnx.merge(graph, parameters, rest, copy=True)
            return mean_square(model(x)), nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(parameters, updates), rest, state

    nnx_optimizer = nnx.Optimizer(stack(NVFP4), optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: mean_square(model(x)))(model)
        optimizer.update(model, gradients)
        return value

    for seed in range(2):
        value, parameters, rest, state = pure_step(parameters, rest, state, inputs(seed))
        np.testing.assert_array_equal(value, step(model, nnx_optimizer, inputs(seed)))
    assert_trees_equal(parameters, nnx.state(model, nnx.Param))
    # The streams have moved on alike, and drawn once a step for each layer.
    counts = nnx.state(model, nnx.RngCount)
    assert_trees_equal(nnx.filter_state(rest, nnx.RngCount), counts)
    assert all(leaf.tolist() == [2] * LAYERS for leaf in jax.tree.leaves(counts))


# Linen


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + fm.LinenFeedForward(WIDTH, name="mlp")(x), None


class Apart(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x, mean_square(fm.LinenFeedForward(WIDTH, name="mlp")(x))


class LinenStack(nn.Module):
    block: type[nn.Module] = Residual
    split: bool = True

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(
            self.block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "quantize": self.split},
            length=LAYERS,
        )
        return blocks(name="blocks")(x, None)


def linen_gradients(model, parameters, seed=0, part=0):
    """The loss and its gradients by the parameters."""

    @jax.jit
    @jax.value_and_grad
    def loss(parameters):
        y = model.apply(parameters, inputs(), rngs={"quantize": jax.random.key(seed)})
        return mean_square(y[part])

    return loss(parameters)


def test_linen_scan_is_a_loop_over_its_layers():
    plain = LinenStack()
    parameters = plain.init(jax.random.key(0), inputs())
    scanned = fp4.linen.quantize_model(plain, both(NEAREST), inputs())
    loss, gradients = linen_gradients(scanned, parameters)
    block = fp4.linen.quantize_model(Residual(), fp4.Policy((fp4.Rule("*", NEAREST),)), inputs())

    @jax.jit
    @jax.value_and_grad
    def looped(slices):
        x = inputs()
        for layer in slices:
            x, _ = block.apply({"params": layer}, x)
        return mean_square(x)

    stacked = parameters["params"]["blocks"]
    one_by_one, of_slices = looped([layer_of(stacked, i) for i in range(LAYERS)])
    np.testing.assert_array_equal(loss, one_by_one)
    for i, layer in enumerate(of_slices):
        assert_trees_close(layer_of(gradients["params"]["blocks"], i), layer)


@pytest.mark.parametrize("split", [True, False])
def test_linen_scan_rounds_each_layer_with_bits_of_its_own_if_the_stream_is_split(split):
    plain = LinenStack(Apart, split)
    parameters = jax.tree.map(all_like_first, plain.init(jax.random.key(0), inputs()))
    model = fp4.linen.quantize_model(plain, both(NVFP4), inputs())
    gradients = linen_gradients(model, parameters, part=1)[1]["params"]["blocks"]["mlp"]
    for name in ("up", "down"):
        one, other, third = np.asarray(gradients[name]["kernel"])
        assert (one != other).any() == (one != third).any() == (other != third).any() == split


def test_linen_remat_changes_nothing():
    plain, lifted = LinenStack(), LinenStack(nn.remat(Residual))
    parameters = plain.init(jax.random.key(0), inputs())
    found, expected = (
        linen_gradients(fp4.linen.quantize_model(model, both(NVFP4), inputs()), parameters)
        for model in (lifted, plain)
    )
    assert_trees_equal(found, expected)


def test_linen_jit_does_not_take_one_conversion_for_another():
    lifted, plain = nn.jit(Residual)(), Residual()
    x = inputs()
    parameters = plain.init(jax.random.key(0), x)
    before, _ = plain.apply(parameters, x)
    outputs = []
    for recipe in (NEAREST, fp4.recipes.mxfp8()):
        policy = fp4.Policy((fp4.Rule("mlp.*", recipe),))
        assert policy.explain(lifted, x) == policy.explain(plain, x)
        (found, _), (expected, _) = (
            fp4.linen.quantize_model(model, policy, x).apply(parameters, x)
            for model in (lifted, plain)
        )
        # What is compiled otherwise may fall on the other side of a few roundings.
        assert jnp.abs(found - expected).mean() < 0.02 * jnp.abs(expected - before).mean()
        outputs.append(expected)
    assert jnp.abs(outputs[0] - outputs[1]).max() > 0.1
    found, _ = lifted.apply(parameters, x)
    np.testing.assert_allclose(found, before, rtol=1e-5, atol=1e-6)
