"""The whole model: an independent implementation's numbers, causality, configurations, sizes."""

import dataclasses

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
    next_token_loss,
    shapes_of,
)

from fp4jax.models import Hybrid, HybridConfig

# The shape of the model behind the vectors: NemotronHForCausalLM of transformers 5.24.0.
SMALL = HybridConfig(
    vocab_size=53,
    d_model=32,
    pattern="M-*-M-",
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=96,
    mamba_heads=4,
    mamba_head_dim=16,
    mamba_groups=2,
    mamba_state=8,
    chunk=16,
    dt_min=1e-3,
)


def torch_name(path):
    """The name that the vectors use for the parameter at ``path``."""
    name = ".".join(map(str, path))
    if name == "head.kernel":
        return "lm_head.weight"
    if name == "norm.scale":
        return "model.norm_f.weight"
    for mine, theirs in {
        "embed.embedding": "embeddings.weight",
        "blocks": "layers",
        "conv_weight": "conv1d.weight",
        "conv_bias": "conv1d.bias",
        "kernel": "weight",
        "scale": "weight",
    }.items():
        name = name.replace(mine, theirs)
    return f"model.{name}"


def to_flax(name, array):
    """A torch parameter in this model's layout."""
    if name.endswith("conv1d.weight"):
        return array[:, 0].T
    return array.T if array.ndim == 2 and "embeddings" not in name else array


def by_torch_name(state):
    return {torch_name(path): value for path, value in nnx.to_flat_state(state)}


@pytest.fixture(scope="module")
def vectors():
    return load("nemotron_h")


@pytest.fixture(scope="module")
def loaded(vectors):
    """The small model with the vectors' parameters, split."""
    graph, state = nnx.split(Hybrid(SMALL, rngs=nnx.Rngs(0)))
    assert by_torch_name(state).keys() == {key[6:] for key in vectors if key.startswith("param/")}
    flat = []
    for path, value in nnx.to_flat_state(state):
        name = torch_name(path)
        array = to_flax(name, vectors[f"param/{name}"])
        assert array.shape == value.shape, name
        flat.append((path, value.replace(jnp.asarray(array))))
    return graph, nnx.from_flat_state(flat)


def test_logits_loss_and_gradients_are_those_of_transformers(vectors, loaded):
    graph, state = loaded
    tokens = jnp.asarray(vectors["ids"])

    def loss(state):
        logits = nnx.merge(graph, state)(tokens)
        return next_token_loss(logits, tokens), logits

    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    np.testing.assert_allclose(logits, vectors["logits"], rtol=0, atol=1e-5)
    assert float(value) == pytest.approx(float(vectors["loss"]), abs=1e-5)
    for name, gradient in by_torch_name(gradients).items():
        want = to_flax(name, vectors[f"grad/{name}"])
        error = np.linalg.norm(gradient[...] - want) / np.linalg.norm(want)
        assert error < 1e-4, name


@pytest.mark.parametrize("chunk", [1, 10, 37, 64])
def test_the_chunk_does_not_change_the_result(vectors, loaded, chunk):
    model = Hybrid(dataclasses.replace(SMALL, chunk=chunk), rngs=nnx.Rngs(1))
    nnx.update(model, loaded[1])
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(vectors["ids"]))
    np.testing.assert_allclose(logits, vectors["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", ["M", "*", "M*-M"])
def test_no_position_sees_a_later_token(pattern):
    model = Hybrid(dataclasses.replace(SMALL, pattern=pattern), rngs=nnx.Rngs(0))
    places = (1, 15, 16, 17, 39)  # around the ends of chunks of 16
    check_causality(model, SMALL.vocab_size, length=40, places=places)


@pytest.mark.parametrize("pattern", ["M", "*", "M*-M"])
def test_no_gradient_flows_back_from_an_earlier_position(pattern):
    model = Hybrid(dataclasses.replace(SMALL, pattern=pattern), rngs=nnx.Rngs(0))
    check_causality_of_gradients(model, SMALL.vocab_size, length=40, places=(0, 15, 16, 38))


def test_an_empty_batch():
    model = Hybrid(SMALL, rngs=nnx.Rngs(0))
    assert model(jnp.zeros((0, 5), jnp.int32)).shape == (0, 5, 53)


@pytest.mark.parametrize("tokens", [jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)])
def test_tokens_are_integers_of_batch_and_length(tokens):
    with pytest.raises(ValueError, match="tokens must be an integer array"):
        Hybrid(SMALL, rngs=nnx.Rngs(0))(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "M-X"}, r"pattern must be .*'M', '-', '\*'; got 'M-X'"),
        ({"pattern": ""}, "pattern must be a non-empty string"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer; got 0"),
        ({"mlp_dim": 96.0}, "mlp_dim must be a positive integer; got 96.0"),
        ({"chunk": True}, "chunk must be a positive integer; got True"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads=3; got 4"),
        ({"mamba_groups": 3}, "mamba_heads must be a multiple of mamba_groups=3; got 4"),
        ({"dt_min": -0.1}, "dt_min must be a finite number from 0 up; got -0.1"),
        ({"norm_eps": float("nan")}, "norm_eps must be a finite number from 0 up; got nan"),
        ({"dtype": "float16"}, "dtype must be 'float32' or 'bfloat16'; got 'float16'"),
    ],
)
def test_inconsistent_configurations_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_a_configuration_is_a_value():
    assert HybridConfig.tiny() == HybridConfig.tiny()
    assert len({HybridConfig.tiny(), HybridConfig.tiny(), SMALL}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.chunk = 3


def of(config):
    """What makes the model of a configuration."""
    return lambda: Hybrid(config, rngs=nnx.Rngs(0))


def closed_form(c):
    inner, shared = c.mamba_heads * c.mamba_head_dim, c.mamba_groups * c.mamba_state
    channels = inner + 2 * shared
    mamba = (
        c.d_model * (inner + channels + c.mamba_heads)  # in_proj
        + (c.conv_width + 1) * channels
        + 3 * c.mamba_heads  # A_log, D, dt_bias
        + inner  # gated norm
        + inner * c.d_model  # out_proj
    )
    attention = 2 * c.d_model * c.head_dim * (c.num_heads + c.num_kv_heads)
    mlp = 2 * c.d_model * c.mlp_dim
    blocks = sum({"M": mamba, "*": attention, "-": mlp}[kind] + c.d_model for kind in c.pattern)
    return 2 * c.vocab_size * c.d_model + blocks + c.d_model


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (HybridConfig.tiny(), 0.742e6),
        # Without the 32000 tokens, embedded and read out, 30.8e6 and 99.9e6.
        (HybridConfig.m30(), 63.6e6),
        (HybridConfig.m100(), 165.5e6),
        # The vocabulary of 131072, embedded once and read out once, is 1.34e9 of the 12.3e9 and
        # 1.07e9 of the 8.1e9; the models' names round these totals.
        (HybridConfig.paper_12b(), 12.3e9),
        (HybridConfig.paper_8b(), 8.1e9),
    ],
)
def test_sizes_of_the_presets(config, total):
    count = count_of(of(config))
    assert count == closed_form(config)
    assert count == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (HybridConfig.paper_12b(), {"M": 28, "-": 28, "*": 6}),
        (HybridConfig.paper_8b(), {"M": 24, "-": 24, "*": 4}),
    ],
)
def test_blocks_of_the_paper(config, counts):
    assert {kind: config.pattern.count(kind) for kind in "M-*"} == counts
    assert config.mamba_heads * config.mamba_head_dim == 2 * config.d_model


@pytest.mark.parametrize("preset", ["tiny", "m30", "m100", "paper_12b", "paper_8b"])
def test_presets_have_whole_blocks_of_16(preset):
    for name, shape in shapes_of(of(getattr(HybridConfig, preset)())).items():
        if name.endswith("kernel"):
            assert shape[0] % 16 == 0, name
            assert shape[1] % 16 == 0, name


def test_parameter_names():
    """Policies choose layers by these paths, and weight decay goes by the last name."""
    names = shapes_of(of(dataclasses.replace(SMALL, pattern="M-*")))
    kernels = {
        f"{layer}.kernel"
        for layer in (
            "blocks.0.mixer.in_proj",
            "blocks.0.mixer.out_proj",
            "blocks.1.mixer.up_proj",
            "blocks.1.mixer.down_proj",
            "blocks.2.mixer.q_proj",
            "blocks.2.mixer.k_proj",
            "blocks.2.mixer.v_proj",
            "blocks.2.mixer.o_proj",
            "head",
        )
    }
    assert {name for name in names if name.endswith("kernel")} == kernels
    assert names.keys() - kernels == {
        "embed.embedding",
        "blocks.0.norm.scale",
        "blocks.0.mixer.conv_weight",
        "blocks.0.mixer.conv_bias",
        "blocks.0.mixer.A_log",
        "blocks.0.mixer.D",
        "blocks.0.mixer.dt_bias",
        "blocks.0.mixer.norm.scale",
        "blocks.1.norm.scale",
        "blocks.2.norm.scale",
        "norm.scale",
    }


def test_projections_are_plain_linear_layers():
    model = Hybrid(SMALL, rngs=nnx.Rngs(0))
    linears = [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Linear)]
    assert len(linears) == 2 * 2 + 3 * 2 + 4 + 1
    assert all(type(layer) is nnx.Linear and layer.bias is None for layer in linears)


def test_layers_that_write_to_the_stream_start_smaller():
    model = Hybrid(HybridConfig.tiny(), rngs=nnx.Rngs(0))
    mlp = model.blocks[1].mixer
    assert np.std(mlp.up_proj.kernel[...]) == pytest.approx(128**-0.5, rel=0.02)
    assert np.std(mlp.down_proj.kernel[...]) == pytest.approx((384 * 7) ** -0.5, rel=0.02)


def test_bfloat16_activations_stay_close():
    tokens = jax.random.randint(jax.random.key(0), (2, 40), 0, SMALL.vocab_size)
    exact = Hybrid(SMALL, rngs=nnx.Rngs(0))(tokens)
    low = Hybrid(dataclasses.replace(SMALL, dtype="bfloat16"), rngs=nnx.Rngs(0))(tokens)
    assert low.dtype == exact.dtype == jnp.float32
    error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 3e-2  # rounded, and no more than that
