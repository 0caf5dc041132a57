"""scaled_matmul in plain JAX: float64 products of the decoded operands, and what it refuses."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import fp4jax as fp4
from fp4jax.kernels import product

RHT = fp4.Hadamard(16)


def uneven(shape, seed=0, dtype=np.float32):
    """Magnitudes from 2**-10 to 2**10, in runs that are no blocks."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    exponents = rng.integers(-10, 11, -(-size // 7)).repeat(7)[:size].reshape(shape)
    return jnp.asarray(np.ldexp(rng.standard_normal(shape), exponents), dtype)


def decoded(q):
    """What is multiplied, block axis last, in float64."""
    operand = q.operand()
    values = np.asarray(operand.values, np.float64)
    return values if operand.scale is None else values * np.asarray(operand.scale, np.float64)


def assert_product(y, a, b):
    left, right = decoded(a), decoded(b)
    bound = 2.0**-24 * (left.shape[1] + 4) * (np.abs(left) @ np.abs(right).T)
    np.testing.assert_array_less(np.abs(np.asarray(y, np.float64) - left @ right.T), bound + 1e-300)


QUANTIZERS = {
    "nvfp4": fp4.Quantizer(fp4.NVFP4),
    "square": fp4.Quantizer(fp4.NVFP4, tile=(16, 16)),
    "transformed": fp4.Quantizer(fp4.NVFP4, hadamard=RHT),
    "row-scaled": fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled()),
    "mxfp8": fp4.Quantizer(fp4.MXFP8_E4M3),
    "fp8_block": fp4.Quantizer(fp4.FP8_BLOCK),
    "fp8_tensor": fp4.Quantizer(fp4.FP8_TENSOR),
}


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("axes", [(-1, -1), (0, -1), (-1, 0), (0, 0)])
def test_products(name, axes):
    shapes = [
        (rows, 70) if axis == -1 else (70, rows) for rows, axis in zip((5, 40), axes, strict=True)
    ]
    a, b = (
        fp4.quantize(uneven(shape, seed), QUANTIZERS[name], axis)
        for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    )
    y = fp4.scaled_matmul(a, b)
    assert y.shape == (5, 40)
    assert y.dtype == jnp.float32
    assert_product(y, a, b)


def test_tiny_tensors_do_not_underflow_on_the_way():
    # Either tensor scale alone is a float32, their product is not.
    a, b = (fp4.quantize(uneven((3, 32), seed) * 1e-25, fp4.NVFP4) for seed in (0, 1))
    assert not np.asarray(fp4.scaled_matmul(a, b)).any()
    big = fp4.quantize(uneven((3, 32), 1) * 1e25, fp4.NVFP4)
    assert_product(fp4.scaled_matmul(a, big), a, big)


def test_dtypes():
    a, b = (fp4.quantize(uneven((4, 32), s, jnp.bfloat16), fp4.NVFP4) for s in (0, 1))
    wide = fp4.quantize(uneven((4, 32)), fp4.NVFP4)
    assert fp4.scaled_matmul(a, b).dtype == jnp.bfloat16
    assert fp4.scaled_matmul(a, wide).dtype == jnp.float32
    y = fp4.scaled_matmul(a, b, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(
        np.asarray(fp4.scaled_matmul(a, b)), np.asarray(y.astype(jnp.bfloat16))
    )


def test_vmap_and_mesh():
    a = jax.vmap(lambda x: fp4.quantize(x, fp4.NVFP4))(uneven((3, 8, 48)))
    b = fp4.quantize(uneven((16, 48), 1), fp4.NVFP4)
    y = jax.vmap(fp4.scaled_matmul, (0, None))(a, b)
    for i in range(3):
        assert_product(y[i], jax.tree.map(lambda leaf, i=i: leaf[i], a), b)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    x = jax.device_put(uneven((64, 48)), NamedSharding(mesh, jax.P("rows")))
    a = fp4.quantize(x, fp4.NVFP4)
    y = jax.jit(fp4.scaled_matmul)(a, b)
    assert y.sharding.spec[0] == "rows"
    assert_product(y, a, b)


class Decoded:
    """A kernel in plain JAX, with tiles that no shape here is a multiple of."""

    EFFECTS = False

    class Tiles(NamedTuple):
        m: int = 24
        n: int = 40
        k: int = 96

    def tiles_for(self, m, n, k):
        return self.Tiles()

    def matmul(self, a, b, out_dtype):
        tiles = self.Tiles()
        (m, half), n = a.codes.shape, b.codes.shape[0]
        assert (m % tiles.m, n % tiles.n, 2 * half % tiles.k) == (0, 0, 0)
        left, right = (self.values(operand) for operand in (a, b))
        y = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())))
        return (y * a.tensor * b.tensor).astype(out_dtype)

    def values(self, operand):
        pairs = jax.lax.bitcast_convert_type(operand.codes, jnp.float4_e2m1fn)
        elements = pairs.reshape(operand.codes.shape[0], -1).astype(jnp.float32)
        return elements * jnp.repeat(operand.scales.astype(jnp.float32), 16, 1)


@pytest.mark.parametrize("specs", [("m", None), (None, "n"), ("m", "n"), (("m", "n"), "n")])
def test_devices_share_a_kernels_product(specs):
    mesh = jax.make_mesh((4, 2), ("m", "n"), axis_types=(AxisType.Auto,) * 2)
    a, b = (
        fp4.quantize(
            jax.device_put(uneven((rows, 72), seed), NamedSharding(mesh, jax.P(spec))),
            fp4.Quantizer(fp4.NVFP4, tile=tile),
        )
        for seed, (rows, spec, tile) in enumerate(
            zip((64, 128), specs, [(1, 16), (16, 16)], strict=True)
        )
    )
    multiply = functools.partial(product.multiply, Decoded(), out_dtype=np.dtype(np.float32))
    run = jax.jit(multiply).lower(a, b).compile()
    y = run(a, b)
    assert_product(y, a, b)
    if specs[0] == "m":
        assert "all-gather" not in run.as_text()
        assert y.sharding.shard_shape(y.shape) == (16, 64 if specs[1] else 128)


def test_a_nan_reaches_its_row_alone():
    a = fp4.quantize(uneven((4, 32)).at[2, 5].set(jnp.nan), fp4.NVFP4)
    y = np.asarray(fp4.scaled_matmul(a, fp4.quantize(uneven((6, 32), 1), fp4.NVFP4)))
    assert np.isnan(y).sum() == 6
    assert np.isnan(y[2]).all()


def test_what_does_not_fit_raises():
    a, b = (fp4.quantize(uneven((4, k)), fp4.NVFP4) for k in (32, 48))
    rotated = fp4.quantize(uneven((4, 32)), QUANTIZERS["transformed"])
    three = fp4.quantize(uneven((2, 4, 32)), fp4.NVFP4)
    with pytest.raises(ValueError, match="block axes of one length, not 32, 48"):
        fp4.scaled_matmul(a, b)
    with pytest.raises(ValueError, match="the same Hadamard transform"):
        fp4.scaled_matmul(a, rotated)
    with pytest.raises(ValueError, match=r"b must have two axes, not shape \(2, 4, 32\)"):
        fp4.scaled_matmul(a, three)
    with pytest.raises(TypeError, match="b must be a QTensor, not ArrayImpl"):
        fp4.scaled_matmul(a, uneven((4, 32)))
    with pytest.raises(TypeError, match="preferred_element_type must be floating-point, not int32"):
        fp4.scaled_matmul(a, a, preferred_element_type=jnp.int32)
    with pytest.raises(
        ValueError, match="implementation must be None or one of 'xla', 'blackwell'"
    ):
        fp4.scaled_matmul(a, a, implementation="triton")
    with pytest.raises(NotImplementedError, match="differentiate fp4jax"):
        jax.grad(lambda s: fp4.scaled_matmul(dataclasses.replace(a, tensor_scale=s), a).sum())(1.0)
