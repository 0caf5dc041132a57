"""The parts of documentation pages that scripts write, each between two markers."""

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def put(name: str, script: str, text: str) -> None:
    """Puts the text in a page's place of a script.

    Args:
      name: the page's file in docs.
      script: whose text it is, as ``experiments.mesh_table``.
      text: Markdown.

    Raises:
      ValueError: the page has no such place, or several.
    """
    path = DOCS / name
    page = with_part(path.read_text(encoding="utf-8"), script, text)
    path.write_text(page, encoding="utf-8")


def with_part(page: str, script: str, text: str) -> str:
    """The page with the text between the script's two markers.

    Raises:
      ValueError: it does not have each of them once, in this order.
    """
    begin, end = (f"<!-- {at} of what {script} writes -->" for at in ("begin", "end"))
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end) or begin in rest or end in after:
        raise ValueError(f"the page must have {begin!r} once, and then {end!r} once")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
