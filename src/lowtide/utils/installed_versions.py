"""Versions of Lowtide and torch as installed, and the versions of torch that the tests have passed with."""

import importlib.util
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lowtide.utils import native_cache

RELEASE = "0.1.0"
"""Version of source without git tags, such as an archive; tags take precedence (tools/package_version.py)."""

TESTED_TORCH = ((2, 10), (2, 12), (2, 13), (2, 14), (2, 15))
"""Versions of torch with which tests have passed, some in an earlier state; README.md says which tests."""


def find_own_version() -> str:
    """Return Lowtide's version: of the installed package, or RELEASE if Lowtide is not installed."""
    return _find_version("lowtide") or RELEASE


def parse_torch_version(torch_version: str) -> tuple[int, int] | None:
    """Return the major and minor version of torch: "2.13.0+cpu" -> (2, 13). Return None if the text has neither."""
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def describe_untested_torch(torch_version: str) -> str | None:
    """Return a warning if this version of torch is newer than all tested ones; None otherwise."""
    numbers = parse_torch_version(torch_version)
    if numbers is None or numbers <= TESTED_TORCH[-1]:
        return None
    newest = ".".join(map(str, TESTED_TORCH[-1]))
    return (
        f"torch {torch_version} is newer than any that Lowtide was tested with, up to {newest}. Rehearsals still "
        "compare every recipe and replay with the original tensors."
    )


def torch_version() -> str | None:
    """Return the version of the installed torch package, without importing it; None if torch is not installed."""
    return _find_version("torch")


def read_torch_build() -> str | None:
    """Return `torch.__version__` without importing torch; None if torch is not installed.

    The result names the build, as in 2.13.0+cpu. The version in the package's metadata may lack that suffix.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return torch_version()
    named = re.search(r"^__version__ = '(.+)'", text, re.MULTILINE)
    return torch_version() if named is None else named[1]


def describe_versions() -> str:
    """Return the lines of `lowtide --version`, without importing torch."""
    installed = torch_version()
    tested = ", ".join(".".join(map(str, numbers)) for numbers in TESTED_TORCH)
    lines = [
        f"lowtide {find_own_version()}",
        f"torch {installed or 'not installed'} (tested: {tested})",
        f"Python {platform.python_version()}",
        f"hooks: {native_cache.state(read_torch_build())}",
    ]
    if installed is not None and (remark := describe_untested_torch(installed)) is not None:
        lines.append(remark)
    return "\n".join(lines)


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
