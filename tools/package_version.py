"""The version of the package to build: from git's tags, or from the file that an archive or sdist contains.

hatchling evaluates `version()` when it builds the package.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]

_DESCRIBED = re.compile(r"v(?P<release>\d+(?:\.\d+)*)(?:-(?P<distance>\d+)-g(?P<commit>[0-9a-f]+))?")


def version(root: Path = ROOT) -> str:
    """Return the version of the source in `root`.

    An sdist has the version that it was built as. A checkout has its last tag `v1.2.3`, or, in a later commit, the next
    release's development version, `1.2.4.dev5+gabc1234`; so has an archive that git made. Any other source has the
    release that it names.
    """
    metadata = root / "PKG-INFO"
    if metadata.is_file() and (found := re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8"), re.M)):
        return found[1]
    archived = root / ".git_archival.txt"
    for described in (_from_git(root), archived.read_text(encoding="utf-8") if archived.is_file() else ""):
        if (found := _DESCRIBED.fullmatch(described.strip())) is not None:
            return _format_version(**found.groupdict())
    source = (root / "src/lowtide/utils/installed_versions.py").read_text(encoding="utf-8")
    found = re.search(r'^RELEASE = "(\S+)"$', source, re.M)
    assert found is not None
    return found[1]


def _from_git(root: Path) -> str:
    """Return the output of `git describe` for the last tag; empty without git, a repository in `root`, or a tag."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--tags", "--match", "v[0-9]*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def _format_version(release: str, distance: str | None, commit: str | None) -> str:
    if distance is None:
        return release
    *parts, last = release.split(".")
    return f"{'.'.join([*parts, str(int(last) + 1)])}.dev{distance}+g{commit}"
