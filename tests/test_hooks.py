"""The products as hooks: of NumPy's einsum, of Flax's layers, with keys from where they belong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import fp4jax as fp4

pytestmark = pytest.mark.usefixtures("compile_fast")

NVFP4 = fp4.recipes.nvfp4()
NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest())
MATRIX = (((1,), (0,)), ((), ()))
PLAIN = fp4.Cast(np.dtype(np.float32))
FLOAT32 = fp4.Recipe("f32", *[fp4.Gemm(PLAIN, PLAIN)] * 3)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("hook", [fp4.DotGeneral, fp4.EinsumOp, fp4.ConvGeneralDilated])
def test_hooks_are_values(hook):
    assert hook(fp4.recipes.nvfp4()) == hook(fp4.recipes.nvfp4())
    assert hash(hook(fp4.recipes.nvfp4())) == hash(hook(fp4.recipes.nvfp4()))
    assert hook(NVFP4) != hook(NEAREST)
    with pytest.raises(TypeError, match="recipe must be a Recipe"):
        hook("nvfp4")


def test_dot_general_is_the_function():
    x, w, key = normal(20, 32), normal(32, 8, seed=1), jax.random.key(0)
    hook = fp4.DotGeneral(NVFP4)
    one, vjp = jax.vjp(lambda x, w: hook(x, w, MATRIX, key=key), x, w)
    two, same = jax.vjp(lambda x, w: fp4.dot_general(x, w, MATRIX, recipe=NVFP4, key=key), x, w)
    for a, b in zip((one, *vjp(one)), (two, *same(two)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert hook(x.astype(jnp.bfloat16), w, MATRIX, key=key).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="key is missing"):
        hook(x, w, MATRIX)
    with pytest.raises(ValueError, match="precision must be None, not highest"):
        hook(x, w, MATRIX, "highest", key=key)


def test_in_numpys_einsum():
    x, w = normal(20, 32), normal(32, 8, seed=1)
    y = jax.jit(lambda x, w: jnp.einsum("ab,bc->ac", x, w, _dot_general=fp4.DotGeneral(NEAREST)))
    np.testing.assert_array_equal(y(x, w), fp4.dot_general(x, w, MATRIX, recipe=NEAREST))


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_in_flax_layers(library):
    """Every hook of a linear layer gives what dot_general gives on its kernel."""
    x, hook = normal(3, 20, 32), fp4.DotGeneral(NEAREST)
    if library == "linen":
        for make in (linen.Dense, linen.DenseGeneral):
            layer = make(8, dot_general=hook)
            variables = layer.init(jax.random.key(0), x)
            kernel, y = variables["params"]["kernel"], layer.apply(variables, x)
            np.testing.assert_array_equal(y, fp4.einsum("abk,kn->abn", x, kernel, recipe=NEAREST))
    else:
        for make in (nnx.Linear, nnx.LinearGeneral):
            layer = make(32, 8, dot_general=hook, rngs=nnx.Rngs(0))
            expected = fp4.einsum("abk,kn->abn", x, layer.kernel[...], recipe=NEAREST)
            np.testing.assert_array_equal(layer(x), expected)
        einsum = nnx.Einsum(
            "abk,kn->abn", (32, 8), einsum_op=fp4.EinsumOp(NEAREST), rngs=nnx.Rngs(0)
        )
        expected = fp4.einsum("abk,kn->abn", x, einsum.kernel[...], recipe=NEAREST)
        np.testing.assert_array_equal(einsum(x), expected)


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_in_attention(library):
    """With float32 operands the hooks change nothing, with quantized ones every kernel."""
    x, float32 = normal(2, 6, 16), fp4.DotGeneral(FLOAT32)

    def outputs(hook):
        hooks = {} if hook is None else {"qkv_dot_general": hook, "out_dot_general": hook}
        if library == "linen":
            layer = linen.MultiHeadDotProductAttention(2, **hooks)
            variables = layer.init(jax.random.key(0), x)

            def loss(params):
                return (layer.apply({"params": params}, x) ** 2).sum()

            return jax.value_and_grad(loss)(variables["params"])
        layer = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0), **hooks)
        value, gradient = nnx.value_and_grad(lambda layer: (layer(x) ** 2).sum())(layer)
        return value, nnx.to_pure_dict(gradient)

    plain, same, quantized = (outputs(hook) for hook in (None, float32, fp4.DotGeneral(NEAREST)))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(same), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for name in ("query", "key", "value", "out"):
        assert (plain[1][name]["kernel"] != quantized[1][name]["kernel"]).any()


def test_linen_draws_from_the_layers_stream():
    x, layer = normal(20, 32), linen.Dense(8, dot_general=fp4.DotGeneral(NVFP4))
    variables = layer.init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"kernel": (32, 8), "bias": (8,)}}

    def gradient(seed):
        def loss(variables):
            rngs = {"quantize": jax.random.key(seed)}
            return (layer.apply(variables, x, rngs=rngs) ** 2).sum()

        return jax.jit(jax.grad(loss))(variables)["params"]["kernel"]

    np.testing.assert_array_equal(gradient(0), gradient(0))
    assert (gradient(0) != gradient(1)).any()
    # Forward, nothing of this recipe is random: no stream is needed, and it changes nothing.
    np.testing.assert_array_equal(
        layer.apply(variables, x), layer.apply(variables, x, rngs={"quantize": jax.random.key(0)})
    )
    with pytest.raises(ValueError, match="key is missing: the recipe rounds stochastically"):
        jax.grad(lambda v: (layer.apply(v, x) ** 2).sum())(variables)


def test_a_linen_method_that_is_not_compact_gives_a_key():
    class Setup(linen.Module):
        own_key: bool = False

        def setup(self):
            self.w = self.param("w", linen.initializers.ones, (32, 8))

        def __call__(self, x):
            key = self.make_rng("quantize") if self.own_key else None
            return fp4.DotGeneral(NVFP4)(x, self.w, MATRIX, key=key)

    x, rngs = normal(20, 32), {"params": jax.random.key(0), "quantize": jax.random.key(1)}
    with pytest.raises(ValueError, match=r"key is missing: .* key=self\.make_rng\('quantize'\)"):
        Setup().init(rngs, x)
    y, _ = Setup(own_key=True).init_with_output(rngs, x)
    np.testing.assert_array_equal(y, fp4.dot_general(x, jnp.ones((32, 8)), MATRIX, recipe=NEAREST))


def test_two_linen_layers_draw_different_bits():
    class Two(linen.Module):
        @linen.compact
        def __call__(self, x):
            eye = {"kernel_init": lambda key, shape, dtype: jnp.eye(*shape, dtype=dtype)}
            hook = fp4.DotGeneral(fp4.recipes.nvfp4(hadamard=None))
            a = linen.Dense(16, use_bias=False, dot_general=hook, **eye)(x)
            b = linen.Dense(16, use_bias=False, dot_general=hook, **eye)(x)
            return a, b

    x, model = jnp.zeros((256, 16)), Two()
    variables = model.init(jax.random.key(0), x)
    halfway = jnp.full((256, 16), 5.0).at[:, 0].set(6.0)
    gradients = []
    for which in (0, 1):
        _, vjp = jax.vjp(
            lambda x, which=which: model.apply(variables, x, rngs={"quantize": jax.random.key(0)})[
                which
            ],
            x,
        )
        gradients.append(np.asarray(vjp(halfway)[0])[:, 1:])
    alike = (gradients[0] == gradients[1]).mean()
    assert abs(alike - 0.5) < 5 * 0.5 / np.sqrt(gradients[0].size)


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 0), (0, 1)]])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("dilation", [(1, 1), (1, 2)])
def test_convolution_of_integers_is_that_of_lax(padding, strides, dilation):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-4, 5, s), jnp.float32) for s in [(2, 7, 8, 3), (3, 2, 3, 5)])
    arguments = (strides, padding)
    options = {"rhs_dilation": dilation, "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    expected, vjp = jax.vjp(
        lambda x, w: lax.conv_general_dilated(x, w, *arguments, **options), x, w
    )
    hook = fp4.ConvGeneralDilated(FLOAT32)
    y, mine = jax.vjp(lambda x, w: hook(x, w, *arguments, **options), x, w)
    dy = jnp.asarray(rng.integers(-4, 5, y.shape), jnp.float32)
    for a, b in zip((y, *mine(dy)), (expected, *vjp(dy)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_convolution_with_other_layouts_and_one_dimension():
    rng = np.random.default_rng(0)
    hook = fp4.ConvGeneralDilated(FLOAT32)
    for shapes, numbers in (
        (((2, 3, 7, 8), (5, 3, 3, 2)), ("NCHW", "OIHW", "NCHW")),
        (((2, 9, 3), (4, 3, 5)), ("NWC", "WIO", "NWC")),
    ):
        x, w = (jnp.asarray(rng.integers(-4, 5, s), jnp.float32) for s in shapes)
        strides = (1,) * (x.ndim - 2)
        given = (x, w, strides, "SAME")
        np.testing.assert_array_equal(
            hook(*given, dimension_numbers=numbers),
            lax.conv_general_dilated(*given, dimension_numbers=numbers),
        )


def test_convolution_quantizes_patches_and_kernel():
    """A 1x1 convolution is dot_general; a larger one differs from the exact one."""
    x, w = normal(2, 5, 5, 32), normal(1, 1, 32, 8, seed=1)
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    y = fp4.ConvGeneralDilated(NEAREST)(x, w, (1, 1), "SAME", **numbers)
    np.testing.assert_array_equal(y, fp4.einsum("nhwi,io->nhwo", x, w[0, 0], recipe=NEAREST))
    for name in ("feature_group_count", "batch_group_count"):
        with pytest.raises(NotImplementedError, match=f"{name} of a quantized convolution is 1"):
            fp4.ConvGeneralDilated(NEAREST)(x, w, (1, 1), "SAME", **numbers, **{name: 2})


def test_a_product_draws_a_fresh_key_each_call():
    product = fp4.nnx.Product(fp4.DotGeneral(NVFP4), rngs=nnx.Rngs(quantize=0))
    layer = nnx.Linear(16, 16, dot_general=product, rngs=nnx.Rngs(0))
    x = normal(20, 16)

    @nnx.jit
    def gradient(layer):
        return nnx.grad(lambda layer: (layer(x) ** 2).sum())(layer)["kernel"][...]

    assert (gradient(layer) != gradient(layer)).any()
    with pytest.raises(ValueError, match="rngs has no stream 'quantize': recipe 'nvfp4'"):
        fp4.nnx.Product(fp4.DotGeneral(NVFP4))
