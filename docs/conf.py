"""Configuration of the documentation site: `make docs` builds it into build/site."""

import re
from typing import Any

import lowtide

project = "Lowtide"
author = "The Lowtide contributors"
project_copyright = author
release = version = lowtide.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
nitpicky = False

html_theme = "furo"
html_title = "Lowtide"
html_show_sourcelink = False
html_copy_source = False


def setup(app: Any) -> None:
    """Register `make_accessible`, which runs after the theme has made the navigation."""
    app.connect("html-page-context", make_accessible, priority=900)


def make_accessible(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the keyboard reach code and tables, which scroll; give captions in the navigation the level of a heading, and
    Japanese pages their language. Sphinx 9 does none of these.
    """
    if page.endswith(".ja"):
        context["language"] = "ja"
    if "body" in context:
        context["body"] = re.sub(r'(<pre|<div class="table-wrapper[^"]*")(?=[ >])', r'\1 tabindex="0"', context["body"])
    if isinstance(tree := context.get("furo_navigation_tree"), str):
        context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')
