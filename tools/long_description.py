"""The long description of the package: README.md without links that only work inside a checkout.

hatchling calls `get_metadata_hook` when it builds the package. A package index shows the README away from the files
that its relative links point to. With the address of a repository as `Source` in `project.urls`, links and pictures
become absolute; without one, a link becomes its text, and a picture its description.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

RELATIVE_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<target>[^)\s]+)\)")


def long_description(readme: str, source: str | None) -> str:
    """Return the text of a README with links that work outside a checkout.

    Args:
        readme: Markdown.
        source: Address of the repository, on GitHub; None if there is none.
    """

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if source is None:
            return f"*{text}*" if picture else text
        return f"{picture}[{text}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return RELATIVE_LINK.sub(link, readme)


def get_metadata_hook() -> type:
    """Return the class to which hatchling passes the project's metadata."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface  # installed only during a build

    class LongDescription(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            readme = ROOT.joinpath("README.md").read_text(encoding="utf-8")
            text = long_description(readme, metadata.get("urls", {}).get("Source"))
            metadata["readme"] = {"content-type": "text/markdown", "text": text}

    return LongDescription
