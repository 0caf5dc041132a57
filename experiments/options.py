"""Command lines whose options may also stand in a TOML or YAML file."""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def with_file(args: Sequence[str]) -> list[str]:
    """The command line, after the options of the file that its ``--config`` names.

    Of an option that is given twice the last one counts: the command line wins. A file is a
    command line in another form, so its mistakes are reported as those of a command line.

    Raises:
      SystemExit: where the file cannot be read; what is wrong with it is printed.
    """
    named = values(args, "--config")
    if sum(arg.partition("=")[0] == "--config" for arg in args) > 1:
        print("error: --config is given more than once; one file is allowed", file=sys.stderr)
        raise SystemExit(2)
    if not named:
        return list(args)
    try:
        entries = _read(Path(named[0]))
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"error: --config {named[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    options: list[str] = []
    for name, value in entries.items():
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no-{name}")
        else:
            options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return [*options, *args]


def values(args: Sequence[str], option: str) -> list[str]:
    """What follows an option, where it is given last; empty where it is not given."""
    found: list[str] = []
    reading = False
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            reading = name == option
            if reading:
                found = [value] if equals else []
        elif reading:
            found.append(arg)
    return found


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    if path.suffix == ".toml":
        values: Any = tomllib.loads(text)
    elif path.suffix in (".yaml", ".yml"):
        values = yaml.safe_load(text) or {}
    else:
        raise ValueError(f"the ending must be .toml, .yaml or .yml, not '{path.suffix}'")
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError("it must hold options and their values, an option being a name")
    if "config" in values:
        raise ValueError("it must not name another file by the option config")
    for name, section in list(values.items()):
        if isinstance(section, dict):
            del values[name]
            values |= {f"{name}.{key}": value for key, value in section.items()}
    for name, value in values.items():
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, dict | list) for part in parts):
            raise ValueError(f"{name} must be a value or a list of values")
    return values
