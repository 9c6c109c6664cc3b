"""Headless Chromium over its DevTools protocol: what a page shows, asks for, and complains about.

Needs Debian's `chromium` and `chromium-driver`, and selenium from the extra `test`.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

LIMIT_S = 20.0


def installed() -> bool:
    """Whether Chromium and its driver are on PATH."""
    return all(shutil.which(name) is not None for name in ("chromium", "chromedriver"))


class Browser:
    """One browser with one page, while the block runs."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        flags = "headless=new no-sandbox disable-gpu disable-dev-shm-usage hide-scrollbars"
        for flag in flags.split():
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(
            options=options, service=Service(str(shutil.which("chromedriver")))
        )
        self.problems: list[str] = []
        """Messages of the console that are warnings or errors."""
        self.hosts: set[str] = set()
        """Hosts that the pages asked for something."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()

    def show(
        self,
        url: str,
        *,
        width: int = 1920,
        height: int = 1080,
        scheme: Literal["light", "dark"] = "light",
    ) -> None:
        """Open a page in a window of this size."""
        self.resize(width, height)
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        self.driver.get("about:blank")  # a new fragment alone would not load the page again
        self.driver.get(url)

    def resize(self, width: int, height: int) -> None:
        """Change the window's size, in CSS pixels."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: object) -> Any:
        """The first true result of an expression; raises TimeoutError."""
        return until(lambda: self.run(f"return {script}", *arguments), script)

    def listen(self) -> None:
        """Read what the console and the network have logged since the last call."""
        for entry in self._log("browser"):
            if entry["level"] in {"WARNING", "SEVERE"}:
                self.problems.append(entry["message"])
        for entry in self._log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = urlsplit(message["params"]["request"]["url"])
                if url.scheme in {"http", "https", "ws", "wss"}:
                    self.hosts.add(url.netloc)

    def _log(self, kind: str) -> list[dict[str, Any]]:
        """New entries of a log; selenium's own method has no types."""
        found: list[dict[str, Any]] = self.driver.execute("getLog", {"type": kind})["value"]
        return found

    def axe(self, source: str) -> list[str]:
        """Violations of WCAG 2.1 A and AA that axe-core (its `source`) finds in the page."""
        self.run(source + "; window.axe = axe;")
        found = self.driver.execute_async_script(
            "const done = arguments[0];"
            "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
            ".then((r) => done(r.violations), (e) => done([{id: String(e), nodes: []}]));"
        )
        return [
            f"{each['id']}: {node['html'][:120]}"
            for each in found
            for node in (each["nodes"] or [{"html": ""}])
        ]

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Save a PNG of the window, or of the whole page."""
        if whole:
            width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
            self.resize(width, height)
            time.sleep(0.5)
        self.driver.save_screenshot(str(file))


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true result; raises TimeoutError."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError(f"did not happen within {LIMIT_S:g} s: {what}")
