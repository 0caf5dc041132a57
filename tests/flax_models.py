"""Small Flax models as one writes them without quantization in mind, in NNX and in Linen.

Only `NnxRaggedDot` and `LinenRaggedDot` know of fp4jax: a grouped product is no layer of Flax, so
whoever writes a mixture of experts with one has to put the quantized one there.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import fp4jax as fp4

lecun = jax.nn.initializers.lecun_normal(batch_axis=0)


class NnxMLP(nnx.Module):
    def __init__(self, features: Sequence[int], rngs: nnx.Rngs):
        layers = [nnx.Linear(*sizes, rngs=rngs) for sizes in itertools.pairwise(features)]
        self.blocks, self.head = nnx.List(layers[:-1]), layers[-1]

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(x)


class LinenMLP(nn.Module):
    features: Sequence[int]  # after the input's

    @nn.compact
    def __call__(self, x):
        for i, size in enumerate(self.features[:-1]):
            x = nn.relu(nn.Dense(size, name=f"hidden_{i}")(x))
        return nn.Dense(self.features[-1], name="head")(x)


class NnxFeedForward(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class NnxBlock(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = NnxFeedForward(width, rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class NnxTransformer(nnx.Module):
    """Decoder only: logits of each position from the tokens up to it."""

    def __init__(
        self, vocab: int, length: int, width: int, heads: int, blocks: int, rngs: nnx.Rngs
    ):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.position = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, heads, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.head(self.norm(x))


class NnxViT(nnx.Module):
    def __init__(
        self, side: int, patch: int, width: int, heads: int, blocks: int, out: int, rngs: nnx.Rngs
    ):
        self.patches = nnx.Conv(1, width, (patch, patch), strides=patch, rngs=rngs)
        self.position = nnx.Embed((side // patch) ** 2, width, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, heads, rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, out, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.position(jnp.arange(x.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class NnxDenseExperts(nnx.Module):
    """Every token through every expert, weighted by the router."""

    def __init__(self, experts: int, width: int, rngs: nnx.Rngs):
        hidden = 2 * width
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Einsum("td,edh->teh", (experts, width, hidden), kernel_init=lecun, rngs=rngs)
        self.down = nnx.Einsum(
            "teh,ehd->ted", (experts, hidden, width), kernel_init=lecun, rngs=rngs
        )

    def __call__(self, x):
        y = self.down(nnx.relu(self.up(x)))
        return (nnx.softmax(self.router(x))[..., None] * y).sum(1)


def ragged_experts(x, logits, up, down, product):
    """Every token through its best expert, weighted by the router's probability of it."""
    expert = logits.argmax(-1)
    gate = jnp.take_along_axis(jax.nn.softmax(logits), expert[:, None], 1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=logits.shape[-1])
    y = product(jax.nn.relu(product(x[order], up, sizes)), down, sizes)
    return gate * y[jnp.argsort(order)]


class NnxRaggedExperts(nnx.Module):
    def __init__(self, experts: int, width: int, rngs: nnx.Rngs, product=jax.lax.ragged_dot):
        hidden = 2 * width
        self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(lecun(rngs.params(), (experts, width, hidden)))
        self.down = nnx.Param(lecun(rngs.params(), (experts, hidden, width)))
        self.product = product

    def __call__(self, x):
        return ragged_experts(x, self.router(x), self.up[...], self.down[...], self.product)


class NnxMoE(nnx.Module):
    def __init__(
        self, features: int, width: int, blocks: int, experts: Callable[[int], Any], rngs: nnx.Rngs
    ):
        self.embed = nnx.Linear(features, width, rngs=rngs)
        self.blocks = nnx.List([experts(width) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, features, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class NnxRaggedDot(nnx.Module):
    """`fp4jax.ragged_dot` with a random stream."""

    def __init__(self, recipe: fp4.Recipe, rngs: nnx.Rngs):
        self.recipe = recipe
        self.stream = rngs.quantize.fork()

    def __call__(self, x, kernels, sizes):
        return fp4.ragged_dot(x, kernels, sizes, recipe=self.recipe, key=self.stream())


class LinenFeedForward(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(2 * self.width, name="up")(x))
        return nn.Dense(self.width, name="down")(x)


class LinenBlock(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x, mask=None):
        attention = nn.MultiHeadDotProductAttention(self.heads, name="attention")
        x = x + attention(nn.LayerNorm(name="norm1")(x), mask=mask)
        return x + LinenFeedForward(self.width, name="mlp")(nn.LayerNorm(name="norm2")(x))


class LinenTransformer(nn.Module):
    vocab: int
    length: int
    width: int
    heads: int
    blocks: int

    @nn.compact
    def __call__(self, tokens):
        position = nn.Embed(self.length, self.width, name="position")
        x = nn.Embed(self.vocab, self.width, name="embed")(tokens)
        x = x + position(jnp.arange(tokens.shape[1]))[None]
        for i in range(self.blocks):
            block = LinenBlock(self.width, self.heads, name=f"block_{i}")
            x = block(x, nn.make_causal_mask(tokens))
        return nn.Dense(self.vocab, name="head")(nn.LayerNorm(name="norm")(x))


class LinenViT(nn.Module):
    patch: int
    width: int
    heads: int
    blocks: int
    out: int

    @nn.compact
    def __call__(self, images):
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size, name="patches")(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        position = nn.Embed(x.shape[1], self.width, name="position")
        x = x + position(jnp.arange(x.shape[1]))[None]
        for i in range(self.blocks):
            x = LinenBlock(self.width, self.heads, name=f"block_{i}")(x)
        return nn.Dense(self.out, name="head")(nn.LayerNorm(name="norm")(x).mean(1))


class LinenDenseExperts(nn.Module):
    experts: int
    width: int

    @nn.compact
    def __call__(self, x):
        hidden = 2 * self.width

        def einsum(subscripts, shape, name):
            return nn.Einsum(shape, subscripts, use_bias=False, kernel_init=lecun, name=name)

        gate = nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(x))
        x = einsum("td,edh->teh", (self.experts, self.width, hidden), "up")(x)
        x = einsum("teh,ehd->ted", (self.experts, hidden, self.width), "down")(nn.relu(x))
        return (gate[..., None] * x).sum(1)


class LinenRaggedExperts(nn.Module):
    experts: int
    width: int
    product: Callable[..., Any] = jax.lax.ragged_dot

    @nn.compact
    def __call__(self, x):
        hidden = 2 * self.width
        up = self.param("up", lecun, (self.experts, self.width, hidden))
        down = self.param("down", lecun, (self.experts, hidden, self.width))
        logits = nn.Dense(self.experts, use_bias=False, name="router")(x)
        return ragged_experts(x, logits, up, down, self.product)


class LinenMoE(nn.Module):
    width: int
    blocks: int
    experts: Callable[..., nn.Module]  # of width and name

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        x = nn.Dense(self.width, name="embed")(x)
        for i in range(self.blocks):
            x = x + self.experts(width=self.width, name=f"block_{i}")(x)
        return nn.Dense(features, name="head")(nn.LayerNorm(name="norm")(x))


class LinenRaggedDot(nn.Module):
    """`fp4jax.ragged_dot` with the running model's stream."""

    recipe: fp4.Recipe

    @nn.compact
    def __call__(self, x, kernels, sizes):
        key = self.make_rng("quantize") if self.recipe.needs_key else None
        return fp4.ragged_dot(x, kernels, sizes, recipe=self.recipe, key=key)
