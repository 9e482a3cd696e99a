"""The documentation site in a real browser: nothing from the network, no error, and nothing that axe calls serious."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from browsers import needs_axe, needs_browser, requested_urls, running_browser, show, violations

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    needs_browser,
    needs_axe,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("sphinx", "furo", "myst_parser")),
        reason="needs the packages of the site: pip install -e '.[docs]'",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "--builder", "html", "--fail-on-warning", "--keep-going"]
    subprocess.run([*command, str(ROOT / "docs"), str(built)], check=True)
    return built


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as driver:
        yield driver


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_each_page_of_the_site_opens_without_fault(site: Path, browser: Any, width: int, dark: bool) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    show(browser, width=width, dark=dark)
    browser.get_log("browser"), requested_urls(browser)
    for page in pages:
        browser.get(page.as_uri())
        assert browser.get_log("browser") == [], page.name
        assert all(url.startswith(("file:", "data:")) for url in requested_urls(browser)), page.name
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page.name
        language = browser.execute_script("return document.documentElement.lang")
        assert language == ("ja" if page.name.endswith(".ja.html") else "en"), page.name
        assert [each for each in violations(browser) if each[0] in ("serious", "critical")] == [], page.name
