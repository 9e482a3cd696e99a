"""A real browser without a window, for tests of pages: Chromium and its driver, which the system provides."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
AXE = Path(os.environ.get("AXE", "node_modules/axe-core/axe.min.js"))

needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="needs a browser: apt-get install chromium chromium-driver"
)
needs_axe = pytest.mark.skipif(
    not AXE.is_file(), reason=f"needs {AXE}: npm install --no-save axe-core, or AXE=path/to/axe.min.js"
)


@contextmanager
def running_browser() -> Iterator[Any]:
    """Yield a browser that logs errors and requests, and quit it afterwards."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def show(browser: Any, *, width: int, dark: bool = False) -> None:
    """Set the width of the window, which is a phone's if small, and the theme that the system prefers."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def requested_urls(browser: Any) -> list[str]:
    """Return the addresses that were requested since the last call."""
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [each["params"]["request"]["url"] for each in entries if each["method"] == "Network.requestWillBeSent"]


def violations(page: Any) -> list[tuple[str, str, str]]:
    """Return the findings of axe-core about the page: impact, rule, and the first element."""
    page.execute_script(AXE.read_text(encoding="utf-8"))
    found = page.execute_async_script("axe.run({preload: false}).then((found) => arguments[0](found.violations))")
    return [(each["impact"], each["id"], each["nodes"][0]["html"]) for each in found]
