"""Configuration of the documentation site: `make docs` builds it into build/site."""

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
