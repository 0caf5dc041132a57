"""Text from models whose next token is known, and from a run's checkpoint."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

import fp4jax as fp4
from experiments import images, pretrain, sample, tokens, zoo
from experiments.checkpoint import Checkpoints
from experiments.folder import FolderError
from experiments.optimization import Training
from experiments.sample import NoSampleError
from fp4jax.models import TransformerConfig

VOCABULARY, LOGITS = 7, 11  # as where a vocabulary is padded to blocks


class Bigram(nnx.Module):
    """Logits of the next token from a table, by the last one."""

    def __init__(self, table):
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    def __call__(self, tokens):
        return self.table[...][tokens]


class Sum(nnx.Module):
    """The next token is the sum of all those seen, and of how many they are."""

    def __call__(self, tokens):
        likely = jnp.cumsum(tokens + 1, axis=1) % VOCABULARY
        return jax.nn.one_hot(likely, LOGITS)


def write(model, prompt, count, window=5, temperature=0.0, seed=0):
    prompt = np.asarray(prompt, np.uint8)
    return sample.sample(model, prompt, count, window, VOCABULARY, temperature, seed).tolist()


def test_without_temperature_the_most_likely_token_comes_next():
    follows = [3, 0, 6, 5, 1, 2, 4]
    table = np.zeros((LOGITS, LOGITS))
    table[range(VOCABULARY), follows] = 0.1
    assert write(Bigram(table), [4], 9) == [4, 1, 0, 3, 5, 2, 6, 4, 1, 0]
    assert write(Bigram(table), [2, 2, 5], 3) == [2, 2, 5, 2, 6, 4]


@pytest.mark.parametrize("window", [1, 4, 6, 30])
@pytest.mark.parametrize("prompt", [[2], [1, 5, 3], [6, 0, 1, 1, 4, 2, 5, 3]])
def test_the_model_sees_the_last_tokens_as_many_as_the_window_has(prompt, window):
    expected = list(prompt)
    for _ in range(10):
        seen = expected[-window:]
        expected.append((sum(seen) + len(seen)) % VOCABULARY)
    assert write(Sum(), prompt, 10, window) == expected


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    """Transitions of a chain of 3,000 tokens; one chain in 10,000 would be outside the bound.

    Of each of the 7 tokens, the counts of its 7 successors have 6 degrees of freedom.
    """
    table = np.random.default_rng(0).uniform(-0.7, 0.7, (LOGITS, LOGITS))
    text = write(Bigram(table), [0], 3000, temperature=temperature, seed=1)
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    p = np.exp(table[:VOCABULARY, :VOCABULARY] / temperature)
    expected = counts.sum(1, keepdims=True) * p / p.sum(1, keepdims=True)
    assert expected.min() > 5, "enough for the normal approximation"
    assert ((counts - expected) ** 2 / expected).sum() < scipy.stats.chi2.ppf(1 - 1e-4, 7 * 6)


def test_tokens_stay_within_the_vocabulary_though_the_model_prefers_others():
    table = np.zeros((LOGITS, LOGITS))
    table[:, VOCABULARY:] = 50
    for temperature in (0.0, 1.0):
        assert max(write(Bigram(table), [1], 40, temperature=temperature)) < VOCABULARY


def test_a_seed_gives_the_same_text_and_another_seed_another():
    model = Bigram(np.zeros((LOGITS, LOGITS)))
    first = write(model, [0], 30, temperature=1.0, seed=3)
    assert first == write(model, [0], 30, temperature=1.0, seed=3)
    assert first != write(model, [0], 30, temperature=1.0, seed=4)
    assert first[:21] == write(model, [0], 20, temperature=1.0, seed=3), "a prefix of a longer one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt must not be empty"),
        (["--tokens", "0"], "tokens must be at least 1, not 0"),
        (["--temperature", "-1"], "temperature must be from 0 up, not -1.0"),
        (["--temperature", "nan"], "temperature must be from 0 up, not nan"),
    ],
)
def test_senseless_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        sample.main(arguments)
    assert message in capsys.readouterr().err


# From a run

NANO = TransformerConfig(
    vocab_size=256, d_model=16, num_blocks=2, num_heads=1, num_kv_heads=1, head_dim=16, mlp_dim=16
)


@pytest.fixture
def nano(monkeypatch):
    monkeypatch.setitem(zoo.MODELS, "nano", zoo.Preset(NANO))


def describe(folder, config, found):
    """A run that has begun, and has no checkpoint."""
    folder.mkdir()
    text = json.dumps(pretrain.described(config, found))
    (folder / "config.json").write_text(text, encoding="utf-8")


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FolderError, match="holds no run"):
            sample.load(folder)
        assert sample.main(["--run", str(folder)]) == 2
        assert f"error: '{folder}' holds no run" in capsys.readouterr().err


def test_tokens_as_they_were_need_their_tokenizer(tmp_path, nano):
    np.save(tmp_path / "tokens.npy", np.arange(5000, dtype=np.uint8))
    found = zoo.load(zoo.MODELS["nano"], [str(tmp_path / "tokens.npy")], sequence=16)
    describe(tmp_path / "run", pretrain.Config.of("nano"), found)
    with pytest.raises(NoSampleError, match="was trained on tokens as they were"):
        sample.load(tmp_path / "run")
    with pytest.raises(NoSampleError, match="has no checkpoint yet"):
        sample.load(tmp_path / "run", tmp_path / "theirs.json")


def test_a_run_of_images_is_refused(tmp_path):
    describe(tmp_path / "run", pretrain.Config.of("vit"), images.load(["digits"]))
    with pytest.raises(NoSampleError, match="'vit' sees images and writes no text"):
        sample.load(tmp_path / "run")


@pytest.fixture
def begun(tmp_path, nano):
    """A run in the folder "run" that will switch from NVFP4 to BF16 after step 2 of 4."""
    (tmp_path / "text").write_bytes(bytes(range(1, 256)) * 20)
    config = dataclasses.replace(
        pretrain.Config.of("nano"),
        late_bf16=0.5,
        training=Training(steps=4, batch=2, sequence=16, ema=0.5),
    )
    found = zoo.load(zoo.MODELS["nano"], [str(tmp_path / "text")], sequence=16)
    describe(tmp_path / "run", config, found)
    return pretrain.make_run(config, found)


def test_a_run_without_a_checkpoint_is_refused(tmp_path, begun):
    with pytest.raises(NoSampleError, match="has no checkpoint yet"):
        sample.load(tmp_path / "run")


@pytest.mark.parametrize("done", [2, 3])
def test_the_model_is_the_one_that_the_newest_checkpoint_was_evaluated_with(tmp_path, begun, done):
    """The averaged parameters, and the recipe of the last step."""
    run = begun
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=3) as checkpoints:
        for step in (1, done):
            average = jax.tree.map(lambda x, step=step: x + step, run.state.params)
            state = run.state._replace(average=average)
            checkpoints.save(step, state, {})
    model, vocabulary, window = sample.load(tmp_path / "run")
    assert (vocabulary.vocab_size, window) == (256, 16)
    found, expected = (jax.tree.leaves(x) for x in (nnx.state(model, nnx.Param), average))
    for ours, evaluated in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, evaluated)
    recipe = model.blocks[0].attention.q_proj.dot_general.hook.recipe
    assert (recipe.fprop == fp4.recipes.nvfp4().fprop) == (done == 2)
    assert (recipe.fprop == fp4.recipes.bf16().fprop) == (done == 3)


def test_a_prompt_without_tokens_is_refused(monkeypatch, capsys):
    tokenizer = Tokenizer(models.WordLevel({"one": 0}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    vocabulary = tokens.Pieces(tokenizer, vocab_size=1)
    monkeypatch.setattr(sample, "load", lambda *named: (Sum(), vocabulary, 5))
    assert sample.main(["--prompt", "  "]) == 2
    assert "the run's tokenizer makes no tokens of the prompt '  '" in capsys.readouterr().err


@pytest.mark.usefixtures("nano", "lenient_promotion", "compile_fast")
def test_a_run_writes_on_from_a_prompt(tmp_path, capsys, monkeypatch):
    text, out, texts = tmp_path / "text.txt", tmp_path / "run", []
    text.write_bytes(b"so much depends upon a red wheel barrow. " * 100)
    trained = (
        "--model nano --recipe mxfp8 --steps 2 --batch 2 --sequence 16 --evals 1 --validation 2 "
        f"--no-tensorboard --data {text} --out {out}"
    )
    assert pretrain.main(trained.split()) == 0
    capsys.readouterr()
    write_text = sample.sample
    monkeypatch.setattr(sample, "sample", lambda *args: texts.append(write_text(*args)) or texts[0])
    assert sample.main(["--run", str(out), "--prompt", "so much ", "--tokens", "30"]) == 0
    written = capsys.readouterr().out
    assert written.startswith("so much ")
    assert len(texts[0]) == 38
    assert written == bytes(texts[0].tolist()).decode(errors="replace") + "\n"
