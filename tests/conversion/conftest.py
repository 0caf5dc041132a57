"""All of these tests compile much and run little."""

import pytest


@pytest.fixture(autouse=True)
def _fast(compile_fast: None) -> None:
    """Applies to every test here."""
