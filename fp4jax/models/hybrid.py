"""The paper's language model: Mamba-2, attention and MLP blocks in any order."""

import dataclasses
from typing import Self

import jax
from flax import nnx

from fp4jax.models.attention import Attention
from fp4jax.models.checks import check_config
from fp4jax.models.decoder import Decoder
from fp4jax.models.layers import RMSNorm, projection
from fp4jax.models.mamba2 import Mamba2
from fp4jax.models.mlp import MLP

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Everything that shapes a ``Hybrid``. Inconsistent values raise ValueError.

    Attributes:
      vocab_size: number of token ids.
      d_model: width of the residual stream.
      pattern: one character per block: ``M`` Mamba-2, ``-`` MLP, ``*`` attention.
      num_heads: query heads of an attention block.
      num_kv_heads: its key and value heads; divides ``num_heads``.
      head_dim: width of one attention head.
      mlp_dim: hidden width of an MLP block.
      mamba_heads: heads of a Mamba-2 block; a multiple of ``mamba_groups``.
      mamba_head_dim: width of one Mamba-2 head.
      mamba_groups: groups of Mamba-2 heads that share the input and output maps.
      mamba_state: state size of one Mamba-2 channel.
      conv_width: steps that the Mamba-2 convolution sees.
      chunk: steps that one matrix product of the scan covers: about 32 is fastest on a CPU,
        128 on a GPU.
      dt_min: lower bound of the Mamba-2 step size.
      norm_eps: epsilon of every norm.
      dtype: dtype of the activations, ``"float32"`` or ``"bfloat16"``. Parameters, norms, the
        scan and the logits are float32 in either case.
    """

    vocab_size: int
    d_model: int
    pattern: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    mamba_state: int
    conv_width: int = 4
    chunk: int = 128
    dt_min: float = 0.0
    norm_eps: float = 1e-5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.pattern or set(self.pattern) - set(_MIXERS):
            raise ValueError(
                f"pattern must be a non-empty string of {', '.join(map(repr, _MIXERS))}; "
                f"got {self.pattern!r}"
            )
        check_config(self, num_heads="num_kv_heads", mamba_heads="mamba_groups")

    @classmethod
    def tiny(cls) -> Self:
        """A byte-level model of 0.74M parameters, for a CPU. Every width is a multiple of 16."""
        return cls(
            vocab_size=256,
            d_model=128,
            pattern="M-M*-M-",
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            mlp_dim=384,
            mamba_heads=16,
            mamba_head_dim=16,
            mamba_groups=2,
            mamba_state=16,
            chunk=32,
        )

    @classmethod
    def m30(cls) -> Self:
        """30.8M parameters besides embedding and head, in the paper's proportions."""
        return cls(
            vocab_size=32000,
            d_model=512,
            pattern="M-M-M*-M-M-M*-M-",
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            mlp_dim=2048,
            mamba_heads=16,
            mamba_head_dim=64,
            mamba_groups=4,
            mamba_state=128,
            dtype="bfloat16",
        )

    @classmethod
    def m100(cls) -> Self:
        """100M parameters besides embedding and head, in the paper's proportions."""
        return cls(
            vocab_size=32000,
            d_model=1024,
            pattern="M-M-M*-M-M-M*-",
            num_heads=8,
            num_kv_heads=2,
            head_dim=128,
            mlp_dim=4096,
            mamba_heads=32,
            mamba_head_dim=64,
            mamba_groups=4,
            mamba_state=128,
            dtype="bfloat16",
        )

    @classmethod
    def paper_12b(cls) -> Self:
        """The 12B hybrid of arXiv:2509.25149; block order of arXiv:2508.14444."""
        return cls(
            vocab_size=131072,
            d_model=5120,
            pattern="M-M-M-M*" + 5 * "-M-M-M-M*" + "-M-M-M-M-",
            num_heads=40,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=20480,
            mamba_heads=160,
            mamba_head_dim=64,
            mamba_groups=8,
            mamba_state=128,
            dtype="bfloat16",
        )

    @classmethod
    def paper_8b(cls) -> Self:
        """The 8B hybrid of arXiv:2509.25149; block order of arXiv:2504.03624."""
        return cls(
            vocab_size=131072,
            d_model=4096,
            pattern="M-M-M-M*" + 3 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            mlp_dim=21504,
            mamba_heads=128,
            mamba_head_dim=64,
            mamba_groups=8,
            mamba_state=128,
            dtype="bfloat16",
        )


def _mamba2(config: HybridConfig, out_variance: float, rngs: nnx.Rngs) -> Mamba2:
    return Mamba2(
        config.d_model,
        heads=config.mamba_heads,
        head_dim=config.mamba_head_dim,
        groups=config.mamba_groups,
        state=config.mamba_state,
        conv_width=config.conv_width,
        chunk=config.chunk,
        dt_min=config.dt_min,
        norm_eps=config.norm_eps,
        out_variance=out_variance,
        dtype=config.dtype,
        rngs=rngs,
    )


def _mlp(config: HybridConfig, out_variance: float, rngs: nnx.Rngs) -> MLP:
    return MLP(
        config.d_model, config.mlp_dim, out_variance=out_variance, dtype=config.dtype, rngs=rngs
    )


def _attention(config: HybridConfig, out_variance: float, rngs: nnx.Rngs) -> Attention:
    return Attention(
        config.d_model,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        out_variance=out_variance,
        dtype=config.dtype,
        rngs=rngs,
    )


_MIXERS = {"M": _mamba2, "-": _mlp, "*": _attention}


class Block(nnx.Module):
    """A residual block that normalizes its input: ``x + mixer(norm(x))``.

    Args:
      kind: the block's character in ``HybridConfig.pattern``.
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, kind: str, config: HybridConfig, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.d_model, epsilon=config.norm_eps, dtype=config.dtype)
        self.mixer = _MIXERS[kind](config, 1 / len(config.pattern), rngs)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(batch, length, d_model)`` to the same shape."""
        return x + self.mixer(self.norm(x))


class Hybrid(Decoder):
    """The hybrid language model of arXiv:2509.25149 and arXiv:2504.03624.

    Embedding, the blocks of ``config.pattern``, a last norm and an untied head. Parameters that
    weight decay should reach are named ``kernel`` or ``embedding``, and no others are.

    Args:
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            embedding_init=nnx.initializers.normal(1.0),
            dtype=config.dtype,
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(kind, config, rngs=rngs) for kind in config.pattern])
        self.norm = RMSNorm(config.d_model, epsilon=config.norm_eps, dtype=config.dtype)
        self.head = projection(config.d_model, config.vocab_size, dtype=config.dtype, rngs=rngs)
