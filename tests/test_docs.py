"""The Python code in docs/*.md runs."""

import re
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
