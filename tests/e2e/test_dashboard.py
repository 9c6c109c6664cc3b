"""The dashboard in a real Chromium: what it shows is what the admin routes say, for everybody.

Needs Debian's chromium and chromium-driver; axe-core comes from npm.
"""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest

from bench.common.fleet import ADMIN_KEY, MODEL, Fleet
from gateway.records.proof import Claim, Interval, Proof
from sluice.children import Children
from sluice.demo.config import KEYS as DEMO_KEYS
from sluice.demo.config import PHASES_MODEL
from sluice.demo.fleet import DemoFleet
from tests.browser import Browser, installed, until

VIEWER_KEY = "sk-test-viewer"
AXE = Path(__file__).parent / "axe"
HOSTILE = "<img src=x onerror=window.hacked=1>"
KEYS = [
    {"name": "web", "sha256": "11" * 32},
    {"name": "nightly", "sha256": "22" * 32, "suspended": True},
]
pytestmark = pytest.mark.skipif(not installed(), reason="needs chromium and chromium-driver")


def entitlement(name: str, **more: Any) -> dict[str, Any]:
    digest = sha256(f"sk-{name}".encode()).hexdigest()
    return {"name": name, "tenant": name, "model": MODEL, "api_keys": [f"sha256:{digest}"], **more}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    many = [entitlement(f"quiet-{i:03}") for i in range(120)]
    with Fleet(
        model={
            "kv_bytes_per_token": 131072,
            "compression": {"enabled": True, "only_when_busy": False},
            "boundary": {"b_short": 4096, "planned": [[512, 0.5], [4096, 0.9], [16384, 1.0]]},
        },
        config={
            "entitlements": [
                entitlement(
                    "acme",
                    service_class="guaranteed",
                    concurrency={"short": 8, "long": 1},
                    slo_target_ms=5000,
                ),
                entitlement("narrow", service_class="spot", max_concurrency=1),
                *many,
            ],
            "tenants": [
                {"name": "acme", "display_name": "Acme", "keys": KEYS},
                *({"name": f"quiet-{i:03}"} for i in range(60)),
            ],
            "compressor": {"time_limit_ms": 60_000},
        },
        server={"viewer_key": VIEWER_KEY},
    ) as fleet:
        fill(fleet)
        yield fleet


def chat(fleet: Fleet, name: str, request_id: str, words: int, **more: Any) -> httpx.Response:
    text = " ".join(f"The hall of number {i} makes parts for customers." for i in range(words))
    return post(fleet, name, request_id, text, **more)


def post(fleet: Fleet, name: str, request_id: str, text: str, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}
    return httpx.post(
        f"{fleet.url}/v1/chat/completions",
        json={"model": MODEL, **body},
        headers={"authorization": f"Bearer sk-{name}", "x-request-id": request_id},
        timeout=30,
        trust_env=False,
    )


def borderline() -> str:
    """A question over passages, a little longer than the boundary."""
    passages = [
        f"[{n}] Notes on mill {n}\nThe mill number {n} was built in {1700 + n} by the river. "
        f"Visitors to mill {n} find a garden, a bench and an old well. "
        f"Its keeper writes that winter {n} was long and the mill stood empty."
        for n in range(90)
    ]
    return "\n\n".join(passages) + "\n\nWhen was the mill number 42 built by the river?"


def fill(fleet: Fleet) -> None:
    """Requests of every kind: short, long, compressed, refused, and one with a hostile id."""
    for number in range(12):
        assert chat(fleet, "acme", f"short-{number}", 4, stream=True).status_code == 200
    assert post(fleet, "acme", "borderline-1", borderline()).status_code == 200
    assert chat(fleet, "acme", "long-1", 900).status_code == 200
    assert chat(fleet, "acme", HOSTILE.replace(" ", "/"), 2).status_code == 200
    slow = threading.Thread(
        target=chat,
        args=(fleet, "narrow", "slow-1", 2),
        kwargs={"max_tokens": 3500, "mock_output_tokens": 3500},
    )
    slow.start()
    until(lambda: any(engine.running() for engine in fleet.engines), "the slow request runs")
    assert chat(fleet, "narrow", "refused-1", 2).status_code == 429
    slow.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def axe() -> str:
    if shutil.which("npm") is None:
        pytest.skip("needs npm for axe-core")
    source = AXE / "node_modules" / "axe-core" / "axe.min.js"
    if not source.exists():
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"],
            cwd=AXE,
            check=True,
            capture_output=True,
            timeout=180,
        )
    return source.read_text(encoding="utf-8")


def opened(
    browser: Browser,
    fleet: Fleet,
    *,
    width: int = 1920,
    scheme: Literal["light", "dark"] = "light",
    fragment: str = "",
) -> None:
    """The page with the viewer key, with its first figures."""
    browser.show(f"{fleet.url}/docs", width=width, scheme=scheme)
    browser.run(f"sessionStorage.setItem('sluice-key', '{VIEWER_KEY}')")
    browser.show(f"{fleet.url}/dashboard{fragment}", width=width, scheme=scheme)
    browser.wait("document.querySelectorAll('#decision-table tbody tr').length > 10")


def cells(browser: Browser, table: str) -> list[list[str]]:
    """Texts of a table's cells."""
    found: list[list[str]] = browser.run(
        f"return [...document.querySelectorAll('#{table} tbody tr')]"
        ".map((tr) => [...tr.cells].map((td) => td.innerText.trim()))"
    )
    return found


def clean(browser: Browser, fleet: Fleet) -> None:
    """No complaint in the console, and no request to another host."""
    browser.listen()
    assert browser.problems == []
    assert browser.hosts == {fleet.url.removeprefix("http://")}


def test_it_asks_for_a_key_refuses_a_wrong_one_and_forgets_it(
    fleet: Fleet, browser: Browser
) -> None:
    browser.show(f"{fleet.url}/dashboard")
    browser.run("sessionStorage.clear()")
    browser.show(f"{fleet.url}/")
    assert browser.wait("location.pathname") == "/dashboard"
    assert browser.wait("document.activeElement.id === 'key'")
    browser.driver.switch_to.active_element.send_keys("sk-wrong\n")
    assert "no admin or viewer key" in browser.wait("document.getElementById('problem').innerText")
    browser.listen()
    browser.problems.clear()  # the browser itself reports the 401
    browser.driver.switch_to.active_element.send_keys(f"{ADMIN_KEY}\n")
    browser.wait("document.querySelectorAll('#entitlement-table tbody tr').length")
    browser.run("document.getElementById('forget').click()")
    assert browser.run("return sessionStorage.length") == 0
    assert browser.wait("document.getElementById('figures').hidden")
    clean(browser, fleet)


def test_each_part_shows_what_the_admin_routes_say(fleet: Fleet, browser: Browser) -> None:
    opened(browser, fleet)
    (model,) = fleet.admin("/admin/pools").json()
    browser.wait("/^[0-9.]+$/.test(document.querySelector('#traffic .value').innerText)")
    cards = browser.run("return document.getElementById('pool-cards').innerText")
    for pool in model["pools"]:
        assert f"of {pool['ready_slots']}" in cards
        assert f"{pool['max_model_len']:,} tokens" in cards
    workers = {row[0]: row for row in cells(browser, "worker-table")}
    assert set(workers) == {w["id"] for pool in model["pools"] for w in pool["workers"]}
    assert {row[3] for row in workers.values()} == {"up"}
    tenants = {row[0]: row for row in cells(browser, "entitlement-table")}
    shown = fleet.admin("/admin/entitlements/acme").json()
    assert tenants["acme"][2:5] == [shown["service_class"], shown["state"], "0"]
    assert "concurrency" in tenants["narrow"][5]
    decisions = {row[1]: row for row in cells(browser, "decision-table")}
    record = fleet.decision("borderline-1")
    assert decisions["borderline-1"][3] == "compressed " + record["compression"][
        "compressed"
    ].replace("->", " → ")
    assert decisions["borderline-1"][5:7] == [record["pool"], record["worker"]]
    assert decisions["refused-1"][2] == "refused 429"
    lengths = browser.run("return document.querySelector('#model-cards svg').ariaLabel")
    assert f"long {1}" in lengths
    assert "1 of 1 (100%)" in browser.run("return document.getElementById('model-cards').innerText")
    clean(browser, fleet)


def test_its_lines_begin_with_what_happened_before_anybody_looked(
    fleet: Fleet, browser: Browser
) -> None:
    until(lambda: len(fleet.admin("/dashboard/history").json()) > 1, "a second point")
    opened(browser, fleet)
    browser.run("document.getElementById('pause').click()")
    lines = "[...document.querySelectorAll('#traffic path')].map((line) => line.getAttribute('d'))"
    assert all("L" in line for line in browser.run(f"return {lines}")[:3])
    card = browser.run("return document.getElementById('target-cards').innerText")
    assert card.startswith("acme\np99 ")
    assert card.endswith(" of 5.00 s")
    clean(browser, fleet)


def test_tenants_are_shown_with_keys_by_name_and_use_against_limits(
    fleet: Fleet, browser: Browser
) -> None:
    opened(browser, fleet)
    acme, *others = cells(browser, "tenant-table")
    used = fleet.admin("/admin/entitlements/acme").json()["usage"]["used_tokens"]
    assert acme[:4] == ["acme", "–", "web, nightly (suspended)", "acme 0/9"]
    assert (acme[5], acme[6]) == (f"{used:,}", "0")
    assert len(others) == 49
    field = browser.driver.find_element("css selector", "#tenant-table input")
    field.send_keys("quiet-05")
    until(lambda: len(cells(browser, "tenant-table")) == 10, "ten tenants")
    assert "10 of 61" in browser.run("return document.querySelector('#tenant-table').innerText")
    assert "1111" not in browser.run("return document.body.innerText")
    clean(browser, fleet)


def test_a_tenant_s_text_is_never_read_as_html(fleet: Fleet, browser: Browser) -> None:
    opened(browser, fleet)
    hostile = HOSTILE.replace(" ", "/")
    assert hostile in [row[1] for row in cells(browser, "decision-table")]
    browser.run(
        "[...document.querySelectorAll('#decision-table button.link')]"
        f".find((b) => b.innerText === {json.dumps(hostile)}).click()"
    )
    browser.wait("document.querySelectorAll('.steps li').length > 4")
    assert browser.run("return [window.hacked, document.images.length]") == [None, 0]


def test_tables_are_searched_paged_and_ordered_by_the_gateway(
    fleet: Fleet, browser: Browser
) -> None:
    opened(browser, fleet)
    assert len(cells(browser, "entitlement-table")) == 50
    field = browser.driver.find_element("css selector", "#entitlement-table input")
    field.send_keys("quiet-11")
    until(lambda: len(cells(browser, "entitlement-table")) == 10, "ten tenants")
    assert "10 of 122" in browser.run(
        "return document.querySelector('#entitlement-table').innerText"
    )
    field.clear()
    field.send_keys("quiet")
    until(lambda: len(cells(browser, "entitlement-table")) == 50, "fifty tenants")
    browser.run("document.querySelectorAll('#entitlement-table button')[1].click()")
    until(lambda: cells(browser, "entitlement-table")[0][0] == "quiet-050", "the second page")
    browser.driver.find_element("css selector", "#decision-table input").send_keys("compressed")
    until(
        lambda: [row[1] for row in cells(browser, "decision-table")] == ["borderline-1"],
        "one decision",
    )


def test_the_story_of_a_request_is_told_and_linked(fleet: Fleet, browser: Browser) -> None:
    opened(browser, fleet, fragment="#request=borderline-1")
    browser.wait("document.querySelectorAll('.steps li').length > 6")
    text = browser.run("return document.getElementById('story-body').innerText")
    for part in ("estimated", "compressor shortened", "was charged", "compression"):
        assert part in text
    browser.driver.switch_to.active_element.send_keys("\ue00c")  # Escape
    assert browser.wait("!document.getElementById('story').open")
    assert browser.run("return location.hash") == ""


@pytest.mark.parametrize("width", [360, 1920])
def test_a_pool_in_phases_is_one_card_and_its_story_has_both_workers(
    browser: Browser, axe: str, tmp_path: Path, width: int
) -> None:
    with Children() as children:
        demo = DemoFleet(children, tmp_path, 0, 8.0)
        demo.run(compare=False)
        content = "The hall of this number makes parts for customers. " * 200
        answer = httpx.post(
            f"{demo.url}/v1/chat/completions",
            json={"model": PHASES_MODEL, "messages": [{"role": "user", "content": content}]}
            | {"max_tokens": 8, "stream": True},
            headers={"authorization": f"Bearer {DEMO_KEYS['spot']}", "x-request-id": "phases-1"},
            timeout=30,
            trust_env=False,
        )
        prefill, decode = (
            answer.headers[f"x-sluice-{name}"] for name in ("prefill-worker", "worker")
        )
        browser.show(f"{demo.url}/dashboard#request=phases-1", width=width)
        browser.wait("document.querySelectorAll('.steps li').length > 6")
        told = browser.run("return document.getElementById('story-body').innerText")
        assert f"Worker {prefill} of pool apart/prefill computed the prompt in" in told
        assert f"Worker {decode} of pool apart served it" in told
        assert told.index("computed the prompt") < told.index("served it") < told.index("hand-over")
        browser.run("document.getElementById('story-close').click()")
        cards = browser.wait(
            "[...document.querySelectorAll('#pool-cards article')].map((card) => card.innerText)"
        )
        assert len(cards) == 3
        for part in (
            "in phases",
            "prefill Slots 1 of 1 ready",
            "0 of 8",
            "decode Slots",
            "0 of 32",
        ):
            assert part in cards[2]
        until(lambda: cells(browser, "decision-table"), "the decision")
        (row,) = cells(browser, "decision-table")
        assert width < 720 or row[6] == f"{prefill} → {decode}"
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.axe(axe) == []
        browser.driver.get("about:blank")  # it asks this gateway no more
        browser.listen()
        assert browser.problems == []
        browser.hosts.clear()


def test_claims_are_shown_beside_what_came_of_them(fleet: Fleet, browser: Browser) -> None:
    bounds = Interval(value=0.996, low=0.993, high=0.998)
    claims = (
        Claim(kind="entitlement", name="narrow", verdict="holds", reason="so", kept=bounds),
        Claim(kind="entitlement", name="quiet-001", verdict="cannot tell", reason="no request"),
    )
    digest = sha256(fleet.replicas[0].file.read_bytes()).hexdigest()
    proof = Proof(id="0123456789ab", config_sha256=digest, verdict="holds", findings=claims)
    answer = httpx.post(
        f"{fleet.url}/admin/reload?proof=true",
        content=msgspec.json.encode(proof),
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
        trust_env=False,
    )
    assert answer.status_code == 200
    opened(browser, fleet)
    text = "document.getElementById('proof').innerText"
    browser.wait(f"{text}.includes('no request since')")
    assert chat(fleet, "narrow", "promised-1", 2).status_code == 200
    browser.wait(f"{text}.includes('since then 100.0% of 1')")
    shown = browser.run(f"return {text}")
    assert "proved 99.6% (99.3% to 99.8%)" in shown
    assert "Not simulated: entitlement quiet-001 (cannot tell)" in shown
    clean(browser, fleet)


def test_it_is_used_with_the_keyboard_alone(fleet: Fleet, browser: Browser) -> None:
    opened(browser, fleet)
    browser.driver.switch_to.active_element.send_keys("\t")
    assert browser.run("return document.activeElement.className") == "skip"
    for _ in range(120):
        browser.driver.switch_to.active_element.send_keys("\t")
        if browser.run("return document.activeElement.matches('#decision-table button.link')"):
            break
    chosen = browser.run("return document.activeElement.innerText")
    ring = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"
    time.sleep(2.2)
    assert browser.run("return document.activeElement.innerText") == chosen, "the list stands still"
    browser.driver.switch_to.active_element.send_keys("\n")
    assert browser.wait("document.getElementById('story').open")
    assert chosen in browser.run("return document.getElementById('story-title').innerText")


@pytest.mark.parametrize(
    ("width", "scheme"), [(360, "light"), (360, "dark"), (1920, "light"), (3840, "dark")]
)
def test_it_fits_and_can_be_read_by_everybody(
    fleet: Fleet, browser: Browser, axe: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    opened(browser, fleet, width=width, scheme=scheme)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.axe(axe) == []
    browser.run("openStory('borderline-1')")
    browser.wait("document.querySelectorAll('.steps li').length > 6")
    assert browser.axe(axe) == []
    clean(browser, fleet)


def test_a_hidden_or_paused_page_asks_for_nothing(fleet: Fleet, browser: Browser) -> None:
    opened(browser, fleet)
    browser.run("document.getElementById('pause').click()")
    before = browser.run("return document.getElementById('traffic').innerText")
    assert chat(fleet, "acme", "while-paused", 2).status_code == 200
    time.sleep(2.5)
    assert browser.run("return document.getElementById('traffic').innerText") == before
    assert "while-paused" not in [row[1] for row in cells(browser, "decision-table")]
    browser.run("document.getElementById('pause').click()")
    until(
        lambda: "while-paused" in [row[1] for row in cells(browser, "decision-table")],
        "live again",
    )


def test_the_api_is_described_without_a_network(fleet: Fleet, browser: Browser, axe: str) -> None:
    browser.show(f"{fleet.url}/docs")
    browser.wait("document.querySelectorAll('#operations section').length > 9")
    text = browser.run("return document.getElementById('operations').innerText")
    assert f"curl {fleet.url}/v1/chat/completions" in text
    assert browser.axe(axe) == []
    clean(browser, fleet)
