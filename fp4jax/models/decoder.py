"""What every decoder does with tokens: embedding, blocks, a last norm and a head."""

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.models.checks import check_tokens
from fp4jax.models.layers import RMSNorm

Array = jax.Array


def logits_of(x: Array, head: nnx.Linear | None, embed: nnx.Embed) -> Array:
    """float32 logits of the normalized stream, by the head or, without one, the embedding."""
    return (embed.attend(x) if head is None else head(x)).astype(jnp.float32)


class Decoder(nnx.Module):
    """Makes logits of tokens, from the parts that a subclass's constructor sets."""

    embed: nnx.Embed
    blocks: nnx.List
    norm: RMSNorm
    head: nnx.Linear | None

    def __call__(self, tokens: Array) -> Array:
        """Logits of the next token at every position.

        Args:
          tokens: integer ids, ``(batch, length)``.

        Returns:
          float32 array ``(batch, length, vocab_size)``. Position ``t`` depends on
          ``tokens[:, :t + 1]`` only.

        Raises:
          ValueError: ``tokens`` is not a two-dimensional integer array.
        """
        check_tokens(tokens)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return logits_of(self.norm(x), self.head, self.embed)
