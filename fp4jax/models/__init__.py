"""Models to train, in plain Flax NNX. They know nothing of quantization."""

from fp4jax.experts import Experts
from fp4jax.models.hybrid import Hybrid, HybridConfig
from fp4jax.models.mamba2 import Mamba2, ssd
from fp4jax.models.moe import Mixture, MoE, MoEConfig
from fp4jax.models.transformer import Transformer, TransformerConfig
from fp4jax.models.vit import ViT, ViTConfig

__all__ = [
    "Experts",
    "Hybrid",
    "HybridConfig",
    "Mamba2",
    "Mixture",
    "MoE",
    "MoEConfig",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "ssd",
]
