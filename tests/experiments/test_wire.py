"""wire: what devices send each other, from a compiled program and from lines of HLO."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from experiments.wire import Moved, collectives, moved_bytes

LINES = """
  %ag = u8[512,256]{1,0} all-gather(%x), channel_id=1, dimensions={0}
  %both = (f32[], bf16[8,4]{1,0}) all-reduce(%a, %b), to_apply=%add
  %start = (f8e4m3fn[4]{0}, f8e4m3fn[16]{0}) all-gather-start(%y), dimensions={0}
  %done = f8e4m3fn[16]{0} all-gather-done(%start)
  %scatter = f4e2m1fn[3]{0} reduce-scatter(%z), dimensions={0}
  %fusion = f32[7]{0} fusion(%all-gather), metadata={op_name="all-gather"}
"""


def test_results_of_every_kind_count_once():
    moved = collectives(LINES)
    assert moved == [
        Moved("all-gather", "u8", (512, 256), 131072),
        Moved("all-reduce", "f32", (), 4),
        Moved("all-reduce", "bf16", (8, 4), 64),
        Moved("all-gather", "f8e4m3fn", (16,), 16),
        Moved("reduce-scatter", "f4e2m1fn", (3,), 2),
    ]
    assert moved_bytes(moved, "all-gather") == {"u8": 131072, "f8e4m3fn": 16}
    assert moved_bytes(moved, "all-to-all") == {}


def test_a_compiled_sum_over_shards():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, jax.P("data")))
    text = jax.jit(lambda x: x.sum(0)).lower(x).compile().as_text()
    assert moved_bytes(collectives(text), "all-reduce") == {"f32": 24}
