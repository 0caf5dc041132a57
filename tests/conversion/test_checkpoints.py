"""Checkpoints of a model that was never converted fit the converted one, and vice versa."""

import flax_models as fm
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import fp4jax as fp4

NVFP4 = fp4.recipes.nvfp4()
EVERYWHERE = fp4.Policy((fp4.Rule("*", NVFP4),))


def inputs():
    return jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), jnp.float32)


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def nnx_model(seed):
    return fm.NnxMLP((16, 32, 8), nnx.Rngs(seed))


def convert(model):
    return fp4.nnx.quantize_model(model, EVERYWHERE, rngs=nnx.Rngs(quantize=0))


def test_nnx_parameters_are_restored_into_a_converted_model(tmp_path):
    trained = nnx_model(0)
    save(tmp_path / "plain", nnx.state(trained, nnx.Param))

    # Converted first and restored then, and the other way round.
    model = convert(nnx_model(1))
    nnx.update(model, restore(tmp_path / "plain", nnx.state(model, nnx.Param)))
    restored_first = nnx_model(2)
    nnx.update(restored_first, restore(tmp_path / "plain", nnx.state(restored_first, nnx.Param)))
    y = model(inputs())
    np.testing.assert_array_equal(y, convert(restored_first)(inputs()))
    expected = trained(inputs())
    assert (y != expected).any()

    # Back into a model that was never converted.
    save(tmp_path / "converted", nnx.state(model, nnx.Param))
    plain = nnx_model(3)
    nnx.update(plain, restore(tmp_path / "converted", nnx.state(plain, nnx.Param)))
    np.testing.assert_array_equal(plain(inputs()), expected)


def test_linen_variables_are_restored_for_a_converted_model(tmp_path):
    plain = fm.LinenMLP((32, 8))
    variables = plain.init(jax.random.key(0), inputs())
    save(tmp_path / "plain", variables)
    converted = fp4.linen.quantize_model(plain, EVERYWHERE, inputs())
    like = jax.eval_shape(converted.init, jax.random.key(1), inputs())
    restored = restore(tmp_path / "plain", like)
    assert jax.tree.structure(restored) == jax.tree.structure(variables)
    jax.tree.map(np.testing.assert_array_equal, restored, variables)
    y = converted.apply(restored, inputs())
    np.testing.assert_array_equal(y, converted.apply(variables, inputs()))
    assert (y != plain.apply(variables, inputs())).any()
