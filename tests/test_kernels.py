"""Other bodies of quantize and scaled_matmul: the same bytes, wherever and however they run."""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from test_vectors import CASES, DTYPES, VECTORS, quantizer_of

import fp4jax as fp4
from fp4jax.kernels import operands, registry, tile
from fp4jax.kernels.wanted import Want
from fp4jax.rounding import key_words

RHT = fp4.Hadamard(16)
MATRIX = (((1,), (0,)), ((), ()))
BODIES = [
    pytest.param("triton:interpret"),
    pytest.param(
        "mosaic:interpret",
        marks=pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="needs JAX 0.12"),
    ),
]
PLAIN = fp4.Quantizer(fp4.NVFP4)
SQUARE = fp4.Quantizer(fp4.NVFP4, tile=(16, 16))
STOCHASTIC = fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic())


def uneven(shape, seed=0, dtype=np.float32):
    """Neighbours share a magnitude, from 1e-6 to 1e3, that has nothing to do with blocks."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    scale = 10.0 ** rng.uniform(-6, 3, -(-size // 7)).repeat(7)[:size]
    return jnp.asarray(rng.standard_normal(shape) * scale.reshape(shape), dtype)


def assert_same(got, wanted):
    """All bytes are equal, and so is what describes them."""
    for name in ("codes", "block_scales", "tensor_scale"):
        a, b = (np.atleast_1d(getattr(q, name)) for q in (got, wanted))
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)
    assert got == wanted


def served(case):
    """Whether the kernels take a reference vector's quantizer."""
    _, dtype, kind, _ = case
    return operands.refusal(jnp.zeros((1, 1), DTYPES[dtype]), Want(quantizer_of(kind), -1)) is None


@functools.cache
def vector_runner(body, kind, axis):
    quantizer = quantizer_of(kind)
    return jax.jit(lambda x: fp4.quantize(x, quantizer, axis, implementation=body))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("case", "dtype", "kind", "way"), list(filter(served, CASES)))
def test_vectors(body, case, dtype, kind, way):
    x = jnp.asarray(VECTORS[f"{case}/{dtype}/x"], DTYPES[dtype])
    axis = -1 if way == "row" else 0
    got = vector_runner(body, kind, axis)(x)
    assert_same(got, fp4.quantize(x, quantizer_of(kind), axis))  # equal to the vectors themselves


QUANTIZERS = {
    "nearest": PLAIN,
    "square": SQUARE,
    "stochastic": STOCHASTIC,
    "8 bits, transformed": fp4.Quantizer(
        fp4.NVFP4,
        rounding=fp4.Stochastic(8),
        hadamard=fp4.Hadamard(16, tuple([1, -1] * 8)),
        scale_rule=fp4.AmaxScale(headroom=17 / 16),
    ),
    "square, 16 bits": fp4.Quantizer(fp4.NVFP4, tile=(16, 16), rounding=fp4.Stochastic(16)),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("axis", [0, -1])
def test_odd_shapes(body, name, axis):
    quantizer = QUANTIZERS[name]
    key = jax.random.key(3) if quantizer.needs_key else None
    for shape, dtype in (((37, 130), jnp.bfloat16), ((1, 5), jnp.float32)):
        x = uneven(shape, dtype=dtype)
        got = fp4.quantize(x, quantizer, axis, key, implementation=body)
        assert_same(got, fp4.quantize(x, quantizer, axis, key))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_more_axes_and_fewer(axis):
    x = uneven((3, 20, 37))
    key = jax.random.key(0)
    got = fp4.quantize(x, STOCHASTIC, axis, key, implementation="triton:interpret")
    assert_same(got, fp4.quantize(x, STOCHASTIC, axis, key))
    if axis == 2:
        row = fp4.quantize(x[0, 0], STOCHASTIC, 0, key, implementation="triton:interpret")
        assert_same(row, fp4.quantize(x[0, 0], STOCHASTIC, 0, key))


SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-39, 1e-30, 1.0, -6.0, 65504.0, 3e38, -3.4e38], np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    largest=st.sampled_from([-118, -108, -60, 0, 60, 125]),
    below=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    special=st.lists(st.tuples(st.integers(0, 4095), st.sampled_from(SPECIAL)), max_size=40),
    bad=st.lists(
        st.tuples(st.integers(0, 4095), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=4
    ),
    name=st.sampled_from(["nearest", "stochastic", "square"]),
    axis=st.sampled_from([0, -1]),
)
def test_any_values(seed, largest, below, special, bad, name, axis):
    # One shape, or each example would compile its program. Columns differ by up to 2**40.
    exponents = largest - np.array(below)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((64, 64)).astype(np.float32)
    x = np.ldexp(x, np.repeat(exponents, 8)).astype(np.float32)
    for index, value in [*special, *bad]:
        x.flat[index] = value
    got, wanted = run_both(name, axis, jnp.asarray(x), jax.random.key(seed))
    assert_same(got, wanted)


def run_both(name, axis, x, key):
    quantizer = QUANTIZERS[name]
    key = key if quantizer.needs_key else None
    return tuple(
        fp4.quantize(x, quantizer, axis, key, implementation=by)
        for by in ("triton:interpret", "xla")
    )


def test_subnormal_numbers_are_zeros():
    # On a CPU a product hides this: XLA flushes them there.
    planes = [jnp.asarray([1e-39, -1e-45, 0.0], jnp.float32)] * 16
    assert not np.asarray(tile.amax(planes)).any()
    assert not np.asarray(tile.finite_amax(planes)).any()


@pytest.mark.parametrize("to", [jnp.float32, jnp.bfloat16])
def test_transformed_blocks_that_are_not_finite(to):
    # The sign of a NaN that a sum makes is the machine's: there alone codes may differ.
    x = np.array(uneven((64, 64)))
    x[5, 7], x[40, 3], x[41, 3] = np.nan, np.inf, -np.inf
    quantizer = fp4.Quantizer(fp4.NVFP4, hadamard=RHT)
    got, wanted = (
        fp4.quantize(jnp.asarray(x, to), quantizer, 0, implementation=by)
        for by in ("triton:interpret", "xla")
    )
    scales = np.asarray(wanted.block_scales).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(got.block_scales).view(np.uint8), scales)
    bad = scales == 0x7F
    assert bad.sum() == 2
    codes = [np.where(bad.repeat(8, -1), 0, np.asarray(q.codes)) for q in (got, wanted)]
    np.testing.assert_array_equal(*codes)
    assert got.tensor_scale == wanted.tensor_scale


def operands_of(body, x, quantizers, key):
    """Several operands of one matrix by one kernel."""
    choice = registry.choose(registry.QUANTIZE, body, x, Want(*quantizers[0]))
    words = tuple(
        key_words(jax.random.fold_in(key, i), 1)[0] if quantizer.needs_key else None
        for i, (quantizer, _) in enumerate(quantizers)
    )
    wants = tuple(itertools.starmap(Want, quantizers))
    return operands.quantize(choice.body, x, wants, words, interpret=choice.interpret)


GRADIENT = (
    (STOCHASTIC, -1),
    (fp4.Quantizer(fp4.NVFP4, rounding=fp4.Stochastic(), hadamard=RHT), -2),
)
WEIGHT = ((SQUARE, -2), (SQUARE, -1))


def assert_operands(got, x, quantizers, key):
    for i, ((quantizer, axis), q) in enumerate(zip(quantizers, got, strict=True)):
        own = jax.random.fold_in(key, i) if quantizer.needs_key else None
        assert_same(q, fp4.quantize(np.asarray(x), quantizer, axis, own))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("quantizers", [GRADIENT, WEIGHT], ids=["gradient", "weight"])
def test_two_operands_by_one_kernel(body, quantizers):
    x, key = uneven((100, 48), dtype=jnp.bfloat16), jax.random.key(1)
    assert_operands(operands_of(body, x, quantizers, key), x, quantizers, key)


@pytest.mark.parametrize(
    ("spec", "quantizers"),
    [
        (jax.P("a", "b"), GRADIENT),
        (jax.P("b", "a"), WEIGHT),
        (jax.P(None, "b"), GRADIENT),
        (jax.P(("a", "b")), WEIGHT),
    ],
)
def test_devices_share_the_work_without_a_gather(spec, quantizers):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(uneven((256, 128)), NamedSharding(mesh, spec))
    key = jax.random.key(1)
    run = jax.jit(lambda x: operands_of("triton:interpret", x, quantizers, key)).lower(x).compile()
    text = run.as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    got = run(x)
    assert_operands(got, x, quantizers, key)
    assert not any(q.codes.sharding.is_fully_replicated for q in got)


def test_shards_that_are_no_whole_blocks():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(uneven((72, 40)), NamedSharding(mesh, jax.P("a")))  # 9 rows each
    key = jax.random.key(1)
    got = jax.jit(lambda x: operands_of("triton:interpret", x, GRADIENT, key))(x)
    assert_operands(got, x, GRADIENT, key)


def test_vmap_and_scan():
    x, keys = uneven((3, 20, 40)), jax.random.split(jax.random.key(5), 3)

    def one(x, key):
        return fp4.quantize(x, STOCHASTIC, 0, key, implementation="triton:interpret")

    mapped = jax.vmap(one)(x, keys)
    _, scanned = jax.lax.scan(lambda carry, given: (carry, one(*given)), None, (x, keys))
    for i in range(3):
        wanted = fp4.quantize(x[i], STOCHASTIC, 0, keys[i])
        for q in (mapped, scanned):
            assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], q), wanted)


def value_and_gradients(kernels, recipe, x, w, key):
    def loss(x, w):
        y = fp4.dot_general(x, w, MATRIX, recipe=recipe, key=key, kernels=kernels)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return y, *gradients


RECIPES = [fp4.recipes.nvfp4(), fp4.recipes.nvfp4(square_weights=False)]


@pytest.mark.parametrize("recipe", RECIPES, ids=["square", "rows"])
def test_layer(recipe):
    x, w = uneven((40, 70), dtype=jnp.bfloat16), uneven((70, 50), seed=1)
    key = jax.random.key(2)
    plain, kernel = (
        jax.jit(value_and_gradients, static_argnums=(0, 1))(kernels, recipe, x, w, key)
        for kernels in (fp4.Kernels(), fp4.Kernels(quantize="triton:interpret"))
    )
    for a, b in zip(kernel, plain, strict=True):
        # Equal operands, and equal products: XLA's in both.
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype


def test_layer_under_vmap_and_scan():
    x, w = uneven((2, 32, 48)), uneven((48, 16), seed=1)
    key = jax.random.key(2)

    def run(kernels, x):
        return value_and_gradients(kernels, RECIPES[0], x, w, key)

    kernels = fp4.Kernels(quantize="triton:interpret")
    mapped = jax.vmap(functools.partial(run, kernels))(x)
    _, scanned = jax.lax.scan(lambda carry, x: (carry, run(kernels, x)), None, x)
    for i in range(2):
        wanted = jax.jit(run, static_argnums=0)(fp4.Kernels(), x[i])
        for got in (mapped, scanned):
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(a[i]), np.asarray(b), rtol=1e-6, atol=1e-7)


def test_hook_of_flax_layers():
    x, w, key = uneven((20, 32)), uneven((32, 16), seed=1), jax.random.key(0)
    kernels = fp4.Kernels(quantize="triton:interpret")
    got, wanted = (
        jax.jit(functools.partial(hook, dimension_numbers=MATRIX))(x, w, key=key)
        for hook in (fp4.DotGeneral(RECIPES[0], kernels=kernels), fp4.DotGeneral(RECIPES[0]))
    )
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


# Which one runs.


@pytest.fixture
def hopper(monkeypatch):
    """As if a GPU of compute capability 9.0 were here, on which Triton's body is proven."""
    monkeypatch.setattr(registry, "compute_capability", lambda: (9, 0))


def test_what_is_not_proven_is_not_chosen(hopper):
    assert not any(i.proven for i in (*registry.QUANTIZE, *registry.SCALED_MATMUL))
    assert registry.choose(registry.QUANTIZE, None, uneven((16, 16)), Want(PLAIN, -1)) is None


@pytest.fixture
def proven(hopper, monkeypatch):
    mosaic, triton = registry.QUANTIZE
    bodies = mosaic, dataclasses.replace(triton, proven=(9,))
    for module in ("fp4jax.quantize", "fp4jax.kernels.passes"):
        monkeypatch.setattr(sys.modules[module], "QUANTIZE", bodies)
    return bodies


def test_the_first_proven_one_is_chosen(proven):
    choice = registry.choose(proven, None, uneven((16, 16)), Want(PLAIN, -1))
    assert (choice.implementation.name, choice.forced) == ("triton", False)
    other = fp4.Quantizer(fp4.MXFP4)
    assert registry.choose(proven, None, uneven((16, 16)), Want(other, -1)) is None


def test_a_choice_holds_on_its_platform_alone(proven):
    x, w, key = uneven((40, 70)), uneven((70, 50), seed=1), jax.random.key(2)
    got = fp4.quantize(x, STOCHASTIC, 0, key)  # on a CPU
    assert_same(got, fp4.quantize(x, STOCHASTIC, 0, key, implementation="xla"))
    run = jax.jit(value_and_gradients, static_argnums=(0, 1))
    automatic, plain = (
        run(kernels, RECIPES[0], x, w, key)
        for kernels in (fp4.Kernels(), fp4.Kernels("xla", "xla"))
    )
    for a, b in zip(automatic, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    traced = run.trace(fp4.Kernels(), RECIPES[0], x, w, key)
    assert str(traced.jaxpr).count("pallas_call") > 0  # chosen when a GPU compiles it


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "triton",
            "needs a GPU of compute capability 8 or 9 or 10 or 12; there is no GPU here; "
            "'triton:interpret' runs anywhere",
        ),
        (
            "fast",
            "must be None or one of 'xla', 'mosaic', 'triton', 'mosaic:interpret', "
            "'triton:interpret', not 'fast'",
        ),
    ],
)
def test_what_cannot_run_here_raises(name, message):
    with pytest.raises(ValueError, match=message):
        fp4.quantize(uneven((16, 16)), PLAIN, implementation=name)


def test_a_gpu_of_another_kind(monkeypatch):
    monkeypatch.setattr(registry, "compute_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match="8 or 9 or 10 or 12; the GPU here has 7"):
        fp4.quantize(uneven((16, 16)), PLAIN, implementation="triton")


@pytest.mark.parametrize(
    ("x", "quantizer", "message"),
    [
        (uneven((16, 16)), fp4.Quantizer(fp4.MXFP4), "format MXFP4 is not NVFP4"),
        (uneven((16, 16)), fp4.Quantizer(fp4.NVFP4, scale_rule=fp4.RowScaled()), "RowScaled"),
        (
            uneven((16, 16)),
            fp4.Quantizer(fp4.NVFP4, hadamard=fp4.Hadamard(32, (1,) * 32)),
            "hadamard has size 32, not 16",
        ),
        (uneven((16, 16), dtype=jnp.float16), PLAIN, "dtype float16, not bfloat16 or float32"),
        (uneven((2, 16, 16)), SQUARE, "square blocks of an array with 3 axes"),
    ],
)
def test_what_is_not_taken_raises_and_runs_in_plain_jax(x, quantizer, message):
    with pytest.raises(ValueError, match=message):
        fp4.quantize(x, quantizer, implementation="triton:interpret")
    fp4.quantize(x, quantizer)


@pytest.mark.parametrize(
    ("recipe", "shape", "message"),
    [
        (fp4.recipes.bf16(), (16, 16), "'bf16' does not quantize all six operands"),
        (fp4.recipes.nvfp4(), (2, 16, 16), "it has batch axes"),
        (fp4.recipes.mxfp4(), (16, 16), r"MXFP4 is not NVFP4 \(quantize, for the activation\)"),
    ],
)
def test_layers_that_kernels_do_not_run(recipe, shape, message):
    x, batch = uneven(shape), tuple(range(len(shape) - 2))
    dims = (((len(shape) - 1,), (len(shape) - 2,)), (batch, batch))
    kernels = fp4.Kernels(quantize="triton:interpret")
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=message):
        fp4.dot_general(x, x, dims, recipe=recipe, key=key, kernels=kernels)


def test_a_gradient_in_float16_is_named():
    x, kernels = uneven((16, 16)), fp4.Kernels(quantize="triton:interpret")
    with pytest.raises(ValueError, match=r"float16, not bfloat16 .*for the gradient\)"):
        fp4.dot_general(
            x, x, MATRIX, recipe=RECIPES[0], key=jax.random.key(0), kernels=kernels,
            preferred_element_type=jnp.float16,
        )  # fmt: skip


def test_kernels_have_names():
    x = uneven((16, 16))
    for product in (fp4.dot_general, fp4.DotGeneral(RECIPES[0], kernels="triton")):
        options = {"key": jax.random.key(0)}
        if product is fp4.dot_general:
            options |= {"recipe": RECIPES[0], "kernels": "triton"}
        with pytest.raises(TypeError, match=r"kernels must be fp4jax.Kernels\(...\), not 'triton'"):
            product(x, x, MATRIX, **options)
    with pytest.raises(ValueError, match="must be None or one of 'xla', 'blackwell', 'cudnn'"):
        fp4.Kernels(scaled_matmul="triton")


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))

    def run(x):
        return fp4.quantize(x, PLAIN, implementation="triton:interpret").codes

    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        jax.shard_map(run, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))(uneven((32, 16)))
