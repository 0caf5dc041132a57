"""Makes tests/data/{llama,arcee,mixtral}.npz: tiny language models run by transformers.

Three models of Hugging Face transformers, on a CPU, in float32, with random parameters:

- llama: LlamaForCausalLM. Rotary positions, grouped queries, SwiGLU, a head of its own.
- arcee: ArceeForCausalLM. The same with a squared-ReLU MLP, and here a head tied to the embedding.
- mixtral: MixtralForCausalLM. A mixture of experts in every block, two of four for each token.

Keys of a file: `ids` [2, 23]; `logits`; `loss`, the mean cross-entropy of the next token, for
mixtral plus BALANCE times the sum of `balance`; `balance` [blocks], load_balancing_loss_func of
each block by itself, which is 2, the experts of a token, for an even load; `param/NAME` and
`grad/NAME` with torch's names and layouts; `source`, the versions.

The vectors in the repository are from transformers 5.24.0 and torch 2.13.0. No test needs either.
To make them again, in an environment of its own:

    pip install torch==2.13.0 transformers==5.24.0
    python tests/vectors/make_transformers.py
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

DATA = Path(__file__).parents[1] / "data"
BALANCE = 0.05
SHAPE = {
    "vocab_size": 53,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "attn_implementation": "eager",
}


def randomize(model, generator):
    """Larger than usual, so that attention and routing are far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


def save(name, model, ids):
    logits, balance = model(ids).logits, None
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if name == "mixtral":
        routers = model(ids, output_router_logits=True).router_logits
        config = model.config
        balance = torch.stack(
            [
                load_balancing_loss_func((r,), config.num_local_experts, config.num_experts_per_tok)
                for r in routers
            ]
        )
        loss = loss + BALANCE * balance.sum()
        top = torch.stack(list(routers)).sort(dim=-1, descending=True).values
        assert (top[..., 1] - top[..., 2]).min() > 1e-3, "a choice of experts is too close"
    loss.backward()
    arrays = {
        "source": np.array(f"transformers {transformers.__version__}, torch {torch.__version__}"),
        "ids": ids.numpy().astype(np.int32),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
    }
    if balance is not None:
        arrays["balance"] = balance.detach().numpy()
    for key, parameter in model.named_parameters():
        arrays[f"param/{key}"] = parameter.detach().numpy()
        arrays[f"grad/{key}"] = parameter.grad.numpy()
    path = DATA / f"{name}.npz"
    np.savez_compressed(path, **arrays)
    print(path.name, path.stat().st_size, arrays["source"], loss.item())
    for key, parameter in model.named_parameters():
        print("  ", key, tuple(parameter.shape), f"{parameter.grad.norm():.3g}")


def main():
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(SHAPE["vocab_size"], (2, 23), generator=generator)
    models = {
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SHAPE, intermediate_size=48)
        ),
        "arcee": transformers.ArceeForCausalLM(
            transformers.ArceeConfig(**SHAPE, intermediate_size=48, tie_word_embeddings=True)
        ),
        "mixtral": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SHAPE,
                intermediate_size=16,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=None,
            )
        ),
    }
    for name, model in models.items():
        randomize(model, generator)
        save(name, model.float(), ids)


if __name__ == "__main__":
    main()
