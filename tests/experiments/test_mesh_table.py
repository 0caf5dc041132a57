"""mesh_table: what devices send and keep, against the sizes that formats and models have."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax as fp4
from experiments.mesh import Extents
from experiments.mesh_table import Sizes, equal, layers_on, model_step, operands_on, uneven
from experiments.optimization import Training
from experiments.zoo import Preset
from fp4jax.models import TransformerConfig

BF16, NVFP4 = fp4.recipes.bf16(), fp4.recipes.nvfp4()
TALL = fp4.recipes.nvfp4(square_weights=False)
SIZES = Sizes(tokens=128, width=128, hidden=256)
TWO = Extents(fsdp=2)


@pytest.mark.usefixtures("compile_fast")
def test_bytes_of_two_layers_are_those_of_the_formats():
    elements = SIZES.width * SIZES.hidden
    activations = SIZES.tokens * (SIZES.width + SIZES.hidden)
    for recipe, dtype, bits in ((TALL, "u8", 4.5), (BF16, "u16", 16)):
        gathered, kept = layers_on(recipe, SIZES, TWO)
        assert gathered == {dtype: 2 * 2 * elements * bits / 8}
        # Besides: tensor scales, and the words of the random streams.
        assert 0 <= kept - activations / 2 * bits / 8 < 1000


@pytest.mark.usefixtures("lenient_promotion", "compile_fast")
def test_bytes_of_a_models_step_are_those_of_its_kernels():
    """Each travels for Fprop and for Dgrad, embedding and head once, in float32."""
    config = TransformerConfig(
        vocab_size=32,
        d_model=64,
        num_blocks=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        mlp_dim=96,
    )
    kernels = 64 * (2 * 64 + 2 * 32 + 3 * 96)
    training = Training(batch=2, sequence=16)
    gathered = model_step(Preset(config, keep_last=0), NVFP4, training, TWO)
    assert gathered == {"u8": 2 * kernels * (4 + 8 / 256) / 8, "f32": 2 * 32 * 64 * 4}


def test_operands_of_a_mesh_are_those_of_one_device():
    """Also in shards of 27 tokens; and it shows where one byte differs."""
    sizes = Sizes(tokens=54, width=64, hidden=64)
    single, spread = (operands_on(TALL, sizes, extents) for extents in (None, TWO))
    assert equal(spread, single) == [True] * 6
    assert [q.shape for q in single] == [(54, 64), (64, 64), (54, 64), (64, 64), (54, 64), (54, 64)]
    codes = spread[4].codes.at[-1, -1].add(1)
    spread = [*spread[:4], dataclasses.replace(spread[4], codes=codes), spread[5]]
    assert equal(spread, single) == [True] * 4 + [False, True]


def test_shards_differ_by_eight_times():
    x = np.abs(uneven(0, (64, 512), jnp.float32))
    quarters = x.reshape(4, 16, 2, 256).max((1, 3))
    np.testing.assert_allclose(quarters[1:] / quarters[:-1], 8, rtol=0.5)
    np.testing.assert_allclose(quarters[:, 1] / quarters[:, 0], 8, rtol=0.5)
