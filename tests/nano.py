"""Models as small as they get, to train by programs."""

import dataclasses

from experiments import zoo
from fp4jax.models import HybridConfig, MoEConfig, TransformerConfig, ViTConfig

TRANSFORMER = TransformerConfig(
    vocab_size=256,
    d_model=32,
    num_blocks=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_dim=32,
)
HYBRID = HybridConfig(
    vocab_size=256,
    d_model=32,
    pattern="M--",
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_dim=32,
    mamba_heads=4,
    mamba_head_dim=16,
    mamba_groups=2,
    mamba_state=16,
    chunk=16,
)
PRESETS = {  # of all, the last block stays in BF16
    "nano": zoo.Preset(HYBRID),
    "nano_moe": zoo.Preset(MoEConfig(transformer=TRANSFORMER, num_experts=3)),
    "nano_vit": zoo.Preset(
        dataclasses.replace(ViTConfig.tiny(), num_blocks=2, d_model=32, num_heads=2, mlp_dim=32),
        data=("digits",),
    ),
}
# One quantized block, whose kernels' shards on four devices are whole blocks of codes.
SHARDED_VIT = zoo.Preset(
    dataclasses.replace(ViTConfig.tiny(), num_blocks=1, num_heads=1, mlp_dim=64),
    keep_last=0,
    data=("digits",),
)
