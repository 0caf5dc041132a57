"""The NNX layer, converting a model, and policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax as fp4

pytestmark = pytest.mark.usefixtures("compile_fast")

NVFP4 = fp4.recipes.nvfp4()


class Net(nnx.Module):
    """Four linear blocks with a head outside them."""

    def __init__(self, rngs, layer=nnx.Linear):
        self.blocks = nnx.List([layer(16, 16, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


def inputs(shape=(20, 16), seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_linear_is_dot_general_of_its_parameters(use_bias, dtype):
    recipe = NVFP4.replace(
        dgrad=fp4.Gemm(NVFP4.fprop.lhs, NVFP4.dgrad.rhs),
        wgrad=fp4.Gemm(NVFP4.wgrad.lhs, NVFP4.wgrad.lhs),
    )
    layer = fp4.nnx.Linear(16, 5, recipe=recipe, use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0))
    if use_bias:
        layer.bias[...] = jnp.arange(5, dtype=jnp.float32)
    x = inputs((2, 7, 16))
    y = layer(x)
    compute = dtype or jnp.float32
    expected = fp4.dot_general(
        x.astype(compute),
        layer.kernel[...],
        (((2,), (0,)), ((), ())),
        recipe=recipe,
        preferred_element_type=compute,
    )
    if use_bias:
        expected = expected + jnp.arange(5).astype(compute)[None, None]
    assert y.dtype == compute
    np.testing.assert_array_equal(y, expected)


def test_preferred_element_type_is_honoured():
    low, high = jnp.bfloat16, jnp.float32
    plain = nnx.Linear(
        16, 4, use_bias=False, dtype=low, preferred_element_type=high, rngs=nnx.Rngs(0)
    )
    model = nnx.List([plain])
    x = inputs()
    expected = plain(x)
    fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(recipe=fp4.recipes.bf16()))
    assert model[0](x).dtype == expected.dtype == jnp.float32


def test_fresh_bits_each_call_and_the_same_from_the_same_seed():
    def gradients(seed):
        layer = fp4.nnx.Linear(16, 16, recipe=NVFP4, rngs=nnx.Rngs(0, quantize=seed))

        @nnx.jit
        def gradient(layer, x):
            return nnx.grad(lambda layer, x: (layer(x) ** 2).sum())(layer, x)["kernel"][...]

        return [np.asarray(gradient(layer, inputs())) for _ in range(2)]

    first, second = gradients(1)
    assert (first != second).any()
    for a, b in zip(gradients(1), (first, second), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (gradients(2)[0] != first).any()


def test_layers_of_a_model_draw_different_bits():
    model = fp4.nnx.quantize_model(
        Net(nnx.Rngs(0)), fp4.Policy.keep_ends(recipe=NVFP4), rngs=nnx.Rngs(quantize=0)
    )
    keys = [jax.random.key_data(block.dot_general.stream()).tolist() for block in model.blocks]
    assert len(set(map(tuple, keys))) == 4


def test_no_stream_where_nothing_is_stochastic():
    layer = fp4.nnx.Linear(16, 16, recipe=fp4.recipes.bf16(), rngs=nnx.Rngs(0))
    assert layer.dot_general.stream is None


def test_quantize_model_keeps_parameters_and_touches_only_what_the_policy_names():
    model = Net(nnx.Rngs(0))
    kernels = [block.kernel for block in model.blocks]
    before = nnx.state(model, nnx.Param)
    policy = fp4.Policy.keep_ends(first=1, last=1, recipe=NVFP4)
    assert fp4.nnx.quantize_model(model, policy, rngs=nnx.Rngs(quantize=0)) is model
    assert all(block.kernel is kernel for block, kernel in zip(model.blocks, kernels, strict=True))
    assert [block.recipe.name for block in model.blocks] == ["bf16", "nvfp4", "nvfp4", "bf16"]
    assert type(model.head) is nnx.Linear
    after = nnx.state(model, nnx.Param)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    # A second policy replaces the first.
    fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(recipe=fp4.recipes.fp8_block()))
    assert [block.recipe.name for block in model.blocks] == ["fp8_block"] * 4


def test_a_shared_layer_stays_shared():
    model = Net(nnx.Rngs(0))
    model.blocks[2] = model.blocks[1]
    fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(recipe=fp4.recipes.fp8_block()))
    assert model.blocks[2] is model.blocks[1]
    assert isinstance(model.blocks[1], fp4.nnx.Linear)


def test_converted_model_computes_what_quantized_layers_do():
    policy = fp4.Policy.keep_ends(recipe=NVFP4)
    converted = fp4.nnx.quantize_model(Net(nnx.Rngs(0)), policy, rngs=nnx.Rngs(quantize=0))

    def quantized_linear(*shape, rngs):
        return fp4.nnx.Linear(*shape, recipe=NVFP4, rngs=rngs)

    built = Net(nnx.Rngs(0), quantized_linear)
    nnx.update(built, nnx.state(converted, nnx.Param))
    np.testing.assert_array_equal(converted(inputs()), built(inputs()))
    assert (converted(inputs()) != Net(nnx.Rngs(0))(inputs())).any()


def test_split_and_a_pure_jitted_step():
    model = fp4.nnx.quantize_model(
        Net(nnx.Rngs(0)), fp4.Policy.keep_ends(recipe=NVFP4), rngs=nnx.Rngs(quantize=0)
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params, rest, x):
        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            return (model(x) ** 2).mean(), nnx.state(model, nnx.Not(nnx.Param))

        gradient, rest = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), rest, gradient

    x = inputs()
    new, rest, first = step(params, rest, x)
    _, _, second = step(params, rest, x)
    difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), first, second)
    assert min(jax.tree.leaves(difference["blocks"][0])) > 0
    assert float(jnp.abs(new["head"]["kernel"][...] - params["head"]["kernel"][...]).max()) > 0


def test_rule_that_matches_only_convolutions_says_so():
    conv = nnx.Sequential(nnx.Conv(16, 16, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"only convolutions, .* \(convolutions=True\)"):
        fp4.Policy([fp4.Rule("*", NVFP4)]).explain(conv)


def test_errors():
    model = Net(nnx.Rngs(0))
    with pytest.raises(ValueError, match="an earlier rule has taken all layers"):
        fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(first=2, last=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs has no stream 'quantize': recipe 'nvfp4'"):
        fp4.nnx.quantize_model(model, fp4.Policy.keep_ends())
    model.blocks[3].precision = "highest"
    with pytest.raises(ValueError, match=r"precision of blocks\.3 cannot be set"):
        fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(), rngs=nnx.Rngs(0))
    assert not any(isinstance(block, fp4.nnx.Linear) for block in model.blocks)
    model.blocks[3].precision = None
    with pytest.raises(ValueError, match="all blocks' -> nvfp4 reaches no layer: it matches none"):
        fp4.nnx.quantize_model(model.head, fp4.Policy.keep_ends(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs has no stream 'quantize': recipe 'nvfp4'"):
        fp4.nnx.Linear(16, 4, recipe=NVFP4, rngs=nnx.Rngs(params=0))
    for name, value in (("dot_general", jax.lax.dot), ("precision", "highest")):
        with pytest.raises(ValueError, match=f"{name} cannot be set"):
            fp4.nnx.Linear(16, 4, recipe=NVFP4, rngs=nnx.Rngs(0), **{name: value})
    layer = fp4.nnx.Linear(16, 4, recipe=NVFP4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="out_sharding must be None"):
        layer(inputs(), out_sharding=jax.P())


def test_explain_lists_every_linear_layer():
    table = fp4.Policy.keep_ends(first=1, last=2, recipe=NVFP4).explain(Net(nnx.Rngs(0)))
    assert [line.split() for line in table.splitlines()] == [
        ["layer", "kernel", "parameters", "recipe"],
        ["blocks.0", "16x16", "272", "bf16"],
        ["blocks.1", "16x16", "272", "nvfp4"],
        ["blocks.2", "16x16", "272", "bf16"],
        ["blocks.3", "16x16", "272", "bf16"],
        ["head", "16x3", "51", "untouched"],
    ]


def test_layers_stacked_along_another_axis_are_refused():
    class One(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(16, 8, rngs=rngs)

    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
    make = nnx.split_rngs(splits=3)(nnx.vmap(One, in_axes=0, out_axes=axes))
    model, policy = make(nnx.Rngs(0)), fp4.Policy([fp4.Rule("*", NVFP4)])
    with pytest.raises(NotImplementedError, match=r"shape \(16, 3, 8\) holds layers of shape \(16"):
        fp4.nnx.quantize_model(model, policy, rngs=nnx.Rngs(quantize=0))


def test_only_nnx_models():
    with pytest.raises(TypeError, match="model must be a Flax NNX model, not list"):
        fp4.nnx.quantize_model([], fp4.Policy.keep_ends())
