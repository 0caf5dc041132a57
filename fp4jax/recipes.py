"""The preset recipes, each with its source."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from fp4jax.formats import FP8_BLOCK, NVFP4
from fp4jax.hadamard import Hadamard
from fp4jax.quantizer import Quantizer
from fp4jax.recipe import Cast, Gemm, Recipe
from fp4jax.rounding import Stochastic


def bf16() -> Recipe:
    """All operands in bfloat16, the baseline."""
    operand = Cast(np.dtype(jnp.bfloat16))
    gemm = Gemm(operand, operand)
    return Recipe("bf16", fprop=gemm, dgrad=gemm, wgrad=gemm)


def fp8_block() -> Recipe:
    """E4M3 with float32 scales: weights in 128x128, activations and gradients in 1x128 blocks.

    The FP8 baseline of arXiv 2509.25149.
    """
    weight, token = Quantizer(FP8_BLOCK, tile=(128, 128)), Quantizer(FP8_BLOCK)
    return Recipe(
        "fp8_block",
        fprop=Gemm(token, weight),
        dgrad=Gemm(token, weight),
        wgrad=Gemm(token, token),
    )


def nvfp4() -> Recipe:
    """The recipe of arXiv 2509.25149, section 4.

    Weights in 16x16 blocks, so that Fprop and Dgrad see the same numbers; activations and
    gradients in 1x16; gradients rounded stochastically; both Wgrad operands Hadamard-transformed.
    """
    rht = Hadamard(16)
    weight, activation = Quantizer(NVFP4, tile=(16, 16)), Quantizer(NVFP4)
    gradient = Quantizer(NVFP4, rounding=Stochastic())
    return Recipe(
        "nvfp4",
        fprop=Gemm(activation, weight),
        dgrad=Gemm(gradient, weight),
        wgrad=Gemm(
            dataclasses.replace(activation, hadamard=rht),
            dataclasses.replace(gradient, hadamard=rht),
        ),
    )
