"""The vision transformer against plain numpy in double precision, sizes, and training on digits."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from language_models import count_of, named, relative_error, run, shapes_of, train
from learnable import cross_entropy

import fp4jax as fp4
from fp4jax.models import ViT, ViTConfig
from fp4jax.models.vit import patches

pytestmark = pytest.mark.usefixtures("compile_fast")

SMALL = ViTConfig(
    image_size=12,
    patch_size=4,
    channels=3,
    num_classes=5,
    d_model=16,
    num_blocks=2,
    num_heads=2,
    mlp_dim=24,
    norm_eps=1e-3,  # large enough to be seen
)


def model_of(config, seed=0):
    """A model of which no parameter is zero or one, as biases and norms are at first."""
    model = ViT(config, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    flat = [
        (path, value.replace(value[...] + jnp.float32(0.1) * rng.standard_normal(value.shape, "f")))
        for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param))
    ]
    nnx.update(model, nnx.from_flat_state(flat))
    return model


def images(config, batch=2, seed=0):
    shape = (batch, config.image_size, config.image_size, config.channels)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def naive(model, image):
    """The logits of one image."""
    config = model.config
    p = {
        name: np.asarray(value[...], np.float64)
        for name, value in named(nnx.state(model, nnx.Param)).items()
    }

    def linear(x, name):
        return x @ p[f"{name}.kernel"] + p[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_eps)
        return scaled * p[f"{name}.scale"] + p[f"{name}.bias"]

    def attention(x, name):
        q, k, v = (linear(x, f"{name}.{part}_proj") for part in "qkv")
        width, heads = config.d_model // config.num_heads, []
        for i in range(config.num_heads):
            mine = slice(i * width, (i + 1) * width)
            weights = np.exp(q[:, mine] @ k[:, mine].T / width**0.5)
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, mine])
        return linear(np.concatenate(heads, -1), f"{name}.o_proj")

    def gelu(x):
        return x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2

    size = config.patch_size
    corners = range(0, config.image_size, size)
    tokens = [image[i : i + size, j : j + size].ravel() for i in corners for j in corners]
    x = linear(np.array(tokens, np.float64), "patch_embed")
    if config.pool == "token":
        x = np.concatenate([p["token"][0], x])
    x = x + p["positions"][0]
    for i in range(config.num_blocks):
        x = x + attention(norm(x, f"blocks.{i}.attention_norm"), f"blocks.{i}.attention")
        hidden = gelu(linear(norm(x, f"blocks.{i}.mlp_norm"), f"blocks.{i}.mlp.up_proj"))
        x = x + linear(hidden, f"blocks.{i}.mlp.down_proj")
    x = norm(x, "norm")
    return linear(x[0] if config.pool == "token" else x.mean(0), "head")


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize(("dtype", "low", "high"), [("float32", 0, 1e-5), ("bfloat16", 1e-4, 3e-2)])
def test_logits(pool, dtype, low, high):
    model = model_of(dataclasses.replace(SMALL, pool=pool, dtype=dtype))
    x = images(SMALL)
    got = run(model, jnp.asarray(x))
    assert got.dtype == jnp.float32
    assert low < relative_error(got, np.array([naive(model, image) for image in x])) < high


def test_patches_are_those_of_a_convolution():
    x = images(SMALL)
    kernel = np.random.default_rng(1).standard_normal((4, 4, 3, 7)).astype(np.float32)
    want = jax.lax.conv_general_dilated(
        x, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    got = patches(jnp.asarray(x), 4) @ kernel.reshape(48, 7)
    np.testing.assert_allclose(got, want.reshape(2, 9, 7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "x", [jnp.zeros((2, 12, 12)), jnp.zeros((2, 12, 8, 3)), jnp.zeros((2, 12, 12, 3), jnp.int32)]
)
def test_images_have_one_shape(x):
    with pytest.raises(
        ValueError, match=r"images must be .* shape \(batch, \*\(12, 12, 3\)\); got"
    ):
        ViT(SMALL, rngs=nnx.Rngs(0))(x)


def test_an_empty_batch():
    assert ViT(SMALL, rngs=nnx.Rngs(0))(jnp.zeros((0, 12, 12, 3))).shape == (0, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": "max"}, "pool must be one of 'token', 'mean'; got 'max'"),
        ({"patch_size": 5}, "image_size must be a multiple of patch_size=5; got 12"),
        ({"num_heads": 3}, "d_model must be a multiple of num_heads=3; got 16"),
        ({"channels": 0}, "channels must be a positive integer; got 0"),
    ],
)
def test_inconsistent_configurations_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def closed_form(c):
    d, token = c.d_model, c.pool == "token"
    patch = c.patch_size**2 * c.channels * d + d
    positions = (c.num_patches + token) * d + token * d
    attention, mlp = 4 * (d * d + d), 2 * d * c.mlp_dim + c.mlp_dim + d
    blocks = c.num_blocks * (attention + mlp + 4 * d)
    return patch + positions + blocks + 2 * d + d * c.num_classes + c.num_classes


@pytest.mark.parametrize(
    ("config", "total"),
    [(ViTConfig.tiny(), 202_058), (ViTConfig.base_16(), 86_567_656), (SMALL, None)],
)
def test_sizes_of_the_presets(config, total):
    count = count_of(lambda: ViT(config, rngs=nnx.Rngs(0)))
    assert count == closed_form(config)
    assert total in (None, count)


def test_parameter_names():
    """Policies choose layers by these paths: the projections are in blocks, the ends are not."""
    names = shapes_of(lambda: ViT(dataclasses.replace(SMALL, num_blocks=1), rngs=nnx.Rngs(0)))
    layers = ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"]
    layers = [f"blocks.0.{name}" for name in [*layers, "mlp.up_proj", "mlp.down_proj"]]
    kernels = {f"{layer}.kernel" for layer in [*layers, "patch_embed", "head"]}
    assert {name for name in names if name.endswith("kernel")} == kernels
    assert names["positions"] == (1, 10, 16)
    assert names["token"] == (1, 1, 16)


def test_training_converted():
    """Two digits that differ in where their ink is are told apart, with 4-bit blocks."""
    config = dataclasses.replace(ViTConfig.tiny(), num_classes=2, num_blocks=2)
    model = ViT(config, rngs=nnx.Rngs(0))
    fp4.nnx.quantize_model(model, fp4.Policy.keep_ends(last=1), rngs=nnx.Rngs(quantize=0))
    recipes = {
        ".".join(map(str, path)): layer.recipe.name
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, fp4.nnx.Linear)
    }
    assert len(recipes) == 2 * 6
    assert all((name[7] == "0") == (recipe == "nvfp4") for name, recipe in recipes.items())
    x = images(config, batch=16)
    labels = jnp.arange(16, dtype=jnp.int32) % 2
    x[::2, :4] += 1
    loss = functools.partial(classification, x=jnp.asarray(x), labels=labels)
    losses = train(model, loss, 15, 0.05)
    assert losses[-1] < 0.5 * losses[0]


def classification(model, x, labels):
    return cross_entropy(model(x), labels)
