"""What the backward pass keeps: packed operands, by JAX's own accounts of it."""

import contextlib
import io
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import print_saved_residuals

import fp4jax as fp4

MATRIX = (((1,), (0,)), ((), ()))
TOKENS, WIDTH = 4096, 128
BF16, FP8, NVFP4 = fp4.recipes.bf16(), fp4.recipes.fp8_block(), fp4.recipes.nvfp4()


def layer(x, w, recipe):
    return fp4.dot_general(
        x,
        w,
        MATRIX,
        recipe=recipe,
        key=jax.random.key(0),
        preferred_element_type=jnp.bfloat16,
    )


def temporaries(recipe, layers):
    """Bytes that the compiled gradient of a scanned stack of linear layers works with.

    Besides arguments and results: what one layer needs while it runs, and what all layers keep.
    """

    def loss(weights, x):
        y, _ = lax.scan(lambda x, w: (layer(x, w, recipe), None), x, weights)
        return (y.astype(jnp.float32) ** 2).sum()

    weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def kept_per_layer(recipe):
    return (temporaries(recipe, 12) - temporaries(recipe, 4)) / 8


def test_a_stack_keeps_3_4_times_less_than_bf16_and_1_75_times_less_than_fp8():
    bf16, fp8, nvfp4 = (kept_per_layer(recipe) for recipe in (BF16, FP8, NVFP4))
    # The activation at 16, 8 + 32/128 and 4 + 8/16 bits; the quantized weight as well; a little
    # for tensor scales and random words. XLA before jax 0.11 stacks bfloat16 in float32 on CPUs.
    activation, weight = TOKENS * WIDTH / 8, WIDTH * WIDTH / 8
    assert bf16 >= 16 * activation
    assert fp8 == pytest.approx((8 + 32 / 128) * activation + 8 * weight, rel=0.01)
    assert nvfp4 == pytest.approx((4 + 8 / 16) * activation + (4 + 8 / 256) * weight, rel=0.01)
    assert 16 * activation / nvfp4 >= 3.4
    assert fp8 / nvfp4 >= 1.75


def saved(function, *arguments):
    """What print_saved_residuals lists: dtype, shape and origin of each array."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print_saved_residuals(function, *arguments)
    lines = re.findall(r"^(\w+)\[([\d,]*)\] (.*)$", text.getvalue(), re.MULTILINE)
    assert len(lines) == len(text.getvalue().splitlines())
    return [(dtype, tuple(map(int, filter(None, s.split(",")))), how) for dtype, s, how in lines]


def stack(policy=None):
    def f(weights, x):
        one = jax.checkpoint(layer, policy=policy, static_argnums=2) if policy else layer
        for w in weights:
            x = one(x, w, NVFP4)
        return (x.astype(jnp.float32) ** 2).sum()

    weights = [jnp.ones((WIDTH, WIDTH))] * 2
    return f, weights, jnp.ones((TOKENS, WIDTH), jnp.bfloat16)


def test_nothing_of_a_layer_is_kept_in_bf16():
    packed = [
        ("u8", (WIDTH, TOKENS // 2)),
        ("u8", (WIDTH, TOKENS // 16)),
        ("f32", ()),
        ("u8", (WIDTH, WIDTH // 2)),
        ("u8", (WIDTH // 16, WIDTH // 16)),
        ("f32", ()),
    ]
    kept = saved(*stack())
    named = [(dtype, shape) for dtype, shape, how in kept if "fp4jax.residual" in how]
    assert named == packed * 2
    # All else is random words and what the loss keeps of its own input.
    rest = [(dtype, shape) for dtype, shape, how in kept if "fp4jax.residual" not in how]
    assert {r for r in rest if r[0] != "u32"} <= {("f32", (TOKENS, WIDTH)), ("f32", ())}


def test_a_checkpoint_policy_keeps_the_packed_operands_by_name():
    """The packed operands are saved, so that the forward products need not run again."""
    policy = jax.checkpoint_policies.save_only_these_names(fp4.RESIDUAL)
    kept = saved(*stack(policy))
    assert sum(dtype == "u8" and fp4.RESIDUAL in how for dtype, _, how in kept) == 8
    f, weights, x = stack(policy)
    g, *_ = stack()
    for a, b in zip(jax.grad(f)(weights, x), jax.grad(g)(weights, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    nothing = saved(*stack(jax.checkpoint_policies.nothing_saveable))
    assert not any(dtype == "u8" for dtype, _, _ in nothing)


@pytest.mark.parametrize(
    ("square", "expected"), [(True, ("u8", 32 * 24)), (False, ("f32", 32 * 48))]
)
def test_a_weight_that_is_quantized_once_serves_fprop_and_dgrad(square, expected):
    """In 16x16 its codes are kept; in 1x16 for each product the weight itself is."""
    recipe = fp4.recipes.nvfp4(square_weights=square)
    x, w = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((32, 48))
    kept = saved(lambda x, w: layer(x, w, recipe), x, w)
    sizes = {(dtype, math.prod(shape)) for dtype, shape, _ in kept}
    activation = {("u8", 32 * 32), ("u8", 32 * 4), ("f32", 1), ("u32", 24)}
    scales = {("u8", 2 * 3)} if square else set()
    assert sizes == activation | scales | {expected}
