"""Renew the tables in docs/recipes.md, or wherever that page is."""

import sys
from pathlib import Path

from lowtide.runtime.recipes.recipes_page import renewed

if len(sys.argv) != 2:
    sys.exit("usage: python -m lowtide.runtime.recipes docs/recipes.md")
path = Path(sys.argv[1])
path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
