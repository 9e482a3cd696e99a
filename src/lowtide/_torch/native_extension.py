"""The compiled saved-tensor hooks: hot_path.cpp, built with torch's own tools. Its private names are listed there."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lowtide.utils import native_cache


class BuildFailed(Exception):
    """Failure to compile the hooks; the text is the compiler's message, or says that there is no compiler."""


def build() -> Path:
    """Compile the hooks for this torch and Python, and return the library's path. Raises BuildFailed if they don't
    compile.
    """
    try:
        library = native_cache.library(torch.__version__)
        library.parent.mkdir(parents=True, exist_ok=True)
        # Not in place: a build that is broken off leaves neither half a library nor a lock.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            from torch.utils import cpp_extension

            cpp_extension.load(
                native_cache.NAME,
                [str(native_cache.SOURCE)],
                extra_cflags=["-O2"],
                build_directory=folder,
                with_cuda=False,
                is_python_module=False,
            )
            shutil.move(Path(folder) / library.name, library)
    except Exception as error:  # raised by the file system, ninja, the compiler or the loader
        lines = str(error).strip().split("\n")
        # torch's first line only names the extension, and ninja's last one only says that it stopped
        causes = [line for line in lines[1:] if "error:" in line or "not found" in line]
        raise BuildFailed((causes or lines[-1:])[0]) from error
    return library


def load() -> ModuleType | None:
    """Return the compiled hooks, which are built first if the environment variable `native_cache.SETTING` is "1".

    Returns None if they are not built or are switched off, and, with a warning, if they can't be built or loaded.
    """
    setting = os.environ.get(native_cache.SETTING)
    if setting == "0" or not sys.platform.startswith(("linux", "darwin")):
        return None
    try:
        library = native_cache.library(torch.__version__)
        if not library.exists():
            if setting != "1":
                return None
            build()
        return _import(library)
    except BuildFailed as error:
        _warn(f"could not be built: {error}")
    except (ImportError, OSError) as error:
        _warn(f"could not be loaded: {error}. `lowtide native --build` builds them again")
    return None


def _import(library: Path) -> ModuleType:
    loader: Any = importlib.machinery.ExtensionFileLoader(native_cache.NAME, str(library))
    spec = importlib.util.spec_from_loader(native_cache.NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _warn(what: str) -> None:
    warnings.warn(
        f"Lowtide's compiled hooks {what}. Its hooks in Python are used: the same bits, more time.", stacklevel=2
    )
