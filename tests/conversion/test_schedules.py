"""Models trained across a late switch to BF16: one trace a phase, and the recipe it should be."""

import functools

import flax_models as fm
import jax
import learnable
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import fp4jax as fp4

NVFP4, BF16 = fp4.recipes.nvfp4(), fp4.recipes.bf16()
STEPS, SWITCH = 6, 4
TASK = learnable.rectified_teacher(16, 8, 32)
PASSES = pytest.mark.parametrize(
    ("forward", "backward"), [(True, False), (False, True), (True, True)]
)


def policy(forward, backward):
    schedule = fp4.Schedule.late_bf16(NVFP4, SWITCH, forward=forward, backward=backward)
    return fp4.Policy((fp4.Rule("head", None), fp4.Rule("*", schedule)))


def late_recipe(forward, backward):
    """What the switch leaves, put together by hand."""
    passes = " and ".join(["forward"] * forward + ["backward"] * backward)
    return fp4.Recipe(
        f"nvfp4, bf16 {passes}",
        fprop=(BF16 if forward else NVFP4).fprop,
        dgrad=(BF16 if backward else NVFP4).dgrad,
        wgrad=(BF16 if backward else NVFP4).wgrad,
    )


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@PASSES
def test_nnx_traces_once_a_phase(forward, backward):
    traces = []

    @nnx.jit
    def step(model, optimizer, x, target):
        traces.append(model.blocks[0].recipe.name)

        def loss(model):
            return TASK.loss(model(x), target)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value, gradients

    schedule = policy(forward, backward)
    model = fm.NnxMLP((16, 16, 8), nnx.Rngs(0))
    fp4.nnx.quantize_model(model, schedule, rngs=nnx.Rngs(quantize=0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for i, batch in enumerate(TASK.batches(STEPS)):
        if i in schedule.starts:
            fp4.nnx.quantize_model(model, schedule, step=i)
        before = nnx.clone(model)
        last = step(model, optimizer, *batch)
    assert traces == ["nvfp4", late_recipe(forward, backward).name]

    # The last step was what a model does that has never had another recipe.
    by_hand = fp4.Policy((fp4.Rule("blocks.*", late_recipe(forward, backward)),))
    never = fm.NnxMLP((16, 16, 8), nnx.Rngs(0))
    fp4.nnx.quantize_model(never, by_hand, rngs=nnx.Rngs(quantize=0))
    nnx.update(never, nnx.state(before, nnx.Param))
    if not backward:  # the only pass that draws: from the stream where the steps have left it
        nnx.update(never, nnx.state(before, nnx.RngState))
    optimizer = nnx.Optimizer(never, optax.sgd(0.1), wrt=nnx.Param)
    assert_trees_equal(step(never, optimizer, *batch), last)


@PASSES
def test_linen_traces_once_a_phase(forward, backward):
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(model, state, key, x, target):
        traces.append(dict(model.recipes)["hidden_0",].name)

        def loss(parameters):
            y = model.apply({"params": parameters}, x, rngs={"quantize": key})
            return TASK.loss(y, target)

        value, gradients = jax.value_and_grad(loss)(state.params)
        return (value, gradients), state.apply_gradients(grads=gradients)

    plain, schedule = fm.LinenMLP((16, 8)), policy(forward, backward)
    x, _ = next(TASK.batches(1))
    parameters = plain.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=plain.apply, params=parameters, tx=optax.sgd(0.1))
    for i, batch in enumerate(TASK.batches(STEPS)):
        # A model that is equal is the same to jit: it may be made anew for every step.
        model = fp4.linen.quantize_model(plain, schedule, x, step=i)
        before, key = state, jax.random.fold_in(jax.random.key(0), i)
        last, state = step(model, state, key, *batch)
    assert traces == ["nvfp4", late_recipe(forward, backward).name]

    by_hand = fp4.Policy((fp4.Rule("hidden_*", late_recipe(forward, backward)),))
    never = fp4.linen.quantize_model(plain, by_hand, x)
    assert_trees_equal(step(never, before, key, *batch)[0], last)
    assert len(traces) == 2
