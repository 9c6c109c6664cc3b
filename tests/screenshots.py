"""`python -m tests.screenshots URL FOLDER`: the pictures in the documentation.

URL is a running gateway whose dashboard is open, such as the demo's.
"""

import sys
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.terminal_theme import MONOKAI

from sluice.operate.gateway_client import GatewayClient
from sluice.top.command import once_of
from sluice.top.screen import screen
from tests.browser import Browser, until

_SETTLE_S = 20.0
"""Until the lines of the tiles have something to show."""


def main(url: str, folder: Path) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    told = _told(url)
    with Browser() as browser:
        browser.show(f"{url}/dashboard", width=1440, height=1500)
        browser.wait("document.querySelectorAll('#decision-table tbody tr').length > 5")
        time.sleep(_SETTLE_S)
        browser.picture(folder / "dashboard.png")
        browser.show(f"{url}/dashboard#request={told}", width=1100, height=860, scheme="dark")
        browser.wait("document.querySelectorAll('.steps li').length > 5")
        browser.picture(folder / "dashboard-story.png")
        _terminal(browser, url, folder / "top.png")


def _told(url: str) -> str:
    """A request with a story worth showing: a compressed one, or else any."""

    def found() -> str | None:
        for text in ("compressed", ""):
            answer = httpx.get(
                f"{url}/dashboard/decisions", params={"text": text}, trust_env=False
            ).raise_for_status()
            if rows := answer.json():
                return str(rows[0]["id"])
        return None

    return str(until(found, "a first decision"))


def _terminal(browser: Browser, url: str, file: Path) -> None:
    """`sluice top` as its own drawing makes it, at 100 columns."""
    out = Console(record=True, width=100, height=32, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    out.print(screen(once_of(GatewayClient(url, None, None)), 100, 30))
    page = file.with_suffix(".html")
    page.write_text(
        out.export_html(theme=MONOKAI, inline_styles=True).replace(
            "<body>", '<body style="margin: 1rem; background: #0c0c0c">'
        ),
        encoding="utf-8",
    )
    try:
        browser.show(page.resolve().as_uri(), width=1000, height=620)
        browser.picture(file)
    finally:
        page.unlink()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
