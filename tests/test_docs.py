"""The Python code in docs/*.md runs, and the API reference is complete."""

import ast
import importlib
import re
import types
from pathlib import Path

import pytest

import fp4jax as fp4

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A Sphinx directive that describes the object, and the options below it.
DIRECTIVE = re.compile(r"^\.\. (auto\w+|py:\w+):: (\S+)\n((?: +:.*\n)*)", re.MULTILINE)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_blocks_run_in_order(path):
    text = path.read_text(encoding="utf-8")
    namespace = {"__name__": path.stem}
    for block in BLOCK.finditer(text):
        # Empty lines before it, so that a traceback names the line in the page.
        before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * before + block[1], path, "exec"), namespace)


def test_a_page_shows_how_to_add_a_format():
    assert "adding-a-format.md" in [path.name for path in DOCS]


def public_names():
    """What fp4jax/__init__.py imports under its own name, which is how it says "public"."""
    tree = ast.parse(Path(fp4.__file__).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [alias.asname for node in imports for alias in node.names if alias.asname]


def own_names(module):
    """The functions and classes that a module defines for others."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        if isinstance(value, type | types.FunctionType) or hasattr(value, "__wrapped__")
    ]


def reference():
    """The full names in docs/api.md; those of a module's members where it asks for them all."""
    text = next(path for path in DOCS if path.name == "api.md").read_text(encoding="utf-8")
    names = set()
    for kind, name, options in DIRECTIVE.findall(text):
        names.add(name)
        if kind == "automodule" and ":members:" in options:
            names |= {f"{name}.{member}" for member in own_names(importlib.import_module(name))}
    return names


def test_every_public_name_is_in_the_reference():
    wanted = set()
    for name in public_names():
        wanted.add(f"fp4jax.{name}")
        if isinstance(value := getattr(fp4, name), types.ModuleType):
            wanted |= {f"fp4jax.{name}.{member}" for member in own_names(value)}
    assert {"fp4jax.quantize", "fp4jax.nnx", "fp4jax.recipes.nvfp4"} <= wanted
    missing = wanted - reference()
    # `fp4jax.formats.Format` is `fp4jax.Format`: once in the reference is enough.
    missing = {name for name in missing if f"fp4jax.{name.split('.')[-1]}" not in reference()}
    assert not missing, f"add these to docs/api.md: {sorted(missing)}"


def test_the_reference_names_only_what_exists():
    for name in reference():
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


def test_every_page_is_in_the_table_of_contents():
    index = next(path for path in DOCS if path.name == "index.md").read_text(encoding="utf-8")
    toctree = "".join(re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL))
    pages = {path.stem for path in DOCS} - {"index"}
    notebooks = {
        f"notebooks/{path.stem}" for path in (DOCS[0].parents[1] / "notebooks").glob("*.ipynb")
    }
    assert pages | notebooks <= set(toctree.split())
