"""Options from a file and from the command line."""

import pytest

from experiments import compare, options, pretrain
from experiments.mesh import Extents


@pytest.fixture
def file(tmp_path):
    """Writes a file of options; the arguments that name it."""

    def write(text, name="options.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["--config", str(path)]

    return write


TOML = """
model = "transformer"
recipe = "mxfp4"
data = ["a.txt", "b.txt"]
tensorboard = false
checkpoint_every = 7
learning-rate = 1e-4
"""
YAML = """
model: transformer
recipe: mxfp4
data: [a.txt, b.txt]
tensorboard: false
checkpoint_every: 7
learning-rate: 1e-4
"""


@pytest.mark.parametrize(("text", "name"), [(TOML, "o.toml"), (YAML, "o.yaml"), (YAML, "o.yml")])
def test_a_file_sets_options_as_the_command_line_does(file, text, name):
    args = file(text, name)
    config = pretrain.parse(args)
    assert (config.model, config.recipe, config.checkpoint_every) == ("transformer", "mxfp4", 7)
    assert config.data == ("a.txt", "b.txt")
    assert config.tensorboard is False
    assert config.training.learning_rate == 1e-4
    assert str(config.config) == args[1]
    assert config.training.steps == 300, "what is not named keeps its default"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[mesh]\nfsdp = 4\ndata = 2", "o.toml"),
        ("mesh.fsdp = 4\nmesh.data = 2", "o.toml"),
        ("mesh:\n  fsdp: 4\n  data: 2", "o.yaml"),
        ("mesh.fsdp: 4\nmesh.data: 2", "o.yaml"),
    ],
)
def test_a_section_sets_the_options_that_begin_with_its_name(file, text, name):
    assert pretrain.parse(file(text, name)).mesh == Extents(data=2, fsdp=4)


@pytest.mark.parametrize("text", ["[training]\nsteps = 3", "[mesh]\nrows = 3"])
def test_an_unknown_section_is_an_unknown_option(file, capsys, text):
    with pytest.raises(SystemExit, match="2"):
        pretrain.parse(file(text))
    assert "Unrecognized" in capsys.readouterr().err


def test_the_command_line_wins(file):
    args = file(TOML)
    config = pretrain.parse(
        "--recipe nvfp4 --data c.txt".split()
        + args
        + "--tensorboard --checkpoint-every 3 --learning_rate 2".split()
    )
    assert (config.recipe, config.data, config.tensorboard) == ("nvfp4", ("c.txt",), True)
    assert (config.checkpoint_every, config.training.learning_rate) == (3, 2)
    assert config.model == "transformer"


@pytest.mark.parametrize("name", ["o.toml", "o.yaml"])
def test_an_empty_file_sets_nothing(file, name):
    args = file("", name)
    assert options.with_file(args) == args


def test_without_a_file_the_command_line_is_all():
    assert options.with_file(["--steps", "3"]) == ["--steps", "3"]


def test_a_file_may_be_named_with_an_equals_sign(file):
    named = file('recipe = "mxfp8"')
    assert pretrain.parse([f"--config={named[1]}"]).recipe == "mxfp8"


def test_one_file_is_all(file, capsys):
    """Neither a second one nor one that the first names is left out in silence."""
    named = file('recipe = "mxfp8"')
    with pytest.raises(SystemExit, match="2"):
        pretrain.parse([*named, f"--config={named[1]}"])
    assert "--config is given more than once" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        pretrain.parse(file('config = "other.toml"'))
    assert "must not name another file" in capsys.readouterr().err


def test_values_are_those_of_the_last_time_an_option_was_given():
    args = "--model a b --seeds 1 --model=c --other d".split()
    assert options.values(args, "--model") == ["c"]
    assert options.values(args[:5], "--model") == ["a", "b"]
    assert options.values(args, "--mode") == []


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("steps = 3", "o.json", "the ending must be .toml, .yaml or .yml, not '.json'"),
        ("steps = ", "o.toml", "o.toml: Invalid value (at end of document)"),
        ("data: [a", "o.yaml", "expected ',' or ']'"),
        ("[mesh.data]\na = 3", "o.toml", "mesh.data must be a value or a list of values"),
        ("data: [[a, b]]", "o.yaml", "data must be a value or a list of values"),
        ("- steps\n- 3", "o.yaml", "it must hold options and their values"),
        ("8: 3", "o.yaml", "an option being a name"),
        ("on: 3", "o.yaml", "an option being a name"),
        (b"steps = 3 # \xff", "o.toml", "can't decode byte 0xff"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_why(file, capsys, text, name, message):
    args = file(text, name)
    with pytest.raises(SystemExit, match="2"):
        pretrain.parse(args)
    said = capsys.readouterr().err
    assert said.startswith(f"error: --config {args[1]}: ")
    assert message in said


def test_a_missing_file_is_named(tmp_path, capsys):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(SystemExit, match="2"):
            compare.parse(["--config", str(path)])
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("setps = 3", "--setps"),
        ("steps = 0", "steps must be above zero, not 0"),
        ('steps = "many"', "invalid literal for int"),
        ("seed = [1, 2]", "Unrecognized options: 2"),
        ('model = "gpt"', "unknown model 'gpt'"),
    ],
)
@pytest.mark.usefixtures("wide")
def test_mistakes_in_a_file_are_reported_as_those_of_a_command_line(file, capsys, text, message):
    with pytest.raises(SystemExit, match="2"):
        pretrain.parse(file(text))
    assert message in capsys.readouterr().err


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


# Each model's own defaults


def test_a_model_brings_its_defaults():
    assert pretrain.parse([]).model == "hybrid"
    for args in (["--model", "vit"], ["--model=vit"]):
        config = pretrain.parse(args)
        assert (config.data, config.training.batch) == (("digits",), 64)
        assert config.training.learning_rate == 1e-3
    config = pretrain.parse(["--model", "moe"])
    assert (config.data, config.training.batch) == (("stdlib",), 8)


def test_what_is_asked_for_wins_over_a_models_defaults(file):
    config = pretrain.parse("--model vit --batch 16 --data mine.npz".split())
    assert (config.data, config.training.batch) == (("mine.npz",), 16)
    assert config.training.learning_rate == 1e-3
    config = pretrain.parse(file('batch = 16\nmodel = "vit"'))
    assert (config.data, config.training.batch) == (("digits",), 16)
    config = pretrain.parse([*file('batch = 16\nmodel = "vit"'), "--model", "moe"])
    assert (config.data, config.training.batch) == (("stdlib",), 16)


def test_compared_models_have_each_their_own_defaults(file):
    for args in (["--model", "vit", "moe"], file('model = ["vit", "moe"]')):
        configs = compare.parse(args)
        assert list(configs) == ["vit", "moe"]
        assert [c.training.batch for c in configs.values()] == [64, 8]
        assert [c.data for c in configs.values()] == [("digits",), ("stdlib",)]
        assert all(c.model == ("vit", "moe") for c in configs.values())
    both = compare.parse("--model vit moe --batch 4 --seeds 1 2".split())
    assert [c.training.batch for c in both.values()] == [4, 4]
    assert [c.seeds for c in both.values()] == [(1, 2), (1, 2)]
    assert list(compare.parse([])) == ["hybrid"]


def test_the_baseline_is_the_first_recipe_unless_named():
    def baseline(args):
        return compare.parse(args.split())["hybrid"].compared_with

    assert baseline("") == "bf16"
    assert baseline("--recipes nvfp4 mxfp4") == "nvfp4"
    assert baseline("--recipes nvfp4 mxfp4 --baseline mxfp4") == "mxfp4"
