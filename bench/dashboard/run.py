"""`python -m bench dashboard`: what the page costs a gateway of 200 workers and 1,000 tenants.

The gateway's CPU is read from the kernel, in turns of nobody looking and one viewer. Where
Chromium is installed, it also opens the page: time to the first figures, and whether updates
block the page.
"""

import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Final

import httpx

from bench.common.browser import Browser, installed
from bench.common.report import Report, Row, at_most
from bench.common.tools import cpu_ns
from bench.dashboard.fleet import MODEL, TENANTS, VIEWER_KEY, WORKERS, key_of, large_fleet

TURNS: Final = 3
TURN_S: Final = 8.0
_REQUESTS: Final = 700
_WATCH_S: Final = 15.0
_HEADERS: Final = {"authorization": f"Bearer {VIEWER_KEY}"}
_SIZE: Final = f"{WORKERS} workers, {TENANTS:,} tenants"


def run() -> Report:
    """All rows."""
    with large_fleet() as (url, pid):
        _send(url)
        idle, watched = _shares(url, pid)
        rows = [
            Row(
                metric="CPU of the gateway, nobody looks",
                measured=round(100 * median(idle), 2),
                note=f"% of a core; {_SIZE}, no traffic",
            ),
            Row(
                metric="CPU more with one viewer",
                measured=round(100 * (median(watched) - median(idle)), 2),
                note=f"aim: 1 % of a core; {_SIZE}",
            ),
            _size(url),
            *_browser(url),
        ]
    return Report(name="dashboard", rows=rows)


def _send(url: str) -> None:
    """Requests of many tenants, so that there are decisions and counters to show."""
    with httpx.Client(base_url=url, trust_env=False, timeout=30.0) as client:
        for number in range(_REQUESTS):
            client.post(
                "/v1/chat/completions",
                json={
                    "model": MODEL,
                    "messages": [{"role": "user", "content": "word " * (1 + 31 * number % 3000)}],
                    "max_tokens": 4,
                },
                headers={"authorization": f"Bearer {key_of(number % TENANTS)}"},
            ).read()


def _shares(url: str, pid: int) -> tuple[list[float], list[float]]:
    """Shares of a core, without and with a viewer, in turns."""
    idle, watched = [], []
    for _ in range(TURNS):
        idle.append(_share(pid))
        with _viewer(url):
            time.sleep(2.0)  # its first figures read more than later ones
            watched.append(_share(pid))
        time.sleep(1.5)  # until the gateway noticed that the viewer left
    return idle, watched


def _share(pid: int) -> float:
    begin, before = time.monotonic(), cpu_ns(pid)
    time.sleep(TURN_S)
    return (cpu_ns(pid) - before) / 1e9 / (time.monotonic() - begin)


class _viewer:  # noqa: N801 - reads as a function
    """Reads the stream of figures in a thread, while the block runs."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(trust_env=False, timeout=10.0, headers=_HEADERS)
        self._url = f"{url}/dashboard/events"
        self._go_on = True
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._go_on = False
        self._thread.join()

    def _read(self) -> None:
        with self._client, self._client.stream("GET", self._url) as answer:
            for _ in answer.iter_raw():
                if not self._go_on:
                    return


def _size(url: str) -> Row:
    answer = httpx.get(f"{url}/dashboard/snapshot", headers=_HEADERS, trust_env=False)
    kib = len(answer.raise_for_status().content) / 1024
    return at_most("Bytes of one update", round(kib, 1), 64.0, "KiB a second and viewer")


def _browser(url: str) -> Iterator[Row]:
    if not installed():
        yield Row(metric="First figures", measured=None, note="not measured: no Chromium here")
        return
    with Browser() as browser:
        browser.show(f"{url}/docs")  # the key is kept by origin; this page does not ask for it
        browser.run(f"sessionStorage.setItem('sluice-key', '{VIEWER_KEY}')")
        browser.show(f"{url}/dashboard")
        shown = browser.wait(
            "document.querySelectorAll('#entitlement-table tbody tr').length === 50"
            " && performance.now()"
        )
        yield Row(
            metric="First figures on the page, s", measured=round(shown / 1000, 2), note=_SIZE
        )
        browser.run(
            "window.tasks = []; new PerformanceObserver((l) => window.tasks.push("
            "...l.getEntries().map((e) => e.duration))).observe({type: 'longtask'});"
        )
        time.sleep(_WATCH_S)
        tasks = browser.run("return window.tasks")
        yield Row(
            metric="Longest block of the page by an update, ms",
            measured=round(max(tasks, default=0.0), 1),
            note=f"of {_WATCH_S:.0f} updates; {len(tasks)} took over 50 ms",
        )
