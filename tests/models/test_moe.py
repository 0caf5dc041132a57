"""Mixtures of experts: routing by hand, another implementation's numbers, sizes, training."""

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
    named,
    next_token_loss,
    relative_error,
    run,
    set_parameters,
    shapes_of,
    train,
)

import fp4jax as fp4
from fp4jax.models import Experts, Mixture, MoE, MoEConfig, TransformerConfig
from fp4jax.models.moe import Router, balance

pytestmark = pytest.mark.usefixtures("compile_fast")

# The shape of the model behind the vectors, and its loss: tests/vectors/make_transformers.py.
SMALL = MoEConfig(
    transformer=TransformerConfig(
        vocab_size=53,
        d_model=32,
        num_blocks=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=16,
        rope_theta=100.0,
    ),
    num_experts=4,
)
BALANCE = 0.05

RENAMED = {
    "model.": "",
    "embed_tokens.weight": "embed.embedding",
    "layers": "blocks",
    "input_layernorm.weight": "attention_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
    "self_attn": "attention",
    "mlp.gate": "mlp.router",
    "mlp.experts": "mlp",
    "lm_head": "head",
    "norm.weight": "norm.scale",
    "weight": "kernel",
}


def from_torch(vectors, prefix):
    """The vectors' parameters or gradients, by this model's names and in its layout."""
    arrays = {}
    for key, array in vectors.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        for theirs, mine in RENAMED.items():
            name = name.replace(theirs, mine)
        if name.endswith("gate_up_proj"):
            name = name.removesuffix("gate_up_proj")
            gate, up = np.split(array.swapaxes(1, 2), 2, axis=2)
            arrays[f"{name}gate_proj.kernel"], arrays[f"{name}up_proj.kernel"] = gate, up
        elif name.endswith("down_proj"):
            arrays[f"{name}.kernel"] = array.swapaxes(1, 2)
        else:
            arrays[name] = array.T if name.endswith("kernel") else array
    return arrays


def test_logits_losses_and_gradients_are_those_of_transformers():
    vectors, model = load("mixtral"), MoE(SMALL, rngs=nnx.Rngs(0))
    set_parameters(model, from_torch(vectors, "param/"))
    graph, state = nnx.split(model)
    tokens = jnp.asarray(vectors["ids"])

    def loss(state):
        logits, balance = nnx.merge(graph, state).with_balance(tokens)
        # The vectors' loss has the sum over two blocks, in which fractions sum to two.
        return next_token_loss(logits, tokens) + BALANCE * 4 * balance, (logits, balance)

    (value, (logits, loads)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    assert relative_error(logits, vectors["logits"]) < 1e-5
    assert float(value) == pytest.approx(float(vectors["loss"]), rel=1e-5)
    assert float(loads) == pytest.approx(float(vectors["balance"].mean()) / 2, rel=1e-5)
    for path, want in from_torch(vectors, "grad/").items():
        assert relative_error(named(gradients)[path][...], want) < 1e-5, path


def silu(x):
    return x / (1 + np.exp(-x))


def naive(layer, x):
    """A mixture in double precision, one token and one expert at a time; and its balance."""
    router, up, down = (
        np.asarray(getattr(layer, name).kernel[...], np.float64)
        for name in ("router", "up_proj", "down_proj")
    )
    gate = None if layer.gate_proj is None else np.asarray(layer.gate_proj.kernel[...], np.float64)
    y, counts, total = np.zeros(x.shape), np.zeros(len(up)), np.zeros(len(up))
    for index in np.ndindex(x.shape[:-1]):
        logits = x[index] @ router
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        total += probabilities
        chosen = sorted(range(len(up)), key=lambda i: (-logits[i], i))[: layer.router.top_k]
        for i in chosen:
            counts[i] += 1
            hidden = x[index] @ up[i]
            if gate is None:
                hidden = np.maximum(hidden, 0) ** 2
            else:
                hidden = silu(x[index] @ gate[i]) * hidden
            y[index] += probabilities[i] / probabilities[chosen].sum() * (hidden @ down[i])
    tokens = np.prod(x.shape[:-1])
    return y, len(up) * np.sum(counts / counts.sum() * total / tokens)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (5, 1), (3, 3), (1, 1)])
def test_mixture(num_experts, top_k, gated):
    layer = Mixture(16, 24, num_experts=num_experts, top_k=top_k, gated=gated, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 7, 16)).astype(np.float32)
    y, loss = run(layer, jnp.asarray(x))
    want, want_loss = naive(layer, x.astype(np.float64))
    assert relative_error(y, want) < 1e-5
    assert float(loss) == pytest.approx(want_loss, rel=1e-5)


def router(kernel, top_k):
    layer = Router(*kernel.shape, top_k, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(kernel, jnp.float32)
    return layer


def test_of_equal_logits_the_first_experts_are_chosen():
    experts, weights, loss = router(np.zeros((3, 5)), 2)(jnp.ones((4, 3)))
    np.testing.assert_array_equal(experts, [[0, 1]] * 4)
    np.testing.assert_array_equal(weights, 0.5)
    assert float(loss) == 1  # all choices on two experts, but even probabilities
    # One larger than the others, which tie.
    kernel = np.array([[0.0, 0.0, 0.0, 1.0]])
    experts, weights, _ = router(kernel, 3)(jnp.full((1, 1), np.log(2.0)))
    np.testing.assert_array_equal(experts, [[3, 0, 1]])
    np.testing.assert_allclose(weights, [[0.5, 0.25, 0.25]], rtol=1e-6)


def test_routing_is_float32():
    """Logits 256 and 256.5, which bfloat16 cannot tell apart."""
    kernel = np.array([[256.0, 256.0], [0.0, 0.5]])
    experts, weights, _ = router(kernel, 2)(jnp.ones((1, 2), jnp.bfloat16))
    np.testing.assert_array_equal(experts, [[1, 0]])
    np.testing.assert_allclose(weights[0, 1], 1 / (1 + np.exp(0.5)), rtol=1e-6)


def test_balance_by_hand():
    probabilities = jnp.asarray(
        [[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.1, 0.6, 0.3], [0.2, 0.1, 0.7]]
    )
    # One choice: 2, 1 and 1 of 4; mean probabilities 0.4, 0.25 and 0.35.
    one = balance(probabilities, jnp.asarray([[0], [0], [1], [2]]))
    assert float(one) == pytest.approx(3 * (0.5 * 0.4 + 0.25 * 0.25 + 0.25 * 0.35), rel=1e-6)
    # Two choices: 3, 2 and 3 of 8.
    two = balance(probabilities, jnp.asarray([[0, 1], [0, 2], [1, 2], [2, 0]]))
    assert float(two) == pytest.approx(3 * (3 * 0.4 + 2 * 0.25 + 3 * 0.35) / 8, rel=1e-6)
    # The gradient is that of the probabilities alone.
    gradient = jax.grad(balance)(probabilities, jnp.asarray([[0], [0], [1], [2]]))
    np.testing.assert_allclose(gradient, np.tile(3 * np.array([2, 1, 1]) / 16, (4, 1)), rtol=1e-6)


def test_all_tokens_to_one_expert():
    layer = Mixture(16, 24, num_experts=4, top_k=1, rngs=nnx.Rngs(0))
    layer.router.kernel[...] = jnp.zeros((16, 4)).at[0, 2].set(1000.0)
    x = jax.random.normal(jax.random.key(0), (2, 9, 16)).at[..., 0].set(1.0)
    y, loss = run(layer, x)
    assert float(loss) == 4
    gate, up, down = (
        np.asarray(getattr(layer, f"{name}_proj").kernel[2], np.float64)
        for name in ("gate", "up", "down")
    )
    exact = np.asarray(x, np.float64)
    assert relative_error(y, (silu(exact @ gate) * (exact @ up)) @ down) < 1e-5
    gradient = nnx.jit(nnx.grad(lambda layer: (layer(x)[0] ** 2).sum()))(layer)
    for name in ("gate_proj", "up_proj", "down_proj"):
        used = np.abs(gradient[name]["kernel"][...]).max(axis=(1, 2)) > 0
        np.testing.assert_array_equal(used, [False, False, True, False])


def test_the_order_of_tokens_does_not_matter():
    layer = Mixture(16, 24, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (11, 16))
    order = np.random.default_rng(0).permutation(11)
    np.testing.assert_allclose(
        run(layer, x[order])[0], run(layer, x)[0][order], rtol=1e-5, atol=1e-6
    )


def test_no_tokens():
    layer = Mixture(16, 24, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
    y, loss = layer(jnp.zeros((0, 5, 16)))
    assert y.shape == (0, 5, 16)
    assert float(loss) == 0


def test_no_position_sees_a_later_token():
    check_causality(MoE(SMALL, rngs=nnx.Rngs(0)), 53)


def test_no_gradient_flows_back_from_an_earlier_position():
    check_causality_of_gradients(MoE(SMALL, rngs=nnx.Rngs(0)), 53)


def test_every_other_block_is_a_mixture():
    config = dataclasses.replace(
        SMALL, sparse_every=2, transformer=dataclasses.replace(SMALL.transformer, num_blocks=5)
    )
    model = nnx.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0)))
    mixtures = [isinstance(block.mlp, Mixture) for block in model.blocks]
    assert mixtures == [False, True, False, True, False]
    # With one block of two, the mixture's balance is the mean over blocks that have one.
    config = dataclasses.replace(SMALL, sparse_every=2)
    model = MoE(config, rngs=nnx.Rngs(0))
    model.blocks[1].mlp.router.kernel[...] = jnp.zeros((32, 4))
    _, load = model.with_balance(jnp.zeros((1, 3), jnp.int32))
    assert float(load) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer; got 0"),
        ({"top_k": 5}, "top_k must be at most num_experts=4; got 5"),
        ({"sparse_every": 3}, "sparse_every must be at most num_blocks=2, .* got 3"),
    ],
)
def test_inconsistent_configurations_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def closed_form(config, experts):
    """Parameters, of ``experts`` experts in each mixture."""
    c, sparse = config.transformer, config.transformer.num_blocks // config.sparse_every
    mlp = {"swiglu": 3, "squared_relu": 2}[c.mlp] * c.d_model * c.mlp_dim
    attention = 2 * c.d_model * c.head_dim * (c.num_heads + c.num_kv_heads)
    blocks = c.num_blocks * (attention + 2 * c.d_model)
    mixtures = sparse * (config.num_experts * c.d_model + experts * mlp)
    return (
        2 * c.vocab_size * c.d_model + c.d_model + blocks + mixtures + (c.num_blocks - sparse) * mlp
    )


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (MoEConfig.tiny(), 1.05e6, 0.66e6),
        (dataclasses.replace(MoEConfig.tiny(), sparse_every=2), 0.756e6, 0.56e6),
        (MoEConfig.mixtral_8x7b(), 46.7e9, 12.9e9),
    ],
)
def test_sizes_of_the_presets(config, total, active):
    count = count_of(lambda: MoE(config, rngs=nnx.Rngs(0)))
    assert count == closed_form(config, config.num_experts)
    assert count == pytest.approx(total, rel=0.005)
    assert closed_form(config, config.top_k) == pytest.approx(active, rel=0.005)


def test_parameter_names():
    """Policies choose layers by these paths, and weight decay goes by the last name."""
    shapes = shapes_of(lambda: MoE(SMALL, rngs=nnx.Rngs(0)))
    block = {name: shape for name, shape in shapes.items() if name.startswith("blocks.1.mlp.")}
    assert block == {
        "blocks.1.mlp.router.kernel": (32, 4),
        "blocks.1.mlp.gate_proj.kernel": (4, 32, 16),
        "blocks.1.mlp.up_proj.kernel": (4, 32, 16),
        "blocks.1.mlp.down_proj.kernel": (4, 16, 32),
    }


def test_layers_that_write_to_the_stream_start_smaller():
    mixture = MoE(MoEConfig.tiny(), rngs=nnx.Rngs(0)).blocks[1].mlp
    assert np.std(mixture.up_proj.kernel[...]) == pytest.approx(128**-0.5, rel=0.02)
    assert np.std(mixture.down_proj.kernel[...]) == pytest.approx((128 * 8) ** -0.5, rel=0.02)


def test_bfloat16_activations_stay_close():
    """With one expert, so that a rounded input cannot send a token elsewhere."""
    tokens = jax.random.randint(jax.random.key(0), (2, 24), 0, 53)
    config = dataclasses.replace(SMALL, num_experts=1, top_k=1)
    low = dataclasses.replace(
        config, transformer=dataclasses.replace(config.transformer, dtype="bfloat16")
    )
    exact, rounded = (run(MoE(c, rngs=nnx.Rngs(0)), tokens) for c in (config, low))
    assert rounded.dtype == exact.dtype == jnp.float32
    assert 1e-4 < relative_error(rounded, exact) < 3e-2


def test_training_converted():
    """Experts and projections of all but the first block are 4-bit, the router is not."""
    model = MoE(dataclasses.replace(SMALL, sparse_every=2), rngs=nnx.Rngs(0))
    fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(first=1), rngs=nnx.Rngs(quantize=0))
    recipes = {
        ".".join(map(str, path)): layer.recipe.name
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, fp4.nnx.Linear | fp4.nnx.Experts)
    }
    assert len(recipes) == 2 * (4 + 3)
    assert all((name[7] == "1") == (recipe == "nvfp4") for name, recipe in recipes.items())
    assert not any(type(layer) is Experts for _, layer in nnx.iter_modules(model))
    tokens = jnp.tile(jnp.arange(8), 4)[None]

    def loss(model):
        logits, load = model.with_balance(tokens)
        return next_token_loss(logits, tokens) + 0.01 * load

    losses = train(model, loss, 15, 0.05)
    assert losses[-1] < 0.5 * losses[0]
