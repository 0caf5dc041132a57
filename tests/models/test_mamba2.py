"""The scan against the recurrence it stands for, and the mixer's other parts against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from fp4jax.models.layers import RMSNorm
from fp4jax.models.mamba2 import Mamba2, causal_conv, segment_sums, ssd

HEADS = 4


def recurrence(x, dt, a, b, c):
    """The scan one step at a time, in numpy's double precision (real or complex)."""
    batch, length, heads, head_dim = x.shape
    groups, state = b.shape[-2:]
    y = np.zeros(x.shape, np.result_type(x, dt, a, b, c))
    for i in range(heads):
        g = i // (heads // groups)
        h = np.zeros((batch, head_dim, state), y.dtype)
        for t in range(length):
            step = dt[:, t, i, None, None]
            h = np.exp(step * a[i]) * h + step * x[:, t, i, :, None] * b[:, t, g, None, :]
            y[:, t, i] = np.sum(h * c[:, t, g, None, :], axis=-1)
    return y


def inputs(length, groups, *, batch=2, head_dim=3, state=5, dt_scale=0.3, seed=0):
    """x, dt, a, b, c in float64, each exact in float32."""
    rng = np.random.default_rng(seed)
    draws = (
        rng.standard_normal((batch, length, HEADS, head_dim)),
        dt_scale * rng.uniform(0.05, 1.0, (batch, length, HEADS)),
        -rng.uniform(1.0, 16.0, HEADS),
        rng.standard_normal((batch, length, groups, state)),
        rng.standard_normal((batch, length, groups, state)),
    )
    return tuple(draw.astype(np.float32).astype(np.float64) for draw in draws)


def single(arrays):
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def relative_error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("length", "chunk"), [(1, 8), (5, 8), (8, 8), (9, 8), (37, 8), (37, 16), (37, 1)]
)
def test_ssd_is_the_recurrence(length, chunk, groups):
    arrays = inputs(length, groups)
    got = jax.jit(ssd, static_argnames="chunk")(*single(arrays), chunk=chunk)
    assert got.dtype == jnp.float32
    assert relative_error(got, recurrence(*arrays)) < 1e-6


def exact_gradients(arrays, weights):
    """Gradients of ``sum(weights * recurrence)``, exact to rounding, by complex steps."""
    step = 1e-40
    gradients = []
    for n, array in enumerate(arrays):
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            moved = array.astype(complex)
            moved[index] += 1j * step
            y = recurrence(*arrays[:n], moved, *arrays[n + 1 :])
            gradient[index] = np.sum(weights * y.imag) / step
        gradients.append(gradient)
    return gradients


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dt_scale", [0.3, 30.0])
def test_ssd_gradients_are_those_of_the_recurrence(groups, dt_scale):
    arrays = inputs(7, groups, batch=1, head_dim=2, state=2, dt_scale=dt_scale)
    weights = np.random.default_rng(1).standard_normal(arrays[0].shape)

    def projected(*args):
        return jnp.sum(ssd(*args, chunk=3) * jnp.asarray(weights, jnp.float32))

    got = jax.jit(jax.grad(projected, argnums=range(5)))(*single(arrays))
    for name, mine, wanted in zip(
        ("x", "dt", "a", "b", "c"), got, exact_gradients(arrays, weights), strict=True
    ):
        assert np.all(np.isfinite(mine)), name
        assert relative_error(mine, wanted) < 1e-5, name


def test_a_large_decay_costs_later_steps_no_digits():
    """A forgotten past must leave no rounding: with cumulative sums, 1e-5 would remain here."""
    arrays = inputs(16, 2)
    arrays[1][:, 0] = 100.0  # the first step decays by up to exp(-1600)
    got = ssd(*single(arrays), chunk=16)
    assert relative_error(got[:, 1:], recurrence(*arrays)[:, 1:]) < 1e-6


@pytest.mark.parametrize(("batch", "length"), [(0, 8), (2, 0)])
def test_ssd_of_nothing_is_nothing(batch, length):
    arrays = inputs(length, 2, batch=batch)
    assert ssd(*single(arrays), chunk=4).shape == arrays[0].shape


def test_ssd_refuses_what_it_cannot_do():
    arrays = single(inputs(4, 3))
    with pytest.raises(ValueError, match="multiple of groups=3"):
        ssd(*arrays, chunk=4)
    with pytest.raises(ValueError, match="chunk must be at least 1; got 0"):
        ssd(*single(inputs(4, 2)), chunk=0)


def test_segment_sums():
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    got = np.asarray(segment_sums(jnp.asarray(x)))
    for i in range(6):
        for j in range(6):
            want = x[:, j + 1 : i + 1].astype(np.float64).sum(-1) if j <= i else -np.inf
            np.testing.assert_allclose(got[:, i, j], want, atol=1e-6)


@pytest.mark.parametrize("length", [1, 3, 10])
def test_causal_conv(length):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, length, 3)).astype(np.float32)
    weight = rng.standard_normal((4, 3)).astype(np.float32)
    bias = rng.standard_normal(3).astype(np.float32)
    got = causal_conv(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias))
    for channel in range(3):
        for row in range(2):
            want = np.convolve(x[row, :, channel], weight[::-1, channel])[:length] + bias[channel]
            np.testing.assert_allclose(got[row, :, channel], want, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
def test_norm_takes_each_group_by_itself(groups):
    rng = np.random.default_rng(0)
    # The scales of the groups differ, so that pooling them would show.
    x = (rng.standard_normal((2, 5, 12)) * np.repeat([0.01, 1.0, 100.0], 4)).astype(np.float32)
    norm = RMSNorm(12, groups=groups, epsilon=1e-6)
    norm.scale[...] = jnp.arange(12, dtype=jnp.float32)
    want = np.zeros(x.shape)
    for part in np.split(np.arange(12), groups):
        chosen = x[..., part].astype(np.float64)
        rms = np.sqrt((chosen**2).mean(-1, keepdims=True) + 1e-6)
        want[..., part] = chosen / rms * part
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-5)


def mixer(**changes):
    shape = {"heads": 4, "head_dim": 8, "groups": 2, "state": 16, "chunk": 8} | changes
    return Mamba2(24, **shape, rngs=nnx.Rngs(0))


def test_parameters_and_their_initial_values():
    layer = mixer(heads=64, head_dim=2)
    shapes = {
        ".".join(map(str, path)): value.shape
        for path, value in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    assert shapes == {
        "in_proj.kernel": (24, 128 + 128 + 2 * 2 * 16 + 64),
        "out_proj.kernel": (128, 24),
        "conv_weight": (4, 192),
        "conv_bias": (192,),
        "A_log": (64,),
        "D": (64,),
        "dt_bias": (64,),
        "norm.scale": (128,),
    }
    rate = np.exp(layer.A_log[...])
    assert 1 <= rate.min() < 3 and 14 < rate.max() <= 16
    step = np.asarray(jax.nn.softplus(layer.dt_bias[...]))
    assert 0.99e-3 < step.min() < 2e-3 and 0.05 < step.max() < 0.101
    assert np.median(step) == pytest.approx(1e-2, rel=0.5)  # uniform in the logarithm
    np.testing.assert_array_equal(layer.D[...], 1)


def test_steps_are_clamped_from_below():
    clamped, plain = mixer(dt_min=0.5), mixer()
    for layer, bias in ((clamped, -50.0), (plain, np.log(np.expm1(0.5)))):
        layer.dt_bias[...] = jnp.full(4, bias, jnp.float32)
        layer.in_proj.kernel[:, -4:] = jnp.zeros((24, 4))  # the steps depend on the bias alone
    x = jax.random.normal(jax.random.key(0), (2, 10, 24))
    np.testing.assert_allclose(clamped(x), plain(x), atol=1e-5)


def operations(jaxpr):
    """All primitive operations, also those in nested functions."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from operations(inner)


def test_between_the_projections_all_is_float32():
    layer, reference = mixer(dtype="bfloat16"), mixer()
    x = jax.random.normal(jax.random.key(0), (2, 20, 24), jnp.bfloat16)
    graph, state = nnx.split(layer)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    low = [
        equation.primitive.name
        for equation in operations(jaxpr.jaxpr)
        if any(v.aval.dtype == jnp.bfloat16 for v in (*equation.invars, *equation.outvars))
    ]
    casts = {"convert_element_type", "jit", "pjit"}
    assert [name for name in low if name not in casts] == ["dot_general", "dot_general"]
    got = layer(x)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, np.asarray(reference(x.astype(jnp.float32)))) < 1e-2
