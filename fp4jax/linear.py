"""The linear layer ``y = x w`` whose three products, Fprop, Dgrad and Wgrad, run by a recipe.

The backward pass keeps the Wgrad operand of the activation as the recipe has it, packed where it
is quantized, and the weight: packed if Fprop and Dgrad share it, else as it came.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp4jax.encode import encode, rotate
from fp4jax.gather import Gather
from fp4jax.kernels import passes
from fp4jax.kernels.passes import Chosen
from fp4jax.kernels.registry import Kernels
from fp4jax.products import Dense, Layout
from fp4jax.qtensor import Operand, QTensor
from fp4jax.quantizer import Quantizer
from fp4jax.recipe import Cast, OperandRule, Recipe
from fp4jax.refuse import refuse_derivative

# What `jax.checkpoint` policies know the kept operands by.
RESIDUAL = "fp4jax.residual"

# The six operands' random streams, in the order of Recipe's fields.
_FPROP_LHS, _FPROP_RHS, _DGRAD_LHS, _DGRAD_RHS, _WGRAD_LHS, _WGRAD_RHS = range(6)
STREAMS = 6


class Spec(NamedTuple):
    """What is static about a layer.

    Attributes:
      recipe: what becomes of each operand.
      out_dtype: of the result.
      lhs_dtype: of the activation and its gradient.
      rhs_dtype: of the weight and its gradient.
      gather: of the weight [..., K, N], if it lies in shards that travel quantized.
      kernels: what runs it.
    """

    recipe: Recipe
    out_dtype: np.dtype[Any]
    lhs_dtype: np.dtype[Any]
    rhs_dtype: np.dtype[Any]
    gather: Gather | None = None
    kernels: Kernels = Kernels()

    def by(self, x: Any, w: Any, dy: Any, layout: Layout) -> Chosen | None:
        """What runs the layer, where it is not plain JAX; raises if that cannot be what is asked.

        The arrays may be anything with their dtype and number of axes.
        """
        reason = None
        if not isinstance(layout, Dense):
            reason = "its rows belong to groups"
        elif self.gather is not None:
            reason = "its weight travels quantized"
        elif x.ndim != 2 or w.ndim != 2:
            reason = "it has batch axes"
        return passes.chosen(self.kernels, self.recipe, (x, w, dy), reason)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(spec: Spec, x: Array, w: Array, words: Array | None, layout: Layout) -> Array:
    """The product, differentiable once.

    Args:
      spec: recipe and dtypes.
      x: [..., M, K], the activation.
      w: [..., K, N], the weight.
      words: uint32[STREAMS, 2, 2] from `key_words`; None if no operand that is computed draws.
      layout: which rows meet which weights.

    Returns:
      [..., M, N] in ``spec.out_dtype``. Cotangents are in the dtypes of the arguments.

    Raises:
      ValueError: if the recipe draws random bits in what is computed, and ``words`` is None.
      NotImplementedError: for second derivatives.
    """
    return _forward(spec, x, w, words, layout)[0]


_SECOND = "fp4jax's products have no second derivative: their backward pass is quantized"


def _linear_fwd(
    spec: Spec, x: Array, w: Array, words: Array | None, layout: Layout
) -> tuple[Array, Any]:
    y, (x_kept, w_kept) = _forward(spec, x, w, words, layout)
    # Named out here: a policy of jax.checkpoint does not look into a guarded function. A weight
    # that is kept as it came is at hand anyway.
    x_kept = _named(x_kept)
    if isinstance(w_kept, QTensor):
        w_kept = _named(w_kept)
    return y, ((x_kept, w_kept), words, layout)


def _named(kept: QTensor | Array) -> Any:
    if isinstance(kept, QTensor) and kept.block_scales is not None:
        # As bytes where they are: XLA on CPUs widens the float8 arrays that a scan stacks.
        scales = kept.block_scales
        if scales.dtype.itemsize == 1:
            kept = dataclasses.replace(
                kept, block_scales=lax.bitcast_convert_type(scales, np.uint8)
            )
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL), kept)


@refuse_derivative(_SECOND, 1)
@functools.partial(jax.jit, static_argnums=0)
def _forward(
    spec: Spec, x: Array, w: Array, words: Array | None, layout: Layout
) -> tuple[Array, tuple[QTensor | Array, QTensor | Array]]:
    def plain(x: Array, w: Array, words: Array | None) -> Any:
        return _plain_forward(spec, x, w, words, layout)

    dy = jax.ShapeDtypeStruct((x.shape[0], w.shape[-1]), spec.out_dtype)
    by = spec.by(x, w, dy, layout)
    if by is None:
        return plain(x, w, words)

    def kernels(x: Array, w: Array, words: Array | None) -> Any:
        recipe = spec.recipe
        streams = _streams(recipe, words)
        shared = _weight_is_shared(recipe)
        return passes.forward(by, recipe, x, w, streams, spec.out_dtype, shared)

    if by.forced:
        return kernels(x, w, words)
    return lax.platform_dependent(x, w, words, cuda=kernels, default=plain)


def _plain_forward(
    spec: Spec, x: Array, w: Array, words: Array | None, layout: Layout
) -> tuple[Array, tuple[QTensor | Array, QTensor | Array]]:
    fprop, wgrad, gather = spec.recipe.fprop, spec.recipe.wgrad, spec.gather
    as_it_came = w  # the parameter itself, of which nothing has to be kept
    if gather is not None:
        gather.check(w.shape, (*[1] * (w.ndim - 2), *spec.recipe.weight_block))
        w = gather.lay(w)
    x_operand = _operand(x, fprop.lhs, -1, words, _FPROP_LHS, layout.row_groups)
    if _weight_is_shared(spec.recipe):
        # One quantization, blocks along N; square tiles make it serve K as well.
        assert isinstance(fprop.rhs, Quantizer)
        encoded = encode(w, fprop.rhs, -1, None, layout.weight_groups)
        q = encoded.pack(w.shape[-1], -1, spec.rhs_dtype)
        w_operand = encoded.operand() if gather is None else gather.travel_packed(q).operand()
        w_kept: QTensor | Array = q
        contract = -2
    else:
        w_operand, contract = _weight(spec, w, fprop.rhs, -2, words, _FPROP_RHS, layout)
        w_kept = as_it_came
    y = layout.rows(x_operand, w_operand, contract)
    x_kept = _keep(x, wgrad.lhs, words, layout.row_groups)
    return y.astype(spec.out_dtype), (x_kept, w_kept)


@refuse_derivative(_SECOND, 1)
@functools.partial(jax.jit, static_argnums=0)
def _backward(
    spec: Spec,
    kept: tuple[QTensor | Array, QTensor | Array],
    words: Array | None,
    layout: Layout,
    dy: Array,
) -> tuple[Array, Array]:
    def plain(kept: Any, words: Array | None, dy: Array) -> tuple[Array, Array]:
        return _plain_backward(spec, kept, words, layout, dy)

    x, w = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in kept)
    by = spec.by(x, w, dy, layout)
    if by is None:
        return plain(kept, words, dy)

    def kernels(kept: Any, words: Array | None, dy: Array) -> tuple[Array, Array]:
        streams = _streams(spec.recipe, words)
        dtypes = spec.lhs_dtype, spec.rhs_dtype
        return passes.backward(by, spec.recipe, kept, dy, streams, dtypes)

    if by.forced:
        return kernels(kept, words, dy)
    return lax.platform_dependent(kept, words, dy, cuda=kernels, default=plain)


def _plain_backward(
    spec: Spec,
    kept: tuple[QTensor | Array, QTensor | Array],
    words: Array | None,
    layout: Layout,
    dy: Array,
) -> tuple[Array, Array]:
    x_kept, w_kept = kept
    dgrad, wgrad = spec.recipe.dgrad, spec.recipe.wgrad
    gather = spec.gather
    if isinstance(w_kept, QTensor):
        w_operand = (w_kept if gather is None else gather.travel_packed(w_kept)).operand()
    else:
        w = w_kept if gather is None else gather.lay(w_kept)
        w_operand, _ = _weight(spec, w, dgrad.rhs, -1, words, _DGRAD_RHS, layout)
    dy_operand = _operand(dy, dgrad.lhs, -1, words, _DGRAD_LHS, layout.row_groups)
    dx = layout.rows(dy_operand, w_operand, -1)

    dy_operand = _operand(dy, wgrad.rhs, -2, words, _WGRAD_RHS, layout.row_groups)
    if isinstance(x_kept, QTensor):
        x_operand, contract = x_kept.operand(), -1
    else:
        x_operand, contract = Operand(x_kept, None), -2
    parts = np.float32 if gather is None else gather.gradient_dtype
    dw = layout.weights(x_operand, dy_operand, contract, -2, parts)
    if gather is not None:
        dw = gather.reduce(dw)
    return dx.astype(spec.lhs_dtype), dw.astype(spec.rhs_dtype)


def _linear_bwd(spec: Spec, kept: Any, dy: Array) -> tuple[Array, Array, Any, Any]:
    operands, words, layout = kept
    none = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), (words, layout))
    return *_backward(spec, operands, words, layout, dy), *none


linear.defvjp(_linear_fwd, _linear_bwd)


def _weight_is_shared(recipe: Recipe) -> bool:
    """Whether Fprop and Dgrad see the same quantized weight."""
    fprop, dgrad = (
        dataclasses.replace(gemm.rhs, watch=None) for gemm in (recipe.fprop, recipe.dgrad)
    )
    return isinstance(fprop, Quantizer) and fprop == dgrad and fprop.square


def _operand(
    x: Array, rule: OperandRule, axis: int, words: Array | None, stream: int, groups: Array | None
) -> Operand:
    if isinstance(rule, Cast):
        return Operand(_cast(x, rule, axis), None)
    return encode(x, rule, axis, _stream(rule, words, stream), groups).operand()


def _weight(
    spec: Spec,
    w: Array,
    rule: OperandRule,
    axis: int,
    words: Array | None,
    stream: int,
    layout: Layout,
) -> tuple[Operand, int]:
    """The weight's operand with blocks along ``axis``, and the axis that it is contracted over."""
    gather, groups = spec.gather, layout.weight_groups
    if gather is None:
        return _operand(w, rule, axis, words, stream, groups), axis
    if isinstance(rule, Cast):
        return Operand(gather.travel(_cast(w, rule, axis)), None), axis
    encoded = encode(w, rule, axis, _stream(rule, words, stream), groups)
    q = gather.travel_packed(encoded.pack(w.shape[axis], axis, spec.rhs_dtype))
    return q.operand(), -1


def _keep(
    x: Array, rule: OperandRule, words: Array | None, groups: Array | None
) -> QTensor | Array:
    """The Wgrad operand of the activation, blocks along the tokens, as the backward keeps it."""
    if isinstance(rule, Cast):
        return _cast(x, rule, -2)
    encoded = encode(x, rule, -2, _stream(rule, words, _WGRAD_LHS), groups)
    return encoded.pack(x.shape[-2], -2, np.dtype(x.dtype))


def _cast(x: Array, rule: Cast, axis: int) -> Array:
    if rule.watch is not None:
        rule.watch.look(x)
    if rule.hadamard is not None:
        x = rotate(x, rule.hadamard, axis)
    return x.astype(rule.dtype)


def _streams(recipe: Recipe, words: Array | None) -> tuple[Array | None, ...]:
    """Each operand's `_stream`, in the order of the recipe's fields."""
    rules = [rule for gemm in recipe.gemms for rule in (gemm.lhs, gemm.rhs)]
    return tuple(
        _stream(rule, words, i) if isinstance(rule, Quantizer) else None
        for i, rule in enumerate(rules)
    )


def _stream(rule: Quantizer, words: Array | None, stream: int) -> Array | None:
    if not rule.needs_key:
        return None
    if words is None:
        raise ValueError(
            "key is missing: the recipe rounds stochastically in this pass "
            "(with Flax Linen: apply(..., rngs={'quantize': key}))"
        )
    return words[stream]
