"""wire: what devices send each other, from compiled programs and from lines of HLO."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import fp4jax as fp4
from experiments.wire import Moved, collectives, moved_bytes

P = jax.P

LINES = """
HloModule jit_f, entry_computation_layout={(f32[2]{0})->f32[2]{0}}

%wrapped (p: f32[9]) -> f32[9] {
  ROOT %permuted = f32[9]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

%one (p: f32[2]) -> f32[2] {
  ROOT %sum = s4[5]{0} all-reduce(%p), to_apply=%add
}

%other (p: f32[2]) -> f32[2] {
  ROOT %spread = f32[1]{0} collective-broadcast(%p)
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %ag = u8[512,256]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %both = (f32[], /*index=1*/bf16[8,4]{1,0:T(8,128)}) all-reduce(%a, %b), to_apply=%add
  %start = (f8e4m3fn[4]{0}, f8e4m3fn[16]{0}) all-gather-start(%y), dimensions={0}
  %done = f8e4m3fn[16]{0} all-gather-done(%start)
  %scatter = f4e2m1fn[3]{0} reduce-scatter(%z), dimensions={0}, control-predecessors={%one}
  %fusion = f32[7]{0} fusion(%all-gather), metadata={op_name="an all-gather(x)"}
  %async = ((f32[9]{0}), f32[9]{0}, u32[]) async-start(%x), calls=%wrapped
  %awaited = f32[9]{0} async-done(%async), calls=%wrapped
  ROOT %chosen = f32[2]{0} conditional(%p, %x, %x), branch_computations={%one, %other}
}
"""


def test_results_of_every_kind_count_once():
    moved = collectives(LINES)
    assert moved == [
        Moved("all-gather", "u8", (512, 256), 131072),
        Moved("all-reduce", "f32", (), 4),
        Moved("all-reduce", "bf16", (8, 4), 64),
        Moved("all-gather", "f8e4m3fn", (16,), 16),
        Moved("reduce-scatter", "f4e2m1fn", (3,), 2),
        Moved("collective-permute", "f32", (9,), 36),
        Moved("all-reduce", "s4", (5,), 3),
        Moved("collective-broadcast", "f32", (1,), 4),
    ]
    assert moved_bytes(moved, "all-gather") == {"u8": 131072, "f8e4m3fn": 16}
    assert moved_bytes(moved, "all-to-all") == {}


def test_what_is_no_compiled_program_is_refused():
    with pytest.raises(ValueError, match="hlo must be the text of a compiled program"):
        collectives(jax.jit(jnp.sin).lower(1.0).as_text())


def mesh_of(**axes):
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def test_a_compiled_sum_over_shards():
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh_of(d=4), P("d")))
    text = jax.jit(lambda x: x.sum(0)).lower(x).compile().as_text()
    assert moved_bytes(collectives(text), "all-reduce") == {"f32": 24}


def moved_by(function, *args):
    """What each of 4 devices sends, which have 2 rows of 6 numbers, running this program."""
    specs = (P("d"), *[P()] * len(args))
    manual = jax.shard_map(
        function, mesh=mesh_of(d=4), in_specs=specs, out_specs=P("d"), check_vma=False
    )
    return collectives(jax.jit(manual).lower(jnp.ones((8, 6)), *args).compile().as_text())


def repeated(times, body, x):
    return lax.scan(lambda x, _: (body(x), None), x, length=times)[0]


def summed(x):
    return jnp.tanh(x * lax.psum(x, "d"))


def gathered(x):
    return jnp.tanh(x + lax.all_gather(x, "d").sum(0))


# float32 numbers that a device has after an all-gather and after a sum.
FOUR, ONE = 4 * 4 * 2 * 6, 4 * 2 * 6


def test_a_loop_counts_as_often_as_it_runs():
    moved = moved_by(functools.partial(repeated, 7, summed))
    assert moved == [Moved("all-reduce", "f32", (2, 6), ONE, times=7)]
    assert moved_bytes(moved, "all-reduce") == {"f32": 7 * ONE}


def test_a_loop_in_a_loop():
    def outer(x):
        return summed(repeated(5, gathered, x))

    moved = moved_by(lambda x: gathered(repeated(3, outer, x)))
    assert moved_bytes(moved, "all-gather") == {"f32": (3 * 5 + 1) * FOUR}
    assert moved_bytes(moved, "all-reduce") == {"f32": 3 * ONE}


def test_branches_of_a_conditional_all_count():
    def body(x):
        return lax.cond(x[0, 0] > 0, summed, gathered, x)

    moved = moved_by(functools.partial(repeated, 3, body))
    assert moved_bytes(moved, "all-reduce") == {"f32": 3 * ONE}
    assert moved_bytes(moved, "all-gather") == {"f32": 3 * FOUR}


def test_a_loop_that_does_not_say_how_often_it_runs_is_refused():
    def until(body, x, n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, body(c[1])), (0, x))[1]

    with pytest.raises(ValueError, match=r"the loop while\S* in hlo holds all-reduce and does not"):
        moved_by(functools.partial(until, summed), jnp.int32(3))
    assert moved_by(functools.partial(until, jnp.tanh), jnp.int32(3)) == []


def test_the_condition_of_a_loop_is_asked_once_more_than_its_body_runs():
    text = re.sub(r"control-pred.*", "", LINES).replace(
        "conditional(%p, %x, %x), branch_computations={%one, %other}",
        'while(%x), condition=%one, body=%other, backend_config={"known_trip_count":{"n":"4"}}',
    )
    assert [array.times for array in collectives(text)[-2:]] == [5, 4]


@pytest.mark.parametrize("remat", [False, True])
def test_layers_that_are_scanned(remat):
    """Of 6 layers each weight travels in Fprop, in Dgrad and, where that is done anew, Fprop."""
    recipe, gather = fp4.recipes.nvfp4(square_weights=False), fp4.Gather(P("d"), axis="d")

    def layer(x, w):
        key = jax.random.key(0)
        product = fp4.matmul(x, w, recipe=recipe, key=key, gather=gather)
        return jnp.tanh(product), None

    def loss(ws, x):
        return lax.scan(jax.checkpoint(layer) if remat else layer, x, ws)[0].sum()

    with jax.set_mesh(mesh_of(d=4)):
        step = jax.jit(jax.grad(loss), in_shardings=(P(None, "d"), P("d")))
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 64, 64), (32, 64))]
        text = step.lower(*shapes).compile().as_text()
    moved = moved_bytes(collectives(text), "all-gather")
    assert moved == {"u8": (3 if remat else 2) * 6 * 64 * 64 * 4.5 / 8}
