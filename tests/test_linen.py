"""Linen layers, and quantizing an existing Linen model by path."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import AxisType

import fp4jax as fp4
from experiments.wire import collectives, moved_bytes

pytestmark = pytest.mark.usefixtures("compile_fast")

P = jax.P
NVFP4 = fp4.recipes.nvfp4()
NEAREST = fp4.recipes.nvfp4(rounding=fp4.Nearest())


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def same_variables(one, other):
    """Drawn from the same key, up to the last bit, which how an initializer is compiled decides."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, other)


class Block(linen.Module):
    width: int = 32

    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(self.width, name="down")(linen.relu(linen.Dense(64, name="up")(x)))


class Net(linen.Module):
    """As a user would write it, with one layer that only training reaches."""

    remat: bool = False

    @linen.compact
    def __call__(self, x, train=False):
        block = linen.remat(Block) if self.remat else Block
        for i in range(3):
            x = block(name=f"block_{i}")(x)
        if train:
            x = linen.Dense(32, name="extra")(x)
        x = linen.DenseGeneral((4, 2), name="head")(x)
        return linen.Einsum((4, 2, 3), "...ab,abc->...c", name="out")(x)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("kind", ["Dense", "DenseGeneral", "Einsum"])
def test_layers_are_products_of_their_parameters(kind, use_bias, dtype):
    x, options = normal(3, 20, 32), {"use_bias": use_bias, "dtype": dtype}
    if kind == "Einsum":
        arguments = ((32, 4, 2), "abk,kcd->abcd")
    else:
        arguments = (8,) if kind == "Dense" else ((4, 2),)
    options["bias_init"] = lambda key, shape, dtype: jnp.arange(8, dtype=dtype).reshape(shape)
    mine = getattr(fp4.linen, kind)(*arguments, recipe=NEAREST, **options)
    plain = getattr(linen, kind)(*arguments, **options)
    variables = plain.init(jax.random.key(0), x)
    same = mine.init(jax.random.key(0), x)
    same_variables(variables, same)
    compute = dtype or jnp.float32
    kernel = variables["params"]["kernel"]
    expected = fp4.einsum(
        "abk,k...->ab...",
        x.astype(compute),
        kernel,
        recipe=NEAREST,
        preferred_element_type=compute,
    )
    if use_bias:
        expected = expected + variables["params"]["bias"].astype(compute)[None, None]
    y = mine.apply(variables, x)
    assert y.dtype == compute
    np.testing.assert_array_equal(y, expected)


def test_layers_survive_clone_and_are_refused_what_the_recipe_decides():
    layer = fp4.linen.Dense(8, recipe=NEAREST)
    assert layer.clone() == layer
    with pytest.raises(ValueError, match="precision cannot be set: the recipe decides"):
        fp4.linen.Dense(8, recipe=NEAREST, precision="highest")
    with pytest.raises(ValueError, match="dot_general cannot be set"):
        fp4.linen.DenseGeneral(8, recipe=NEAREST, dot_general=jax.lax.dot_general)
    with pytest.raises(TypeError, match="recipe"):
        fp4.linen.Dense(8)


@pytest.mark.parametrize("remat", [False, True])
def test_a_quantized_model_has_the_models_variables_and_the_recipes_products(remat):
    x, model = normal(20, 32), Net(remat)
    variables = model.init(jax.random.key(0), x)
    policy = fp4.Policy([fp4.Rule("block_1.*", NEAREST), fp4.Rule("out", NEAREST)])
    quantized = fp4.linen.quantize_model(model, policy, x)
    same_variables(variables, quantized.init(jax.random.key(0), x))

    class ByHand(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = Block(name="block_0")(x)
            up = fp4.linen.Dense(64, recipe=NEAREST, name="up", parent=None)
            down = fp4.linen.Dense(32, recipe=NEAREST, name="down", parent=None)
            inner = variables["params"]["block_1"]
            hidden = linen.relu(up.apply({"params": inner["up"]}, x))
            x = x + down.apply({"params": inner["down"]}, hidden)
            x = Block(name="block_2")(x)
            x = linen.DenseGeneral((4, 2), name="head")(x)
            return fp4.linen.Einsum((4, 2, 3), "...ab,abc->...c", recipe=NEAREST, name="out")(x)

    y = quantized.apply(variables, x)
    np.testing.assert_allclose(y, ByHand().apply(variables, x), rtol=1e-5, atol=1e-5)
    assert (y != model.apply(variables, x)).any()
    # The model itself is as it was.
    assert (model.apply(variables, x) == Net(remat).apply(variables, x)).all()


def test_stochastic_rounding_draws_from_the_stream_and_differs_by_layer():
    x = normal(20, 32)
    quantized = fp4.linen.quantize_model(Net(), fp4.Policy.keep_ends(recipe=NVFP4), x)
    variables = quantized.init(jax.random.key(0), x)

    def gradient(seed):
        def loss(v):
            return (quantized.apply(v, x, rngs={"quantize": jax.random.key(seed)}) ** 2).sum()

        return jax.jit(jax.grad(loss))(variables)["params"]

    one, other, again = gradient(0), gradient(1), gradient(0)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    for i in range(3):
        for name in ("up", "down"):
            kernels = [g[f"block_{i}"][name]["kernel"] for g in (one, other)]
            assert (kernels[0] != kernels[1]).any()


def test_explain():
    table = fp4.Policy.keep_ends(first=1, recipe=NVFP4).explain(Net(), normal(20, 32))
    assert [line.split() for line in table.splitlines()] == [
        ["layer", "kernel", "parameters", "recipe"],
        ["block_0.up", "32x64", "2,112", "bf16"],
        ["block_0.down", "64x32", "2,080", "bf16"],
        ["block_1.up", "32x64", "2,112", "nvfp4"],
        ["block_1.down", "64x32", "2,080", "nvfp4"],
        ["block_2.up", "32x64", "2,112", "nvfp4"],
        ["block_2.down", "64x32", "2,080", "nvfp4"],
        ["head", "32x4x2", "264", "untouched"],
        ["out", "4x2x3", "27", "untouched"],
    ]


def test_inputs_may_be_shapes_and_keywords():
    policy = fp4.Policy([fp4.Rule("extra", NEAREST)])
    shape = jax.ShapeDtypeStruct((20, 32), jnp.float32)
    quantized = fp4.linen.quantize_model(Net(), policy, shape, train=True)
    assert dict(quantized.recipes)[("extra",)] == NEAREST


def test_a_layer_that_was_not_there_is_an_error_at_run_time():
    x = normal(20, 32)
    policy = fp4.Policy.keep_ends(recipe=NEAREST)
    variables = Net().init(jax.random.key(0), x, train=True)
    quantized = fp4.linen.quantize_model(Net(), policy, x)
    with pytest.raises(ValueError, match="layer extra was not there when the model was quantized"):
        quantized.apply(variables, x, train=True)


def test_as_a_part_of_another_model():
    class Outer(linen.Module):
        inner: linen.Module

        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="last")(self.inner(x))

    x = normal(20, 32)
    policy = fp4.Policy([fp4.Rule("*.up", NEAREST)])
    quantized = fp4.linen.quantize_model(Net(), policy, x)
    variables = Outer(Net()).init(jax.random.key(0), x)
    y = Outer(quantized).apply(variables, x)
    inner = quantized.apply({"params": variables["params"]["inner"]}, x)
    expected = linen.Dense(3).apply({"params": variables["params"]["last"]}, inner)
    np.testing.assert_array_equal(y, expected)


def test_submodules_that_are_attributes_and_methods_besides_call():
    class Coder(linen.Module):
        layer: linen.Module

        def setup(self):
            self.back = linen.Dense(32)

        def encode(self, x):
            return self.layer(x)

        def __call__(self, x):
            return self.back(self.encode(x))

    x, model = normal(20, 32), Coder(linen.Dense(8))
    variables = model.init(jax.random.key(0), x)
    policy = fp4.Policy([fp4.Rule("layer", NEAREST)])
    quantized = fp4.linen.quantize_model(model, policy, x)
    assert isinstance(quantized, Coder)
    assert quantized == fp4.linen.quantize_model(quantized, policy, x)
    assert hash(quantized) == hash(fp4.linen.quantize_model(model, policy, x))
    assert quantized != fp4.linen.quantize_model(model, fp4.Policy([fp4.Rule("back", NEAREST)]), x)
    same_variables(variables, quantized.init(jax.random.key(0), x))
    kernel = variables["params"]["layer"]["kernel"]
    expected = fp4.einsum("ab,bc->ac", x, kernel, recipe=NEAREST)
    np.testing.assert_array_equal(quantized.apply(variables, x, method="encode"), expected)
    bound = quantized.bind(variables)
    np.testing.assert_array_equal(bound.encode(x), expected)
    np.testing.assert_array_equal(
        bound(x), linen.Dense(32).apply({"params": variables["params"]["back"]}, expected)
    )


class Coder(linen.Module):
    def setup(self):
        self.inner = linen.Dense(32)

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return self.inner(x)

    def _encode(self, x):
        return self.inner(x)

    def width(self):
        return 32


@pytest.mark.parametrize(
    "method", [Coder.encode, "_encode", lambda coder, x: coder.inner(x)], ids=["base", "own", "any"]
)
def test_apply_quantizes_whatever_function_it_is_given(method):
    x = normal(16, 32)
    quantized = fp4.linen.quantize_model(Coder(), fp4.Policy([fp4.Rule("*", NEAREST)]), x)
    variables = Coder().init(jax.random.key(0), x)
    expected = quantized.apply(variables, x)
    np.testing.assert_array_equal(quantized.apply(variables, x, method=method), expected)
    y, _ = quantized.init_with_output(jax.random.key(0), x, method=method)
    np.testing.assert_array_equal(y, expected)


def test_methods_that_run_no_layer_need_no_variables():
    x, policy = normal(16, 32), fp4.Policy([fp4.Rule("*", NEAREST)])
    assert fp4.linen.quantize_model(Coder(), policy, x).width() == 32
    cell, key = linen.LSTMCell(8), jax.random.key(0)
    carry = cell.initialize_carry(key, x.shape)
    quantized = fp4.linen.quantize_model(cell, policy, carry, x)
    jax.tree.map(np.testing.assert_array_equal, quantized.initialize_carry(key, x.shape), carry)


def test_a_quantized_model_survives_pickle_and_deepcopy():
    x = normal(20, 32)
    quantized = fp4.linen.quantize_model(Net(), fp4.Policy([fp4.Rule("*.up", NEAREST)]), x)
    for copied in (pickle.loads(pickle.dumps(quantized)), copy.deepcopy(quantized)):
        assert copied == quantized and type(copied) is type(quantized)


def test_a_convolution_when_asked():
    class Images(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Conv(8, (1, 1), use_bias=False, name="conv")(x)

    x = normal(2, 5, 5, 32)
    policy = fp4.Policy([fp4.Rule("conv", NEAREST, convolutions=True)])
    quantized = fp4.linen.quantize_model(Images(), policy, x)
    variables = quantized.init(jax.random.key(0), x)
    kernel = variables["params"]["conv"]["kernel"][0, 0]
    expected = fp4.einsum("nhwi,io->nhwo", x, kernel, recipe=NEAREST)
    np.testing.assert_array_equal(quantized.apply(variables, x), expected)


def test_what_cannot_be_quantized_raises():
    class Own(linen.Dense):
        @linen.compact
        def __call__(self, x):
            kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
            return x @ kernel

    class Model(linen.Module):
        layer: linen.Module

        def __call__(self, x):
            return self.layer(x)

    x, everything = normal(20, 32), fp4.Policy([fp4.Rule("*", NEAREST, convolutions=True)])
    with pytest.raises(NotImplementedError, match="layer is a Dense whose __call__ does not use"):
        fp4.linen.quantize_model(Model(Own(8)), everything, x)
    custom = linen.Dense(8, dot_general=jax.lax.dot_general)
    with pytest.raises(ValueError, match="dot_general of layer cannot be set"):
        fp4.linen.quantize_model(Model(custom), everything, x)
    with pytest.raises(ValueError, match="precision of layer cannot be set"):
        fp4.linen.quantize_model(Model(linen.Dense(8, precision="high")), everything, x)
    grouped = linen.Conv(32, (3,), feature_group_count=2)
    with pytest.raises(NotImplementedError, match="feature_group_count"):
        fp4.linen.quantize_model(Model(grouped), everything, normal(2, 9, 32))
    with pytest.raises(NotImplementedError, match="layer layer is a ConvLocal"):
        fp4.linen.quantize_model(Model(linen.ConvLocal(8, (3,))), everything, normal(2, 9, 32))
    with pytest.raises(TypeError, match="policy must be a Policy"):
        fp4.linen.quantize_model(Model(linen.Dense(8)), NEAREST, x)


def test_blocks_that_share_a_trace_are_refused():
    class Jitted(linen.Module):
        @linen.compact
        def __call__(self, x):
            block = linen.jit(Block)  # by a class each, every block would have a trace of its own
            for _ in range(2):
                x = block()(x)
            return linen.Dense(3, name="head")(x)

    with pytest.raises(NotImplementedError, match=r"JitBlock_1\.\w+ shares a trace"):
        fp4.Policy([fp4.Rule("*", NEAREST)]).explain(Jitted(), normal(20, 32))


class Heads(linen.Module):
    """A layer of each kind, as the body of a scan."""

    @linen.compact
    def __call__(self, x, _):
        x = linen.Dense(64, name="dense")(x)
        x = linen.DenseGeneral((4, 16), name="general")(x)
        x = linen.Einsum((4, 16, 64), "...hk,hkd->...d", use_bias=False, name="einsum")(x)
        return jnp.tanh(x), None


class Stack(linen.Module):
    """Three blocks whose parameters are stacked, done anew in the backward pass."""

    @linen.compact
    def __call__(self, x):
        scanned = linen.scan(
            linen.remat(Heads),
            variable_axes={"params": 0},
            split_rngs={"params": True, "quantize": True},
            length=3,
        )
        return scanned(name="blocks")(x, None)[0]


class Image(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Conv(64, (1, 3), name="conv")(x)


# How one layer's kernel lies: its input features divided, or its output features or heads.
LIES = {
    "dense": P("fsdp"),
    "general": P(None, "fsdp"),
    "einsum": P("fsdp"),
    "conv": P(None, None, None, "fsdp"),
}


def lies(layer):
    return fp4.Gather(LIES[layer.path[-1]])


def fsdp(shards=4):
    return jax.make_mesh((shards,), ("fsdp",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(("model", "passes"), [(Stack(), 3), (Image(), 2)], ids=["scan", "conv"])
def test_kernels_in_shards_travel_quantized(model, passes):
    """In Fprop, in Dgrad, and where the blocks are done anew in Fprop again, with the same bits."""
    x = normal(32, 64) if passes == 3 else normal(2, 1, 6, 64)
    policy = fp4.Policy([fp4.Rule("*", NVFP4, convolutions=True)])
    single = fp4.linen.quantize_model(model, policy, x)
    spread = fp4.linen.quantize_model(model, policy, x, gather=lies)
    variables = single.init(jax.random.key(0), x)

    def step(quantized):
        def loss(variables, x):
            y = quantized.apply(variables, x, rngs={"quantize": jax.random.key(1)})
            return (y**3).sum(), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    expected = step(single)(variables, x)
    with jax.set_mesh(fsdp()):
        program = step(spread).lower(variables, x).compile()
        got = program(variables, x)
    for mine, alone in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, alone)
    elements = 3 * 3 * 64 * 64 if passes == 3 else 3 * 64 * 64
    moved = moved_bytes(collectives(program.as_text()), "all-gather")
    assert moved == {"u8": passes * elements * (4 + 8 / 256) / 8}


def test_how_kernels_lie_is_part_of_the_model():
    x, policy = normal(32, 64), fp4.Policy([fp4.Rule("*", NVFP4)])
    plain = fp4.linen.quantize_model(Stack(), policy, x)
    spread = fp4.linen.quantize_model(Stack(), policy, x, gather=lies)
    assert spread.gathers == tuple(
        (("blocks", name), fp4.Gather(LIES[name])) for name in ("dense", "general", "einsum")
    )
    # Called again they lie as they did, whatever the recipes are now; or as one says.
    assert spread == fp4.linen.quantize_model(spread, policy, x, step=5)
    later = fp4.linen.quantize_model(spread, fp4.Policy([fp4.Rule("*", NEAREST)]), x)
    assert later.gathers == spread.gathers and later != spread
    assert plain == fp4.linen.quantize_model(spread, policy, x, gather=lambda layer: None)
    again = fp4.linen.quantize_model(Stack(), policy, x, gather=lies)
    assert again == spread and hash(again) == hash(spread) and again != plain
    for copied in (pickle.loads(pickle.dumps(spread)), copy.deepcopy(spread)):
        assert copied == spread and type(copied) is type(spread)


def test_a_model_whose_kernels_lie_on_a_mesh_runs_on_one():
    x, policy = normal(32, 64), fp4.Policy([fp4.Rule("*", NEAREST)])
    model = fp4.linen.quantize_model(
        linen.Dense(64), policy, x, gather=lambda layer: fp4.Gather(P("fsdp"))
    )
    with pytest.raises(ValueError, match="says which mesh a program runs on"):
        model.init(jax.random.key(0), x)
    with jax.set_mesh(fsdp()):
        variables = model.init(jax.random.key(0), x)
    same_variables(variables, linen.Dense(64).init(jax.random.key(0), x))
