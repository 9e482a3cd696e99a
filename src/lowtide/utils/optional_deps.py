"""Check for optional dependencies where they are first needed."""

import sys
from importlib import import_module

from lowtide.errors import PackageMissing, TorchMissing
from lowtide.utils.installed_versions import describe_untested_torch, parse_torch_version
from lowtide.utils.messages import say

OLDEST_TORCH = (2, 10)

_shown_warnings: list[str] = []
"""The warning about a torch newer than all tested ones, after it was written to stderr; otherwise empty."""


def require_torch(asked_by: str) -> None:
    """Import torch; raise TorchMissing if it is absent or too old.

    The error names `asked_by`, the public function or command line that needs torch.
    """
    try:
        version = getattr(import_module("torch"), "__version__", None)
    except (ImportError, OSError) as error:  # OSError: torch is installed, but one of its shared libraries is not
        raise TorchMissing(_message(asked_by, f"`import torch` says {type(error).__name__}: {error}")) from error
    if version is None:
        # A folder called "torch" on sys.path imports as an empty namespace package.
        raise TorchMissing(_message(asked_by, "the module called torch has no version, so it is not PyTorch"))
    numbers = parse_torch_version(str(version))
    if numbers is None or numbers < OLDEST_TORCH:
        raise TorchMissing(_message(asked_by, f"torch {version}"))
    if not _shown_warnings and (remark := describe_untested_torch(str(version))) is not None:
        _shown_warnings.append(remark)
        say(remark)


def require_pictures(asked_by: str) -> None:
    """Import the plotting packages; raise PackageMissing if any of them is absent.

    The error names `asked_by`, the command line that needs the packages.
    """
    for package in ("matplotlib", "textalloc"):
        try:
            import_module(package)
        except ImportError as error:
            raise PackageMissing(
                f"{asked_by} needs the package {package}.\n"
                f"  Found: {error} (in {sys.executable}).\n"
                '  Install it: pip install "lowtide[pictures]"'
            ) from error


def _message(asked_by: str, installed: str) -> str:
    oldest = ".".join(map(str, OLDEST_TORCH))
    return (
        f"{asked_by} needs torch {oldest} or newer.\n"
        f"  Found: {installed} (in {sys.executable}).\n"
        '  Install it: pip install "lowtide[torch]"\n'
        "  That takes the build pip finds first. If your GPU or system needs another one (CPU only, an older CUDA, "
        "ROCm), install torch with PyTorch's own command for it before that."
    )
