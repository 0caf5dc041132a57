"""The preset recipes, each with its source."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from fp4jax.formats import (
    FP8_BLOCK,
    FP8_TENSOR,
    FP8_TENSOR_E5M2,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
)
from fp4jax.hadamard import Hadamard
from fp4jax.quantizer import Quantizer
from fp4jax.recipe import Cast, Gemm, Recipe
from fp4jax.rounding import Rounding, Stochastic
from fp4jax.scaling import AmaxScale, PowerOfTwo, ScaleRule


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


def fp8_tensor() -> Recipe:
    """FP8 with one scale a tensor, from its current amax: E4M3, and E5M2 for gradients.

    The oldest of the FP8 recipes (arXiv 2209.05433, section 3, with current instead of delayed
    scaling).
    """
    forward, gradient = Quantizer(FP8_TENSOR), Quantizer(FP8_TENSOR_E5M2)
    backward = Gemm(gradient, forward)
    return Recipe(
        "fp8_tensor",
        fprop=Gemm(forward, forward),
        dgrad=backward,
        wgrad=Gemm(forward, gradient),
    )


def mxfp8() -> Recipe:
    """MXFP8: E4M3 in 1x32 blocks everywhere, power-of-two scales that let nothing clip.

    As in arXiv 2506.08027: E4M3 for gradients too, and the scale's exponent rounded up.
    """
    operand = Quantizer(MXFP8_E4M3, scale_rule=PowerOfTwo("rceil"))
    gemm = Gemm(operand, operand)
    return Recipe("mxfp8", fprop=gemm, dgrad=gemm, wgrad=gemm)


def mxfp4(
    *,
    rounding: Rounding = Stochastic(),
    hadamard: Hadamard | None = Hadamard(16),
    square_weights: bool = True,
    scale_rule: PowerOfTwo = PowerOfTwo("floor"),
) -> Recipe:
    """MXFP4 with the method of `nvfp4`: the format's blocks of 32 and OCP's power-of-two scales.

    The paper compares the two formats under one method (arXiv 2509.25149, section 5) and does not
    say how large MXFP4's square weight blocks are; here they are the format's 32.

    Args:
      rounding: of gradients.
      hadamard: of both Wgrad operands, or None.
      square_weights: weights in 32x32 blocks, quantized once; else in 1x32 for each product.
      scale_rule: of all operands.
    """
    plain = Quantizer(MXFP4, scale_rule=scale_rule)
    gradient = dataclasses.replace(plain, rounding=rounding)
    return _four_bit("mxfp4", plain, gradient, hadamard, square_weights)


def nvfp4(
    *,
    rounding: Rounding = Stochastic(),
    hadamard: Hadamard | None = Hadamard(16),
    square_weights: bool = True,
    scale_rule: ScaleRule = AmaxScale(),
    gradient_scale_rule: ScaleRule = AmaxScale(),
) -> Recipe:
    """The recipe of arXiv 2509.25149, section 4.

    Weights in 16x16 blocks, so that Fprop and Dgrad see the same numbers; activations and
    gradients in 1x16; gradients rounded stochastically; both Wgrad operands Hadamard-transformed.

    Args:
      rounding: of gradients; ``Nearest()`` is one of the paper's ablations.
      hadamard: of both Wgrad operands, or None.
      square_weights: weights in 16x16 blocks, quantized once; else in 1x16 for each product.
      scale_rule: of weights and activations, for example `FourOverSix`.
      gradient_scale_rule: of gradients; ``AmaxScale(headroom=17 / 16)`` keeps stochastic rounding
        from clipping.
    """
    plain = Quantizer(NVFP4, scale_rule=scale_rule)
    gradient = Quantizer(NVFP4, rounding=rounding, scale_rule=gradient_scale_rule)
    return _four_bit("nvfp4", plain, gradient, hadamard, square_weights)


def _four_bit(
    name: str,
    plain: Quantizer,
    gradient: Quantizer,
    hadamard: Hadamard | None,
    square_weights: bool,
) -> Recipe:
    block = plain.format.block
    assert block is not None
    weight = dataclasses.replace(plain, tile=(block, block)) if square_weights else plain
    return Recipe(
        name,
        fprop=Gemm(plain, weight),
        dgrad=Gemm(gradient, weight),
        wgrad=Gemm(plain, gradient).with_hadamard(hadamard),
    )
