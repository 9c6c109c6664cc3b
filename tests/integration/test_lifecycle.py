"""Starting and stopping: draining on SIGTERM, the request log, the demo."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from bench.common.fleet import MODEL, Fleet, RedisServer, consecutive_ports

CHAT = "/v1/chat/completions"


def body(**more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **more}


def test_sigterm_drains_and_nothing_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with Fleet(
        short=1, long=1, mock=("--speed", "2"), config={"request_log": {"path": str(log)}}
    ) as f:
        assert f.gateway is not None
        with (
            httpx.Client(timeout=30) as client,
            client.stream(
                "POST",
                f.url + CHAT,
                json=body(max_tokens=150, mock_output_tokens=150, stream=True),
            ) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            f.gateway.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 2
            while httpx.get(f.url + "/ready").status_code != 503:
                assert time.monotonic() < deadline, "/ready still answers 200 while draining"
            refused = httpx.post(f.url + CHAT, json=body())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["x-should-retry"] == "true"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert f.gateway.wait(10) == 0
        f.forget_gateway()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    done = [r for r in records if r["outcome"] == "ok"]
    assert len(done) == 1
    assert done[0]["usage"]["completion_tokens"] == 150
    assert done[0]["schema"] == 2


def test_a_request_that_arrives_as_the_drain_ends_is_still_answered() -> None:
    """Else its client sees a connection that closes without a word."""
    with Fleet(short=1, long=0, mock=("--speed", "2")) as f, httpx.Client() as kept:
        assert f.gateway is not None
        assert kept.post(f.url + CHAT, json=body(max_tokens=2)).status_code == 200
        long = body(max_tokens=50, mock_output_tokens=50, stream=True)
        with httpx.stream("POST", f.url + CHAT, json=long, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            f.gateway.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        time.sleep(0.4)  # nothing runs any more
        late = kept.post(f.url + CHAT, json=body())
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert late.headers["connection"] == "close"
        assert f.gateway.wait(10) == 0
        f.forget_gateway()


START = """
version: 1
server: { port: 0 }
health: { timeout_s: 30 }
models:
  - name: m
    pools:
      only: { max_model_len: 4096, max_num_seqs: 8, workers: ["http://127.0.0.1:%d"] }
"""


def test_sigterm_ends_a_gateway_that_still_probes_its_engines(tmp_path: Path) -> None:
    """By a handler: the default action does not end the first process of a container."""
    file = tmp_path / "sluice.yaml"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file.write_text(START % silent.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-m", "sluice", "serve", "-c", str(file)])
        silent.settimeout(60)
        with silent.accept()[0]:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.redis)])
def test_sighup_reloads_in_every_replica_and_ends_nothing(
    workers: int, request: pytest.FixtureRequest
) -> None:
    state = {}
    pages: list[str] = []
    if workers > 1:
        redis_server: RedisServer = request.getfixturevalue("redis_server")
        state = {"state": {"url": redis_server.url}}
    f = Fleet(short=1, long=0, mock=("--speed", "2"), config=state)
    if workers > 1:
        server = f.replicas[0].config["server"]
        server["workers"] = workers
        server["management_port"] = first = consecutive_ports(workers + 1)
        pages = [f"http://127.0.0.1:{first + 1 + index}" for index in range(workers)]
    with f:
        pages = pages or [f.url]
        assert f.gateway is not None
        with (
            httpx.Client(timeout=30) as client,
            client.stream(
                "POST",
                f.url + CHAT,
                json=body(max_tokens=100, mock_output_tokens=100, stream=True),
            ) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            before_unix_s = time.time()
            f.gateway.send_signal(signal.SIGHUP)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert f.gateway.poll() is None
        assert httpx.post(f.url + CHAT, json=body(max_tokens=4)).status_code == 200
        for url in pages:
            page = httpx.get(f"{url}/metrics").text
            (read,) = re.findall(
                r"^sluice_config_last_reload_timestamp_seconds (\S+)", page, re.MULTILINE
            )
            assert float(read) >= before_unix_s


def test_a_gateway_in_use_and_idle_logs_no_defect(capfd: pytest.CaptureFixture[str]) -> None:
    """Its own work between requests (ticks, chores) is done without an error."""
    with Fleet(short=1, long=1) as f:
        for _ in range(5):
            assert httpx.post(f.url + CHAT, json=body(max_tokens=4)).status_code == 200
            time.sleep(0.3)
    logged = capfd.readouterr().err
    assert "no entitlements are configured" in logged, "what is logged is seen here"
    assert "ERROR" not in logged
    assert "Traceback" not in logged


def test_the_demo_gets_ready_serves_and_takes_its_children_along() -> None:
    command = [sys.executable, "-m", "sluice", "demo", "--port", "0", "--no-traffic"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as demo:
        children = _check_demo(demo)
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in children):
        assert time.monotonic() < deadline, "a child outlived the demo"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "verb",
    [
        ["demo", "--no-traffic"],
        ["serve", "-c", "docs/sluice.yaml"],
        ["mock", "--model", "m"],
    ],
    ids=lambda verb: verb[0],
)
def test_a_busy_port_is_told_and_exits_1(verb: list[str]) -> None:
    """Though what listens there answers as a gateway that is ready does."""
    env = {**os.environ, "SLUICE_ADMIN_KEY": "sk-a", "LONG_KEY": "sk-l"}
    with Fleet(short=1, long=0) as f:
        command = [sys.executable, "-m", "sluice", *verb, "--port", f.url.rpartition(":")[2]]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    assert "READY" not in done.stdout
    assert done.returncode == 1, done.stderr
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("bad", [("--duration", "-5"), ("--speed", "0"), ("--port", "70000")])
def test_the_demo_refuses_what_it_cannot_do(bad: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "sluice", "demo", "--no-traffic", *bad]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert bad[0] in done.stderr


def _check_demo(demo: subprocess.Popen[str]) -> list[int]:
    try:
        assert demo.stdout is not None
        line = demo.stdout.readline()
        assert line.startswith("SLUICE READY http://127.0.0.1:")
        url = line.split()[-1]
        answer = httpx.post(
            url + CHAT,
            json={**body(max_tokens=4), "model": "demo-model"},
            headers={"authorization": "Bearer sk-demo-elastic"},
        )
        assert answer.status_code == 200
        assert answer.headers["x-sluice-pool"] == "short"
        children = _children(demo.pid)
        assert len(children) == 6
        return children
    finally:
        demo.send_signal(signal.SIGINT)
        try:
            demo.wait(20)
        except subprocess.TimeoutExpired:
            demo.kill()  # leaving Popen's block would wait for ever
            raise


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
