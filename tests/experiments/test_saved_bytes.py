"""What a layer keeps for its backward pass, against closed forms."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp4jax as fp4
from experiments.saved_bytes import saved_bytes

TOKENS, FEATURES_IN, FEATURES_OUT = 40, 128, 256


def linear(dtype=jnp.float32) -> nnx.Linear:
    return nnx.Linear(FEATURES_IN, FEATURES_OUT, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))


def activation(dtype=jnp.float32, shape=(4, 10, FEATURES_IN)) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_plain_layer_keeps_its_input_and_not_its_kernel():
    assert saved_bytes(linear(), activation()) == TOKENS * FEATURES_IN * 4


def test_a_cast_copy_of_the_kernel_is_counted():
    kept = saved_bytes(linear(jnp.bfloat16), activation(jnp.bfloat16))
    assert kept == 2 * TOKENS * FEATURES_IN + 2 * FEATURES_IN * FEATURES_OUT


def test_jit_inside_the_layer_changes_nothing():
    class Jitted(nnx.Module):
        def __init__(self):
            self.inner = linear()

        def __call__(self, x):
            return jax.jit(lambda x, kernel: x @ kernel)(x, self.inner.kernel[...])

    assert saved_bytes(Jitted(), activation()) == TOKENS * FEATURES_IN * 4


@pytest.mark.parametrize(
    ("recipe", "bits", "weight_bits"),
    [
        # The activation in bfloat16, and the parameter itself.
        (fp4.recipes.bf16(), 16, 0),
        # Packed codes, and a scale for every 16 elements, or for every 16x16 of the weight.
        (fp4.recipes.nvfp4(), 4 + 8 / 16, 4 + 8 / 256),
    ],
)
def test_quantized_layers_keep_packed_operands(recipe, bits, weight_bits):
    layer = fp4.nnx.Linear(
        FEATURES_IN, FEATURES_OUT, use_bias=False, recipe=recipe, rngs=nnx.Rngs(0)
    )
    x = activation(shape=(4, 16, FEATURES_IN))
    expected = (64 * FEATURES_IN * bits + FEATURES_IN * FEATURES_OUT * weight_bits) / 8
    # And a little for tensor scales and random words.
    assert expected <= saved_bytes(layer, x) < expected + 128


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(jnp.float4_e2m1fn, 4), (jnp.int4, 4), (jnp.float8_e4m3fn, 8), (jnp.bool_, 8)],
)
def test_narrow_residuals_count_their_true_bits(dtype, bits):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        return x @ w, (x.astype(dtype), w)

    def backward(residuals, dy):
        x, w = residuals
        return dy @ w.T, x.astype(dy.dtype).T @ dy

    product.defvjp(forward, backward)

    class Layer(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((FEATURES_IN, FEATURES_OUT)))

        def __call__(self, x):
            return product(x, self.kernel[...])

    x = activation(shape=(TOKENS, FEATURES_IN))
    assert saved_bytes(Layer(), x) == TOKENS * FEATURES_IN * bits // 8


def test_a_parameter_that_passes_through_a_jitted_forward_costs_nothing():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    forward = jax.jit(lambda x, w: (x @ w, (x, w)))
    product.defvjp(forward, lambda kept, dy: (dy @ kept[1].T, kept[0].T @ dy))

    class Layer(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((FEATURES_IN, FEATURES_OUT)))

        def __call__(self, x):
            return product(x, self.kernel[...])

    x = activation(shape=(TOKENS, FEATURES_IN))
    assert saved_bytes(Layer(), x) == TOKENS * FEATURES_IN * 4


def test_random_streams_may_be_drawn_from():
    class Noisy(nnx.Module):
        def __init__(self):
            self.inner = linear()
            self.rngs = nnx.Rngs(0)

        def __call__(self, x):
            return self.inner(x * jax.random.uniform(self.rngs(), x.shape))

    layer = Noisy()
    # The noisy input, kept for the kernel's gradient, and the noise, for the input's.
    assert saved_bytes(layer, activation()) == 2 * TOKENS * FEATURES_IN * 4
    assert layer.rngs.default.count[...] == 0, "tracing leaves the layer as it was"


def test_what_is_kept_grows_with_the_tokens():
    one, ten = (saved_bytes(linear(), activation(shape=(n, FEATURES_IN))) for n in (1, 10))
    assert ten == 10 * one


def test_a_mask_that_follows_from_no_array_is_not_kept():
    class Masked(nnx.Module):
        def __call__(self, x):
            mask = jnp.broadcast_to(jnp.tri(4, FEATURES_IN, dtype=bool), x.shape)
            return jnp.where(mask, jnp.sin(x), 0.0)

    # The derivative of the sine.
    assert saved_bytes(Masked(), activation(shape=(4, FEATURES_IN))) == 4 * FEATURES_IN * 4


def test_a_gathered_parameter_that_is_not_quantized_costs_nothing():
    layer = linear()
    layer.dot_general = fp4.DotGeneral(fp4.recipes.bf16(), fp4.Gather(jax.P("fsdp", None)))
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        kept = saved_bytes(layer, activation())
    assert kept == TOKENS * FEATURES_IN * 2
