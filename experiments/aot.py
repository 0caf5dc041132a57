"""Compile a JAX function for a GPU that is not there, and read what came out."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

# The plugin refuses to load where CUDA's run-time libraries and a driver are missing; compiling
# needs neither. It is read when JAX first looks for its backends.
_SKIP_CHECKS = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_MOSAIC_DUMP = "MOSAIC_GPU_DUMP_TO"  # read at every compilation

# What XLA's list of launches holds beside launches: containers, and waits.
_NO_LAUNCH = {"Sequential", "CommandBuffer", "While", "Conditional", "Call", "WaitForStreams"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of GPU, in the facts that XLA plans its kernels by.

    Attributes:
      name: short, for tables.
      device_kind: what JAX calls such a device.
      capability: CUDA's compute capability, major and minor.
      cores: multiprocessors.
      memory: bytes.
      bandwidth: of the memory, bytes per second.
      l2: bytes of the second-level cache.
      shared: bytes of shared memory of one multiprocessor; a block may have 1024 fewer.
    """

    name: str
    device_kind: str
    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: int
    l2: int
    shared: int = 228 * 1024

    @property
    def arch(self) -> str:
        """What ``ptxas`` calls it, with the instructions that only this generation has."""
        major, minor = self.capability
        return f"sm_{major}{minor}a"

    @property
    def config(self) -> str:
        """The facts as a ``GpuTargetConfigProto`` in text form, as XLA wants them."""
        major, minor = self.capability
        capability = f"major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES"
        version = '"13.0.0"'
        device: dict[str, Any] = {
            "name": f'"{self.device_kind}"',
            "device_vendor": '"NVIDIA Corporation"',
            "cuda_compute_capability": f"{{ {capability} }}",
            "core_count": self.cores,
            "fpus_per_core": 128,
            "clock_rate_ghz": 1.9,
            "device_memory_size": self.memory,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2,
            "shared_memory_per_core": self.shared,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_block_optin": self.shared - 1024,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "threads_per_warp": 32,
            "threads_per_block_limit": 1024,
            "threads_per_core_limit": 2048,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "driver_version": version,
            "runtime_version": version,
            "compile_time_toolkit_version": version,
            "dnn_version": '"9.10.0"',
        }
        info = " ".join(f"{field}: {value}" for field, value in device.items())
        return (
            f'gpu_device_info {{ {info} }} platform_name: "CUDA" '
            f"dnn_version_info {{ major: 9 minor: 10 patch: 0 }} "
            f'device_description_str: "{self.device_kind}"'
        )


H200 = Target(
    name="H200",
    device_kind="NVIDIA H200",
    capability=(9, 0),
    cores=132,
    memory=141 * 2**30,
    bandwidth=4_800_000_000_000,
    l2=50 * 2**20,
)
B200 = Target(
    name="B200",
    device_kind="NVIDIA B200",
    capability=(10, 0),
    cores=148,
    memory=178 * 2**30,
    bandwidth=7_672_000_000_000,
    l2=126 * 2**20,
)


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one thread, or one block, of a kernel takes, by ``ptxas -v``.

    Attributes:
      registers: of a thread.
      stack: bytes of local memory of a thread, spilled registers among them.
      spill_stores: bytes.
      spill_loads: bytes.
      shared: bytes of shared memory whose size is fixed in the kernel.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
      name: of the entry point, or of the library function or copy.
      operation: the HLO instruction that it carries out; two launches may share one.
      made_by: that instruction's opcode, such as ``fusion``, or a custom call's target.
      source: where in the traced function it stems from.
      bytes: of the instruction's operands and results: what it moves at most, if it reads
        each once.
      ptx: its code; None where a library has it, or the driver does the work.
      resources: None without code.
      dynamic_shared: bytes of shared memory that the launch asks for; None where unknown.
    """

    name: str
    operation: str
    made_by: str
    source: str
    bytes: int
    ptx: str | None
    resources: Resources | None
    dynamic_shared: int | None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A function compiled for a target.

    Attributes:
      target: the GPU.
      kernels: in launch order; those in a loop's body or in either branch of a condition once.
      hlo: the optimized module.
      floor: bytes of arguments and results: less than this no version of the function moves.
      seconds: that tracing and compiling took.
    """

    target: Target
    kernels: tuple[Kernel, ...]
    hlo: str
    floor: int
    seconds: float

    @property
    def moved(self) -> int:
        """Bytes that all kernels together move at most, by their operands and results."""
        return sum({kernel.operation: kernel.bytes for kernel in self.kernels}.values())


@dataclasses.dataclass(frozen=True)
class _Described(AbstractDevice):
    """The GPU that Pallas lowers for, as it asks the mesh; without this Mosaic assumes Hopper."""

    compute_capability: str


class Code(NamedTuple):
    """One entry point's PTX, its resources, and the shared memory that its launch asks for."""

    ptx: str
    resources: Resources
    dynamic_shared: int | None


@dataclasses.dataclass
class _Mosaic:
    """What jaxlib's Mosaic compiler keeps for the life of a process, and so does this module.

    It compiles for the GPU that it met first whatever it is asked for later, and shows the code
    of a kernel only when it compiles it, which is once.

    Attributes:
      target: the first GPU.
      code: of the kernels by the hash that their custom calls carry.
    """

    target: Target | None = None
    code: dict[str, Code] = dataclasses.field(default_factory=dict)


_mosaic = _Mosaic()


def compile_for(target: Target, function: Callable[..., Any], *args: Any) -> Compiled:
    """Traces, lowers and compiles ``function`` for ``target``, and reads the kernels back.

    Args:
      target: a GPU, which need not exist here.
      function: of arrays; anything static about it is bound already.
      *args: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
      ModuleNotFoundError: if the CUDA plugin or ``ptxas`` is not installed.
      RuntimeError: if JAX has set up its backends without the plugin; if ``ptxas`` refuses a
        kernel; for a Mosaic kernel also if this process has compiled one for another target, or
        this one by other means.
    """
    assembler = find_ptxas()
    device = _device(target)
    place = SingleDeviceSharding(device)
    described = _Described(target.device_kind, None, "gpu", "{}.{}".format(*target.capability))
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=described)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dump, mosaic = Path(folder, "xla"), Path(folder, "mosaic")
        mosaic.mkdir()
        with _environment(_MOSAIC_DUMP, str(mosaic)):
            with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
                jitted = jax.jit(function, in_shardings=place, out_shardings=place)
                lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
            if "mosaic_gpu" in lowered.as_text():
                _claim_mosaic(target)
            # Nothing but the code, of all that the emitters can dump: more takes seconds.
            options = {"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"}
            hlo = lowered.compile(compiler_options=options).as_text() or ""
        seconds = time.perf_counter() - began
        module = read_hlo(hlo)
        launches = read_launches(
            _text(dump, "*.thunk_sequence.txt"), _text(dump, "*.thunk_metadata.txt")
        )
        code: dict[str, Code] = {}
        for path in dump.glob("*.ptx"):
            code |= _assembled(assembler, target, path)
        wanted = [
            instruction.mosaic
            for launch in launches
            if (instruction := module.instructions.get(launch.operation)) and instruction.mosaic
        ]
        _mosaic.code.update(_new_mosaic_code(target, mosaic, wanted))
    kernels = tuple(_kernel(launch, module.instructions, code) for launch in launches)
    return Compiled(target, kernels, hlo, module.floor, seconds)


def find_ptxas() -> Path:
    """The assembler of the ``nvidia-cuda-nvcc`` package.

    Raises:
      ModuleNotFoundError: if it, or JAX's CUDA plugin, is not installed; it says how to.
    """
    # Looked for one level at a time: find_spec raises where the upper one is missing.
    if not importlib.util.find_spec("jax_plugins") or not importlib.util.find_spec(
        "jax_plugins.xla_cuda13"
    ):
        raise ModuleNotFoundError(
            "to compile for a GPU, JAX needs its CUDA plugin: "
            f"pip install 'jax-cuda13-plugin=={jax.__version__}' 'jax-cuda13-pjrt=="
            f"{jax.__version__}'"
        )
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        if (path := Path(folder, "cu13", "bin", "ptxas")).exists():
            return path
    raise ModuleNotFoundError(
        "a kernel's registers are told by ptxas: pip install nvidia-cuda-nvcc"
    )


class Launch(NamedTuple):
    """One launch of XLA's list: entry point or thunk kind, HLO instruction, shared memory."""

    name: str
    operation: str
    dynamic_shared: int | None


def read_launches(sequence: str, metadata: str) -> list[Launch]:
    """The launches of XLA's dumped thunk sequence, in order.

    Args:
      sequence: one thunk a line with its number and, for a kernel of XLA's own, its entry point
        and shared memory. What goes into a CUDA graph is listed twice, with one number.
      metadata: which HLO instruction a number belongs to.
    """
    operations = {
        number: name
        for block in metadata.split("thunk_metadata {")
        if (number := _first(r"thunk_id: (\d+)", block))
        and (name := _first(r'profile_annotation: "([^"]*)"', block))
    }
    launches = {}
    line = r"^\s*0*(\d+): k(\w+)\s+\[[^]]*\] (\S+)(?:.*shared_memory: (\d+) bytes)?"
    for number, kind, name, shared in re.findall(line, sequence, re.MULTILINE):
        if kind not in _NO_LAUNCH:
            operation = operations.get(number, "")
            launches[number] = Launch(name, operation, int(shared) if shared else None)
    return list(launches.values())


class Mosaic(NamedTuple):
    """What a custom call says of its Mosaic kernel: a hash of the code, and the entry point."""

    hash: str
    entry: str


class Instruction(NamedTuple):
    """An HLO instruction: opcode or custom call's target, source, bytes in and out."""

    made_by: str
    source: str
    bytes: int
    mosaic: Mosaic | None


class Module(NamedTuple):
    """The instructions of an HLO module by name, and the bytes of its arguments and results."""

    instructions: dict[str, Instruction]
    floor: int


_SHAPE = r"\((?:[^()]|\([^()]*\))*\)|\S+"  # of one array, or of a tuple
_INSTRUCTION = rf"^\s+(?:ROOT )?%(\S+) = ({_SHAPE}) ([a-z][\w-]*)\(([^)]*)\)(.*)$"


def read_hlo(text: str) -> Module:
    """Reads what an optimized HLO module says of its instructions."""
    lines = re.findall(_INSTRUCTION, text, re.MULTILINE)
    sizes = {name: shape_bytes(shape) for name, shape, *_ in lines}
    instructions = {}
    for name, _, opcode, operands, rest in lines:
        target = _first(r'custom_call_target="([^"]*)"', rest)
        read = set(re.findall(r"%([\w.-]+)", operands))
        mosaic = None
        if target and target.startswith("mosaic_gpu"):
            key = _first(r'kernel_hash = "((?:[^"\\]|\\.)*)"', rest)
            # Among the names in its bytecode; the other one is the dialect's.
            entry = _first(r"\\00(?!stable_mosaic_gpu)(\w+_mosaic_gpu)\\00", rest)
            mosaic = Mosaic(key or "", f"{entry}_kernel")
        instructions[name] = Instruction(
            made_by=target or opcode,
            source=_first(r'op_name="([^"]*)"', rest) or "",
            bytes=sizes[name] + sum(sizes.get(operand, 0) for operand in read),
            mosaic=mosaic,
        )
    signature = _first(r"^ENTRY (.*)$", text) or ""
    return Module(instructions, shape_bytes(signature))


def shape_bytes(shapes: str) -> int:
    """Bytes of all arrays that an HLO text names, 4-bit elements two in a byte."""
    total = 0
    for dtype, bits, dims in re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", shapes):
        elements = 1
        for dim in filter(None, dims.split(",")):
            elements *= int(dim)
        total += (elements * (8 if dtype == "pred" else int(bits)) + 7) // 8
    return total


def read_resources(report: str) -> dict[str, Resources]:
    """Reads what ``ptxas -v`` reports of each entry point."""
    found = {}
    parts = re.split(r"Compiling entry function '([^']+)'", report)[1:]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        frame = re.search(
            rf"Function properties for {re.escape(name)}\s+(\d+) bytes stack frame, "
            r"(\d+) bytes spill stores, (\d+) bytes spill loads",
            part,
        )
        registers = _first(r"Used (\d+) registers", part)
        if frame is None or registers is None:
            raise RuntimeError(f"ptxas reports no resources for {name!r}: {part!r}")
        stack, stores, loads = map(int, frame.groups())
        shared = int(_first(r"(\d+) bytes smem", part) or 0)
        found[name] = Resources(int(registers), stack, stores, loads, shared)
    return found


def entry_points(ptx: str) -> dict[str, str]:
    """The entry points of a PTX file by name, each with all that is common to them."""
    whole = r"^(?:\.visible )?\.entry ([\w$]+)\(.*?^\}$"
    spans = {m[1]: m.span() for m in re.finditer(whole, ptx, re.MULTILINE | re.DOTALL)}
    if len(spans) == 1:
        return dict.fromkeys(spans, ptx)
    common, end = "", 0
    for start, stop in spans.values():
        common, end = common + ptx[end:start], stop
    common += ptx[end:]
    return {name: common + ptx[start:stop] for name, (start, stop) in spans.items()}


def _device(target: Target) -> Any:
    os.environ.setdefault(_SKIP_CHECKS, "1")
    try:
        described = topologies.get_topology_desc(
            "", "cuda", target_config=target.config, topology="1x1x1"
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX has set up its backends without the CUDA plugin, which a machine without a GPU "
            f"refuses by default: set {_SKIP_CHECKS}=1 before JAX's first use"
        ) from error
    return described.devices[0]


def _claim_mosaic(target: Target) -> None:
    if _mosaic.target not in (None, target):
        raise RuntimeError(
            f"this process has compiled a Mosaic kernel for {_mosaic.target.name}, and Mosaic "
            f"would go on doing so: compile for {target.name} in a new process"
        )
    _mosaic.target = target


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _assembled(assembler: Path, target: Target, path: Path) -> dict[str, Code]:
    """Runs ``ptxas`` on a file of XLA's, which may hold no kernel at all."""
    kernels = ", ".join(entry_points(path.read_text()))
    if not kernels:
        return {}
    command = [str(assembler), "-v", f"-arch={target.arch}", "-o", os.devnull, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ptxas refuses {kernels} for {target.arch}:\n{run.stderr}")
    return _code(target, path.read_text(), run.stderr)


def _code(target: Target, ptx: str, report: str) -> dict[str, Code]:
    kernels, resources = entry_points(ptx), read_resources(report)
    if (found := _first(r"^\.target (\w+)", ptx)) != target.arch:
        raise RuntimeError(f"{', '.join(kernels)}: compiled for {found}, not {target.arch}")
    return {name: Code(text, resources[name], None) for name, text in kernels.items()}


def _new_mosaic_code(target: Target, folder: Path, wanted: list[Mosaic]) -> dict[str, Code]:
    """The code by hash of those kernels that Mosaic has compiled into ``folder``.

    Args:
      target: the GPU.
      folder: with PTX, the report of Mosaic's own ``ptxas`` and a log of passes for each.
      wanted: what is launched, in order, which is the order of compiling too. It tells apart
        kernels of one name; most have their own.
    """
    left = [kernel for kernel in dict.fromkeys(wanted) if kernel.hash not in _mosaic.code]
    found = {}
    for path in sorted(folder.glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns):
        report, passes = (path.with_suffix(end) for end in (".ptxas", ".mlir-passes.log"))
        launch = r"launch_func .*dynamic_shared_memory_size %c(\d+)_i32"
        shared = _first(launch, passes.read_text())
        for entry, code in _code(target, path.read_text(), report.read_text()).items():
            kernel = next((kernel for kernel in left if kernel.entry == entry), None)
            if kernel is None:
                raise RuntimeError(f"Mosaic compiled {entry}, which no launch of the module names")
            left.remove(kernel)
            found[kernel.hash] = code._replace(dynamic_shared=int(shared) if shared else None)
    if left:
        raise RuntimeError(
            f"no code of {', '.join(kernel.entry for kernel in left)}: this process has compiled "
            "it before, outside of compile_for, and Mosaic shows its code once; use a new process"
        )
    return found


def _kernel(
    launch: Launch, instructions: Mapping[str, Instruction], code: Mapping[str, Code]
) -> Kernel:
    instruction = instructions.get(launch.operation, Instruction("", "", 0, None))
    name, mine, shared = launch.name, code.get(launch.name), launch.dynamic_shared
    if instruction.mosaic:
        mine = _mosaic.code[instruction.mosaic.hash]
        name, shared = instruction.mosaic.entry, mine.dynamic_shared
    elif mine is None and instruction.made_by:
        name = f"{launch.name.removeprefix('k')} {instruction.made_by}"
    return Kernel(
        name=name,
        operation=launch.operation,
        made_by=instruction.made_by,
        source=instruction.source,
        bytes=instruction.bytes,
        ptx=mine and mine.ptx,
        resources=mine and mine.resources,
        dynamic_shared=shared,
    )


def _text(folder: Path, pattern: str) -> str:
    return "".join(path.read_text() for path in folder.glob(pattern))


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None
