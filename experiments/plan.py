"""What a training step of a big model would take on many devices: compiled for them, never run.

``python -m experiments.plan`` prints a Markdown table with a column per recipe. The devices are
fake, and no array of the model is ever made: shapes, and where their parts lie, are enough.
"""

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

import fp4jax as fp4
from experiments import zoo
from experiments.folder import write
from experiments.mesh import Extents, MeshError, batch_shape, make_mesh, rows_here, specs
from experiments.objective import measure
from experiments.optimization import Training
from experiments.pretrain import UNUSABLE
from experiments.saved_bytes import bits_of, kept_besides
from experiments.step import State, first_state, traced_step
from experiments.terminal import say
from experiments.wire import collectives, moved_bytes
from experiments.zoo import RECIPES, Preset
from fp4jax.layers import nnx_modules
from fp4jax.linear import RESIDUAL
from fp4jax.models import HybridConfig, TransformerConfig

MODELS = {
    name: preset
    for name, preset in zoo.MODELS.items()
    if isinstance(preset.config, HybridConfig | TransformerConfig)
}

DEFAULT_MESH = Extents(data=8, fsdp=8)

# Nothing is run, so machine code need not be good. Of XLA's passes for CPUs two undo each other's
# work on these programs until they are stopped, which is half of the time, and one joins sums into
# few operations; without them the same bytes are sent.
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_disable_hlo_passes": "reshape-mover,cpu-all-reduce-combiner",
}

NOTES = """\
- Weights (float32), optimizer state and gradients follow from shapes and where their parts lie.
- Saved is what the backward pass reads besides the parameters. The models recompute nothing
  (`jax.checkpoint`), and their attention keeps its scores. What several layers keep of one input
  counts once for each, though a compiler may keep one.
- The peak is arguments, results and temporary arrays, as XLA for CPUs plans them.
- Bytes on the wire are those that a collective operation leaves on a device. XLA for CPUs sums
  gradients as float32 on every device; GPUs and TPUs leave each device its part of the sum.
- Matrix products include those of attention and of Mamba-2's scan. XLA counts all operations of its
  program for one device.
- The quantized products are those of linear layers in blocks whose operands are both quantized.
"""


@dataclasses.dataclass(frozen=True)
class Config:
    """Says what a training step of a language model would take on a mesh of devices.

    None of them has to be there: the step is compiled for as many fake ones, and not run.
    """

    model: Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(MODELS)}}}")] = "hybrid_12b"
    """Model to train, with a vocabulary of its own."""
    recipes: Annotated[tuple[str, ...], tyro.conf.arg(metavar=f"{{{','.join(RECIPES)}}} ...")] = (
        "bf16",
        "fp8_block",
        "nvfp4",
    )
    """Recipes of the linear layers in all blocks but those kept in BF16."""
    mesh: Extents = DEFAULT_MESH
    """Of the devices."""
    batch: int | None = None
    """Sequences in a step; one for each device along data and fsdp unless given."""
    sequence: int = 8192
    """Tokens in a sequence."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which devices add up their parts of a quantized kernel's gradient."""
    out: Path | None = None
    """Folder for plan.md and plan.json, if they are wanted."""

    def __post_init__(self) -> None:
        zoo.check_names("model", (self.model,), MODELS)
        zoo.check_names("recipe", self.recipes, RECIPES)
        for name in ("batch", "sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder; '{self.out}' is a file")

    @property
    def training(self) -> Training:
        """How the model is trained, as far as it matters here."""
        batch = self.mesh.data * self.mesh.fsdp if self.batch is None else self.batch
        return Training(batch=batch, sequence=self.sequence, gradient_dtype=self.gradient_dtype)


@dataclasses.dataclass(frozen=True)
class Products:
    """FLOPs of matrix products in a step of the whole model.

    Attributes:
      all: of the step, whatever they are for.
      linear: of the linear layers in blocks: Fprop, Dgrad and Wgrad.
      quantized: those among them whose operands are both quantized.
    """

    all: int
    linear: int
    quantized: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step takes; bytes are those of one device.

    Attributes:
      weights: bytes of the parameters, in float32.
      optimizer: of what the optimizer remembers.
      gradients: of the parameters' gradients.
      kept: of what the backward pass reads besides the parameters.
      kept_by_linear: of the operands among it that linear layers in blocks keep.
      peak: of all that the compiled step has in memory at its fullest.
      moved: by collective operation and dtype, bytes that a step leaves there.
      products: FLOPs of the whole model's matrix products.
      device_flops: of one device, as XLA counts its program.
    """

    weights: int
    optimizer: int
    gradients: int
    kept: int
    kept_by_linear: int
    peak: int
    moved: dict[str, dict[str, int]]
    products: Products
    device_flops: float


def plan(
    preset: Preset,
    recipe: fp4.Recipe,
    training: Training,
    mesh: Mesh,
    tell: Callable[[str], None] = lambda stage: None,
) -> Plan:
    """What a step of the model takes on the mesh.

    Args:
      preset: the model; a language model.
      recipe: of the linear layers in all blocks but those kept in BF16.
      training: batch, sequence and dtype of gradients are those of the step.
      mesh: with the axes of `experiments.mesh`.
      tell: is told what is being done, which may take minutes.

    Raises:
      MeshError: the batch cannot be divided among the devices.
    """
    rows_here(mesh, training.batch)
    tell("tracing the step")
    model, state, batch = abstract(preset, recipe, training, mesh)
    step = traced_step(nnx.graphdef(model), training, state, batch)
    tell("compiling the step")
    program = step.lower().compile(compiler_options=FAST)
    memory, moved = program.memory_analysis(), collectives(program.as_text())
    weights = _bytes_of(jax.tree.leaves(state.params))
    tell("compiling what is saved for the backward pass")
    kept, by_linear = saved(nnx.graphdef(model), state, batch, mesh)
    return Plan(
        weights=weights,
        optimizer=_bytes_of(jax.tree.leaves(state.opt_state)),
        gradients=weights,  # which are in the parameters' dtype, and lie as they do
        kept=kept,
        kept_by_linear=by_linear,
        peak=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        moved={op: moved_bytes(moved, op) for op in sorted({array.op for array in moved})},
        products=Products(
            product_flops(step.jaxpr.jaxpr),
            *linear_flops(model, training.batch * training.sequence),
        ),
        device_flops=program.cost_analysis()["flops"],
    )


def abstract(
    preset: Preset, recipe: fp4.Recipe, training: Training, mesh: Mesh
) -> tuple[Any, State, jax.ShapeDtypeStruct]:
    """The model, the state before its first step and a batch, with shapes in place of arrays.

    Those of state and batch say where on the mesh their parts lie.
    """

    def make() -> Any:
        dtype = training.gradient_dtype
        return zoo.make_model(preset, {}, recipe, seed=0, mesh=mesh, gradient_dtype=dtype)

    model = nnx.eval_shape(make)
    state = jax.eval_shape(lambda model: first_state(model, training), model)
    state = jax.tree.map(
        lambda leaf, spec: _lying(leaf.shape, leaf.dtype, NamedSharding(mesh, spec)),
        state,
        specs(state, mesh),
    )
    shape = (training.batch, training.sequence + 1)
    return model, state, batch_shape(shape, jnp.int32, mesh)


def saved(graphdef: Any, state: State, batch: Any, mesh: Mesh) -> tuple[int, int]:
    """Bytes a device saves for the backward pass; and those of linear layers' operands among them.

    What is saved is what the vjp function of the loss closes over, but for parameters; the compiler
    says where it lies.
    """

    def residuals(params: nnx.State, rest: nnx.State, batch: jax.Array) -> list[Any]:
        def loss(params: nnx.State) -> jax.Array:
            return measure(nnx.merge(graphdef, params, rest, copy=True), batch)[0]

        return jax.tree.leaves(jax.vjp(loss, params)[1])

    with jax.set_mesh(mesh):
        traced = jax.jit(residuals).trace(state.params, state.rest, batch)
        lies = traced.lower().compile(compiler_options=FAST).output_shardings
    jaxpr = traced.jaxpr.jaxpr
    arrays = jax.tree.leaves(traced.out_info)
    kept = {
        var: _bytes_of([_lying(arrays[i].shape, arrays[i].dtype, lies[i])])
        for var, i in kept_besides(jaxpr, len(jax.tree.leaves(state.params))).items()
    }
    operands = {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "name" and eqn.params["name"] == RESIDUAL
    }
    return sum(kept.values()), sum(n for var, n in kept.items() if var in operands)


def product_flops(jaxpr: core.Jaxpr) -> int:
    """FLOPs of all matrix products: two for each pair of numbers that are multiplied and added.

    Raises:
      NotImplementedError: for one in a loop whose number of turns a jaxpr does not say.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            operand: Any = eqn.invars[0].aval
            result: Any = eqn.outvars[0].aval
            total += 2 * math.prod(result.shape) * math.prod(operand.shape[i] for i in contracted)
            continue
        inner = sum(map(product_flops, _called(eqn.params.values())))
        if inner and eqn.primitive.name in ("while", "cond"):
            raise NotImplementedError(f"matrix products in {eqn.primitive.name} cannot be counted")
        total += inner * eqn.params.get("length", 1)
    return total


def linear_flops(model: Any, tokens: int) -> tuple[int, int]:
    """FLOPs of the three products of all linear layers in blocks; and of those quantized."""
    total = quantized = 0
    for _, layer in nnx_modules(model):
        if isinstance(layer, fp4.nnx.Linear):
            flops = 2 * tokens * math.prod(layer.kernel.shape)
            total += 3 * flops
            quantized += flops * sum(
                all(isinstance(rule, fp4.Quantizer) for rule in (gemm.lhs, gemm.rhs))
                for gemm in layer.recipe.gemms
            )
    return total, quantized


def table(plans: dict[str, Plan], devices: int) -> str:
    """The plans side by side, as Markdown.

    Args:
      plans: by recipe.
      devices: how many there are in all.
    """
    found = list(plans.values())
    rows: list[tuple[str, list[str]]] = [
        ("weights", [_size(p.weights) for p in found]),
        ("optimizer state", [_size(p.optimizer) for p in found]),
        ("gradients", [_size(p.gradients) for p in found]),
        ("saved for the backward pass", [_size(p.kept) for p in found]),
        ("of it operands of linear layers", [_size(p.kept_by_linear) for p in found]),
        ("peak memory of the step", [_size(p.peak) for p in found]),
    ]
    for op, dtype in sorted(
        {(op, dtype) for p in found for op, sizes in p.moved.items() for dtype in sizes}
    ):
        moved = [p.moved.get(op, {}).get(dtype, 0) for p in found]
        rows.append((f"{op}, {dtype}", [_size(n) for n in moved]))
    each = [p.products.all / devices for p in found]
    rows += [
        ("matrix products", [f"{_scaled(n)}FLOP" for n in each]),
        ("FLOPs by XLA", [f"{_scaled(p.device_flops)}FLOP" for p in found]),
        ("matrix products, all devices", [f"{_scaled(p.products.all)}FLOP" for p in found]),
        (
            "quantized, of linear layers",
            [f"{p.products.quantized / p.products.linear:.1%}" for p in found],
        ),
        (
            "quantized, of matrix products",
            [f"{p.products.quantized / p.products.all:.1%}" for p in found],
        ),
    ]
    lines = [["a device and step", *plans], ["---", *["---:"] * len(plans)]]
    lines += [[name, *cells] for name, cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(args: Sequence[str] | None = None) -> int:
    """Makes the plans that the command line asks for; returns the exit code."""
    config = tyro.cli(Config, prog="python -m experiments.plan", args=args)
    plans: dict[str, Plan] = {}
    try:
        if config.out is not None:
            config.out.mkdir(parents=True, exist_ok=True)
        mesh = fake_mesh(config.mesh)
        started = time.perf_counter()
        for recipe in config.recipes:

            def tell(stage: str, recipe: str = recipe) -> None:
                say(f"{time.perf_counter() - started:5.0f} s  {recipe}: {stage}")

            preset, training = MODELS[config.model], config.training
            plans[recipe] = plan(preset, RECIPES[recipe](), training, mesh, tell)
        page = described(config, plans)
        if config.out is not None:
            write(config.out / "plan.md", page)
            found = {recipe: dataclasses.asdict(each) for recipe, each in plans.items()}
            asked = dataclasses.asdict(config) | {"batch": config.training.batch}
            results = {"config": asked, "jax": jax.__version__, "plans": found}
            write(config.out / "plan.json", json.dumps(results, indent=1, default=str) + "\n")
    except (MeshError, OSError) as error:
        say(f"error: {error}")
        return UNUSABLE
    print(page, end="")
    return 0


def fake_mesh(extents: Extents) -> Mesh:
    """A mesh of as many CPU devices as it takes, unless JAX is running already.

    Raises:
      MeshError: JAX is, with fewer.
    """
    # It must be said before JAX makes its devices, and is refused after that.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", extents.devices)
        jax.config.update("jax_platforms", "cpu")
    return make_mesh(extents)


def described(config: Config, plans: dict[str, Plan]) -> str:
    """What is planned, the table and what it does not say by itself."""
    training = config.training
    head = (
        f"`{config.model}` on a mesh of {config.mesh} (data x fsdp x tensor), in a step "
        f"{training.batch:,} sequences of {training.sequence:,} tokens. JAX {jax.__version__}."
    )
    return f"{head}\n\n{table(plans, config.mesh.devices)}\n\n{NOTES}"


def _lying(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _bytes_of(leaves: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Of the parts on one device."""
    parts = [
        jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves
    ]
    return sum(map(bits_of, parts)) // 8


def _called(params: Iterable[Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for param in params:
        for each in param if isinstance(param, tuple | list) else (param,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each


def _size(size: int) -> str:
    return f"{_scaled(size)}B" if size else "0"


def _scaled(number: float) -> str:
    """Three digits or four, and the prefix of what they count."""
    power = min(5, max(0, math.floor(math.log10(number)) // 3))
    return f"{number / 1000**power:.4g} {['', 'k', 'M', 'G', 'T', 'P'][power]}"


if __name__ == "__main__":
    sys.exit(main())
