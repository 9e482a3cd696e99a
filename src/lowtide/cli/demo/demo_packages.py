"""The packages that the demo needs in addition to Lowtide's own."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtide.errors import PackageMissing

# Both are read when the package is first imported or used; a user's own choice stays.
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",  # the demo downloads nothing; this makes an attempt fail instead of starting
    "TOKENIZERS_PARALLELISM": "false",  # else tokenizers warns on stderr at every later fork, and gains nothing here
}


def need(module: str) -> Any:
    """Import and return `module`, which belongs to a slow package. Raises PackageMissing if that fails."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing(module.partition(".")[0], str(error)) from error


def need_folder(package: str, folder: str) -> Path:
    """Return a folder of data files inside an installed package, which is not imported.

    Raises PackageMissing if the package or the folder is missing.
    """
    spec = find_spec(package)
    for root in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(root) / folder).is_dir():
            return path
    raise _missing(package.replace("_", "-"), "it is not installed" if spec is None else f"it has no folder {folder}")


def _missing(package: str, state: str) -> PackageMissing:
    return PackageMissing(
        f"the demo needs the package {package}.\n"
        f"  Found: {state} (in {sys.executable}).\n"
        '  Install it: pip install "lowtide[demo]"'
    )
