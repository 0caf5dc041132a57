"""The models to train: which layers carry the recipe, their sizes, and what follows the data."""

import jax
import numpy as np
import pytest
from flax import nnx

import fp4jax as fp4
from experiments import zoo
from experiments.data import DataError
from experiments.optimization import Training
from experiments.zoo import MODELS, RECIPES, Preset
from fp4jax.models import HybridConfig, MoEConfig, TransformerConfig, ViTConfig

BYTES = {"vocab_size": 256}
DIGITS = {"image_size": 8, "channels": 1, "num_classes": 10}
NVFP4, BF16 = fp4.recipes.nvfp4(), fp4.recipes.bf16()

SMALL = ("hybrid", "transformer", "mamba", "moe", "vit")

# The layers of one block, by the character in a hybrid's pattern or by the kind of model.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HYBRID = {
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "-": ("mixer.up_proj", "mixer.down_proj"),
    "*": tuple(f"mixer.{name}" for name in ATTENTION),
}
SWIGLU = (
    *(f"attention.{name}" for name in ATTENTION),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
UNGATED = (*(f"attention.{name}" for name in ATTENTION), "mlp.up_proj", "mlp.down_proj")
BLOCKS = {
    "hybrid": [HYBRID[kind] for kind in "M-M*-M-"],
    "transformer": [SWIGLU] * 4,
    "mamba": [HYBRID["M"]] * 6,
    "moe": [SWIGLU] * 4,  # the experts' kernels among them, the router not
    "vit": [UNGATED] * 4,
    "hybrid_m30": [HYBRID[kind] for kind in "M-M-M*-M-M-M*-M-"],
    "hybrid_m100": [HYBRID[kind] for kind in "M-M-M*-M-M-M*-"],
    "transformer_m30": [SWIGLU] * 6,
    "transformer_m100": [SWIGLU] * 8,
    "transformer_1_2b": [UNGATED] * 20,
    "hybrid_8b": [HYBRID[kind] for kind in "M-M-M-M*" + "-M-M-M-M-M*" * 3 + "-M-M-M-M-M-"],
    "hybrid_12b": [HYBRID[kind] for kind in "M-M-M-M*" + "-M-M-M-M*" * 5 + "-M-M-M-M-"],
    "tiny": [HYBRID[kind] for kind in "M-M*-M-"],
}
# How many blocks at the start and at the end keep BF16.
KEPT = dict.fromkeys(BLOCKS, (0, 1)) | {
    "hybrid_m30": (0, 2),
    "hybrid_m100": (0, 2),
    "transformer_1_2b": (0, 4),
    "hybrid_8b": (0, 8),
    "hybrid_12b": (2, 8),
}

# On bytes, or on digits.
PARAMETERS = {
    "hybrid": 741_968,
    "transformer": 754_816,
    "mamba": 729_120,
    "moe": 1_051_776,
    "vit": 202_058,
    "hybrid_m30": 31_078_224,
    "hybrid_m100": 100_456_000,
    "transformer_m30": 30_810_240,
    "transformer_m100": 103_302_144,
    "transformer_1_2b": 756_107_264,
    "hybrid_8b": 7_012_430_848,
    "hybrid_12b": 10_975_035_520,
    "tiny": 741_968,
}


def fits(name: str) -> dict:
    return DIGITS if name == "vit" else BYTES


def shapes(preset: Preset, fits: dict, recipe=NVFP4, step=0):
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: zoo.make_model(preset, fits, recipe, 0, step))


def recipes_by_layer(model) -> dict:
    """By the name of a layer, the recipe of its product."""
    return {
        ".".join(map(str, path[:-1])): module.hook.recipe
        for path, module in nnx.iter_modules(model)
        if isinstance(module, fp4.nnx.Product)
    }


def test_every_model_is_here():
    assert set(BLOCKS) == set(KEPT) == set(PARAMETERS) == set(MODELS)


# Layers


@pytest.mark.parametrize("name", MODELS)
def test_all_blocks_but_those_at_the_ends_carry_the_recipe(name):
    """Embeddings, heads, routers and patches have no product of ours at all."""
    blocks, (first, last) = BLOCKS[name], KEPT[name]
    names = [{f"blocks.{i}.{layer}" for layer in block} for i, block in enumerate(blocks)]
    middle, ends = names[first:-last], names[:first] + names[-last:]
    found = recipes_by_layer(shapes(MODELS[name], fits(name)))
    assert {layer for layer, got in found.items() if got == NVFP4} == set().union(*middle)
    assert {layer for layer, got in found.items() if got == BF16} == set().union(*ends)
    if name.startswith("hybrid_"):
        assert 0.12 <= len(ends) / len(blocks) <= 0.17, "the paper's hybrids keep 15% and 16%"


# Sizes


def decoder(config: TransformerConfig, experts: int = 0) -> int:
    d, heads = config.d_model, config.num_heads + config.num_kv_heads
    mlp = (3 if config.mlp == "swiglu" else 2) * d * config.mlp_dim
    block = 2 * d + 2 * d * heads * config.head_dim + (experts * (mlp + d) or mlp)
    return config.num_blocks * block + d + 2 * 256 * d


def hybrid(config: HybridConfig) -> int:
    d, inner = config.d_model, config.mamba_heads * config.mamba_head_dim
    maps = 2 * config.mamba_groups * config.mamba_state
    mamba = d * (2 * inner + maps + config.mamba_heads)  # in_proj: z, x, B and C, dt
    mamba += (config.conv_width + 1) * (inner + maps)  # the convolution, with a bias
    mamba += 3 * config.mamba_heads + inner + inner * d  # A_log, D, dt_bias; norm; out_proj
    heads = config.num_heads + config.num_kv_heads
    block = {"M": mamba, "-": 2 * d * config.mlp_dim, "*": 2 * d * heads * config.head_dim}
    return sum(block[kind] + d for kind in config.pattern) + d + 2 * 256 * d


def vit(config: ViTConfig) -> int:
    d, mlp = config.d_model, config.mlp_dim
    block = 4 * d + 4 * (d * d + d) + 2 * d * mlp + mlp + d
    patches = (config.patch_size**2 + 1) * d + (config.image_size // config.patch_size) ** 2 * d
    return patches + config.num_blocks * block + 2 * d + 10 * d + 10


def closed_form(config) -> int:
    if isinstance(config, MoEConfig):
        return decoder(config.transformer, config.num_experts)
    forms = {TransformerConfig: decoder, HybridConfig: hybrid, ViTConfig: vit}
    return forms[type(config)](config)


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_parameters(name):
    assert closed_form(MODELS[name].config) == PARAMETERS[name]
    params = nnx.state(shapes(MODELS[name], fits(name)), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["hybrid", "mamba", "transformer", "moe"])
def test_the_vocabulary_follows_the_data(name):
    model = shapes(MODELS[name], {"vocab_size": 320})
    assert (model.embed.embedding.shape[0], model.head.kernel.shape[1]) == (320, 320)


def test_sizes_and_classes_of_images_follow_the_data(tmp_path):
    images = np.zeros((20, 12, 12, 3), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(20) % 7)
    found = zoo.load(MODELS["vit"], [str(tmp_path / "a.npz")], 256)
    model = shapes(MODELS["vit"], found.fits)
    assert model.patch_embed.kernel.shape == (2 * 2 * 3, 64)
    assert model.positions.shape == (1, 36, 64)
    assert model.head.kernel.shape == (64, 7)


def test_images_that_a_model_cannot_cut_are_refused(tmp_path):
    images = np.zeros((20, 9, 9), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(20) % 7)
    with pytest.raises(DataError, match=r"a\.npz do not fit the model: image_size must be a mult"):
        zoo.load(MODELS["vit"], [str(tmp_path / "a.npz")], 256)


# Parameters


@pytest.mark.parametrize("name", SMALL)
def test_parameters_do_not_depend_on_the_recipe(name):
    """They are those of the model without quantization, bit for bit."""
    preset = MODELS[name]
    plain = type(zoo.make_model(preset, fits(name), BF16, 0))(preset.config, rngs=nnx.Rngs(3))
    expected = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    for recipe in (BF16, NVFP4):
        model = zoo.make_model(preset, fits(name), recipe, 3)
        found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    kernel = jax.tree.leaves(nnx.state(zoo.make_model(preset, fits(name), NVFP4, 4), nnx.Param))
    same = [np.array_equal(a, b) for a, b in zip(kernel, jax.tree.leaves(expected), strict=True)]
    assert not all(same), "another seed gives others"


# Runs


@pytest.fixture
def digits():
    return zoo.load(MODELS["vit"], ["digits"], 256)


TRAINING = Training(steps=10, batch=2, evals=1, validation=4)


def recipe_of(run, done: int) -> fp4.Recipe:
    """What layers carry after so many steps."""
    run.done = done
    recipes = recipes_by_layer(run.model)
    assert recipes["blocks.3.mlp.up_proj"] == BF16, "kept, whatever the schedule"
    return recipes["blocks.0.mlp.up_proj"]


def test_a_run_by_a_schedule_has_two_phases(digits):
    schedule = fp4.Schedule.late_bf16(NVFP4, 4)
    run = zoo.make_run(MODELS["vit"], schedule, digits, TRAINING, 0)
    late = NVFP4.replace(fprop=BF16.fprop)
    found = [recipe_of(run, done) for done in range(8)]
    assert found == [NVFP4] * 5 + [late] * 3, "the first four steps, and all that follow"
    assert late != NVFP4


def test_a_run_by_a_recipe_has_one(digits):
    run = zoo.make_run(MODELS["vit"], NVFP4, digits, TRAINING, 0)
    assert [recipe_of(run, done) for done in (0, 5, 10)] == [NVFP4] * 3


def test_a_model_may_be_adapted(digits):
    def adapt(model):
        model.blocks[0].mlp.up_proj.dot_general.hook = fp4.DotGeneral(BF16)
        return model

    run = zoo.make_run(MODELS["vit"], NVFP4, digits, TRAINING, 0, adapt)
    assert recipe_of(run, 1) == BF16


# Names


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["hybrid", "huge"], "unknown model 'huge'; allowed: hybrid, transformer, mamba, moe, vit"),
        ([], "name each model once; got"),
        (["vit", "vit"], r"name each model once; got \['vit', 'vit'\] of hybrid, transformer"),
    ],
)
def test_unknown_names_are_refused_with_the_list(names, message):
    with pytest.raises(ValueError, match=message):
        zoo.check_names("model", names, MODELS)


def test_known_names_pass():
    zoo.check_names("recipe", list(RECIPES), RECIPES)
    assert {name: make().name for name, make in RECIPES.items()} == {name: name for name in RECIPES}
