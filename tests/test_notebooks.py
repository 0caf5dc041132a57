"""Each notebook runs, and its two files agree.

After an edit of a ``.py``, this brings the other one up to date, outputs included::

    jupytext --sync notebooks/*.py
    jupyter execute --inplace notebooks/*.ipynb
"""

import re
from pathlib import Path

import jupytext
import nbclient
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ["comparing_rounding", "formats_and_rounding", "quantizing_your_model"]
MACHINE_PATH = re.compile(r"/(home|root|tmp|usr|opt|Users|private|var)/|[A-Z]:\\")


@pytest.fixture(params=NOTEBOOKS)
def script(request):
    """The path of a notebook's ``.py``."""
    return ROOT / "notebooks" / f"{request.param}.py"


def test_list_is_complete():
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.py")) == NOTEBOOKS


def test_runs_in_a_fresh_kernel(script):
    notebook = jupytext.read(script)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()


def test_both_files_have_the_same_cells(script):
    of_script, of_notebook = (
        [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]
        for path in (script, script.with_suffix(".ipynb"))
    )
    assert of_notebook == of_script


def test_committed_outputs(script):
    path = script.with_suffix(".ipynb")
    assert path.stat().st_size < 300_000
    code = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    for output in outputs:
        data = {**output.get("data", {}), "text": output.get("text", "")}
        texts = [text for kind, text in data.items() if not kind.startswith("image/")]
        assert not MACHINE_PATH.search("\n".join(texts))
