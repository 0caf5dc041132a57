"""One device or a mesh: the same codes, block scales, tensor scale and products."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import fp4jax as fp4

P = jax.P
RHT = fp4.Hadamard(16)
ROW, SQUARE = fp4.Quantizer(fp4.NVFP4), fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
QUANTIZERS = {
    "row": ROW,
    "square": SQUARE,
    "rht": fp4.Quantizer(fp4.NVFP4, hadamard=RHT),
    "stochastic": fp4.Quantizer(
        fp4.NVFP4, rounding=fp4.Stochastic(), hadamard=RHT, scale_rule=fp4.AmaxScale(17 / 16)
    ),
    "stochastic scales": fp4.Quantizer(
        fp4.NVFP4, scale_rule=fp4.AmaxScale(rounding=fp4.Stochastic())
    ),
    "row scaled": fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled()),
    "four over six": fp4.Quantizer(fp4.NVFP4, (16, 16), scale_rule=fp4.FourOverSix("mse")),
    "if4": fp4.Quantizer(fp4.IF4),
    "nvint4": fp4.Quantizer(fp4.NVINT4),
    "ue5m3": fp4.Quantizer(fp4.FP4_UE5M3),
    "mxfp4": fp4.Quantizer(fp4.MXFP4, (32, 32)),
    "mxfp8": fp4.Quantizer(fp4.MXFP8_E4M3, scale_rule=fp4.PowerOfTwo("rceil")),
    "mxfp8 e5m2": fp4.Quantizer(fp4.MXFP8_E5M2),
    "fp8 block": fp4.Quantizer(fp4.FP8_BLOCK, (128, 128)),
    "fp8 tensor": fp4.Quantizer(fp4.FP8_TENSOR),
}
CORE = ("row", "square", "stochastic", "fp8 block")
# Meshes, and how the rows and columns of a matrix lie on them.
LAYOUTS = [
    ({"data": 1}, P("data")),
    ({"data": 2}, P("data")),
    ({"data": 4}, P("data")),
    ({"data": 8}, P("data")),
    ({"data": 8}, P(None, "data")),
    ({"data": 2, "fsdp": 4}, P("data", "fsdp")),
    ({"fsdp": 4, "tensor": 2}, P("fsdp", "tensor")),
    ({"fsdp": 4, "tensor": 2}, P("tensor", "fsdp")),
]
# 96 rows on 4 devices are shards of 24, one block and a half; 64 columns on 8 half a block. The
# second shape has no axis that a mesh divides.
SHAPES = [(96, 64), (37, 50)]


def mesh_of(axes, kind=AxisType.Auto):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def uneven(shape, seed=0):
    """Gaussian, each quarter of the rows 8 times larger than the one before."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(np.float32(x * 8.0 ** (np.arange(shape[0]) * 4 // shape[0])[:, None]))


def quantized(x, names):
    """Everything that is made of ``x`` by quantizers of these names, along both axes."""
    made = {}
    for name in names:
        quantizer = QUANTIZERS[name]
        key = jax.random.key(3) if quantizer.needs_key else None
        for axis in (0, -1):
            q = fp4.quantize(x, quantizer, axis, key)
            fake = fp4.fake_quantize(x, quantizer, axis, key)
            made[name, axis] = (q, q.dequantize(), fake)
    return made


def assert_same_bytes(got, expected):
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        assert a.shape == b.shape and a.dtype == b.dtype
        same = np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert same, jax.tree_util.keystr(path)


@functools.cache
def expected_of(shape, dtype, names):
    return jax.jit(quantized, static_argnums=1)(uneven(shape).astype(dtype), names)


def check(axes, spec, shape, dtype, names):
    sharding = NamedSharding(mesh_of(axes), spec)

    @jax.jit
    def sharded(x):
        # Inside jit, where JAX lets axes be divided unevenly.
        return quantized(lax.with_sharding_constraint(x, sharding), names)

    x = uneven(shape).astype(dtype)
    assert_same_bytes(sharded(x), expected_of(shape, dtype, names))


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize(("axes", "spec"), LAYOUTS)
def test_codes_and_scales_on_every_mesh(axes, spec):
    check(axes, spec, SHAPES[0], jnp.float32, CORE)


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize(("axes", "spec"), [LAYOUTS[4], LAYOUTS[6]])
def test_axes_that_the_mesh_does_not_divide(axes, spec):
    check(axes, spec, SHAPES[1], jnp.float32, CORE)


@pytest.mark.parametrize("shape", [(16, 32), (32, 16)])
def test_shards_smaller_than_a_word_of_codes(shape):
    """Of 4 or 2 elements, where 8 codes are packed at once."""
    spec = P(None, "data") if shape[1] == 32 else P("data")
    check({"data": 8}, spec, shape, jnp.float32, ("row",))
    check({"data": 8}, P(*spec[::-1]), shape, jnp.float32, ("row",))


@pytest.mark.usefixtures("compile_fast")
def test_every_format_and_scale_rule():
    check(*LAYOUTS[6], SHAPES[0], jnp.float32, tuple(QUANTIZERS.keys() - set(CORE)))


@pytest.mark.parametrize(
    ("names", "layout"), [(("row",), 2), (("square",), 4), (("stochastic",), 6)]
)
def test_with_full_optimization(names, layout):
    check(*LAYOUTS[layout], SHAPES[0], jnp.bfloat16, names)


def test_a_shard_is_what_a_device_works_on():
    """Else the tests above would compare one device with itself."""
    mesh = mesh_of({"data": 4})
    x = jax.device_put(uneven((96, 64)), NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda x: fp4.quantize(x, ROW).codes).lower(x).compile()
    assert compiled.output_shardings.spec == P("data")
    text = compiled.as_text()
    # The tensor's amax is all that devices tell each other.
    assert "all-reduce" in text and "all-gather" not in text
    assert "f32[24,64]" in text and "f32[96,64]" not in text


def test_a_nan_spoils_its_block_on_a_mesh_too():
    x = uneven((96, 64)).at[25, 3].set(jnp.nan)
    x_sharded = jax.device_put(x, NamedSharding(mesh_of({"data": 8}), P(None, "data")))
    for quantizer in (ROW, SQUARE):
        q = fp4.quantize(x_sharded, quantizer)
        assert q == fp4.quantize(x, quantizer)
        assert np.isnan(q.dequantize()).sum() == math.prod(quantizer.tile)


NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest())
MATRIX = (((1,), (0,)), ((), ()))
SIZES = jnp.array([40, 0, 56])
# Name: function of x [96, 64], w and key; shape of w; where w lies on (data, tensor).
PRODUCTS = {
    "dot_general": (
        lambda x, w, key: fp4.dot_general(x, w, MATRIX, recipe=fp4.recipes.nvfp4(), key=key),
        (64, 96),
        P(None, "tensor"),
    ),
    "einsum": (
        lambda x, w, key: fp4.einsum(
            "bsd,dhk->bshk", x.reshape(4, 24, 64), w, recipe=fp4.recipes.nvfp4(), key=key
        ),
        (64, 6, 16),
        P(None, "tensor"),
    ),
    "ragged_dot": (
        lambda x, w, key: fp4.ragged_dot(x, w, SIZES, recipe=fp4.recipes.mxfp4(), key=key),
        (3, 64, 96),
        P(None, None, "tensor"),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients(name):
    """Exactly equal, but where a contraction is divided: there the order of additions differs.

    That is dw, summed over the tokens, and might be dx, over the features.
    """
    product, shape, spec = PRODUCTS[name]
    x, w = uneven((96, 64)), jnp.asarray(np.random.default_rng(1).standard_normal(shape), "float32")
    dy = uneven((96, 96), 2).reshape(jax.eval_shape(product, x, w, jax.random.key(0)).shape)

    def run(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: product(x, w, jax.random.key(0)), x, w)
        return y, *vjp(dy)

    expected = jax.jit(run)(x, w, dy)
    mesh = mesh_of({"data": 4, "tensor": 2})
    place = [NamedSharding(mesh, s) for s in (P("data"), spec, P("data"))]
    got = jax.jit(run, in_shardings=place)(x, w, dy)
    np.testing.assert_array_equal(got[0], expected[0])
    for mine, single in zip(got[1:], expected[1:], strict=True):
        # float32 sums of 96 numbers in another order; another code would be 1e-3 away.
        np.testing.assert_allclose(mine, single, rtol=0, atol=1e-6 * np.abs(single).max())


def test_explicit_axes_are_refused_and_auto_axes_lets_them_in():
    mesh = mesh_of({"fsdp": 4, "tensor": 2}, AxisType.Explicit)
    x, w = uneven((96, 64)), uneven((64, 32))
    x_sharded = jax.device_put(x, NamedSharding(mesh, P("fsdp", "tensor")))
    with pytest.raises(ValueError, match=r"x is float32\[96@fsdp,64@tensor\], divided along"):
        fp4.quantize(x_sharded, ROW)
    with pytest.raises(ValueError, match=r"lhs is .* call this inside jax\.sharding\.auto_axes"):
        fp4.matmul(x_sharded, w, recipe=NEAREST)
    with pytest.raises(ValueError, match="rhs is "):
        fp4.ragged_dot(w.T, x_sharded.reshape(1, 96, 64).swapaxes(1, 2), SIZES[:1], recipe=NEAREST)
    with jax.set_mesh(mesh):
        inside = jax.sharding.auto_axes(
            lambda x: fp4.fake_quantize(x, SQUARE), out_sharding=P("fsdp", "tensor")
        )
        got = inside(x_sharded)
        undivided = fp4.quantize(x, ROW)
    assert_same_bytes(undivided, fp4.quantize(x, ROW))
    assert_same_bytes(got, fp4.fake_quantize(x, SQUARE))
