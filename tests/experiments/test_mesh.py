"""Where arrays lie on a mesh, and what a model computes there."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import mesh as meshes
from experiments import zoo
from experiments.data import Corpus
from experiments.mesh import Extents, MeshError, make_mesh, rows_here, spec_of
from experiments.optimization import Training
from experiments.step import State, compiled_step, first_state

P = jax.P

# By model of the zoo: kernels and embeddings, written down by hand. What is not here lies
# everywhere.
ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj"), P("fsdp", "tensor")) | {
    "o_proj": P("tensor", "fsdp")
}
MLP = {"up_proj": P("fsdp", "tensor"), "down_proj": P("tensor", "fsdp")}
ENDS = {"embed": P("tensor", "fsdp"), "head": P("fsdp", "tensor")}
MAMBA = {"in_proj": P("fsdp", None), "out_proj": P("tensor", "fsdp")}
WHERE = {
    "hybrid": ATTENTION | MLP | MAMBA | ENDS,
    "mamba": MAMBA | ENDS,
    "transformer": ATTENTION | MLP | ENDS | {"gate_proj": P("fsdp", "tensor")},
    "moe": ATTENTION
    | ENDS
    | {
        "up_proj": P(None, "fsdp", "tensor"),
        "gate_proj": P(None, "fsdp", "tensor"),
        "down_proj": P(None, "tensor", "fsdp"),
        "router": P(),
    },
    # Of the 10 classes, "tensor" divides none.
    "vit": ATTENTION | MLP | {"patch_embed": P("fsdp", "tensor"), "head": P("fsdp", "tensor")},
}


def state_of(name: str, training: Training) -> State:
    """The shapes of a model's first state."""
    preset = zoo.MODELS[name]
    fits = {} if preset.sees_images else {"vocab_size": 256}

    def make():
        return first_state(zoo.make_model(preset, fits, zoo.RECIPES["nvfp4"](), 0), training)

    return nnx.eval_shape(make)


@pytest.mark.parametrize("name", WHERE)
def test_every_model_lies_as_written_down_and_so_does_what_the_optimizer_remembers(name):
    mesh = make_mesh(Extents(1, 2, 2))
    state = state_of(name, Training(ema=0.9))
    specs = meshes.specs(state, mesh)
    seen = set()
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        if names[-2] in ("kernel", "embedding"):
            assert spec == WHERE[name][names[-3]], names
            seen.add((names[-3], names[0], names[3] if names[0] == "opt_state" else ""))
        else:
            assert spec == P(), names
    places = {("params", ""), ("average", ""), ("opt_state", "mu"), ("opt_state", "nu")}
    assert seen == {(layer, *place) for layer in WHERE[name] for place in places}


def test_an_axis_that_the_devices_do_not_divide_evenly_lies_everywhere():
    mesh = make_mesh(Extents(1, 4, 2))
    assert spec_of(("up_proj", "kernel"), (6, 10), mesh) == P(None, "tensor")
    assert spec_of(("up_proj", "kernel"), (8, 7), mesh) == P("fsdp", None)
    assert spec_of(("down_proj", "kernel"), (8, 7), mesh) == P("tensor", None)


def test_placed_arrays_have_their_values_in_shards_of_the_size_that_follows():
    mesh = make_mesh(Extents(1, 4, 2))
    key = jax.random.key(3)
    kernel = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    placed = meshes.place({"up_proj": {"kernel": jnp.asarray(kernel)}, "key": key}, mesh)
    shards = placed["up_proj"]["kernel"].addressable_shards
    assert {shard.data.shape for shard in shards} == {(2, 3)}
    for shard in shards:
        np.testing.assert_array_equal(shard.data, kernel[shard.index])
    assert placed["key"].sharding.mesh == mesh
    assert (jax.random.key_data(placed["key"]) == jax.random.key_data(key)).all()


def test_a_batch_is_divided_by_rows_unless_it_does_not_divide():
    mesh = make_mesh(Extents(2, 2, 2))
    rows = np.arange(8 * 3).reshape(8, 3)
    for batch in (meshes.batch_of(rows, mesh, 8), meshes.whole_batch(rows, mesh)):
        for shard in batch.addressable_shards:
            assert shard.data.shape == (2, 3)
            np.testing.assert_array_equal(shard.data, rows[shard.index])
    assert rows_here(mesh, 8) == slice(0, 8), "all devices are this process's"
    whole = meshes.whole_batch(rows[:6], mesh)
    assert {shard.data.shape for shard in whole.addressable_shards} == {(6, 3)}


def test_what_does_not_fit_is_refused():
    with pytest.raises(MeshError, match=r"mesh of 2 x 4 x 2 .* takes 16 devices, and there are 8"):
        make_mesh(Extents(2, 4, 2))
    with pytest.raises(MeshError, match="batch of 6 cannot be divided among 4 devices"):
        rows_here(make_mesh(Extents(2, 2, 2)), 6)
    with pytest.raises(ValueError, match=r"mesh\.fsdp must be at least 1, not 0"):
        Extents(fsdp=0)


@pytest.fixture(scope="module")
def text():
    tokens = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8)
    return Corpus("noise", tokens, "0", window=33, block=1250, vocab_size=256, bytes_per_target=1.0)


TRAINING = Training(steps=2, batch=8, sequence=32, evals=1, validation=8)
SMALL = {
    "hybrid": dataclasses.replace(
        zoo.MODELS["hybrid"],
        config=dataclasses.replace(zoo.MODELS["hybrid"].config, pattern="M*-"),
    ),
    "moe": dataclasses.replace(
        zoo.MODELS["moe"],
        config=dataclasses.replace(
            zoo.MODELS["moe"].config,
            transformer=dataclasses.replace(zoo.MODELS["moe"].config.transformer, num_blocks=2),
        ),
    ),
}
DENSE = dataclasses.replace(
    zoo.MODELS["transformer"],
    config=dataclasses.replace(zoo.MODELS["transformer"].config, num_blocks=2),
)


@pytest.mark.usefixtures("lenient_promotion", "compile_fast")
@pytest.mark.parametrize("name", SMALL)
def test_losses_on_a_mesh_are_those_of_one_device_up_to_the_order_of_sums(name, text):
    training = dataclasses.replace(TRAINING, accumulate=2 if name == "hybrid" else 1)

    def losses(extents):
        mesh = make_mesh(extents)
        run = zoo.make_run(SMALL[name], zoo.RECIPES["bf16"](), text, training, 0, mesh=mesh)
        assert meshes.mesh_of(run.state).size == extents.devices
        found = list(run.go())
        return [found[0].evaluation.loss, *found[-1].losses, *found[-1].gradient_norms]

    np.testing.assert_allclose(losses(Extents(2, 2, 2)), losses(Extents()), rtol=1e-3)


@pytest.mark.usefixtures("lenient_promotion", "compile_fast")
def test_parts_of_a_batch_are_divided_among_all_devices(text):
    """If a part lay on some of the devices only, the others would repeat their work."""

    def flops(extents):
        training = dataclasses.replace(TRAINING, accumulate=2)
        mesh, model = make_mesh(extents), zoo.make_model(DENSE, text.fits, zoo.RECIPES["bf16"](), 0)
        state = meshes.place(first_state(model, training), mesh)
        batch = meshes.whole_batch(text.validation(8), mesh)
        step: Any = compiled_step(nnx.graphdef(model), training, state, batch)
        return step.cost_analysis()["flops"]

    # All of them update the parameters, which takes a tenth more.
    assert flops(Extents(4)) < 1.2 * flops(Extents()) / 4
