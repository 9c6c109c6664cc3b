"""Pools in phases, where somebody leaves, waits too long or means harm; over real sockets."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.common.fleet import Fleet
from tests.asking import until
from tests.running import MOCK_MODEL, mock_engine

WORDS = "What is it that the people of this country think of? "
LEASE_S = 2000 * 60.0
"""Model seconds of a lease: nothing that is left behind expires during a test."""


class Phased:
    """Engines in phases and a gateway before them; each model has engines of its own."""

    def __init__(self, stack: contextlib.ExitStack, models: dict[str, dict[str, Any]]) -> None:
        """`models`: by name; of `p` and `d` their mocks, each a list of settings; `pool`: more."""
        self.engines: dict[tuple[str, str], list[str]] = {}
        listed = []
        for name, model in models.items():
            pool: dict[str, Any] = {"max_model_len": 8192, "transfer": {"kind": "vllm"}}
            for side, section in (("p", "prefill"), ("d", "decode")):
                urls = self.engines[name, side] = [
                    stack.enter_context(
                        mock_engine(
                            **{
                                "kv_transfer": "vllm",
                                "kv_hold_s": LEASE_S,
                                "max_model_len": 8192,
                                **mock,
                            }
                        )
                    )
                    for mock in model.pop(side)
                ]
                workers = [{"url": url, "model": MOCK_MODEL} for url in urls]
                more = model.pop(section, {})
                pool[section] = {"max_num_seqs": 32, "workers": workers, **more}
            listed.append({"name": name, "pools": {"all": {**pool, **model.pop("pool", {})}}})
            listed[-1].update(model)
        health = {"interval_s": 1.5, "timeout_s": 1.5, "eject_after": 1000}
        config = {"models": listed, "health": health}
        self.fleet = stack.enter_context(Fleet(short=0, long=0, config=config))
        self.url = self.fleet.url

    def fail(self, model: str, side: str, spec: str) -> None:
        """Break engines; "" mends."""
        for url in self.engines[model, side]:
            httpx.post(url + "/mock/fail", json={"spec": spec}).raise_for_status()

    def last(self, model: str, side: str, count: int = 50) -> list[dict[str, Any]]:
        """What the engines received."""
        found = []
        for url in self.engines[model, side]:
            answer = httpx.get(url + "/mock/last", params={"n": count}).json()
            found += answer["requests"] if isinstance(answer, dict) else answer
        return found

    def held(self) -> list[dict[str, float]]:
        """What each engine holds, where that is anything."""
        urls = [url for urls in self.engines.values() for url in urls]
        found = [httpx.get(url + "/mock/kv").json() for url in urls]
        return [state for state in found if any(state.values())]

    def metric(self, *parts: str) -> float:
        """The sum of the gateway's series with all of these in their names."""
        series = self.fleet.metrics().items()
        return sum(value for name, value in series if all(part in name for part in parts))

    def idle(self) -> bool:
        """Whether neither an engine nor the gateway holds anything."""
        kept = self.metric("sluice_worker_inflight"), self.metric("sluice_queue_depth")
        return not any(kept) and not self.fleet.leases() and not self.held()

    def ask(self, model: str, tokens: int = 4, text: str = WORDS, **more: Any) -> httpx.Response:
        """Ask once."""
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "max_tokens": tokens, **more}
        limit_s = body.pop("limit_s", 60.0)
        return httpx.post(self.url + "/v1/chat/completions", json=body, timeout=limit_s)


@pytest.fixture(scope="module")
def phased() -> Iterator[Phased]:
    quartz = {"scheduling": {"policy": "quartz"}}
    with contextlib.ExitStack() as stack:
        yield Phased(
            stack,
            {
                "queued": {
                    "p": [{"speed": 0.05}],
                    "d": [{}],
                    "prefill": quartz,
                    "scheduling": {"queue_timeout_s": 1.0, "queue_limit": 4},
                },
                "patient": {"p": [{"speed": 0.02}], "d": [{}], "prefill": quartz},
            },
        )


def test_who_waits_in_vain_for_a_prefill_leaves_its_queue(phased: Phased) -> None:
    assert phased.ask("queued").status_code == 200  # from now on the gate knows what it lets in

    def ends(number: int) -> str:
        impatient = number % 3 == 2
        try:
            text = f"{number} {WORDS * 500}"
            answer = phased.ask("queued", 4, text, limit_s=0.7 if impatient else 60.0)
        except httpx.TimeoutException:
            return "left"
        return str(answer.headers.get("x-sluice-reason", "ok"))

    with ThreadPoolExecutor(14) as threads:
        ended = list(threads.map(ends, range(14)))
    assert "ok" in ended
    assert len({"queue_timeout", "queue_full", "left"} & set(ended)) > 1
    until(lambda: not phased.metric("sluice_queue_depth") + phased.metric("_inflight"))
    assert phased.ask("queued").status_code == 200
    ran = phased.metric("sluice_prefill_seconds_count")
    counted = phased.metric("sluice_prefills_total", '"ok"')
    assert ended.count("ok") + 2 <= counted == ran, "of those that were refused no prompt was"


def test_a_stream_that_waits_for_a_prefill_worker_is_told_so(phased: Phased) -> None:
    assert phased.ask("patient").status_code == 200

    def comments(number: int) -> int:
        text = f"{number} {WORDS * 200}"
        body = {"model": "patient", "stream": True, "max_tokens": 3}
        answer = httpx.post(
            phased.url + "/v1/chat/completions",
            json={**body, "messages": [{"role": "user", "content": text}]},
            headers={"x-sluice-queue-status": "on"},
            timeout=60,
        )
        assert answer.text.endswith("data: [DONE]\n\n")
        return answer.text.count(": sluice queued position=")

    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(comments, range(8)))
    assert max(told) >= 1
    until(phased.idle)
