"""The transformer: other implementations' numbers, causality, configurations, sizes, training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from language_models import (
    check_causality,
    check_causality_of_gradients,
    count_of,
    load,
    named,
    next_token_loss,
    relative_error,
    run,
    set_parameters,
    shapes_of,
    train,
)

import fp4jax as fp4
from fp4jax.models import Transformer, TransformerConfig

pytestmark = pytest.mark.usefixtures("compile_fast")

# The shape of the models behind the vectors: tests/vectors/make_transformers.py.
LLAMA = TransformerConfig(
    vocab_size=53,
    d_model=32,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    rope_theta=100.0,
)
ARCEE = dataclasses.replace(LLAMA, mlp="squared_relu", tied=True)
CONFIGS = {"llama": LLAMA, "arcee": ARCEE}

RENAMED = {
    "model.": "",
    "embed_tokens.weight": "embed.embedding",
    "layers": "blocks",
    "input_layernorm.weight": "attention_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
    "self_attn": "attention",
    "lm_head": "head",
    "norm.weight": "norm.scale",
    "weight": "kernel",
}


def from_torch(vectors, prefix):
    """The vectors' parameters or gradients, by this model's names and in its layout."""
    arrays = {}
    for key, array in vectors.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            for theirs, mine in RENAMED.items():
                name = name.replace(theirs, mine)
            arrays[name] = array.T if name.endswith("kernel") else array
    return arrays


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_gradients_are_those_of_transformers(name):
    vectors, model = load(name), Transformer(CONFIGS[name], rngs=nnx.Rngs(0))
    set_parameters(model, from_torch(vectors, "param/"))
    graph, state = nnx.split(model)
    tokens = jnp.asarray(vectors["ids"])

    def loss(state):
        logits = nnx.merge(graph, state)(tokens)
        return next_token_loss(logits, tokens), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    assert relative_error(logits, vectors["logits"]) < 1e-5
    assert float(value) == pytest.approx(float(vectors["loss"]), rel=1e-5)
    for path, want in from_torch(vectors, "grad/").items():
        assert relative_error(named(gradients)[path][...], want) < 1e-5, path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_position_sees_a_later_token(config):
    check_causality(Transformer(config, rngs=nnx.Rngs(0)), config.vocab_size)


def test_no_gradient_flows_back_from_an_earlier_position():
    # Not with a tied head, through which every embedding has a gradient.
    check_causality_of_gradients(Transformer(LLAMA, rngs=nnx.Rngs(0)), LLAMA.vocab_size)


def test_an_empty_batch():
    assert Transformer(LLAMA, rngs=nnx.Rngs(0))(jnp.zeros((0, 5), jnp.int32)).shape == (0, 5, 53)


@pytest.mark.parametrize("tokens", [jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)])
def test_tokens_are_integers_of_batch_and_length(tokens):
    with pytest.raises(ValueError, match="tokens must be an integer array"):
        Transformer(LLAMA, rngs=nnx.Rngs(0))(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": "gelu"}, "mlp must be one of 'swiglu', 'squared_relu'; got 'gelu'"),
        ({"num_blocks": 0}, "num_blocks must be a positive integer; got 0"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads=3; got 4"),
        ({"head_dim": 7}, "head_dim must be even, for rotary positions; got 7"),
        ({"rope_theta": 0.0}, r"rope_theta must be above zero; got 0\.0"),
        ({"norm_eps": float("inf")}, "norm_eps must be a finite number from 0 up; got inf"),
        ({"tied": 1}, "tied must be True or False; got 1"),
        ({"dtype": "float16"}, "dtype must be 'float32' or 'bfloat16'; got 'float16'"),
    ],
)
def test_inconsistent_configurations_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **changes)


def closed_form(c):
    """Parameters in the blocks, and besides."""
    attention = 2 * c.d_model * c.head_dim * (c.num_heads + c.num_kv_heads)
    mlp = {"swiglu": 3, "squared_relu": 2}[c.mlp] * c.d_model * c.mlp_dim
    blocks = c.num_blocks * (attention + mlp + 2 * c.d_model)
    return blocks, (1 if c.tied else 2) * c.vocab_size * c.d_model + c.d_model


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (TransformerConfig.tiny(), 0.69e6),
        (TransformerConfig.m30(), 30.5e6),
        (TransformerConfig.m100(), 103e6),
        # 1.2e9 is the paper's rounding of 1.29e9 with 131072 tokens, or of another vocabulary.
        (TransformerConfig.paper_1_2b(), 755e6),
        (dataclasses.replace(TransformerConfig.paper_1_2b(), tied=True), 755e6),
    ],
)
def test_sizes_of_the_presets(config, blocks):
    assert count_of(lambda: Transformer(config, rngs=nnx.Rngs(0))) == sum(closed_form(config))
    assert closed_form(config)[0] == pytest.approx(blocks, rel=0.01)


def test_the_papers_transformer():
    c = TransformerConfig.paper_1_2b()
    assert sum(closed_form(c)) == 1_291_929_600
    assert (c.num_blocks, c.d_model, c.mlp_dim) == (20, 2048, 6144)
    assert (c.num_heads, c.num_kv_heads, c.head_dim) == (16, 8, 128)


@pytest.mark.parametrize("preset", ["tiny", "m30", "m100", "paper_1_2b"])
def test_presets_have_whole_blocks_of_16(preset):
    config = getattr(TransformerConfig, preset)()
    for name, shape in shapes_of(lambda: Transformer(config, rngs=nnx.Rngs(0))).items():
        if name.endswith("kernel"):
            assert shape[0] % 16 == 0 and shape[1] % 16 == 0, name


def test_parameter_names():
    """Policies choose layers by these paths, and weight decay goes by the last name."""
    config = dataclasses.replace(LLAMA, num_blocks=1)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]
    attention = {f"blocks.0.attention.{name}.kernel" for name in projections}
    norms = {"blocks.0.attention_norm.scale", "blocks.0.mlp_norm.scale", "norm.scale"}
    mlp = {f"blocks.0.mlp.{name}_proj.kernel" for name in ("up", "down")}
    gate, ends = "blocks.0.mlp.gate_proj.kernel", {"embed.embedding", "head.kernel"}
    names = shapes_of(lambda: Transformer(config, rngs=nnx.Rngs(0))).keys()
    assert names == attention | norms | mlp | ends | {gate}
    config = dataclasses.replace(config, mlp="squared_relu", tied=True)
    names = shapes_of(lambda: Transformer(config, rngs=nnx.Rngs(0))).keys()
    assert names == attention | norms | mlp | {"embed.embedding"}


@pytest.mark.parametrize("tied", [False, True])
def test_at_first_logits_have_variance_one(tied):
    config = dataclasses.replace(TransformerConfig.tiny(), tied=tied)
    tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, 256)
    logits = np.array(run(Transformer(config, rngs=nnx.Rngs(0)), tokens))
    if tied:  # A token's own embedding is in the stream, and so its logit is large.
        np.put_along_axis(logits, np.asarray(tokens)[..., None], np.nan, axis=-1)
    assert np.nanstd(logits) == pytest.approx(1, rel=0.1)


def test_bfloat16_activations_stay_close():
    tokens = jax.random.randint(jax.random.key(0), (2, 40), 0, LLAMA.vocab_size)
    for config in CONFIGS.values():
        exact = run(Transformer(config, rngs=nnx.Rngs(0)), tokens)
        config = dataclasses.replace(config, dtype="bfloat16")
        low = run(Transformer(config, rngs=nnx.Rngs(0)), tokens)
        assert low.dtype == exact.dtype == jnp.float32
        assert 1e-4 < relative_error(low, exact) < 3e-2


def test_training_converted():
    """All projections of all but the last block are 4-bit."""
    model = Transformer(LLAMA, rngs=nnx.Rngs(0))
    fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(last=1), rngs=nnx.Rngs(quantize=0))
    recipes = {
        ".".join(map(str, path)): layer.recipe.name
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, fp4.nnx.Linear)
    }
    assert len(recipes) == 2 * 7
    assert all((name[7] == "0") == (recipe == "nvfp4") for name, recipe in recipes.items())
    tokens = jnp.tile(jnp.arange(8), 4)[None]
    losses = train(model, functools.partial(next_token, tokens=tokens), 15, 0.05)
    assert losses[-1] < 0.5 * losses[0]


def next_token(model, tokens):
    return next_token_loss(model(tokens), tokens)
