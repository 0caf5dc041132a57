"""How Sphinx renders this directory: ``make docs`` writes the site to build/docs."""

from importlib.metadata import version as installed_version

project = "fp4jax"
copyright = "the fp4jax authors, Apache-2.0"
version = release = installed_version("fp4jax")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The sources are linked into this directory as docs/notebooks.
exclude_patterns = ["notebooks/*.py"]

html_theme = "furo"
html_title = f"{project} {version}"

# Notebooks are shown with the outputs that are committed; the tests execute them.
nb_execution_mode = "off"
# So that PAGE.md#a-heading works as a link, as it does on GitHub.
myst_heading_anchors = 3

# A name in single backticks in a docstring becomes a link where the reference has it.
default_role = "py:obj"
autodoc_member_order = "bysource"
# Defaults as they are written in the source.
autodoc_preserve_defaults = True
# Fields stay where "Attributes:" describes them, instead of being listed a second time as members.
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
