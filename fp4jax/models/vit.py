"""A vision transformer: patches of an image as tokens, and one label for all of them."""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.models.attention import Attention
from fp4jax.models.checks import check_choice, check_config
from fp4jax.models.layers import LayerNorm, projection
from fp4jax.models.mlp import MLP

Array = jax.Array

_gelu = functools.partial(jax.nn.gelu, approximate=False)
_POOLS = ("token", "mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that shapes a ``ViT``. Inconsistent values raise ValueError.

    Attributes:
      image_size: height and width of an image; a multiple of ``patch_size``.
      patch_size: height and width of a patch.
      channels: of an image.
      num_classes: number of labels.
      d_model: width of the residual stream; a multiple of ``num_heads``.
      num_blocks: number of blocks, each of attention and an MLP.
      num_heads: heads of attention.
      mlp_dim: hidden width of the MLP.
      pool: what the head reads: ``"token"``, one more token that is learned, or ``"mean"``, the
        mean over the patches.
      norm_eps: epsilon of every norm.
      dtype: dtype of the activations, ``"float32"`` or ``"bfloat16"``. Parameters, norms and the
        logits are float32 in either case.
    """

    image_size: int
    patch_size: int
    channels: int
    num_classes: int
    d_model: int
    num_blocks: int
    num_heads: int
    mlp_dim: int
    pool: str = "token"
    norm_eps: float = 1e-6
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_config(self, image_size="patch_size", d_model="num_heads")
        check_choice("pool", self.pool, _POOLS)

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def tiny(cls) -> Self:
        """For 8x8 gray digits, on a CPU: 16 patches, 0.2M parameters."""
        return cls(
            image_size=8,
            patch_size=2,
            channels=1,
            num_classes=10,
            d_model=64,
            num_blocks=4,
            num_heads=4,
            mlp_dim=256,
            pool="mean",
        )

    @classmethod
    def base_16(cls) -> Self:
        """ViT-B/16 of arXiv:2010.11929 for 1000 classes: 86.6M parameters."""
        return cls(
            image_size=224,
            patch_size=16,
            channels=3,
            num_classes=1000,
            d_model=768,
            num_blocks=12,
            num_heads=12,
            mlp_dim=3072,
            dtype="bfloat16",
        )


def patches(images: Array, size: int) -> Array:
    """Cuts images into squares, row by row.

    Args:
      images: ``(batch, height, width, channels)``, multiples of ``size``.
      size: height and width of a patch.

    Returns:
      Array ``(batch, height * width // size**2, size**2 * channels)``. Of a patch, channels vary
      fastest, then columns: a kernel for it is that of a convolution, reshaped.
    """
    batch, height, width, channels = images.shape
    rows, columns = height // size, width // size
    tiles = images.reshape(batch, rows, size, columns, size, channels)
    return jnp.moveaxis(tiles, 2, 3).reshape(batch, rows * columns, size * size * channels)


class Block(nnx.Module):
    """Attention and an MLP, each on the normalized stream and added to it.

    Args:
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        variance = 1 / (2 * config.num_blocks)
        self.attention_norm = _norm(config)
        self.attention = Attention(
            config.d_model,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.d_model // config.num_heads,
            causal=False,
            use_bias=True,
            out_variance=variance,
            dtype=config.dtype,
            rngs=rngs,
        )
        self.mlp_norm = _norm(config)
        self.mlp = MLP(
            config.d_model,
            config.mlp_dim,
            activation=_gelu,
            use_bias=True,
            out_variance=variance,
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(batch, tokens, d_model)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nnx.Module):
    """The vision transformer of arXiv:2010.11929.

    A linear map of the patches, learned positions, blocks that normalize first, a last norm and a
    head on one token or on the mean.

    Args:
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        linear = functools.partial(projection, use_bias=True, dtype=config.dtype, rngs=rngs)
        self.patch_embed = linear(config.patch_size**2 * config.channels, config.d_model)
        has_token = config.pool == "token"
        self.token = nnx.Param(jnp.zeros((1, 1, config.d_model))) if has_token else None
        positions = (1, config.num_patches + has_token, config.d_model)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), positions))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_blocks)])
        self.norm = _norm(config)
        self.head = linear(config.d_model, config.num_classes)

    def __call__(self, images: Array) -> Array:
        """Logits of the labels.

        Args:
          images: floating-point ``(batch, image_size, image_size, channels)``.

        Returns:
          float32 array ``(batch, num_classes)``.

        Raises:
          ValueError: ``images`` has another shape or is not floating-point.
        """
        config = self.config
        shape = (config.image_size, config.image_size, config.channels)
        if images.shape[1:] != shape or not jnp.issubdtype(images.dtype, jnp.floating):
            raise ValueError(
                f"images must be a floating-point array of shape (batch, *{shape}); "
                f"got {images.dtype} of shape {images.shape}"
            )
        x = self.patch_embed(patches(images, config.patch_size))
        if self.token is not None:
            token = jnp.broadcast_to(self.token[...].astype(x.dtype), (len(x), 1, x.shape[-1]))
            x = jnp.concatenate([token, x], axis=1)
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        pooled = jnp.mean(x, axis=1) if self.token is None else x[:, 0]
        return self.head(pooled).astype(jnp.float32)


def _norm(config: ViTConfig) -> LayerNorm:
    return LayerNorm(config.d_model, epsilon=config.norm_eps, dtype=config.dtype)
