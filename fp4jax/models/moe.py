"""A transformer whose MLPs are mixtures of experts: every token goes through a few of many MLPs."""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from fp4jax.experts import Experts
from fp4jax.models.checks import check_config, check_tokens
from fp4jax.models.decoder import logits_of
from fp4jax.models.mlp import squared_relu
from fp4jax.models.transformer import (
    Block,
    TransformerConfig,
    attention_of,
    embedding_of,
    head_of,
    norm_of,
    out_variance,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Everything that shapes an ``MoE``. Inconsistent values raise ValueError.

    Attributes:
      transformer: the model without mixtures; an expert is its MLP.
      num_experts: experts of a mixture.
      top_k: how many of them a token goes through.
      sparse_every: one of how many blocks is a mixture: 1 for every block, 2 for the second, the
        fourth and so on.
    """

    transformer: TransformerConfig
    num_experts: int
    top_k: int = 2
    sparse_every: int = 1

    def __post_init__(self) -> None:
        check_config(self)
        blocks = self.transformer.num_blocks
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k must be at most num_experts={self.num_experts}; got {self.top_k}"
            )
        if self.sparse_every > blocks:
            raise ValueError(
                f"sparse_every must be at most num_blocks={blocks}, or no block is a mixture; got "
                f"{self.sparse_every}"
            )

    def is_sparse(self, block: int) -> bool:
        """Whether the block of this number, from 0, is a mixture."""
        return (block + 1) % self.sparse_every == 0

    @classmethod
    def tiny(cls) -> Self:
        """A byte-level model of 1.05M parameters, for a CPU; a token goes through 0.66M of them."""
        return cls(
            transformer=dataclasses.replace(TransformerConfig.tiny(), mlp_dim=128),
            num_experts=4,
        )

    @classmethod
    def mixtral_8x7b(cls) -> Self:
        """The 46.7B mixture of arXiv:2401.04088; a token goes through 12.9B of them."""
        return cls(
            transformer=TransformerConfig(
                vocab_size=32000,
                d_model=4096,
                num_blocks=32,
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                mlp_dim=14336,
                rope_theta=1e6,
                dtype="bfloat16",
            ),
            num_experts=8,
        )


class Router(nnx.Module):
    """Chooses the experts of every token, in float32.

    Not a linear layer, so that no policy for quantization reaches it: a rounded logit would send a
    token elsewhere.

    Args:
      d_model: width of the input.
      num_experts: experts to choose from.
      top_k: how many are chosen.
      rngs: source of the initial parameters.
    """

    def __init__(self, d_model: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (d_model, num_experts), jnp.float32))
        self.top_k = top_k

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """Experts, weights and balance for ``x`` of shape ``(tokens, d_model)``.

        Returns:
          int32 ``(tokens, top_k)``, the experts of the largest logits, largest first; of equal
          ones the first. float32 ``(tokens, top_k)``, the softmax over these logits, which is the
          softmax over all logits, renormalized. The ``balance`` of all choices, a float32 scalar.
        """
        # float32 stays float32 on accelerators whose default would be TF32 or bfloat16.
        logits = jnp.dot(x.astype(jnp.float32), self.kernel[...], precision=lax.Precision.HIGHEST)
        largest, experts = lax.top_k(logits, self.top_k)
        return experts, jax.nn.softmax(largest), balance(jax.nn.softmax(logits), experts)


def balance(probabilities: Array, experts: Array) -> Array:
    """The load-balancing loss of Switch Transformer (arXiv:2101.03961, equations 4 to 6).

    ``num_experts * sum_i f_i P_i`` with the fraction ``f_i`` of choices that fell on expert ``i``,
    which has no gradient, and the mean probability ``P_i`` of that expert. It is 1 where either is
    uniform, and ``num_experts`` where one expert gets everything. With more than one choice a
    token, the fractions still sum to 1; implementations in which they sum to ``top_k`` have
    ``top_k`` times this loss.

    Args:
      probabilities: ``(tokens, num_experts)``.
      experts: integers ``(tokens, top_k)``, each token's choices.

    Returns:
      A scalar; zero without tokens.
    """
    tokens, num_experts = probabilities.shape
    counts = jnp.bincount(experts.reshape(-1), length=num_experts).astype(probabilities.dtype)
    mean = jnp.sum(probabilities, axis=0) / max(1, tokens)
    return num_experts * jnp.sum(counts / max(1, experts.size) * mean)


class Mixture(nnx.Module):
    """An MLP of many experts, of which each token goes through ``top_k``; no token is dropped.

    ``y = sum_k weight_k * expert_k(x)``. The tokens are sorted by expert, so that each weight takes
    one grouped product.

    Args:
      d_model: width of the residual stream.
      hidden: width between an expert's projections.
      num_experts: number of experts.
      top_k: how many of them a token goes through.
      gated: whether an expert is a SwiGLU, else an MLP with a squared ReLU.
      out_variance: see ``projection``; for the layer that writes to the residual stream.
      dtype: dtype of the activations. Routing is float32 in any case.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        num_experts: int,
        top_k: int,
        gated: bool = True,
        out_variance: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.router = Router(d_model, num_experts, top_k, rngs=rngs)
        experts = functools.partial(Experts, num_experts, dtype=dtype, rngs=rngs)
        init = nnx.initializers.variance_scaling(
            out_variance, "fan_in", "truncated_normal", batch_axis=(0,)
        )
        self.gate_proj = experts(d_model, hidden) if gated else None
        self.up_proj = experts(d_model, hidden)
        self.down_proj = experts(hidden, d_model, kernel_init=init)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """The mixture's output and its load-balancing loss.

        Args:
          x: ``(..., d_model)``.

        Returns:
          Array of ``x``'s shape, and the ``balance`` of the choices, a float32 scalar.
        """
        tokens = x.reshape(-1, x.shape[-1])
        experts, weights, loss = self.router(tokens)
        top_k = experts.shape[1]
        # One row for each choice. A stable sort keeps the order of the tokens in each group.
        chosen = experts.reshape(-1)
        order = jnp.argsort(chosen, stable=True)
        sizes = jnp.bincount(chosen, length=self.up_proj.num_experts)
        rows = _permute(jnp.repeat(tokens, top_k, axis=0), order)
        rows = self.down_proj(self._hidden(rows, sizes), sizes)
        y = _permute(rows, jnp.argsort(order)).reshape(-1, top_k, x.shape[-1])
        y = jnp.sum(y * weights[..., None].astype(y.dtype), axis=1)
        return y.reshape(x.shape), loss

    def _hidden(self, rows: Array, sizes: Array) -> Array:
        if self.gate_proj is None:
            return squared_relu(self.up_proj(rows, sizes))
        return jax.nn.silu(self.gate_proj(rows, sizes)) * self.up_proj(rows, sizes)


def _permute(rows: Array, order: Array) -> Array:
    """``rows[order]``; its gradient need not add up, and is the same on every run."""
    return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")


class SparseBlock(nnx.Module):
    """A transformer's block with a mixture in place of the MLP.

    Args:
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        dense = config.transformer
        self.attention_norm = norm_of(dense)
        self.attention = attention_of(dense, rngs=rngs)
        self.mlp_norm = norm_of(dense)
        self.mlp = Mixture(
            dense.d_model,
            dense.mlp_dim,
            num_experts=config.num_experts,
            top_k=config.top_k,
            gated=dense.mlp == "swiglu",
            out_variance=out_variance(dense),
            dtype=dense.dtype,
            rngs=rngs,
        )

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Maps ``x`` of shape ``(batch, length, d_model)`` to the same shape, and a loss."""
        x = x + self.attention(self.attention_norm(x))
        y, loss = self.mlp(self.mlp_norm(x))
        return x + y, loss


class MoE(nnx.Module):
    """A transformer with mixtures of experts, as in Mixtral (arXiv:2401.04088).

    Parameters that weight decay should reach are named ``kernel`` or ``embedding``, and no others
    are.

    Args:
      config: the model's shape.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        dense = config.transformer
        self.config = config
        self.embed = embedding_of(dense, rngs=rngs)
        self.blocks = nnx.List(
            [
                SparseBlock(config, rngs=rngs) if config.is_sparse(i) else Block(dense, rngs=rngs)
                for i in range(dense.num_blocks)
            ]
        )
        self.norm = norm_of(dense)
        self.head = head_of(dense, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Logits of the next token at every position, as those of ``Transformer``."""
        return self.with_balance(tokens)[0]

    def with_balance(self, tokens: Array) -> tuple[Array, Array]:
        """Logits, and what to add to the training loss, times 0.01 or so, for an even load.

        Args:
          tokens: integer ids, ``(batch, length)``.

        Returns:
          float32 array ``(batch, length, vocab_size)`` and the mean of the mixtures' ``balance``,
          a float32 scalar: 1 for an even load.

        Raises:
          ValueError: ``tokens`` is not a two-dimensional integer array.
        """
        check_tokens(tokens)
        x, losses = self.embed(tokens), []
        for block in self.blocks:
            if isinstance(block, SparseBlock):
                x, loss = block(x)
                losses.append(loss)
            else:
                x = block(x)
        return logits_of(self.norm(x), self.head, self.embed), jnp.mean(jnp.stack(losses))
