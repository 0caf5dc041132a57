"""What scripts write into the documentation, and what they leave alone."""

import re

import pytest

from experiments import pages

PAGE = """# A page
<!-- begin of what x.y writes -->
old
<!-- end of what x.y writes -->
<!-- begin of what x.z writes -->
<!-- end of what x.z writes -->
the rest
"""


def test_a_part_is_replaced_and_the_rest_is_kept():
    page = pages.with_part(PAGE, "x.y", "| a |\n")
    assert page == PAGE.replace("\nold\n", "\n\n| a |\n\n")
    assert pages.with_part(page, "x.y", "| a |") == page


@pytest.mark.parametrize(
    "broken", ["", PAGE.replace("begin of", "start of"), PAGE + PAGE, PAGE[::-1]]
)
def test_a_page_without_its_place_is_refused(broken):
    with pytest.raises(ValueError, match=r"the page must have .* once, and then .* once"):
        pages.with_part(broken, "x.y", "new")


def test_the_pages_have_the_places_that_scripts_write_to():
    page = (pages.DOCS / "distributed.md").read_text(encoding="utf-8")
    for script in ("experiments.mesh_table", "experiments.process_table"):
        assert re.search(r"\| --- \|", page.split(f"begin of what {script}")[1])
        pages.with_part(page, script, "new")
