"""QTensor under JAX's transformations, cut into parts, compared, stored and looked at."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_quantize import uneven

import fp4jax as fp4

SQUARE = fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
ROWS = fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled())
RHT = fp4.Quantizer(fp4.NVFP4, hadamard=fp4.Hadamard(16))


def test_through_jit_scan_and_donation():
    x = jnp.asarray(uneven((4, 5, 32)))
    stack = jax.vmap(lambda x: fp4.quantize(x, fp4.NVFP4))(x)
    _, out = jax.lax.scan(lambda carry, q: (carry, q.dequantize()), None, stack)
    np.testing.assert_array_equal(out, stack.dequantize())
    q = fp4.quantize(x, fp4.NVFP4)
    expected = q.dequantize()
    passed = jax.jit(lambda q: q, donate_argnums=0)(q)
    np.testing.assert_array_equal(passed.dequantize(), expected)
    assert passed.quantizer == q.quantizer


def test_device_put_and_sharding_keep_the_bytes():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("rows"))
    x = jnp.asarray(uneven((64, 96)))
    for quantizer in (fp4.Quantizer(fp4.NVFP4), SQUARE, RHT):
        for axis in (0, 1):
            local = fp4.quantize(x, quantizer, axis=axis)
            spread = fp4.quantize(jax.device_put(x, sharding), quantizer, axis=axis)
            assert spread == local
    moved = jax.device_put(fp4.quantize(x, fp4.NVFP4), sharding_of(mesh))
    assert moved == fp4.quantize(x, fp4.NVFP4)
    assert len(moved.codes.sharding.device_set) == 4


def sharding_of(mesh):
    return jax.tree.map(
        lambda leaf: jax.NamedSharding(mesh, jax.P("rows") if leaf.ndim else jax.P()),
        fp4.quantize(jnp.ones((64, 96)), fp4.NVFP4),
    )


def test_equality_is_of_bytes_and_of_what_describes_them():
    x = uneven((8, 32))
    q = fp4.quantize(x, fp4.NVFP4)
    assert q == fp4.quantize(x, fp4.NVFP4)
    changed = x.copy()
    changed[0, 0] = -changed[0, 0]
    for other in (
        fp4.quantize(changed, fp4.NVFP4),
        fp4.quantize(x * np.float32(2), fp4.NVFP4),
        fp4.quantize(x, SQUARE),
        fp4.quantize(x.astype(ml_dtypes.bfloat16), fp4.NVFP4),
        "something else",
    ):
        assert q != other


PARTS = [
    (fp4.Quantizer(fp4.NVFP4), -1, (slice(2, 5),)),
    (fp4.Quantizer(fp4.NVFP4), -1, (3,)),
    (fp4.Quantizer(fp4.NVFP4), -1, (slice(None), slice(16, 48))),
    (fp4.Quantizer(fp4.NVFP4), -1, (-1, slice(48, None))),
    (fp4.Quantizer(fp4.NVFP4), 0, (slice(16, 32), slice(3, 7))),
    (fp4.Quantizer(fp4.NVFP4), 0, (slice(32, None), 5)),
    (SQUARE, -1, (slice(16, 32), slice(0, 16))),
    (SQUARE, 0, (slice(0, 16),)),
    (ROWS, -1, (slice(2, 5), slice(16, 32))),
    (ROWS, 0, (slice(None), 4)),
    (RHT, -1, (slice(2, 5),)),
    (fp4.Quantizer(fp4.FP8_TENSOR), -1, (slice(2, 5), slice(3, 8))),
    (fp4.Quantizer(fp4.MXFP4), -1, (slice(2, 5), slice(32, 50))),
]


@pytest.mark.parametrize(("quantizer", "axis", "index"), PARTS)
def test_a_part_decodes_to_the_part(quantizer, axis, index):
    q = fp4.quantize(uneven((40, 50)), quantizer, axis=axis)
    part = q[index]
    expected = np.asarray(q.dequantize())[index]
    assert part.shape == expected.shape
    np.testing.assert_array_equal(part.dequantize(), expected)


@pytest.mark.parametrize(
    ("quantizer", "index", "message"),
    [
        (fp4.Quantizer(fp4.NVFP4), (slice(None), 3), "axis 1 has blocks of 16: use a slice"),
        (fp4.Quantizer(fp4.NVFP4), (slice(None), slice(8, 24)), "slices of whole blocks of 16"),
        (fp4.Quantizer(fp4.NVFP4), (slice(None), slice(0, 20)), "slices of whole blocks of 16"),
        (fp4.Quantizer(fp4.NVFP4), (slice(0, 8, 2),), "slices of whole blocks of 1"),
        (fp4.Quantizer(fp4.NVFP4), (slice(3, 3),), "slices of whole blocks"),
        (fp4.Quantizer(fp4.NVFP4), (40,), "index 40 is out of range on axis 0"),
        (fp4.Quantizer(fp4.NVFP4), (np.array([1, 2]),), "takes an integer or a slice"),
        (fp4.Quantizer(fp4.NVFP4), (0, slice(None), 0), "3 entries for 2 axes"),
        (SQUARE, (2,), "axis 0 has blocks of 16"),
        (SQUARE, (slice(4, 20),), "axis 0 of length 40 takes slices of whole blocks of 16"),
        (RHT, (slice(None), slice(0, 16)), "slices of whole blocks of 50"),
    ],
)
def test_other_parts_are_refused(quantizer, index, message):
    q = fp4.quantize(uneven((40, 50)), quantizer)
    with pytest.raises(IndexError, match=message):
        q[index]


@pytest.mark.parametrize("quantizer", [fp4.Quantizer(fp4.NVFP4), SQUARE, ROWS, RHT])
def test_a_part_of_a_vmapped_stack(quantizer):
    x = uneven((4, 20, 32)) * 10.0 ** np.arange(4, dtype=np.float32)[:, None, None]
    stack = jax.vmap(lambda x: fp4.quantize(x, quantizer))(x)
    for i in range(4):
        assert stack[i] == fp4.quantize(x[i], quantizer)
    np.testing.assert_array_equal(stack[1:3].dequantize(), np.asarray(stack.dequantize())[1:3])


def test_float4_view():
    x = np.float32([[0.5, -6, 3, 0, 1, 1.5, -2]])
    view = fp4.quantize(x, fp4.NVFP4).float4()
    assert view.dtype == jnp.float4_e2m1fn
    np.testing.assert_array_equal(np.asarray(view).astype(np.float32), x)
    with pytest.raises(ValueError, match="float4 needs E2M1 elements; MXFP8_E4M3 has other ones"):
        fp4.quantize(x, fp4.MXFP8_E4M3).float4()


def test_orbax_round_trip(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = {
        "w": fp4.quantize(uneven((40, 50)), SQUARE),
        "mx": fp4.quantize(uneven((40, 50)), fp4.MXFP8_E5M2),
        "row": fp4.quantize(uneven((4, 5)), ROWS, axis=0),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", jax.eval_shape(lambda: tree))
    assert restored == tree


def test_dequantize_to_another_dtype():
    q = fp4.quantize(uneven((3, 20)), fp4.NVFP4)
    low = q.dequantize(jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, q.dequantize().astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="dtype must be floating, not int32"):
        q.dequantize(jnp.int32)


def test_float64_is_rounded_once():
    with jax.enable_x64(True):
        # The scale of this block is exactly 1: elements are rounded as they are.
        x = np.zeros((1, 16))
        x[0, :4] = [6, 2.5 + 1e-12, 2.5, 5 + 1e-12]
        q = fp4.quantize(jnp.asarray(x), fp4.NVFP4)
        unit = float(q.tensor_scale) * 448
        codes = np.asarray(q.codes)[0, :2]
        assert codes.tolist() == [5 << 4 | 7, 7 << 4 | 4]  # 6 and 3, 2 and 6
        assert abs(unit - 1) < 1e-6
        assert q.dequantize().dtype == jnp.float64
        fake = fp4.fake_quantize(jnp.asarray(x), fp4.NVFP4)
        np.testing.assert_array_equal(fake, q.dequantize())


@pytest.mark.parametrize("name", ["NVFP4", "NVINT4", "MXFP4", "FP8_BLOCK", "FP8_TENSOR"])
def test_float64_below_float32_becomes_zero(name):
    with jax.enable_x64(True):
        x = np.zeros(16)
        x[0] = 1
        x[1:] = np.random.default_rng(0).uniform(-2, 2, 15) * 10.0 ** -np.arange(38, 68, 2)
        y = np.asarray(fp4.fake_quantize(jnp.asarray(x), getattr(fp4, name)))
        np.testing.assert_array_equal(y[1:], 0)
        np.testing.assert_allclose(y[0], 1, rtol=1e-6)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP8_E4M3", "FP8_BLOCK"])
def test_float64_of_float32_numbers_has_their_bytes(name):
    format = getattr(fp4, name)
    x = uneven((19, 150))
    expected = fp4.quantize(x, format)
    with jax.enable_x64(True):
        q = fp4.quantize(jnp.asarray(np.float64(x)), format)
        assert (q.block_scales == expected.block_scales).all()
        # x * e is exact in float64 and rounded in float32: they differ only next to a tie.
        assert (np.asarray(q.codes) != np.asarray(expected.codes)).mean() < 1e-3


def test_checked_mode_names_the_tensor_and_counts():
    x = uneven((4, 32))
    x[1, 3] = x[2, 5] = np.inf
    fine = fp4.quantize(uneven((4, 32)), fp4.checked(fp4.NVFP4, "g"))
    assert (fine.codes == fp4.quantize(uneven((4, 32)), fp4.NVFP4).codes).all()
    with pytest.raises(jax.errors.JaxRuntimeError, match="g: 2 of 128 elements are not finite"):
        jax.block_until_ready(fp4.quantize(x, fp4.checked(fp4.NVFP4, "g")))


def test_checked_recipe_names_the_operand():
    recipe = fp4.checked(fp4.recipes.nvfp4())
    x, w = jnp.ones((16, 32)), jnp.ones((32, 8))

    def gradient(x, w, size):
        def f(w):
            y = fp4.dot_general(
                x, w, (((1,), (0,)), ((), ())), recipe=recipe, key=jax.random.key(0)
            )
            return y.sum() * size

        return jax.jit(jax.grad(f))(w)

    plain = jax.grad(
        lambda w: fp4.dot_general(
            x, w, (((1,), (0,)), ((), ())), recipe=fp4.recipes.nvfp4(), key=jax.random.key(0)
        ).sum()
    )(w)
    np.testing.assert_array_equal(gradient(x, w, 1.0), plain)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"nvfp4\.fprop\.rhs: 256 of 256"):
        jax.block_until_ready(gradient(x, w * np.nan, 1.0))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"nvfp4\.(dgrad|wgrad)\.\w+: 128 of 128"):
        jax.block_until_ready(gradient(x, w, np.inf))


def test_what_is_not_finite_can_be_told_without_failing():
    """On a mesh too, where each device would wait for the one that fails."""
    told = []
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.zeros((8, 32)).at[3, 5].set(jnp.nan).at[7, 0].set(jnp.inf)
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("i")))
    quantize = jax.jit(fp4.quantize, static_argnums=1)
    q = quantize(spread, fp4.checked(fp4.NVFP4, "g", told.append))
    jax.effects_barrier()
    assert told == ["g: 2 of 256 elements are not finite, (8, 32)"]
    unchecked = fp4.quantize(x, fp4.NVFP4)
    np.testing.assert_array_equal(q.codes, unchecked.codes)
    fine = quantize(jnp.zeros((8, 32)), fp4.checked(fp4.NVFP4, "g", told.append))
    jax.block_until_ready(fine)
    jax.effects_barrier()
    assert len(told) == 1
