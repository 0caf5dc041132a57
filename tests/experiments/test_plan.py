"""plan: what a step takes on many devices, against closed forms, and without making an array."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

import fp4jax as fp4
from experiments import plan, zoo
from experiments.mesh import BATCH as ROWS
from experiments.mesh import Extents, make_mesh
from experiments.optimization import Training
from experiments.step import State
from fp4jax.models import TransformerConfig

# Two blocks, of which the second stays in BF16.
CONFIG = TransformerConfig(
    vocab_size=96,
    d_model=64,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=128,
    mlp="squared_relu",
    dtype="bfloat16",
)
# Of a block: queries, keys, values, output of attention; up and down.
KERNELS = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (128, 64))
BLOCK = sum(k * n for k, n in KERNELS)
EMBEDDING = 96 * 64  # and the head has as many
NORMS = 5 * 64
DATA, FSDP, BATCH, SEQUENCE = 2, 2, 8, 32
TOKENS = BATCH * SEQUENCE
# Square tiles of the weights have one scale of a byte for 256 codes, activations for 16.
WEIGHT_BITS, ACTIVATION_BITS = 4 + 8 / 256, 4 + 8 / 16
ARGS = f"--model tiny_plan --mesh.data {DATA} --mesh.fsdp {FSDP} --sequence {SEQUENCE}".split()


@pytest.fixture(scope="module", autouse=True)
def _tiny():
    jax.devices()  # which the program would make, for all tests
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setitem(plan.MODELS, "tiny_plan", zoo.Preset(CONFIG))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the program leaves behind."""
    out = tmp_path_factory.mktemp("plan")
    args = [*ARGS, "--recipes", "nvfp4", "--batch", str(BATCH), "--out", str(out)]
    assert plan.main(args) == 0
    return out


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "plan.json").read_text())["plans"]["nvfp4"]


# Bytes


def test_bytes_of_the_state(found):
    """Kernels and embeddings are divided over fsdp, all else lies everywhere."""
    weights = 4 * ((2 * BLOCK + 2 * EMBEDDING) // FSDP + NORMS)
    assert found["weights"] == found["gradients"] == weights
    counters = 2 * 4  # Adam's and the schedule's
    assert found["optimizer"] == 2 * weights + counters


def test_bytes_that_linear_layers_keep(found):
    tokens, width = TOKENS // (DATA * FSDP), sum(k for k, _ in KERNELS)
    quantized = tokens * width * ACTIVATION_BITS / 8 + BLOCK // FSDP * WEIGHT_BITS / 8
    tensor_scales = 2 * len(KERNELS) * 4
    assert found["kept_by_linear"] == quantized + tensor_scales + tokens * width * 2


def test_parameters_are_not_kept(monkeypatch):
    """But the input of each of two layers, and the derivative of each sine: four arrays."""

    class Sines(nnx.Module):
        def __init__(self):
            self.kernels = nnx.List([nnx.Param(jnp.ones((64, 64))) for _ in range(2)])

        def __call__(self, x):
            for kernel in self.kernels:
                x = jnp.sin(x @ kernel[...])
            return x

    monkeypatch.setattr(plan, "measure", lambda model, batch: (model(batch).sum(), None))
    mesh = make_mesh(Extents(data=2, fsdp=2))

    def lying(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    graphdef, params, rest = nnx.split(Sines(), nnx.Param, ...)
    params = jax.tree.map(lambda leaf: lying(leaf, jax.P("fsdp")), params)
    x = lying(jnp.ones((8, 64)), ROWS)
    kept, by_linear = plan.saved(graphdef, State(params, (), rest, None), x, mesh)
    assert (kept, by_linear) == (4 * (8 * 64 * 4) // 4, 0)


def test_scores_of_attention_are_kept(found):
    """In each block at least the softmax in float32, and what multiplies the values in bfloat16."""
    scores = BATCH // (DATA * FSDP) * CONFIG.num_heads * SEQUENCE**2
    assert found["kept"] > found["kept_by_linear"] + 2 * scores * (4 + 2)


def test_peak_memory_holds_the_state_and_what_is_kept(found):
    """The old state lies where the new one will: it is there once."""
    state = found["weights"] + found["optimizer"]
    assert state + found["kept_by_linear"] < found["peak"] < 1.5 * (state + found["kept"])


def test_bytes_on_the_wire(found):
    """A weight is gathered in Fprop and in Dgrad, embedding and head once."""
    gathered = found["moved"]["all-gather"]
    assert gathered["u8"] == 2 * BLOCK * WEIGHT_BITS / 8
    assert gathered["u16"] == 2 * (2 * BLOCK + 2 * EMBEDDING)
    assert set(gathered) == {"u8", "u16"}
    # Gradients, by XLA for CPUs whole and in float32; the tensors' largest numbers besides.
    gradients = 4 * (2 * BLOCK + 2 * EMBEDDING + NORMS)
    assert 0 <= found["moved"]["all-reduce"]["f32"] - gradients < 1000
    assert set(found["moved"]) == {"all-gather", "all-reduce"}


# Matrix products


def test_flops_of_a_transformer(found):
    """Every product has two in the backward pass, each of as many FLOPs as itself."""
    products, linear = found["products"], 3 * 2 * TOKENS * 2 * BLOCK
    attention = 3 * 2 * 2 * CONFIG.num_blocks * BATCH * CONFIG.num_heads * SEQUENCE**2 * 16
    assert products["all"] == linear + 3 * 2 * TOKENS * EMBEDDING + attention
    assert (products["linear"], products["quantized"]) == (linear, linear // 2)
    # XLA counts what is not a matrix product, too.
    each = products["all"] / (DATA * FSDP)
    assert each < found["device_flops"] < 4 * each


def test_only_products_of_two_quantized_operands_count_as_quantized():
    nvfp4 = fp4.recipes.nvfp4()
    bf16 = fp4.recipes.bf16()
    late = nvfp4.replace(fprop=bf16.fprop)
    half = nvfp4.replace(fprop=fp4.Gemm(lhs=bf16.fprop.lhs, rhs=nvfp4.fprop.rhs))
    for recipe, parts in ((nvfp4, 3), (late, 2), (half, 2), (bf16, 0)):
        model = nnx.eval_shape(
            lambda recipe=recipe: zoo.make_model(zoo.Preset(CONFIG), {}, recipe, 0)
        )
        total, quantized = plan.linear_flops(model, TOKENS)
        assert total == 3 * 2 * TOKENS * 2 * BLOCK
        assert quantized == parts * 2 * TOKENS * BLOCK


def test_products_in_a_scan_count_as_often_as_it_runs():
    def turn(x, w):
        return jax.jit(jnp.matmul)(x, w), None

    jaxpr = jax.make_jaxpr(functools.partial(lax.scan, turn))(jnp.ones((4, 8)), jnp.ones((5, 8, 8)))
    assert plan.product_flops(jaxpr.jaxpr) == 5 * 2 * 4 * 8 * 8


def test_products_in_a_loop_without_an_end_are_refused():
    def program(x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    with pytest.raises(NotImplementedError, match="in while cannot be counted"):
        plan.product_flops(jax.make_jaxpr(program)(jnp.ones((4, 4))).jaxpr)


# The paper's 12B model


def test_no_array_of_a_big_model_is_made():
    preset, mesh = zoo.MODELS["hybrid_12b"], make_mesh(Extents(data=2, fsdp=4))
    training = Training(batch=8, sequence=8192)
    before = len(jax.live_arrays())
    abstract = plan.abstract(preset, fp4.recipes.nvfp4(), training, mesh)
    assert len(jax.live_arrays()) == before
    leaves = jax.tree.leaves(abstract)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # 12.31 billion parameters, with what Adam remembers of each; the embedding has as many as the
    # head, and all but a few lie divided.
    params = jax.tree.leaves(abstract[1].params)
    assert sum(leaf.size for leaf in params) == 12_314_591_360
    parts = [leaf.sharding.shard_shape(leaf.shape) for leaf in params if leaf.ndim == 2]
    assert max(parts) == (131072, 1280)
    total, quantized = plan.linear_flops(abstract[0], 1)
    assert 1 - quantized / total == pytest.approx(10 / 62, abs=0.02), "PAPER: 16% stay in BF16"


# The program


def test_the_page_has_a_row_for_every_figure(folder, found):
    page = (folder / "plan.md").read_text()
    assert "`tiny_plan` on a mesh of 2 x 2 x 1 (data x fsdp x tensor), in a step 8 sequ" in page
    rows = dict(line.strip("| ").split(" | ") for line in page.splitlines() if line[:1] == "|")
    assert rows["a device and step"] == "nvfp4"
    assert rows["weights"] == f"{found['weights'] / 1e3:.4g} kB"
    assert rows["all-gather, u8"] == f"{found['moved']['all-gather']['u8'] / 1e3:.4g} kB"
    assert rows["quantized, of linear layers"] == "50.0%"


def test_a_collective_that_one_recipe_has_is_zero_in_the_others():
    products = plan.Products(all=4_000_000, linear=2_000_000, quantized=0)
    one = plan.Plan(1, 20, 300, 4_000, 50_000, 6_000_000, {}, products, 7e9)
    other = plan.Plan(1, 1, 1, 1, 1, 1, {"all-gather": {"u8": 1_230_000_000}}, products, 7e9)
    lines = plan.table({"a": one, "b": other}, 4).splitlines()
    assert "| all-gather, u8 | 0 | 1.23 GB |" in lines
    assert "| matrix products | 1 MFLOP | 1 MFLOP |" in lines
    assert "| optimizer state | 20 B | 1 B |" in lines


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "6"], "error: a batch of 6 cannot be divided among 4 devices (data x fsdp)"),
        (["--mesh.tensor", "1000"], "error: a mesh of 2 x 2 x 1000 (data x fsdp x tensor) takes"),
    ],
)
def test_a_mesh_that_does_not_fit_ends_the_program(args, message, capsys):
    assert plan.main([*ARGS, *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "vit"], "unknown model 'vit'; allowed: hybrid, transformer, mamba,"),
        (["--recipes", "bf16", "fp2"], "unknown recipe 'fp2'; allowed: bf16,"),
        (["--sequence", "0"], "sequence must be at least 1, not 0"),
        (["--batch", "0"], "batch must be at least 1, not 0"),
        (["--mesh.fsdp", "0"], "mesh.fsdp must be at least 1, not 0"),
        (["--out", __file__], "out must be a folder"),
    ],
)
def test_what_cannot_be_planned_is_refused(args, message, capsys):
    with pytest.raises(SystemExit) as error:
        plan.main([*ARGS, *args])
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
