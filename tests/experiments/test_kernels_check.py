"""What is read from compilers' output, by fixtures written by hand, and what fails a check."""

import dataclasses
import importlib.util
import io
import subprocess
import sys

import pytest
from rich.console import Console

from experiments import aot, kernels_check
from experiments.aot import B200, H200, Compiled, Kernel, Launch, Mosaic, Resources
from experiments.kernels_check import APPROXIMATE, FLUSHED, FUSED, Check, Outcome

REPORT = """\
ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for helper
    64 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Function properties for first
    24 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 24 bytes cumulative stack size, 4224 bytes smem
ptxas info    : Compile time = 2.000 ms
ptxas info    : Compiling entry function 'second$1' for 'sm_90a'
ptxas info    : Function properties for second$1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 1 barriers
"""

PTX = """\
.version 9.0
.target sm_90a
.global .b8 table[4];

.visible .entry first(
	.param .u64 first_0
)
.maxntid 128, 1, 1
{
	{ .reg .b16 t; }
	div.full.f32 	%r4, 0f45280000, %r3;
	ret;
}
.visible .entry second$1(
	.param .u64 second_0
)
{
	mul.rn.f32 	%r2, %r1, %r1;
	ret;
}
"""

SEQUENCE = """\
001: kMemzero      [source       | next=002 (1)] kMemzero
002: kCustomKernel [prev=001 (1) | next=003 (1)] scale \
grid: [64, 8, 1] threads: [128, 1, 1]  shared_memory: 2048 bytes
010: kCustomCall   [prev=002 (1) | sink        ] kCustomCall
000: kCommandBuffer [source | sink]\x20
    001: kMemzero      [source       | next=002 (1)] kMemzero
    002: kCustomKernel [prev=001 (1) | next=003 (1)] scale \
grid: [64, 8, 1] threads: [128, 1, 1]  shared_memory: 2048 bytes
010: kCustomCall   [source | sink] kCustomCall
"""

METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer"
  }
  thunk_kind: "kCommandBuffer"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "scale.1"
    thunk_id: 2
  }
  thunk_kind: "kCustomKernel"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "pack.7"
    thunk_id: 10
  }
  thunk_kind: "kCustomCall"
}
"""

TARGET = (
    r'custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/pack"}, '
    r'backend_config={kernel_hash = "\9E\"x", module = "ML\EFR\00stable_mosaic_gpu\00module'
    r'\00fp4_pack_mosaic_gpu\00ordering\00"}'
)

HLO = """
HloModule jit_f, entry_computation_layout={(bf16[4,32]{1,0})->(f4e2m1fn[4,32]{1,0:E(4)})}

%body (a: bf16[4,32]) -> f32[4,32] {
  %a = bf16[4,32]{1,0} parameter(0)
  ROOT %wide = f32[4,32]{1,0} convert(%a)
}

ENTRY %main (x.1: bf16[4,32], s: f32[]) -> (f4e2m1fn[4,32], u8[4,2]) {
  %x.1 = bf16[4,32]{1,0} parameter(0), metadata={op_name="x"}
  %s = f32[] parameter(1), metadata={op_name="s"}
  %scale.1 = f32[4,32]{1,0} fusion(%x.1), kind=kLoop, calls=%body, METADATA
  ROOT %pack.7 = (f4e2m1fn[4,32]{1,0:E(4)}, u8[4,2]{1,0}) custom-call(%scale.1, %s, %s), TARGET
}
""".replace("METADATA", 'metadata={op_name="jit(f)/mul"}').replace("TARGET", TARGET)


def test_resources_are_the_entry_points_own():
    assert aot.read_resources(REPORT) == {
        "first": Resources(255, stack=24, spill_stores=12, spill_loads=20, shared=4224),
        "second$1": Resources(18, stack=0, spill_stores=0, spill_loads=0, shared=0),
    }


def test_a_report_without_registers_is_refused():
    with pytest.raises(RuntimeError, match="no resources for 'first'"):
        aot.read_resources(REPORT.replace("Used 255 registers", ""))


def test_each_entry_point_has_its_own_code_and_what_is_common():
    found = aot.entry_points(PTX)
    assert list(found) == ["first", "second$1"]
    assert all(".target sm_90a" in text and "table[4]" in text for text in found.values())
    assert "div.full" in found["first"] and "mul.rn" not in found["first"]
    assert "mul.rn" in found["second$1"] and "div.full" not in found["second$1"]
    assert aot.entry_points("") == {}


def test_launches_are_counted_once_in_order():
    assert aot.read_launches(SEQUENCE, METADATA) == [
        Launch("kMemzero", "", None),
        Launch("scale", "scale.1", 2048),
        Launch("kCustomCall", "pack.7", None),
    ]


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[4096,4096]{1,0}", 2 * 4096**2),
        ("f32[]", 4),
        ("pred[3]", 3),
        ("f4e2m1fn[3,5]{1,0:E(4)}", 8),  # 15 elements in whole bytes
        ("(f8e4m3fn[2,3]{1,0}, s64[2], (u8[5]))", 6 + 16 + 5),
        ("token[]", 0),
    ],
)
def test_bytes_of_shapes(shape, size):
    assert aot.shape_bytes(shape) == size


def test_hlo_tells_source_bytes_and_which_mosaic_kernel():
    module = aot.read_hlo(HLO)
    x, scaled, packed = 4 * 32 * 2, 4 * 32 * 4, 4 * 32 // 2 + 4 * 2
    assert module.floor == x + 4 + packed
    scale, pack = module.instructions["scale.1"], module.instructions["pack.7"]
    assert scale == ("fusion", "jit(f)/mul", x + scaled, None)
    mosaic = Mosaic(r"\9E\"x", "fp4_pack_mosaic_gpu_kernel")
    assert pack == ("mosaic_gpu_v2", "jit(f)/pack", scaled + 4 + packed, mosaic)


def test_targets_are_named_as_ptxas_names_them():
    assert (H200.arch, B200.arch) == ("sm_90a", "sm_100a")
    assert "core_count: 132 " in H200.config and "core_count: 148 " in B200.config


def test_a_process_compiles_mosaic_kernels_for_one_target(monkeypatch):
    monkeypatch.setattr(aot, "_mosaic", aot._Mosaic())
    aot._claim_mosaic(B200)
    aot._claim_mosaic(B200)
    with pytest.raises(RuntimeError, match=r"for B200, .* compile for H200 in a new process"):
        aot._claim_mosaic(H200)


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("jax_plugins", "pip install 'jax-cuda13-plugin=="),
        ("nvidia", "pip install nvidia-cuda-nvcc"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, missing, advice):
    def find_spec(name):
        return None if name.startswith(missing) else importlib.util.spec_from_loader(name, None)

    monkeypatch.setattr(aot.importlib.util, "find_spec", find_spec)
    with pytest.raises(ModuleNotFoundError, match=advice):
        aot.find_ptxas()


def test_the_program_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def missing():
        raise ModuleNotFoundError("pip install it")

    monkeypatch.setattr(kernels_check, "find_ptxas", missing)
    assert kernels_check.main([]) == 1
    assert "error: pip install it" in capsys.readouterr().err


def kernel(ptx: str | None = "mul.rn.f32 %r1, %r2, %r3;", **changes: int) -> Kernel:
    used = Resources(registers=40, stack=0, spill_stores=0, spill_loads=0, shared=32)
    return Kernel(
        "scale", "scale.1", "fusion", "", 512, ptx, dataclasses.replace(used, **changes), 2048
    )


def compiled(*kernels: Kernel) -> Compiled:
    return Compiled(H200, kernels, "", 1024, 0.5)


GOOD = Check("good", H200, lambda: None, (), must=(r"\bmul\.rn",), must_not=APPROXIMATE)


@pytest.mark.parametrize(
    ("check", "kernels", "reason"),
    [
        (GOOD, [kernel()] * 2, "2 kernels, where 1 are allowed"),
        (dataclasses.replace(GOOD, most=3), [], "0 kernels, where 1 to 3 are allowed"),
        (GOOD, [kernel("ret;")], r"no kernel has \bmul\.rn"),
        (GOOD, [kernel("mul.rn.f32 a; div.full.f32 b;")], r"\bdiv\.(?:full|approx)\S* in scale"),
        (GOOD, [kernel(spill_stores=4, spill_loads=8)], "scale spills 12 bytes, where 0 are"),
    ],
)
def test_reasons(check, kernels, reason):
    found = kernels_check.reasons(check, compiled(*kernels))
    assert any(reason in each for each in found), found


def test_a_check_that_holds_has_no_reasons():
    assert kernels_check.reasons(GOOD, compiled(kernel())) == []
    spilling = dataclasses.replace(GOOD, spills=12)
    assert not kernels_check.reasons(spilling, compiled(kernel(spill_stores=4, spill_loads=8)))


@pytest.mark.parametrize(
    ("patterns", "found", "left"),
    [
        (
            APPROXIMATE,
            ["div.full.f32 a", "div.approx.ftz.f32 a", "rcp.approx.f32 a", "rsqrt.approx.f32 a"],
            ["div.rn.f32 a", "rcp.rn.f32 a", "sqrt.rn.f32 a", "loop_div.full_fusion", "div.s32 a"],
        ),
        (FLUSHED, ["add.rn.ftz.f32 a", "cvt.ftz.f32.f16 a"], ["add.rn.f32 a"]),
        (
            FUSED,
            ["fma.rn.f32 a", "fma.rn.f32x2 a", "add.f32 a", "sub.f32x2 a"],
            ["add.rn.f32 a", "add.s32 a", "fma.rn.bf16x2 a", "mul.f32 a", "mma.f32.bf16 a"],
        ),
    ],
)
def test_patterns_find_instructions(patterns, found, left):
    check = dataclasses.replace(GOOD, must=(), must_not=patterns)
    for line in found:
        assert kernels_check.reasons(check, compiled(kernel(f"\t{line};\n"))), line
    for line in left:
        assert not kernels_check.reasons(check, compiled(kernel(f"\t{line};\n"))), line


def reported(*outcomes: Outcome) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = kernels_check.report(outcomes, console, kernels=True)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_a_forbidden_instruction_ends_with_exit_code_1_and_the_reason():
    bad = compiled(kernel("mul.rn.f32 a;\n rcp.approx.f32 b;\n rcp.approx.f32 c;"))
    code, text = reported(Outcome(GOOD, compiled(kernel())), Outcome(GOOD, bad))
    assert code == 1
    assert text.count("failed:") == 1
    assert r"failed: H200, good: \brcp\.approx\S* in scale" in text
    assert "2 rcp.approx.f32" in text


def test_what_does_not_compile_fails():
    code, text = reported(Outcome(GOOD, None, "RuntimeError: [no] such instruction"))
    assert code == 1
    assert "does not compile" in text
    assert "failed: H200, good: RuntimeError: [no] such instruction" in text


def test_the_table_has_the_largest_of_all_kernels_and_each():
    check = dataclasses.replace(GOOD, most=3)
    code, text = reported(
        Outcome(check, compiled(kernel(), kernel(registers=72, shared=8192), kernel(ptx=None)))
    )
    assert code == 0
    (row,) = [line for line in text.splitlines() if "good" in line]
    assert row.split()[:6] == ["H200", "good", "3", "72", "0", "10240"]
    assert text.count("scale") == 3


def test_checks_have_different_names():
    names = [(check.target.name, check.name) for check in kernels_check.CHECKS]
    assert len(set(names)) == len(names)


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    try:
        aot.find_ptxas()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("plugin")
def test_a_check_runs(capsys):
    assert kernels_check.main(["--only", "200 quantize, XLA", "--kernels"]) == 0
    text = capsys.readouterr().out
    assert text.count("quantize, XLA") == 2
    assert "div.full.f32" in text


# Two Mosaic kernels of one name, the smaller last, and XLA's own for what feeds it.
MOSAIC_PROGRAM = """
import jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from experiments.aot import B200, H200, compile_for

def double(x):
    def double_rows(x_gmem, y_gmem, x_smem, y_smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
        plgpu.barrier_wait(barrier)
        y_smem[...] = x_smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, y_gmem)
        plgpu.wait_smem_to_gmem(0)
    scratch = [plgpu.SMEM(x.shape, x.dtype)] * 2 + [plgpu.Barrier()]
    return plgpu.kernel(double_rows, out_type=x, scratch_types=scratch)(x)

large, small = (jax.ShapeDtypeStruct((128, n), jnp.float32) for n in (64, 32))
for _ in range(2):  # the second time Mosaic has both already
    kernels = compile_for(B200, lambda x, y: double(double(x)[:, :32] + y), large, small).kernels
    print(*(kernel.name for kernel in kernels))
    print(*(kernel.dynamic_shared // 1024 for kernel in kernels if "mosaic" in kernel.name))
    print(all(".target sm_100a" in kernel.ptx for kernel in kernels))
try:
    compile_for(H200, double, small)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.usefixtures("plugin")
def test_mosaic_kernels_are_told_apart_and_remembered():
    program = [sys.executable, "-c", MOSAIC_PROGRAM]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    *twice, refusal = run.stdout.splitlines()
    entry = "double_rows_mosaic_gpu_kernel"
    # Two copies of 128 x 64 floats are 64 KB.
    assert twice == [f"{entry} loop_add_fusion {entry}", "64 32", "True"] * 2
    assert "compile for H200 in a new process" in refusal
