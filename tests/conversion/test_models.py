"""Flax models converted by a policy and trained, beside BF16 and a loss known in closed form."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax_models as fm
import jax
import learnable
import numpy as np
import optax
import pytest
from flax import nnx

import fp4jax as fp4

BF16, NVFP4, MXFP8 = fp4.recipes.bf16(), fp4.recipes.nvfp4(), fp4.recipes.mxfp8()

MLP = learnable.rectified_teacher()
TOKENS = learnable.previous_token()
SHAPES = learnable.shapes()
QUADRANTS = learnable.quadrants()


class Case(NamedTuple):
    """A model, how it is converted, and what must come of its training.

    Attributes:
      task: what it is trained on.
      build: the model; with random streams as an argument for NNX, without for Linen.
      policy: for a recipe.
      rows: what the policy has to say about the model's layers with NVFP4.
      rate: of learning, with Adam.
      steps: of training.
      gap: how much further from zero than BF16's the loss may end with NVFP4, as a fraction.
    """

    task: learnable.Task
    build: Callable[..., Any]
    policy: Callable[[fp4.Recipe], fp4.Policy]
    rows: str
    rate: float
    steps: int
    gap: float


def convolutions_too(recipe):
    return fp4.Policy((fp4.Rule("patches", recipe, convolutions=True), fp4.Rule("*.mlp.*", recipe)))


def einsums(recipe):
    return fp4.Policy((fp4.Rule(lambda layer: layer.kind == "Einsum", recipe),))


CASES = {
    "nnx-mlp": Case(
        MLP,
        functools.partial(fm.NnxMLP, (32, 64, 64, 64, 8)),
        lambda recipe: fp4.Policy.keep_ends(1, 0, recipe),
        """
        blocks.0  32x64  2,112  bf16
        blocks.1  64x64  4,160  nvfp4
        blocks.2  64x64  4,160  nvfp4
        head      64x8     520  untouched
        """,
        1e-2, 60, 0.3,
    ),
    "linen-mlp": Case(
        MLP,
        functools.partial(fm.LinenMLP, (64, 64, 64, 8)),
        lambda recipe: fp4.Policy((fp4.Rule("hidden_0", BF16), fp4.Rule("hidden_*", recipe))),
        """
        hidden_0  32x64  2,112  bf16
        hidden_1  64x64  4,160  nvfp4
        hidden_2  64x64  4,160  nvfp4
        head      64x8     520  untouched
        """,
        1e-2, 60, 0.3,
    ),
    "nnx-transformer": Case(
        TOKENS,
        functools.partial(fm.NnxTransformer, 16, 16, 32, 4, 2),
        lambda recipe: fp4.Policy.keep_ends(0, 1, recipe),
        """
        blocks.0.attention.key    32x4x8  1,056  nvfp4
        blocks.0.attention.out    4x8x32  1,056  nvfp4
        blocks.0.attention.query  32x4x8  1,056  nvfp4
        blocks.0.attention.value  32x4x8  1,056  nvfp4
        blocks.0.mlp.down         64x32   2,080  nvfp4
        blocks.0.mlp.up           32x64   2,112  nvfp4
        blocks.1.attention.key    32x4x8  1,056  bf16
        blocks.1.attention.out    4x8x32  1,056  bf16
        blocks.1.attention.query  32x4x8  1,056  bf16
        blocks.1.attention.value  32x4x8  1,056  bf16
        blocks.1.mlp.down         64x32   2,080  bf16
        blocks.1.mlp.up           32x64   2,112  bf16
        head                      32x16     528  untouched
        """,
        1e-2, 40, 0.1,
    ),
    "linen-transformer": Case(
        TOKENS,
        functools.partial(fm.LinenTransformer, 16, 16, 32, 4, 1),
        lambda recipe: fp4.Policy((fp4.Rule("*.attention.*", recipe), fp4.Rule("*.mlp.*", BF16))),
        """
        block_0.attention.query  32x4x8  1,056  nvfp4
        block_0.attention.key    32x4x8  1,056  nvfp4
        block_0.attention.value  32x4x8  1,056  nvfp4
        block_0.attention.out    4x8x32  1,056  nvfp4
        block_0.mlp.up           32x64   2,112  bf16
        block_0.mlp.down         64x32   2,080  bf16
        head                     32x16     528  untouched
        """,
        1e-2, 40, 0.1,
    ),
    "nnx-vit": Case(
        SHAPES,
        functools.partial(fm.NnxViT, 16, 4, 32, 4, 1, 4),
        convolutions_too,
        """
        blocks.0.attention.key    32x4x8    1,056  untouched
        blocks.0.attention.out    4x8x32    1,056  untouched
        blocks.0.attention.query  32x4x8    1,056  untouched
        blocks.0.attention.value  32x4x8    1,056  untouched
        blocks.0.mlp.down         64x32     2,080  nvfp4
        blocks.0.mlp.up           32x64     2,112  nvfp4
        head                      32x4        132  untouched
        patches                   4x4x1x32    544  nvfp4
        """,
        5e-3, 60, 0.25,
    ),
    "linen-vit": Case(
        SHAPES,
        functools.partial(fm.LinenViT, 4, 32, 4, 1, 4),
        convolutions_too,
        """
        patches                  4x4x1x32    544  nvfp4
        block_0.attention.query  32x4x8    1,056  untouched
        block_0.attention.key    32x4x8    1,056  untouched
        block_0.attention.value  32x4x8    1,056  untouched
        block_0.attention.out    4x8x32    1,056  untouched
        block_0.mlp.up           32x64     2,112  nvfp4
        block_0.mlp.down         64x32     2,080  nvfp4
        head                     32x4        132  untouched
        """,
        5e-3, 60, 0.25,
    ),
    "nnx-moe": Case(
        QUADRANTS,
        lambda rngs: fm.NnxMoE(16, 32, 2, lambda w: fm.NnxDenseExperts(4, w, rngs), rngs),
        einsums,
        """
        blocks.0.down    4x64x32  8,192  nvfp4
        blocks.0.router  32x4       128  untouched
        blocks.0.up      4x32x64  8,192  nvfp4
        blocks.1.down    4x64x32  8,192  nvfp4
        blocks.1.router  32x4       128  untouched
        blocks.1.up      4x32x64  8,192  nvfp4
        embed            16x32      544  untouched
        head             32x16      528  untouched
        """,
        1e-2, 60, 0.15,
    ),
    "linen-moe": Case(
        QUADRANTS,
        functools.partial(fm.LinenMoE, 32, 1, functools.partial(fm.LinenDenseExperts, 4)),
        einsums,
        """
        embed           16x32      544  untouched
        block_0.router  32x4       128  untouched
        block_0.up      4x32x64  8,192  nvfp4
        block_0.down    4x64x32  8,192  nvfp4
        head            32x16      528  untouched
        """,
        1e-2, 60, 0.15,
    ),
}  # fmt: skip

# No layer of Flax is quantized here, but a product inside of one that the user wrote.
RAGGED = Case(
    QUADRANTS,
    lambda: None,
    lambda recipe: recipe,
    """
    blocks.0.up    4x32x64  8,192  nvfp4
    blocks.0.down  4x64x32  8,192  nvfp4
    """,
    1e-2, 60, 0.15,
)  # fmt: skip


class Nnx:
    """A model trained as one does with NNX; ``policy`` None leaves it as it is."""

    def __init__(self, case: Case, policy: fp4.Policy | None) -> None:
        self.case, self.policy = case, policy

        @nnx.jit
        def gradient(model, x, target):
            def loss(model):
                y = model(x)
                return case.task.loss(y, target), y

            return nnx.value_and_grad(loss, has_aux=True)(model)

        @nnx.jit
        def update(optimizer, model, gradients):
            optimizer.update(model, gradients)

        self.gradient, self.update = gradient, update

    def model(self, seed: int = 0):
        model = self.case.build(nnx.Rngs(0))
        if self.policy is not None:
            fp4.nnx.quantize_model(model, self.policy, rngs=nnx.Rngs(quantize=seed))
        return model

    def first_step(self, seed: int = 0):
        (_, y), gradients = self.gradient(self.model(seed), *self.batch())
        return y, dict(jax.tree.leaves_with_path(nnx.to_pure_dict(gradients)))

    def batch(self):
        return next(self.case.task.batches(1))

    def train(self) -> list[float]:
        model, losses = self.model(), []
        optimizer = nnx.Optimizer(model, optax.adam(self.case.rate), wrt=nnx.Param)
        for batch in self.case.task.batches(self.case.steps):
            (loss, _), gradients = self.gradient(model, *batch)
            self.update(optimizer, model, gradients)
            losses.append(float(loss))
        return losses


class NnxRagged(Nnx):
    """With `fp4jax.ragged_dot` in its experts; the policy is a recipe."""

    def model(self, seed: int = 0):
        rngs = nnx.Rngs(0, quantize=seed)
        product = jax.lax.ragged_dot if self.policy is None else fm.NnxRaggedDot(self.policy, rngs)
        return fm.NnxMoE(16, 32, 1, lambda w: fm.NnxRaggedExperts(4, w, rngs, product), rngs)


class Linen:
    """The same as one does with Linen: pure functions of the parameters and a key for each step."""

    def __init__(self, case: Case, policy: fp4.Policy | None) -> None:
        self.case = case
        x, _ = self.batch()
        model = self.model(policy, x)
        self.parameters = jax.jit(self.model(None, x).init)(jax.random.key(0), x)
        optimizer = optax.adam(case.rate)
        self.state = optimizer.init(self.parameters)

        @jax.jit
        def gradient(parameters, key, x, target):
            def loss(parameters):
                y = model.apply(parameters, x, rngs={"quantize": key})
                return case.task.loss(y, target), y

            return jax.value_and_grad(loss, has_aux=True)(parameters)

        @jax.jit
        def update(parameters, state, gradients):
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(parameters, updates), state

        self.gradient, self.update = gradient, update

    def model(self, policy, x):
        model = self.case.build()
        return model if policy is None else fp4.linen.quantize_model(model, policy, x)

    def batch(self):
        return next(self.case.task.batches(1))

    def first_step(self, seed: int = 0):
        (_, y), gradients = self.gradient(self.parameters, jax.random.key(seed), *self.batch())
        return y, dict(jax.tree.leaves_with_path(gradients["params"]))

    def train(self) -> list[float]:
        parameters, state, losses = self.parameters, self.state, []
        for i, batch in enumerate(self.case.task.batches(self.case.steps)):
            key = jax.random.fold_in(jax.random.key(0), i)
            (loss, _), gradients = self.gradient(parameters, key, *batch)
            parameters, state = self.update(parameters, state, gradients)
            losses.append(float(loss))
        return losses


class LinenRagged(Linen):
    """With `fp4jax.ragged_dot` in its experts; the policy is a recipe."""

    def model(self, policy, x):
        product = jax.lax.ragged_dot if policy is None else fm.LinenRaggedDot(policy)
        return fm.LinenMoE(32, 1, functools.partial(fm.LinenRaggedExperts, 4, product=product))


def end(losses: list[float]) -> float:
    """The last eight steps' mean: batches are fresh, so this is a loss on unseen data."""
    return float(np.mean(losses[-8:]))


def one_name(path: str) -> str:
    """Blocks are elements of a list in NNX, and in Linen have their number in their name."""
    return path.replace("block_", "blocks.")


def relative_error(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("nnx")])
def test_nnx_conversion_keeps_parameters(name):
    case = CASES[name]
    model = case.build(nnx.Rngs(0))
    variables = dict(nnx.iter_graph(model))
    before = {path: v for path, v in variables.items() if isinstance(v, nnx.Param)}
    values = {path: np.asarray(v[...]) for path, v in before.items()}
    policy = case.policy(NVFP4)
    assert fp4.nnx.quantize_model(model, policy, rngs=nnx.Rngs(quantize=0)) is model
    after = {path: v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)}
    assert after.keys() == before.keys()
    for path, variable in after.items():
        assert variable is before[path]
        np.testing.assert_array_equal(variable[...], values[path])
    # The policy reads a converted model as it reads the original.
    assert policy.explain(model) == policy.explain(case.build(nnx.Rngs(0)))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("linen")])
def test_linen_conversion_keeps_parameters(name):
    case = CASES[name]
    x = next(case.task.batches(1))[0]
    converted = fp4.linen.quantize_model(case.build(), case.policy(NVFP4), x)
    assert isinstance(converted, type(case.build()))
    models = case.build(), converted
    before, after = (jax.eval_shape(m.init, jax.random.key(0), x) for m in models)
    assert after == before
    if name == "linen-mlp":  # the values too, from the same key
        before, after = (model.init(jax.random.key(0), x) for model in models)
        jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("name", CASES)
def test_explain(name):
    case = CASES[name]
    if name.startswith("nnx"):
        table = case.policy(NVFP4).explain(case.build(nnx.Rngs(0)))
    else:
        table = case.policy(NVFP4).explain(case.build(), next(case.task.batches(1))[0])
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["layer", "kernel", "parameters", "recipe"]
    assert rows[1:] == [line.split() for line in case.rows.strip().splitlines()]


@pytest.mark.usefixtures("lenient_promotion")
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"linen-vit"}))  # to save time
def test_training(name):
    check_training(Nnx if name.startswith("nnx") else Linen, CASES[name])


@pytest.mark.usefixtures("lenient_promotion")
@pytest.mark.parametrize("api", [NnxRagged, LinenRagged])
def test_training_of_ragged_experts(api):
    check_training(api, RAGGED)


@pytest.mark.usefixtures("lenient_promotion")
def test_training_in_mxfp8():
    case = CASES["nnx-mlp"]
    high, low = (end(Nnx(case, case.policy(recipe)).train()) for recipe in (BF16, MXFP8))
    # Half of what NVFP4 may lose.
    assert case.task.baseline - low > (1 - case.gap / 2) * (case.task.baseline - high)


def check_training(api, case):
    """Converted models learn, NVFP4 nearly as much as BF16, and do compute in NVFP4."""
    runs = {recipe.name: api(case, case.policy(recipe)) for recipe in (BF16, NVFP4)}
    ends = {}
    for recipe, run in runs.items():
        losses = run.train()
        ends[recipe] = end(losses)
        assert ends[recipe] < 0.4 * losses[0], recipe
    baseline, high, low = case.task.baseline, ends["bf16"], ends["nvfp4"]
    # What counts as learned is what the baseline has not, which leaves out the first steps' gains.
    assert high < 2 / 3 * baseline
    assert baseline - low > (1 - case.gap) * (baseline - high), (high, low)

    y, plain = api(case, None).first_step()
    (y0, first), (again, same), (_, other) = (runs["nvfp4"].first_step(seed) for seed in (0, 0, 1))
    # Four bits are seen in the output; no random bits take part in that.
    assert 0.02 < relative_error(y0, y) < 0.5
    np.testing.assert_array_equal(again, y0)
    random = set()
    for path, gradient in first.items():
        np.testing.assert_array_equal(gradient, same[path])
        name = one_name(".".join(str(part.key) for part in path))
        if (gradient != other[path]).any():
            random.add(name.removesuffix(".kernel"))
        # Per parameter, since Adam would train without a tensor scale, and losses near each other
        # may both lack a product. A gradient that is lost is wrong by 1. That of a key's bias is 0
        # but for rounding: the softmax takes no notice of it.
        if not name.endswith("key.bias"):
            assert relative_error(gradient, plain[path]) < 0.75, name
    rows = [row.split() for row in case.rows.strip().splitlines()]
    assert random >= {one_name(row[0]) for row in rows if row[3] == "nvfp4"}
    assert "head" not in random
