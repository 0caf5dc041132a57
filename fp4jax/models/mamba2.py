"""Mamba-2: the state-space scan as chunked matrix products, and the mixer around it.

Source: "Transformers are SSMs" (arXiv:2405.21060), section 6 for the chunked scan.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from fp4jax.models.layers import RMSNorm, projection

Array = jax.Array
# float32 stays float32 on accelerators whose default would be TF32 or bfloat16.
_HIGHEST = lax.Precision.HIGHEST
_einsum = functools.partial(jnp.einsum, precision=_HIGHEST)


def segment_sums(x: Array) -> Array:
    """Sums over all segments of the last axis.

    ``out[..., i, j] = x[..., j + 1] + ... + x[..., i]`` for ``j <= i`` (zero on the diagonal),
    and minus infinity for ``j > i``, so that its exponential is a causal matrix of decays. Each
    segment is summed by itself: the difference of two cumulative sums would lose the digits
    that they share.

    Args:
      x: float32 array of shape ``(..., n)``. Meant for ``n`` up to a few hundred: a constant of
        ``n**3`` elements is made.

    Returns:
      Array of shape ``(..., n, n)``, target ``i`` before source ``j``.
    """
    n = x.shape[-1]
    # One product with a constant of zeros and ones. Cumulative sums are slower, on a CPU too, and
    # need an operand of the result's size.
    k, i, j = jnp.ogrid[:n, :n, :n]
    member = ((j < k) & (k <= i)).reshape(n, n * n).astype(x.dtype)
    sums = jnp.matmul(x, member, precision=_HIGHEST).reshape(*x.shape, n)
    causal = jnp.tri(n, dtype=bool).reshape((1,) * (x.ndim - 1) + (n, n))
    return jnp.where(causal, sums, -jnp.inf)


def ssd(x: Array, dt: Array, a: Array, b: Array, c: Array, *, chunk: int) -> Array:
    """The selective state-space scan, in chunks that are matrix products.

    For every head, with a state ``h`` of shape ``(head_dim, state)`` that starts at zero::

        h_t = exp(dt_t * a) * h_{t-1} + dt_t * x_t b_t^T
        y_t = h_t c_t

    Head ``i`` reads group ``i // (heads // groups)`` of ``b`` and ``c``. Any length works: the
    last chunk is padded with steps of size zero, which leave the state as it is.

    Args:
      x: float32 input, ``(batch, length, heads, head_dim)``.
      dt: float32 step sizes, not negative, ``(batch, length, heads)``.
      a: float32 decay rates, not positive, ``(heads,)``.
      b: float32 input map, ``(batch, length, groups, state)``.
      c: float32 output map, ``(batch, length, groups, state)``.
      chunk: number of steps that one matrix product covers. Affects speed and memory (the
        decays take ``length * chunk * heads`` elements a sequence), not the result.

    Returns:
      ``y``, float32, of ``x``'s shape.

    Raises:
      ValueError: ``groups`` does not divide ``heads``, or ``chunk`` is below one.
    """
    batch, length, heads, head_dim = x.shape
    groups, state = b.shape[-2:]
    if heads % groups:
        raise ValueError(f"heads must be a multiple of groups={groups}; got x.shape={x.shape}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")
    chunk = min(chunk, max(1, length))
    chunks = -(-length // chunk)

    # Axes: b batch, z chunk, g group, r head within the group, p head_dim, n state; i and j are
    # the target and the source step within a chunk.
    def split(t: Array, *tail: int) -> Array:
        padding = [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (t.ndim - 2)
        return jnp.pad(t, padding).reshape(batch, chunks, chunk, *tail)

    by_head = (groups, heads // groups)
    x = split(x * dt[..., None], *by_head, head_dim)  # b z j g r p
    log_decay = jnp.moveaxis(split(dt * a.reshape(1, 1, heads), *by_head), 2, -1)  # b z g r j
    b = split(b, groups, state)
    c = split(c, groups, state)

    # Within a chunk every step reads the steps up to it, like attention with decay.
    sums = segment_sums(log_decay)
    decay = jnp.exp(sums)  # b z g r i j
    scores = _einsum("bzign,bzjgn->bzgij", c, b)
    y = _einsum("bzgrij,bzjgrp->bzigrp", scores[:, :, :, None] * decay, x)

    # What a chunk adds to the state by its end, then the state at the start of each chunk.
    to_end = jnp.moveaxis(decay[..., -1, :], -1, 2)  # b z j g r
    added = _einsum("bzjgn,bzjgrp->bzgnrp", b, x * to_end[..., None])
    kept = jnp.exp(jnp.sum(log_decay, axis=-1))[:, :, :, None, :, None]
    _, ends = lax.associative_scan(_then, (kept, added), axis=1)
    starts = jnp.pad(ends[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * 4)

    from_start = jnp.moveaxis(jnp.exp(sums[..., 0] + log_decay[..., :1]), -1, 2)  # b z i g r
    y = y + _einsum("bzign,bzgnrp->bzigrp", c, starts) * from_start[..., None]
    return y.reshape(batch, chunks * chunk, heads, head_dim)[:, :length]


def _then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Composes two maps ``state -> kept * state + added``, the left one applied first."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def causal_conv(x: Array, weight: Array, bias: Array) -> Array:
    """Depthwise causal convolution over time.

    ``y[:, t] = bias + sum_k weight[k] * x[:, t - (width - 1) + k]``, with zeros before the
    start. A sum of shifted products: on a CPU tens of times faster than a grouped convolution.

    Args:
      x: ``(batch, length, channels)``.
      weight: ``(width, channels)``; the last row multiplies the current step.
      bias: ``(channels,)``.

    Returns:
      Array of ``x``'s shape.
    """
    width, channels = weight.shape
    length = x.shape[1]
    padded = jnp.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
    y = bias.reshape(1, 1, channels)
    for k in range(width):
        y = y + padded[:, k : k + length] * weight[k].reshape(1, 1, channels)
    return y


class Mamba2(nnx.Module):
    """The Mamba-2 mixer: in_proj, causal convolution, scan, gated group norm, out_proj.

    ``in_proj`` yields, in this order, the gate ``z`` and the input ``x`` (``heads * head_dim``
    each), ``b`` and ``c`` (``groups * state`` each) and ``dt`` (``heads``). Everything between
    the two projections is float32 whatever ``dtype`` is.

    Args:
      d_model: width of the residual stream.
      heads: number of heads; a multiple of ``groups``.
      head_dim: width of one head.
      groups: number of groups of heads that share ``b`` and ``c``, and of the norm.
      state: size of the state of one channel.
      conv_width: number of steps that the convolution sees.
      chunk: see ``ssd``.
      dt_min: the step size is clamped to at least this.
      norm_eps: epsilon of the gated norm.
      out_variance: see ``projection``; for the layer that writes to the residual stream.
      dtype: dtype of the activations outside the scan.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state: int,
        conv_width: int = 4,
        chunk: int = 128,
        dt_min: float = 0.0,
        norm_eps: float = 1e-5,
        out_variance: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.heads, self.head_dim, self.groups, self.state = heads, head_dim, groups, state
        self.chunk, self.dt_min = chunk, dt_min
        inner = heads * head_dim
        channels = inner + 2 * groups * state

        self.in_proj = projection(d_model, inner + channels + heads, dtype=dtype, rngs=rngs)
        bound = conv_width**-0.5
        self.conv_weight = nnx.Param(
            jax.random.uniform(rngs.params(), (conv_width, channels), minval=-bound, maxval=bound)
        )
        self.conv_bias = nnx.Param(jnp.zeros((channels,), jnp.float32))
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0))
        )
        log_dt = jax.random.uniform(
            rngs.params(), (heads,), minval=jnp.log(1e-3), maxval=jnp.log(0.1)
        )
        dt = jnp.exp(log_dt)
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))  # softplus of this is dt
        self.D = nnx.Param(jnp.ones((heads,), jnp.float32))
        self.norm = RMSNorm(inner, groups=groups, epsilon=norm_eps, dtype=dtype)
        self.out_proj = projection(inner, d_model, variance=out_variance, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` of shape ``(batch, length, d_model)`` to the same shape."""
        inner, shared = self.heads * self.head_dim, self.groups * self.state
        projected = self.in_proj(x).astype(jnp.float32)
        z, xbc, dt = jnp.split(projected, [inner, 2 * inner + 2 * shared], axis=-1)

        xbc = jax.nn.silu(causal_conv(xbc, self.conv_weight[...], self.conv_bias[...]))
        u, b, c = jnp.split(xbc, [inner, inner + shared], axis=-1)
        u = u.reshape(*u.shape[:-1], self.heads, self.head_dim)
        b = b.reshape(*b.shape[:-1], self.groups, self.state)
        c = c.reshape(*c.shape[:-1], self.groups, self.state)

        dt = jax.nn.softplus(dt + self.dt_bias[...].reshape(1, 1, -1))
        dt = jnp.maximum(dt, self.dt_min)
        y = ssd(u, dt, -jnp.exp(self.A_log[...]), b, c, chunk=self.chunk)
        y = y + u * self.D[...].reshape(1, 1, -1, 1)

        # The gate comes first: it is part of what the norm sees.
        y = self.norm(y.reshape(*z.shape) * jax.nn.silu(z))
        return self.out_proj(y)
