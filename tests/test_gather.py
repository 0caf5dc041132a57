"""Gather: packed codes are what travels, and the products are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import fp4jax as fp4
from experiments.wire import collectives, moved_bytes

P = jax.P
MATRIX = (((1,), (0,)), ((), ()))
TOKENS, K, N = 512, 128, 256
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


@pytest.mark.parametrize(
    ("axes", "spec", "recipe"),
    [
        ({"data": 1, "fsdp": 8}, P(None, "fsdp"), NVFP4),
        ({"data": 2, "fsdp": 4}, P("fsdp"), TALL),
        ({"data": 1, "fsdp": 4, "tensor": 2}, P("fsdp", "tensor"), NVFP4),
    ],
)
def test_the_bits_are_those_of_one_device(axes, spec, recipe):
    """Exactly, but where a sum is divided among devices: dw over tokens, dx over features."""
    w = numbers(0, (256, 256)) * np.float32(8.0 ** (np.arange(256) // 64))[:, None]
    x, target = numbers(1, (64, 256)), numbers(2, (64, 256))
    step = jax.value_and_grad(loss, (2, 3), has_aux=True)
    (_, y), gradients = jax.jit(lambda *args: step(recipe, None, *args))(w, x, target)
    with jax.set_mesh(mesh_of(**axes)):
        sharded = jax.jit(
            lambda *args: step(recipe, fp4.Gather(spec), *args),
            in_shardings=(spec, BATCH, BATCH),
            out_shardings=(None, (spec, BATCH)),
        )
        (_, got), got_gradients = sharded(w, x, target)
    assert got_gradients[0].sharding.spec == spec
    np.testing.assert_array_equal(got, y)
    for mine, single in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(mine, single, rtol=0, atol=1e-6 * np.abs(single).max())
    if "tensor" not in axes:
        np.testing.assert_array_equal(got_gradients[1], gradients[1])


def test_gradients_are_added_in_bfloat16_if_asked():
    """As asked of XLA; for CPUs it widens that again and drops the rounding."""
    gather = fp4.Gather(P("fsdp"), gradient_dtype=jnp.bfloat16)
    args = (jnp.asarray(numbers(i, shape)) for i, shape in enumerate([(K, N), (64, K), (64, N)]))
    w, x, target = args
    step = jax.grad(loss, 2, has_aux=True)
    dw = {}
    with jax.set_mesh(mesh_of(data=1, fsdp=4)):
        for name, given in (("bfloat16", gather), ("float32", fp4.Gather(P("fsdp")))):
            program = jax.jit(lambda *args, given=given: step(TALL, given, *args)[0])
            parts = f"tensor<{K}x{N}x{'bf16' if name == 'bfloat16' else 'f32'}>"
            products = [
                line
                for line in program.lower(w, x, target).as_text().splitlines()
                if "dot_general" in line and f"-> tensor<{K}x{N}x" in line
            ]
            assert [f"-> {parts}" in line for line in products] == [True]
            dw[name] = program(w, x, target)
    assert dw["bfloat16"].dtype == jnp.float32
    np.testing.assert_allclose(dw["bfloat16"], dw["float32"], rtol=2**-8)
    with pytest.raises(ValueError, match="gradient_dtype must be float32 or bfloat16"):
        fp4.Gather(P("fsdp"), gradient_dtype=jnp.float16)


def gathered_u8(function, *args):
    """Bytes of codes and scales that its gradient gathers on 4 devices; and no float may be."""
    with jax.set_mesh(mesh_of(data=1, fsdp=4)):
        text = jax.jit(jax.grad(function)).lower(*args).compile().as_text()
    moved = moved_bytes(collectives(text), "all-gather")
    assert moved.keys() == {"u8"}, moved
    return moved["u8"]


def cube(y):
    return (y**3).sum()


TALL_NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest(), square_weights=False)
X = jnp.asarray(numbers(3, (32, 64)))
# Shape and spec of the weight, and the product of X with it.
PRODUCTS = {
    "matmul": (
        (64, 128),
        P(None, "fsdp"),
        lambda w, **kwargs: fp4.matmul(X, w, recipe=TALL_NEAREST, **kwargs),
    ),
    "matmul, vmapped": (
        (2, 64, 128),
        P(None, "fsdp"),
        lambda w, **kwargs: jax.vmap(lambda w: fp4.matmul(X, w, recipe=TALL_NEAREST, **kwargs))(w),
    ),
    "einsum, heads flattened": (
        (4, 16, 128),
        P(None, None, "fsdp"),
        lambda w, **kwargs: fp4.einsum(
            "bhk,hkd->bd", X.reshape(32, 4, 16), w, recipe=TALL_NEAREST, **kwargs
        ),
    ),
    "einsum, batched and transposed": (
        (2, 128, 32),
        P(None, "fsdp"),
        lambda w, **kwargs: fp4.einsum(
            "beh,edh->bed", X.reshape(32, 2, 32), w, recipe=TALL_NEAREST, **kwargs
        ),
    ),
    "ragged_dot": (
        (2, 64, 64),
        P(None, "fsdp"),
        lambda w, **kwargs: fp4.ragged_dot(
            X, w, jnp.array([20, 12]), recipe=TALL_NEAREST, **kwargs
        ),
    ),
    "convolution": (
        (1, 64, 128),
        P(None, "fsdp"),
        lambda w, gather=None: fp4.ConvGeneralDilated(TALL_NEAREST, gather)(
            X[None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
    ),
}


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_gathers_codes_and_has_the_same_bits(name):
    shape, spec, product = PRODUCTS[name]
    w = jnp.asarray(numbers(4, shape))
    gather = fp4.Gather(spec)
    # Once, in Fprop: no gradient of X is asked for.
    assert gathered_u8(lambda w: cube(product(w, gather=gather)), w) == w.size * 4.5 / 8
    with jax.set_mesh(mesh_of(fsdp=4)):
        got = jax.jit(lambda w: product(w, gather=gather))(w)
    np.testing.assert_array_equal(got, jax.jit(product)(w))


class Stack(nnx.Module):
    """Blocks whose parameters are stacked, run by a scan."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda key: nnx.Linear(64, 64, rngs=nnx.Rngs(key)))
        self.blocks = make(jax.random.split(rngs.params(), 3))

    def __call__(self, x):
        def block(x, layer):
            return jnp.tanh(layer(x))

        return nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_of_a_model_that_is_scanned(remat):
    model = Stack(nnx.Rngs(0))
    seen = []

    def lies(layer):
        seen.append(layer.name)
        return fp4.Gather(P("fsdp"))

    policy = fp4.Policy((fp4.Rule("*", NVFP4),))
    fp4.nnx.quantize_model(model, policy, rngs=nnx.Rngs(1), gather=lies)
    fp4.nnx.quantize_model(model, policy, step=5)  # keeps how the kernels lie
    assert seen == ["blocks"]
    assert model.blocks.dot_general.hook == fp4.DotGeneral(NVFP4, fp4.Gather(P("fsdp")))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def value(params, x):
        def run(params, x):
            return nnx.merge(graph, params, rest, copy=True)(x)

        return cube((jax.checkpoint(run) if remat else run)(params, x))

    x = jnp.ones((32, 64))
    # Of each of the 3 layers: in Fprop, in Dgrad, and with remat in Fprop again.
    expected = 3 * (3 if remat else 2) * (64 * 64 // 2 + 64 * 64 // 256)
    spread = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    assert gathered_u8(value, spread, x) == expected


def multiply(w_shape=(64, 64), recipe=NVFP4, **gather):
    w = jnp.ones(w_shape)
    fp4.dot_general(
        jnp.ones((4, w_shape[0])),
        w,
        (((1,), (0,)), ((), ())),
        recipe=recipe,
        key=jax.random.key(0),
        gather=fp4.Gather(**gather),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec": P("tensor")}, "'fsdp' is not in"),
        ({"spec": P("data"), "axis": "data"}, r"names \['data'\], which the mesh does not have"),
        ({"spec": P(None, None, "fsdp")}, "more entries than a weight of shape"),
        (
            {"spec": P("fsdp"), "w_shape": (96, 64)},
            "96 elements are no 4 shards of whole blocks of 16",
        ),
        ({"spec": P("fsdp"), "w_shape": (64, 64), "recipe": fp4.recipes.mxfp4()}, "blocks of 32"),
        ({"spec": P(None, None, "fsdp"), "w_shape": (64, 4, 16)}, "flattens behind another"),
    ],
)
def test_what_cannot_be_gathered_is_refused(arguments, message):
    with jax.set_mesh(mesh_of(fsdp=4)), pytest.raises(ValueError, match=message):
        multiply(**arguments)


def test_a_mesh_is_needed_with_axes_of_type_auto():
    with pytest.raises(ValueError, match="says which mesh"):
        multiply(spec=P("fsdp"))
    explicit = mesh_of(AxisType.Explicit, fsdp=4)
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="axes of type Auto"):
        multiply(spec=P("fsdp"))
    with pytest.raises(ValueError, match="axes of type Auto"):
        jax.shard_map(
            lambda: multiply(spec=P("fsdp")), mesh=mesh_of(fsdp=4), in_specs=(), out_specs=None
        )()
    ragged = PRODUCTS["ragged_dot"][2]
    gather = fp4.Gather(P(None, "fsdp"), gradient_dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="grouped products add their parts in float32"):
        gathered_u8(lambda w: cube(ragged(w, gather=gather)), jnp.ones((2, 64, 64)))
    with pytest.raises(TypeError, match="spec must be"):
        fp4.Gather("fsdp")
    with pytest.raises(TypeError, match="gather must be Gather"):
        fp4.DotGeneral(NVFP4, P("fsdp"))
