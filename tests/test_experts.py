"""The layer of experts, plain, quantized, and reached by a policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp4jax as fp4
from fp4jax.models import Experts

NVFP4 = fp4.recipes.nvfp4()
NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest())
SIZES = np.array([7, 0, 12, 1])


def inputs(rows=20, features=16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, features)), jnp.float32)


def experts(**options):
    return Experts(4, 16, 24, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), (jnp.bfloat16, 3e-2)])
def test_each_group_has_its_own_kernel(dtype, tolerance):
    layer = experts(dtype=dtype)
    got = nnx.jit(lambda layer, x, sizes: layer(x, sizes))(layer, inputs(), jnp.asarray(SIZES))
    assert got.dtype == (dtype or jnp.float32)
    kernel = np.asarray(layer.kernel[...], np.float64)[np.repeat(np.arange(4), SIZES)]
    want = np.einsum("mk,mkn->mn", np.asarray(inputs(), np.float64), kernel)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance)


def test_experts_start_like_linear_layers():
    layer = Experts(8, 64, 48, rngs=nnx.Rngs(0))
    assert layer.kernel.shape == (8, 64, 48)
    assert np.std(layer.kernel[...]) == pytest.approx(64**-0.5, rel=0.02)
    assert layer.kernel.dtype == jnp.float32
    assert experts(param_dtype=jnp.bfloat16).kernel.dtype == jnp.bfloat16


def test_options_reach_the_product():
    """precision and preferred_element_type, as Flax's layers pass them on."""

    def product(lhs, rhs, sizes, *, precision, preferred_element_type):
        assert (precision, preferred_element_type) == ("highest", jnp.float32)
        assert lhs.dtype == rhs.dtype == jnp.bfloat16
        return lax.ragged_dot(lhs, rhs, sizes, precision, preferred_element_type)

    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    layer = experts(dtype=jnp.bfloat16, ragged_dot=product, **options)
    assert layer(inputs(), jnp.asarray(SIZES)).dtype == jnp.float32


def test_a_quantized_layer_is_ragged_dot_of_its_kernel():
    layer = fp4.nnx.Experts(4, 16, 24, recipe=NEAREST, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer.recipe == NEAREST
    assert layer.kernel.dtype == jnp.float32
    x, sizes = inputs().astype(jnp.bfloat16), jnp.asarray(SIZES)
    graph, state = nnx.split(layer)
    y, vjp = jax.vjp(lambda state: nnx.merge(graph, state)(x, sizes), state)
    want, same = jax.vjp(
        lambda w: fp4.ragged_dot(x, w, sizes, recipe=NEAREST, preferred_element_type=jnp.bfloat16),
        layer.kernel[...],
    )
    np.testing.assert_array_equal(y, want)
    gradient = vjp(y)[0]["kernel"][...]
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, same(want)[0])


class Model(nnx.Module):
    """Two blocks of experts and a head."""

    def __init__(self, layer=Experts):
        self.blocks = nnx.List([layer(4, 16, 16, rngs=nnx.Rngs(i)) for i in range(2)])
        self.head = nnx.Linear(16, 3, rngs=nnx.Rngs(2))

    def __call__(self, x, sizes):
        for block in self.blocks:
            x = x + block(x, sizes)
        return self.head(x)


@pytest.mark.usefixtures("compile_fast")
def test_quantize_model_reaches_experts():
    model = Model()
    kernels = [block.kernel for block in model.blocks]
    before = model(inputs(), jnp.asarray(SIZES))
    table = fp4.Policy.keep_ends(last=1, recipe=NVFP4).explain(model)
    assert [line.split() for line in table.splitlines()[1:3]] == [
        ["blocks.0", "4x16x16", "1,024", "nvfp4"],
        ["blocks.1", "4x16x16", "1,024", "bf16"],
    ]
    layers = []
    where = fp4.Rule(lambda layer: layers.append(layer) or layer.kind == "Experts", NVFP4)
    fp4.nnx.quantize_model(model, fp4.Policy([where]), rngs=nnx.Rngs(quantize=0))
    assert [layer.kind for layer in layers] == ["Experts", "Experts", "Linear"]
    for block, kernel in zip(model.blocks, kernels, strict=True):
        assert type(block) is fp4.nnx.Experts
        assert block.kernel is kernel
        assert block.recipe == NVFP4
    assert type(model.head) is nnx.Linear
    after = model(inputs(), jnp.asarray(SIZES))
    assert 1e-3 < np.abs(after - before).max() < 1


@pytest.mark.usefixtures("compile_fast")
def test_each_call_and_each_layer_draws_its_own_bits():
    model = fp4.nnx.quantize_model(
        Model(), fp4.Policy([fp4.Rule("blocks.*", NVFP4)]), rngs=nnx.Rngs(quantize=0)
    )

    @nnx.jit
    def gradients(model):
        def loss(model):
            return (model(inputs(), jnp.asarray(SIZES)) ** 2).sum()

        return nnx.grad(loss)(model)["blocks"]

    first, second = gradients(model), gradients(model)
    for i in range(2):
        assert (first[i]["kernel"][...] != second[i]["kernel"][...]).any()
    keys = [jax.random.key_data(block.ragged_dot.stream()).tolist() for block in model.blocks]
    assert keys[0] != keys[1]


def test_stacked_experts_have_a_stream_each():
    @nnx.vmap
    def stack(key):
        return Experts(4, 16, 16, rngs=nnx.Rngs(key))

    model = nnx.List([stack(jax.random.split(jax.random.key(0), 3))])
    fp4.nnx.quantize_model(model, fp4.Policy([fp4.Rule("*", NVFP4)]), rngs=nnx.Rngs(quantize=0))
    assert model[0].ragged_dot.stream.key.shape == (3,)


def test_what_cannot_be_quantized_says_so():
    policy, rngs = fp4.Policy([fp4.Rule("*", NVFP4)]), nnx.Rngs(quantize=0)
    for options in ({"precision": "highest"}, {"ragged_dot": lambda *args, **kwargs: None}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))} of 0 cannot be set"):
            fp4.nnx.quantize_model(nnx.List([experts(**options)]), policy, rngs=rngs)

    class Biased(Experts):
        def __call__(self, inputs, group_sizes):
            return super().__call__(inputs, group_sizes) + 1

    model = nnx.List([Biased(4, 16, 16, rngs=nnx.Rngs(0))])
    with pytest.raises(NotImplementedError, match=r"0 is a Biased, .*; only that of Experts"):
        fp4.nnx.quantize_model(model, policy, rngs=rngs)
    with pytest.raises(ValueError, match="rngs has no stream 'quantize': recipe 'nvfp4'"):
        fp4.nnx.Experts(4, 16, 16, recipe=NVFP4, rngs=nnx.Rngs(params=0))
