"""A decoder-only transformer in the manner of Llama, and the paper's 1.2B model."""

import dataclasses
from typing import Self

import jax
from flax import nnx

from fp4jax.models.attention import Attention
from fp4jax.models.checks import check_choice, check_config
from fp4jax.models.decoder import Decoder
from fp4jax.models.layers import RMSNorm, projection
from fp4jax.models.mlp import MLP, SwiGLU

Array = jax.Array

_MLPS: dict[str, type[MLP] | type[SwiGLU]] = {"swiglu": SwiGLU, "squared_relu": MLP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything that shapes a ``Transformer``. Inconsistent values raise ValueError.

    Attributes:
      vocab_size: number of token ids.
      d_model: width of the residual stream.
      num_blocks: number of blocks, each of attention and an MLP.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides ``num_heads``.
      head_dim: width of one head; even.
      mlp_dim: hidden width of the MLP.
      mlp: ``"swiglu"``, which has three kernels, or ``"squared_relu"``, which has two.
      tied: whether the head is the embedding, transposed.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every norm.
      dtype: dtype of the activations, ``"float32"`` or ``"bfloat16"``. Parameters, norms and the
        logits are float32 in either case.
    """

    vocab_size: int
    d_model: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    mlp: str = "swiglu"
    tied: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_config(self, num_heads="num_kv_heads")
        check_choice("mlp", self.mlp, _MLPS)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, for rotary positions; got {self.head_dim}")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta must be above zero; got {self.rope_theta}")

    @classmethod
    def tiny(cls) -> Self:
        """A byte-level model of 0.75M parameters, for a CPU. Every width is a multiple of 16."""
        return cls(
            vocab_size=256,
            d_model=128,
            num_blocks=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_dim=320,
        )

    @classmethod
    def m30(cls) -> Self:
        """30.5M parameters besides embedding and head: the small model of arXiv:2601.22813.

        Blocks, width and heads are that paper's, the MLP is Llama's 8/3 of the width, in 256s.
        """
        return cls(
            vocab_size=32000,
            d_model=640,
            num_blocks=6,
            num_heads=5,
            num_kv_heads=5,
            head_dim=128,
            mlp_dim=1792,
            dtype="bfloat16",
        )

    @classmethod
    def m100(cls) -> Self:
        """102.8M parameters besides embedding and head, in the proportions of ``m30``."""
        return cls(
            vocab_size=32000,
            d_model=1024,
            num_blocks=8,
            num_heads=8,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=2816,
            dtype="bfloat16",
        )

    @classmethod
    def paper_1_2b(cls) -> Self:
        """The 1.2B transformer of arXiv:2509.25149.

        The paper does not give its vocabulary. This is that of the paper's other models, with
        which it has 1.29B parameters, 0.76B of them in the blocks.
        """
        return cls(
            vocab_size=131072,
            d_model=2048,
            num_blocks=20,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=6144,
            mlp="squared_relu",
            dtype="bfloat16",
        )


def attention_of(config: TransformerConfig, *, rngs: nnx.Rngs) -> Attention:
    """The attention of one block: causal, with rotary positions."""
    return Attention(
        config.d_model,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_theta,
        out_variance=out_variance(config),
        dtype=config.dtype,
        rngs=rngs,
    )


def norm_of(config: TransformerConfig) -> RMSNorm:
    """A norm of the residual stream."""
    return RMSNorm(config.d_model, epsilon=config.norm_eps, dtype=config.dtype)


def out_variance(config: TransformerConfig) -> float:
    """See ``projection``: two layers a block write to the residual stream."""
    return 1 / (2 * config.num_blocks)


def embedding_of(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.Embed:
    """The embedding of the tokens; as a head its output has variance one, else as a stream."""
    init = nnx.initializers.normal(config.d_model**-0.5 if config.tied else 1.0)
    return nnx.Embed(
        config.vocab_size, config.d_model, embedding_init=init, dtype=config.dtype, rngs=rngs
    )


def head_of(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.Linear | None:
    """The output head; None where the embedding is it."""
    if config.tied:
        return None
    return projection(config.d_model, config.vocab_size, dtype=config.dtype, rngs=rngs)


class Block(nnx.Module):
    """Attention and an MLP, each on the normalized stream and added to it.

    Args:
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = norm_of(config)
        self.attention = attention_of(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = _MLPS[config.mlp](
            config.d_model,
            config.mlp_dim,
            out_variance=out_variance(config),
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(batch, length, d_model)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(Decoder):
    """A decoder as in Llama (arXiv:2302.13971), with grouped queries (arXiv:2305.13245).

    Embedding, equal blocks, a last norm and a head. Parameters that weight decay should reach are
    named ``kernel`` or ``embedding``, and no others are.

    Args:
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = embedding_of(config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_blocks)])
        self.norm = norm_of(config)
        self.head = head_of(config, rngs=rngs)
