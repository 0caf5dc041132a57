"""A run that is stopped in every way and goes on as if it had not been."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from nano import HYBRID, PRESETS

from experiments import pretrain, train, zoo
from experiments.metrics import read

SMALL = (
    "--model nano --steps 9 --checkpoint-every 3 --batch 2 --sequence 32 --evals 3 --validation 2"
).split()


@pytest.fixture(autouse=True)
def _presets(monkeypatch, lenient_promotion, compile_fast):
    for name, preset in PRESETS.items():
        monkeypatch.setitem(zoo.MODELS, name, preset)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d. " % (i, i * i) for i in range(2000)))
    return str(path)


@pytest.fixture
def run(tmp_path, text):
    """Does a run, or the rest of it: exit code, and what does not depend on the clock, by step."""

    def do(name, *options, complete=True):
        out = tmp_path / name
        data = [] if "nano_vit" in options else ["--data", text]
        code = pretrain.main([*SMALL, *data, "--out", str(out), *options])
        lines = read(out / "metrics.jsonl")
        if complete:
            assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        clocked = {"tokens_per_second", "images_per_second"}
        return code, [{k: v for k, v in line.items() if k not in clocked} for line in lines]

    return do


def at_step(monkeypatch, number, action):
    """Makes ``action`` happen while the batch of step ``number``, from 0, is fetched, once."""
    make, done = train.batches, []

    def patched(*args, **kwargs):
        iterator = make(*args, **kwargs)
        fetch = type(iterator).__next__

        class Acting(type(iterator)):
            def __next__(self):
                if self.get_state()["next_index"] == number and not done:
                    done.append(number)
                    action()
                return fetch(self)

        iterator.__class__ = Acting
        return iterator

    monkeypatch.setattr(train, "batches", patched)


def interrupt():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c_twice():
    press_ctrl_c()
    press_ctrl_c()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--late-bf16", "0.5"),
        ("--accumulate", "2", "--ema", "0.9", "--schedule", "cosine"),
        ("--model", "nano_moe"),
        ("--model", "nano_vit"),
    ],
    ids=["one phase", "late switch", "parts and averages", "mixture", "images"],
)
def test_losses_after_a_resume_are_those_of_a_run_that_never_stopped(run, monkeypatch, options):
    """Bit for bit, with stochastic rounding; interrupted between two checkpoints."""
    code, straight = run("straight", *options)
    assert code == 0 and len(straight) == 9
    assert [line["step"] for line in straight if "validation_loss" in line] == [3, 6, 9]
    at_step(monkeypatch, 5, interrupt)
    code, part = run("stopped", *options)
    assert code == pretrain.INTERRUPTED and len(part) < 9
    code, whole = run("stopped", *options)
    assert code == 0
    assert whole == straight
    # Nothing is left to do: the same command changes nothing.
    assert run("stopped", *options) == (0, straight)


def test_a_late_switch_changes_what_follows_and_nothing_before(run):
    """With a switch at step 5 of 9, the sixth loss is the first that another forward pass made."""
    straight, switched = run("straight")[1], run("switched", "--late-bf16", "0.5")[1]
    losses = [[line["loss"] for line in lines] for lines in (straight, switched)]
    assert round(0.5 * 9) == 4
    assert losses[0][:4] == losses[1][:4]
    assert losses[0][4] != losses[1][4]


@pytest.mark.parametrize(("ask", "expected"), [(terminate, 0), (press_ctrl_c, 130)])
def test_who_is_asked_to_stop_saves_and_exits(run, monkeypatch, tmp_path, capsys, ask, expected):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    at_step(monkeypatch, 4, ask)
    code, part = run("stopped")
    assert code == expected and len(part) == 5
    assert (tmp_path / "stopped" / "checkpoints" / "5").is_dir()
    assert "the same command goes on from here" in capsys.readouterr().out
    code, whole = run("stopped")
    assert code == 0
    assert "going on after step 5" in capsys.readouterr().out
    assert whole == run("straight")[1]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_ctrl_c_ends_at_once(run, monkeypatch, tmp_path):
    at_step(monkeypatch, 4, press_ctrl_c_twice)
    code, part = run("stopped")
    assert code == 130 and len(part) == 3
    assert not (tmp_path / "stopped" / "checkpoints" / "5").exists()


def test_lost_lines_of_metrics_are_said(run, tmp_path, capsys):
    """Those that are left are kept, and none is there twice."""
    assert run("mine")[0] == 0
    path = tmp_path / "mine" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[0], lines[1], "\0\0\n", *lines[3:]]))
    assert run("mine", complete=False)[0] == 0
    assert "metrics.jsonl lacks 1 of the 9 steps that are done" in capsys.readouterr().out
    assert path.read_text() == "".join(lines[:2] + lines[3:])


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, tmp_path, capsys, damage):
    _, straight = run("damaged")
    shutil.copytree(tmp_path / "damaged", tmp_path / "kept")
    files = [p for p in (tmp_path / "damaged/checkpoints/9/state").rglob("*") if p.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    if damage == "cut short":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 4
    largest.write_bytes(content)
    assert run("damaged") == (0, straight)
    said = " ".join(capsys.readouterr().out.split())
    assert "checkpoint 9 cannot be used" in said and "going on after step 6" in said


@contextlib.contextmanager
def small_disk(folder):
    """A file system of its own that has room for one checkpoint, but not for two."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=500k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_the_run_which_then_goes_on(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    with small_disk(tmp_path / "full") as make_room:
        code, _ = run("full")
        assert code == pretrain.NOT_SAVED
        said = " ".join(capsys.readouterr().err.split())
        assert "stopped: checkpoint 6 could not be written" in said
        assert "MB are free); the newest good one is 3; the same command goes on" in said
        make_room()
        code, whole = run("full")
    assert code == 0
    assert whole == run("straight")[1]


def test_numbers_that_go_non_finite_stop_the_run_and_say_where(run, tmp_path, capsys):
    """The last good checkpoint stays."""
    code, lines = run("wild", "--learning-rate", "1e30", "--checkpoint-every", "1")
    assert code == pretrain.DIVERGED
    assert len(lines) < 9
    said = " ".join(capsys.readouterr().err.split())
    assert "stopped: in step" in said
    assert "blocks." in said and "elements are not finite" in said
    kept = [int(p.name) for p in (tmp_path / "wild" / "checkpoints").iterdir() if p.name.isdigit()]
    assert kept == [] or max(kept) < len(lines)


def test_a_folder_holds_one_run(run, capsys):
    assert run("mine")[0] == 0
    code, _ = run("mine", "--seed", "1", "--keep", "1")
    assert code == pretrain.UNUSABLE
    assert "holds another run: seed 0, not 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model", "huge"],
            "unknown model 'huge'; allowed: hybrid, transformer, mamba, moe, vit",
        ),
        (["--recipe", "fp5"], "unknown recipe 'fp5'; allowed: bf16"),
        (["--checkpoint-every", "0"], "checkpoint_every must be at least 1, not 0"),
        (["--late-bf16", "0"], "late_bf16 must be above 0 and at most 1, not 0.0"),
        (["--seed", "-1"], "seed must be from 0 to 4294967295, not -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        pretrain.main(options)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_killed_for_real(run, tmp_path, text):
    """SIGKILL in the middle of steps, then while a checkpoint is written; then the rest is done."""
    options = "--steps 60 --checkpoint-every 5 --evals 1".split()
    code = (
        "import sys; from experiments import pretrain, zoo; "
        "from fp4jax.models import HybridConfig; "
        f"zoo.MODELS['nano'] = zoo.Preset({HYBRID!r}); "
        "sys.exit(pretrain.main(sys.argv[1:]))"
    )
    # As the fixture compile_fast does in this process; and compiled once for all processes.
    env = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [*SMALL, *options, "--data", text, "--out", str(tmp_path / "killed")]
    metrics, checkpoints = tmp_path / "killed/metrics.jsonl", tmp_path / "killed/checkpoints"

    def start():
        arguments = [sys.executable, "-c", code, *command]
        return subprocess.Popen(arguments, env=env, stdout=subprocess.DEVNULL)

    def half_written():
        return any("tmp" in path.name for path in checkpoints.iterdir())

    def kill_when(due):
        process = start()
        while not due() and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL

    kill_when(lambda: len(read(metrics)) >= 15)
    at = len(read(metrics))
    kill_when(lambda: len(read(metrics)) > at + 8 and half_written())
    assert start().wait() == 0
    losses = [(line["step"], line["loss"]) for line in read(metrics)]
    assert losses == [(line["step"], line["loss"]) for line in run("straight", *options)[1]]
    assert len(losses) == 60
    assert not half_written()
