"""Gather: packed codes are what travels, and the products are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

import fp4jax as fp4
from experiments.wire import collectives, moved_bytes

P = jax.P
MATRIX = (((1,), (0,)), ((), ()))
TOKENS, K, N = 512, 128, 192
NVFP4 = fp4.recipes.nvfp4()
TALL = fp4.recipes.nvfp4(square_weights=False)
BF16 = fp4.recipes.bf16()
BATCH = P(("data", "fsdp"))


def mesh_of(kind=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def loss(recipe, gather, w, x, target):
    y = fp4.dot_general(
        x,
        w,
        MATRIX,
        recipe=recipe,
        key=jax.random.key(0),
        preferred_element_type=jnp.float32,
        gather=gather,
    )
    return ((y - target) ** 2).sum(), y


def compiled(recipe, gather, spec, mesh):
    """A step of one layer: its result and both gradients."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((K, N), "float32"),
            ((TOKENS, K), "bfloat16"),
            ((TOKENS, N), "float32"),
        )
    ]
    with jax.set_mesh(mesh):
        step = jax.jit(
            lambda *args: jax.value_and_grad(loss, (2, 3), has_aux=True)(recipe, gather, *args),
            in_shardings=(spec, BATCH, BATCH),
            out_shardings=(None, (spec, BATCH)),
        )
        return step.lower(*shapes).compile()


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp")])
@pytest.mark.parametrize(
    ("recipe", "dtype", "bits"),
    [
        (BF16, "u16", 16),
        (NVFP4, "u8", 4 + 8 / 256),
        (TALL, "u8", 4 + 8 / 16),
        (fp4.recipes.mxfp8(), "u8", 8 + 8 / 32),
    ],
)
def test_what_travels(recipe, dtype, bits, spec):
    """The weight twice, for Fprop and Dgrad, and no other array; its gradient once."""
    mesh = mesh_of(data=2, fsdp=4)
    moved = collectives(compiled(recipe, fp4.Gather(spec), spec, mesh).as_text())
    assert moved_bytes(moved, "all-gather") == {dtype: 2 * K * N * bits / 8}
    # The gradient and the loss; XLA for CPUs has no reduce-scatter. Tensor amaxes move as u32.
    sums = moved_bytes(moved, "all-reduce")
    assert sums["f32"] == 4 * K * N + 4
    assert sums.keys() <= {"f32", "u32"} and sums.get("u32", 0) < 100
    assert {array.op for array in moved} == {"all-gather", "all-reduce"}


def test_without_it_floats_travel():
    moved = collectives(compiled(NVFP4, None, P("fsdp"), mesh_of(data=2, fsdp=4)).as_text())
    assert moved_bytes(moved, "all-gather")["f32"] >= 4 * K * N


def test_beside_tensor_parallelism_only_the_axis_is_gathered():
    spec = P("fsdp", "tensor")
    mesh = mesh_of(data=1, fsdp=4, tensor=2)
    moved = collectives(compiled(TALL, fp4.Gather(spec), spec, mesh).as_text())
    assert moved_bytes(moved, "all-gather")["u8"] == 2 * (K * N // 2) * 4.5 / 8


def numbers(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("recipe", [NVFP4, TALL, fp4.recipes.mxfp4(square_weights=False)])
@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ({"data": 1, "fsdp": 8}, P(None, "fsdp")),
        ({"data": 2, "fsdp": 4}, P("fsdp")),
        ({"data": 1, "fsdp": 4, "tensor": 2}, P("tensor", "fsdp")),
    ],
)
def test_the_bits_are_those_of_one_device(axes, spec, recipe):
    w = numbers(0, (256, 256)) * np.float32(8.0 ** (np.arange(256) // 64))[:, None]
    x, target = numbers(1, (64, 256)), numbers(2, (64, 256))
    step = jax.value_and_grad(loss, (2, 3), has_aux=True)
    (_, y), (dw, dx) = jax.jit(lambda *args: step(recipe, None, *args))(w, x, target)
    with jax.set_mesh(mesh_of(**axes)):
        sharded = jax.jit(
            lambda *args: step(recipe, fp4.Gather(spec), *args),
            in_shardings=(spec, BATCH, BATCH),
            out_shardings=(None, (spec, BATCH)),
        )
        (_, y2), (dw2, dx2) = sharded(w, x, target)
    assert dw2.sharding.spec == spec
    pairs = [("y", y2, y), ("dx", dx2, dx), ("dw", dw2, dw)]
    for name, mine, single in pairs:
        print(
            axes,
            name,
            np.array_equal(mine, single),
            np.abs(mine - single).max() / np.abs(single).max(),
        )
