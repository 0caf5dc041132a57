"""How Sphinx renders this directory: ``make docs`` writes the site to build/docs."""

from importlib.metadata import version as installed_version
from typing import Any

from flax import nnx
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.util.inspect import signature, stringify_signature

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
# Tables in their outputs; plain CommonMark, the default, has none.
nb_render_markdown_format = "myst"
# So that PAGE.md#a-heading works as a link, as it does on GitHub.
myst_heading_anchors = 3

# A name in single backticks in a docstring becomes a link where the reference has it.
default_role = "py:obj"
autodoc_member_order = "bysource"
# Defaults as they are written in the source.
autodoc_preserve_defaults = True
# What "Attributes:" describes is a list, as the parameters are; the signature has the types.
napoleon_use_ivar = True
napoleon_attr_annotations = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# Sphinx heads that list "Variables".
for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"


def layer_signature(
    app: Sphinx, what: str, name: str, obj: Any, *unused: Any
) -> tuple[str, None] | None:
    """The arguments of a Flax layer, which the ``__call__`` of its metaclass hides."""
    if what != "class" or not issubclass(obj, nnx.Module):
        return None
    own = signature(obj.__init__, bound_method=True)
    return (
        stringify_signature(own, show_return_annotation=False, unqualified_typehints=True),
        None,
    )


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", layer_signature)
