"""Weights travel quantized where each shard is whole blocks, else as they multiply."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax as fp4
from experiments import travel
from experiments.mesh import Extents, make_mesh
from experiments.wire import collectives
from fp4jax.layers import Layer

P = jax.P
MESH = Extents(1, 4, 2)
NVFP4, FP8_BLOCK = fp4.recipes.nvfp4(), fp4.recipes.fp8_block()


def gather(shape, recipe=NVFP4, extents=MESH, dtype="float32", kind="Linear"):
    layer = Layer(("mlp", "up_proj"), kind, shape, 0)
    return travel.quantized(recipe, make_mesh(extents), dtype)(layer)


def test_kernels_of_whole_blocks_travel_quantized():
    assert gather((128, 64)) == fp4.Gather(P("fsdp", "tensor"))
    # 16 x 16 blocks: 4 shards of 16 rows each, and 2 of 16 columns.
    assert gather((64, 32)) == fp4.Gather(P("fsdp", "tensor"))
    assert gather((96, 32)) is None, "24 rows a shard"
    assert gather((64, 48)) is None, "24 columns a shard"
    assert gather((64, 33)) == fp4.Gather(P("fsdp", None)), "33 columns lie together"
    assert gather((62, 32)) is None, "62 rows lie everywhere"
    # 128 x 128 blocks
    assert gather((512, 256), FP8_BLOCK) == fp4.Gather(P("fsdp", "tensor"))
    assert gather((256, 256), FP8_BLOCK) is None


def test_on_one_part_nothing_is_gathered_but_gradients_may_be_added_in_bfloat16():
    assert gather((64, 64), extents=Extents(8, 1, 1)) is None
    found = gather((64, 64), extents=Extents(8, 1, 1), dtype="bfloat16")
    assert found == fp4.Gather(P("fsdp", "tensor"), gradient_dtype=jnp.bfloat16)
    experts = gather((3, 64, 64), dtype="bfloat16", kind="Experts")
    assert experts == fp4.Gather(P(None, "fsdp", "tensor")), "experts' are added in float32"


class Plain(nnx.Module):
    """An embedding, a linear layer with a bias, and the embedding once more as a head."""

    def __init__(self, dtype=jnp.bfloat16):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(64, 32, dtype=dtype, rngs=rngs)
        self.up_proj = nnx.Linear(32, 32, dtype=dtype, rngs=rngs)
        self.up_proj.bias[...] = jnp.arange(32.0) / 32

    def __call__(self, tokens):
        return self.embed.attend(self.up_proj(self.embed(tokens)))


@pytest.mark.parametrize(("dtype", "moves"), [(jnp.bfloat16, "u16"), (jnp.float32, "f32")])
def test_what_is_not_quantized_travels_as_it_multiplies_with_the_same_results(dtype, moves):
    mesh, tokens = make_mesh(Extents(1, 4, 1)), jnp.arange(16) * 3
    plain, moved = Plain(dtype), travel.rest_as_multiplied(Plain(dtype), mesh)

    def both(model):
        graphdef, params = nnx.split(model)

        def loss(params):
            y = nnx.merge(graphdef, params)(tokens).astype(jnp.float32)
            return jnp.sum(y * jnp.sin(jnp.arange(64.0))[None]), y

        return jax.jit(jax.grad(loss, has_aux=True)).lower(params).compile(), params

    with jax.set_mesh(mesh):
        program, params = both(moved)
        grads, y = program(params)
    program_of_one, params = both(plain)
    expected_grads, expected = program_of_one(params)
    np.testing.assert_array_equal(y, expected)
    # XLA leaves out a rounding to bfloat16 where nothing stands between.
    rtol = 0 if dtype == jnp.float32 else 2**-7
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * jnp.abs(b).max())
    gathered = [m.dtype for m in collectives(program.as_text()) if m.op == "all-gather"]
    assert set(gathered) == {moves}, "as bits, since XLA on CPUs moves bfloat16 as float32"


def test_quantized_layers_are_left_to_their_gather():
    model = Plain()
    fp4.nnx.quantize_model(model, fp4.Policy((fp4.Rule("up_proj", NVFP4),)), rngs=nnx.Rngs(0))
    promote = model.up_proj.promote_dtype
    travel.rest_as_multiplied(model, make_mesh(Extents(1, 2, 1)))
    assert model.up_proj.promote_dtype is promote
