"""A run that is stopped in every way and goes on as if it had not been."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import compare, pretrain
from experiments.metrics import read
from fp4jax.models import HybridConfig

NANO = {
    "vocab_size": 256,
    "d_model": 32,
    "pattern": "M--",  # the last block stays in BF16
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "mlp_dim": 32,
    "mamba_heads": 4,
    "mamba_head_dim": 16,
    "mamba_groups": 2,
    "mamba_state": 16,
    "chunk": 16,
}
RUN = "--model nano --steps 9 --checkpoint-every 3 --batch 2 --sequence 32 --evals 3".split()
SMALL = [*RUN, "--validation", "2"]


@pytest.fixture(autouse=True)
def _nano(monkeypatch, lenient_promotion, compile_fast):
    monkeypatch.setitem(compare.MODELS, "nano", lambda: HybridConfig(**NANO))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d. " % (i, i * i) for i in range(2000)))
    return str(path)


@pytest.fixture
def run(tmp_path, text):
    """Does a run, or the rest of it: exit code, and the losses by step."""

    def do(name, *options):
        out = tmp_path / name
        code = pretrain.main([*SMALL, "--data", text, "--out", str(out), *options])
        lines = read(out / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        kept = ("step", "loss", "validation_loss")
        return code, [{name: line.get(name) for name in kept} for line in lines]

    return do


def at_step(monkeypatch, number, action):
    """Makes ``action`` happen before step ``number``, counted from 0, once."""
    step, done = pretrain._Run.step, []

    def patched(self, at, state):
        if at == number and not done:
            done.append(at)
            action()
        return step(self, at, state)

    monkeypatch.setattr(pretrain._Run, "step", patched)


def interrupt():
    raise KeyboardInterrupt


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("options", [(), ("--late-bf16", "0.5")], ids=["one phase", "late switch"])
def test_losses_after_a_resume_are_those_of_a_run_that_never_stopped(run, monkeypatch, options):
    """Bit for bit, with stochastic rounding; interrupted between two checkpoints."""
    code, straight = run("straight", *options)
    assert code == 0 and len(straight) == 9
    assert straight[-1]["loss"] < straight[0]["loss"]
    at_step(monkeypatch, 5, interrupt)
    code, part = run("stopped", *options)
    assert code == compare.INTERRUPTED and len(part) < 9
    code, whole = run("stopped", *options)
    assert code == 0
    assert whole == straight
    # Nothing is left to do: the same command changes nothing.
    assert run("stopped", *options) == (0, straight)


def test_sigterm_saves_and_exits_cleanly(run, monkeypatch, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    at_step(monkeypatch, 4, terminate)
    code, part = run("stopped")
    assert code == 0 and len(part) == 5
    assert (tmp_path / "stopped" / "checkpoints" / "5").is_dir()
    assert "the same command goes on from here" in capsys.readouterr().out
    code, whole = run("stopped")
    assert code == 0 and len(whole) == 9
    assert "going on after step 5" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


def test_numbers_that_go_non_finite_stop_the_run_and_say_where(run, tmp_path, capsys):
    code, lines = run("wild", "--learning-rate", "1e30", "--checkpoint-every", "1")
    assert code == pretrain.DIVERGED
    assert len(lines) < 9
    said = capsys.readouterr().err
    assert "stopped: in step" in said
    assert "blocks." in said and "elements are not finite" in " ".join(said.split())
    kept = [int(p.name) for p in (tmp_path / "wild" / "checkpoints").iterdir() if p.name.isdigit()]
    assert kept == [] or max(kept) < len(lines)


def test_a_folder_holds_one_run(run, capsys):
    assert run("mine", "--steps", "3")[0] == 0
    code, _ = run("mine", "--steps", "3", "--seed", "1", "--keep", "1")
    assert code == compare.UNUSABLE
    assert "holds another run: seed 0, not 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "huge"], "unknown model 'huge'; allowed: tiny, nano"),
        (["--recipe", "fp5"], "unknown recipe 'fp5'; allowed: bf16"),
        (["--checkpoint-every", "0"], "checkpoint_every must be at least 1, not 0"),
        (["--late-bf16", "0"], "late_bf16 must be above 0 and at most 1, not 0.0"),
        (["--seed", "-1"], "seed must be at least 0, not -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        pretrain.main(options)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_killed_for_real(tmp_path, text):
    """SIGKILL, wherever it happens to hit, twice; then the run ends and equals a straight one."""
    code = (
        "import sys; from experiments import compare, pretrain; "
        "from fp4jax.models import HybridConfig; "
        f"compare.MODELS['nano'] = lambda: HybridConfig(**{NANO!r}); "
        "sys.exit(pretrain.main(sys.argv[1:]))"
    )

    def start(name):
        options = ["--recipe", "bf16", "--steps", "150", "--checkpoint-every", "5", "--evals", "1"]
        command = [*SMALL, *options, "--data", text, "--out", str(tmp_path / name)]
        return subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.DEVNULL)

    metrics = tmp_path / "killed" / "metrics.jsonl"
    for lines in (20, 70):
        process = start("killed")
        while len(read(metrics)) < lines and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    for name in ("killed", "straight"):
        assert start(name).wait() == 0
    killed, straight = (read(tmp_path / name / "metrics.jsonl") for name in ("killed", "straight"))
    assert [line["step"] for line in killed] == list(range(1, 151))
    assert [line["loss"] for line in killed] == [line["loss"] for line in straight]
