"""Policies: which layer gets which recipe, and that nothing is missed in silence."""

import numpy as np
import pytest

import fp4jax as fp4
from fp4jax.layers import Layer

BF16, NVFP4, FP8 = fp4.recipes.bf16(), fp4.recipes.nvfp4(), fp4.recipes.fp8_block()


def layers(*names, kind="Linear", shape=(16, 16)):
    return [
        Layer(tuple(int(p) if p.isdigit() else p for p in name.split(".")), kind, shape, 256)
        for name in names
    ]


def assigned(policy, given):
    names = {layer.path: layer.name for layer in given}
    return {names[path]: recipe.name for path, recipe in policy.assign(given).items()}


TEN = layers(*(f"blocks.{i}.{part}" for i in range(10) for part in ("up", "down")), "head")


def blocks_of(policy, recipe, given=TEN):
    return {name for name, got in assigned(policy, given).items() if got == recipe.name}


@pytest.mark.parametrize(
    ("first", "last", "kept"),
    [
        (0, 0, set()),
        (2, 0, {0, 1}),
        (0, 3, {7, 8, 9}),
        (1, 2, {0, 8, 9}),
        (0.2, 0, {0, 1}),
        (0, 0.16, {8, 9}),
        (0.1, 0.25, {0, 8, 9}),
    ],
)
def test_keep_ends(first, last, kept):
    policy = fp4.Policy.keep_ends(first=first, last=last, recipe=NVFP4)
    got = assigned(policy, TEN)
    assert "head" not in got
    assert {int(n.split(".")[1]) for n, recipe in got.items() if recipe == "bf16"} == kept
    assert len(got) == 20


def test_the_paper_keeps_10_of_62_blocks():
    given = layers(*(f"blocks.{i}.mixer" for i in range(62)))
    kept = blocks_of(fp4.Policy.keep_ends(first=2, last=8), BF16, given)
    assert kept == {f"blocks.{i}.mixer" for i in (0, 1, *range(54, 62))}


def test_blocks_are_numbered_by_lists_and_by_linens_names():
    """A number in the layer's own Linen name is no block; numbers need not be consecutive."""
    given = layers("layers.0", "layers.2", "layers.7", "Block_0.Dense_0", "Block_1.Dense_0")
    given += layers("Dense_0", "conv1.proj", "fc_1")
    first = fp4.Policy([fp4.Rule(fp4.Blocks(first=1), FP8), fp4.Rule(fp4.Blocks(), NVFP4)])
    assert assigned(first, given) == {
        "layers.0": "fp8_block",
        "Block_0.Dense_0": "fp8_block",
        "layers.2": "nvfp4",
        "layers.7": "nvfp4",
        "Block_1.Dense_0": "nvfp4",
    }


def test_ends_count_in_each_stack_by_number():
    names = [f"{stack}.{i}.up" for stack in ("decoder", "encoder") for i in (10, 2, 0, 1)]
    last = fp4.Policy([fp4.Rule(fp4.Blocks(last=1), BF16)])
    assert set(assigned(last, layers(*names))) == {"decoder.10.up", "encoder.10.up"}


def test_only_the_outermost_number_is_the_block():
    given = layers(*(f"blocks.{i}.experts.{j}.up" for i in range(3) for j in range(4)))
    kept = blocks_of(fp4.Policy.keep_ends(last=1), BF16, given)
    assert kept == {f"blocks.2.experts.{j}.up" for j in range(4)}


def test_the_first_rule_that_matches_decides():
    policy = fp4.Policy(
        [
            fp4.Rule("blocks.3.*", None),
            fp4.Rule("*.down", FP8),
            fp4.Rule(lambda layer: layer.name.startswith("blocks.9"), BF16),
            fp4.Rule(fp4.Blocks(), NVFP4),
        ]
    )
    got = assigned(policy, TEN)
    assert not any(name.startswith("blocks.3.") for name in got)
    assert got["blocks.9.up"] == "bf16" and got["blocks.9.down"] == "fp8_block"
    assert [got[f"blocks.{i}.down"] for i in (0, 4)] == ["fp8_block"] * 2
    assert [got[f"blocks.{i}.up"] for i in (0, 4)] == ["nvfp4"] * 2


def test_by_shape_and_by_kind():
    given = layers("a", shape=(8, 8)) + layers("b", shape=(8, 512)) + layers("c", kind="Einsum")
    wide = fp4.Policy([fp4.Rule(lambda layer: min(layer.shape) >= 16, NVFP4)])
    assert assigned(wide, given) == {"c": "nvfp4"}
    einsums = fp4.Policy([fp4.Rule(lambda layer: layer.kind == "Einsum", NVFP4)])
    assert assigned(einsums, given) == {"c": "nvfp4"}


def test_convolutions_only_where_a_rule_asks_for_them():
    given = layers("blocks.0.mix") + layers("blocks.0.conv", kind="Conv", shape=(3, 3, 4, 4))
    assert assigned(fp4.Policy([fp4.Rule("*", NVFP4)]), given) == {"blocks.0.mix": "nvfp4"}
    asked = fp4.Policy([fp4.Rule("*", NVFP4, convolutions=True)])
    assert set(assigned(asked, given)) == {"blocks.0.mix", "blocks.0.conv"}
    with pytest.raises(ValueError, match="it matches only convolutions"):
        fp4.Policy([fp4.Rule("*.conv", NVFP4)]).assign(given)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([fp4.Rule("*.gate", NVFP4)], r"'\*\.gate' -> nvfp4 reaches no layer: it matches none"),
        ([fp4.Rule("*", None), fp4.Rule("head", BF16)], "'head' -> bf16 .* earlier rule"),
        ([fp4.Rule(fp4.Blocks(first=0.01), BF16)], "'first 0.01 blocks' -> bf16 reaches no layer"),
    ],
)
def test_a_rule_that_reaches_nothing_is_an_error(rules, message):
    with pytest.raises(ValueError, match=message) as error:
        fp4.Policy(rules).assign(TEN)
    assert "the model's layers are: blocks.0.up, blocks.0.down" in str(error.value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fp4.Policy(["*"]), TypeError, "rules must be a sequence of Rule"),
        (lambda: fp4.Rule(3, BF16), TypeError, "where must be Blocks, a pattern or a function"),
        (lambda: fp4.Rule("*", "bf16"), TypeError, "recipe must be a Recipe, a Schedule or None"),
        (lambda: fp4.Policy.keep_ends(first=-1), ValueError, "first must be a number .* not -1"),
        (lambda: fp4.Blocks(last=1.5), ValueError, "last must be .* not 1.5"),
        (lambda: fp4.Blocks(last=float("nan")), ValueError, "last must be .* not nan"),
        (lambda: fp4.Blocks(first="1"), TypeError, "str"),
        (lambda: fp4.Policy.keep_ends().explain(3), TypeError, "NNX or Linen model, not int"),
    ],
)
def test_what_cannot_be_honoured_raises(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_policies_are_values():
    assert fp4.Blocks(np.int64(1), np.float64(0.5)) == fp4.Blocks(1, 0.5)
    assert fp4.Blocks(np.int64(1)).select(TEN) == fp4.Blocks(1).select(TEN)
    assert fp4.Policy.keep_ends(first=2) == fp4.Policy.keep_ends(first=2)
    assert hash(fp4.Policy.keep_ends(last=0.2)) == hash(fp4.Policy.keep_ends(last=0.2))
    assert fp4.Policy.keep_ends(first=2) != fp4.Policy.keep_ends(first=3)
