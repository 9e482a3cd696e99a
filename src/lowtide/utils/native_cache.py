"""Location of Lowtide's compiled hooks on this machine, and the setting that enables them. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Final

SETTING: Final = "LOWTIDE_NATIVE"
"""Environment variable: 0 never uses compiled hooks, 1 builds them if needed; if unset, they are used if built."""

SOURCE: Final = Path(__file__).parents[1] / "_torch" / "hot_path.cpp"
NAME: Final = "lowtide_hot_path"


def library(torch_version: str) -> Path:
    """Return the path of the compiled hooks for this torch, this Python and this source; the file may not exist yet."""
    return _root() / "lowtide" / _key(torch_version) / f"{NAME}.so"


def state(torch_version: str | None) -> str:
    """Describe the saved-tensor hooks that a new process would use: "compiled", or "Python" with the reason."""
    setting = os.environ.get(SETTING)
    if setting == "0":
        return f"Python ({SETTING}=0)"
    try:
        is_built = torch_version is not None and library(torch_version).exists()
    except OSError:
        return f"Python ({SOURCE.name} is not installed)"
    if is_built:
        return "compiled"
    if setting == "1":
        return f"compiled on first use ({SETTING}=1)"
    return "Python (`lowtide native --build` compiles them, if there is a C++ compiler)"


def _root() -> Path:
    """Return the folder in which torch keeps compiled extensions."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    home = Path(os.path.expanduser("~"))  # unlike `Path.home()`, without an error where there is none
    cache = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or cache) / "torch_extensions"


@functools.cache
def _key(torch_version: str) -> str:
    digest = hashlib.sha256(SOURCE.read_bytes())
    # not `cache_tag`, which is the same for debug builds and for builds without a GIL
    abi = sysconfig.get_config_var("SOABI")
    digest.update(f"{torch_version} {abi} {sys.platform} {platform.machine()}".encode())
    return digest.hexdigest()[:16]
