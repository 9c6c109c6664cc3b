"""A new process takes over under load: no connection is refused, no stream is cut."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.fleet import Fleet, RedisServer, consecutive_ports
from tests.asking import CHAT, chat, children, entitlement, eventually, gone

STREAMS = 200
TOKENS = 100
SPEED = "0.5"
"""A stream lasts some seconds, longer than a new process takes to start."""
ASKING = 3
DRAIN_S = 120
_CHUNK = b'"delta":{"content":'

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def successor(pid: int) -> int | None:
    """The `serve` process that a gateway started."""
    for child in children(pid):
        with contextlib.suppress(OSError):
            if b"\0serve\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


async def started(pid: int, limit_s: float = 150.0) -> int:
    """Wait for the process that takes over. It is looked for only once.

    A second look may come while it execs, when its command line is empty. Never return 0 for
    "none": tests signal this id, and 0 means their own process group.
    """
    end_s = time.monotonic() + limit_s
    while not (found := successor(pid)):
        assert time.monotonic() < end_s, "no process took over in time"
        await asyncio.sleep(0.02)
    return found


def replicas(pid: int) -> list[int]:
    """The replicas of a supervisor."""
    return [child for child in children(pid) if child != successor(pid)]


class Load:
    """Streams that run, and clients that connect anew for each request."""

    def __init__(self, url: str) -> None:
        self._url = url + CHAT
        self._port = int(url.rpartition(":")[2])
        self.begun = 0
        self.answers: Counter[str] = Counter()
        self.longest_s = 0.0
        self._done = asyncio.Event()

    async def stream(self) -> int:
        """Chunks of one whole stream. A bare socket: 200 streams would keep httpx busy."""
        asked = json.dumps(chat(TOKENS, stream=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (CHAT.encode(), len(asked), asked)
        )
        answer = b""
        begun = False
        while part := await reader.read(65536):
            answer += part
            if not begun and _CHUNK in answer:
                begun = True
                self.begun += 1
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert answer.count(b"data: [DONE]") == 1
        return answer.count(_CHUNK)

    async def ask(self) -> None:
        """Ask until `stop`."""
        while not self._done.is_set():
            began_s = time.monotonic()
            try:
                async with httpx.AsyncClient(timeout=180, trust_env=False) as client:
                    answer = await client.post(self._url, json=chat(2))
                self.answers[str(answer.status_code)] += 1
            except httpx.TransportError as error:
                self.answers[repr(error)] += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """Have the clients that ask end."""
        self._done.set()


@contextlib.contextmanager
def upgraded(found: list[int]) -> Iterator[None]:
    """Ends the processes that took over."""
    try:
        yield
    finally:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + 20
        while not all(gone(pid) for pid in found) and time.monotonic() < end_s:
            time.sleep(0.05)


def serves(url: str) -> bool:
    return httpx.post(url + CHAT, json=chat(2), trust_env=False).status_code == 200


def rewrite(file: Path, text: str | None = None) -> str:
    """The file's text; then it has another, if given."""
    found = file.read_text()
    if text is not None:
        file.write_text(text)
    return found


async def upgrade_under_load(url: str, swap: Callable[[], int]) -> tuple[float, int]:
    """Replace a gateway by `swap`, which returns the old one's id, under streams and connections.

    Returns the seconds that the slowest new request took, and the number of new requests answered
    after the old process had left the port and before it ended.
    """
    port = int(url.rpartition(":")[2])
    load = Load(url)
    whole = await load.stream()
    running = [asyncio.ensure_future(load.stream()) for _ in range(STREAMS)]
    asking = [asyncio.ensure_future(load.ask()) for _ in range(ASKING)]
    await eventually(lambda: load.begun == 1 + STREAMS)
    old = swap()
    await eventually(lambda: not any(listens(pid, port) for pid in (old, *replicas(old))))
    left = load.answers["200"]
    await eventually(lambda: gone(old))
    after = load.answers["200"]
    await eventually(lambda: load.answers["200"] > after + 8 * ASKING)
    load.stop()
    await asyncio.gather(*asking)
    chunks = await asyncio.gather(*running)
    assert set(load.answers) == {"200"}, load.answers
    assert chunks == [whole] * STREAMS, "no stream is cut"
    return load.longest_s, after - left


@pytest.mark.parametrize("kept", ["memory", "redis", "replicas"])
async def test_an_upgrade_serves_new_requests_while_the_old_process_ends_its_streams(
    kept: str, tmp_path: Path
) -> None:
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        config: dict[str, Any] = {}
        server: dict[str, Any] = {"drain_timeout_s": DRAIN_S}
        if kept != "memory":
            config["state"] = {"url": stack.enter_context(RedisServer()).url}
        if kept == "replicas":
            server |= {"workers": 2, "management_port": consecutive_ports(3)}
        fleet = Fleet(short=2, long=0, mock=("--speed", SPEED), config=config, server=server)
        stack.enter_context(upgraded(found))
        stack.enter_context(fleet)
        assert fleet.gateway is not None
        pid = fleet.gateway.pid

        def swap() -> int:
            os.kill(pid, signal.SIGUSR2)
            return pid

        async def watch() -> None:
            found.append(await started(pid))

        watching = asyncio.ensure_future(watch())
        longest_s, beside = await upgrade_under_load(fleet.url, swap)
        await watching
        assert fleet.gateway.wait(10) == 0
        fleet.forget_gateway()
        assert beside > ASKING, "the new process served while the old one had streams"
        assert longest_s < 10.0, "nothing waits for the end of the streams"
        assert not gone(found[0])
        assert serves(fleet.url)


def limited(folder: Path, most: int) -> dict[str, Any]:
    state = {"url": f"sqlite:///{folder}/sluice.db"}
    return {"entitlements": [entitlement("a", max_concurrency=most)], "state": state}


async def test_one_process_at_a_time_owns_embedded_limits(tmp_path: Path) -> None:
    """The new process waits for the old one's last settlement; connections wait with it."""
    found: list[int] = []
    key = {"authorization": "Bearer sk-a"}
    with (
        upgraded(found),
        Fleet(short=1, long=0, mock=("--speed", SPEED), config=limited(tmp_path, most=3)) as fleet,
    ):
        assert fleet.gateway is not None
        pid = fleet.gateway.pid
        async with httpx.AsyncClient(timeout=60, trust_env=False, headers=key) as client:

            async def asked(tokens: int) -> httpx.Response:
                return await client.post(fleet.url + CHAT, json=chat(tokens))

            running = [asyncio.ensure_future(asked(60)) for _ in range(3)]
            await eventually(lambda: fleet.leases() == 3)
            os.kill(pid, signal.SIGUSR2)
            found.append(await started(pid))
            await eventually(lambda: not listens(pid, fleet.port))
            late = asyncio.ensure_future(asked(2))
            ends = await asyncio.gather(*running)
            assert [answer.status_code for answer in ends] == [200] * 3
            assert not late.done(), "the limit is spent until the old process has settled"
            assert (await late).status_code == 200
            await eventually(lambda: gone(pid))
        assert fleet.gateway.wait(10) == 0
        fleet.forget_gateway()
        used = sum(answer.json()["usage"]["total_tokens"] for answer in (*ends, late.result()))
        await eventually(lambda: fleet.leases() == 0)
        async with httpx.AsyncClient(trust_env=False, headers=key) as client:
            usage = (await client.get(fleet.url + "/v1/sluice/me")).json()["usage"]
        assert usage["used_tokens"] == used, "every token is charged, and once"


def listens(pid: int, port: int) -> bool:
    """Whether a process has a listening socket on a port."""
    wanted = f":{port:04X}"
    inodes = {
        columns[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (columns := line.split())[1].endswith(wanted) and columns[3] == "0A"
    }
    links = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(str(fd.readlink()))
    return any(f"socket:[{inode}]" in links for inode in inodes)


async def test_a_new_process_that_cannot_start_changes_nothing(tmp_path: Path) -> None:
    found: list[int] = []
    with upgraded(found), Fleet(short=1, long=0) as fleet:
        assert fleet.gateway is not None
        pid = fleet.gateway.pid
        file = Path(fleet.replicas[0].command[fleet.replicas[0].command.index("-c") + 1])
        good = rewrite(file)
        rewrite(file, good.replace("max_num_seqs", "max_num_seq"))
        for _ in range(2):
            os.kill(pid, signal.SIGUSR2)
            failed = await started(pid)
            await eventually(partial(gone, failed))
            await eventually(lambda: not children(pid))  # it is reaped
            assert serves(fleet.url)
        rewrite(file, good)
        os.kill(pid, signal.SIGUSR2)
        found.append(await started(pid))
        await eventually(lambda: gone(pid))
        assert fleet.gateway.wait(10) == 0
        fleet.forget_gateway()
        assert serves(fleet.url)


async def test_a_new_process_that_ends_after_it_took_over_leaves_the_port_to_the_old_one() -> None:
    with Fleet(short=1, long=0, mock=("--speed", SPEED)) as fleet:
        assert fleet.gateway is not None
        pid = fleet.gateway.pid
        endless = chat(8000, stream=True)
        async with (
            httpx.AsyncClient(timeout=60, trust_env=False) as client,
            client.stream("POST", fleet.url + CHAT, json=endless) as stream,
        ):
            lines = stream.aiter_lines()
            for _ in range(2):
                await anext(lines)
                os.kill(pid, signal.SIGUSR2)
                taking = await started(pid)
                await eventually(lambda: not listens(pid, fleet.port))
                os.kill(taking, signal.SIGKILL)
                await eventually(lambda: listens(pid, fleet.port))
                assert await asyncio.to_thread(serves, fleet.url)
                await eventually(lambda: not children(pid))
            assert await anext(lines) is not None, "the stream that ran meanwhile goes on"


async def test_a_new_process_that_hangs_gives_way_to_the_next_one() -> None:
    found: list[int] = []
    with upgraded(found), Fleet(short=1, long=0) as fleet:
        assert fleet.gateway is not None
        pid = fleet.gateway.pid
        os.kill(pid, signal.SIGUSR2)
        hung = await started(pid)
        os.kill(hung, signal.SIGSTOP)
        os.kill(pid, signal.SIGUSR2)
        await eventually(partial(gone, hung))
        found.append(await started(pid))
        await eventually(lambda: gone(pid))
        assert fleet.gateway.wait(10) == 0
        fleet.forget_gateway()
        assert serves(fleet.url)


async def test_signals_during_the_start_wait_for_it() -> None:
    """From the first line of the program on; before it, Python itself starts."""
    held = (1 << signal.SIGHUP - 1) | (1 << signal.SIGUSR2 - 1)
    with Fleet(short=1, long=0) as fleet:
        command = fleet.replicas[0].command
        file = command[command.index("-c") + 1]
        port = consecutive_ports(1)
        process = subprocess.Popen(  # noqa: ASYNC220 - only started here
            [sys.executable, "-m", "sluice", "serve", "-c", file, "--port", str(port)]
        )

        def blocked() -> bool:
            text = Path(f"/proc/{process.pid}/status").read_text()
            return int(text.split("SigBlk:")[1].split()[0], 16) & held == held

        try:
            await eventually(blocked)
            while not listens(process.pid, port):
                process.send_signal(signal.SIGHUP)
                assert process.poll() is None
                await asyncio.sleep(0.01)
            assert serves(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(30)


class SystemD:
    """Holds a listening socket and a notification socket, as systemd does for a service."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self._command = command
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._address = str(folder / "notify")
        self._notified.bind(self._address)
        self._notified.setblocking(False)
        self.process: subprocess.Popen[bytes] | None = None
        self.said: list[str] = []

    def start(self) -> int:
        fd = self._listener.fileno()
        self.process = subprocess.Popen(
            ["bash", "-c", f'LISTEN_PID=$$ exec "$@" 3<&{fd}', "bash", *self._command],
            env={
                **os.environ,
                "LISTEN_FDS": "1",
                "NOTIFY_SOCKET": self._address,
                "WATCHDOG_USEC": "2000000",
            },
            pass_fds=(fd,),
            start_new_session=True,
        )
        return self.process.pid

    def heard(self, what: str) -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.said += self._notified.recv(4096).decode().split("\n")
        return what in self.said

    async def restart(self) -> None:
        """`systemctl restart`: the new process starts when the old one has ended."""
        assert self.process is not None
        self.process.terminate()
        await asyncio.to_thread(self.process.wait)
        self.heard("")
        self.said.clear()
        self.start()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
        self._listener.close()
        self._notified.close()


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_restart_with_systemd_s_socket_refuses_and_cuts_nothing(
    workers: int, tmp_path: Path
) -> None:
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        first = consecutive_ports(workers + 2)
        server = {"port": first, "workers": workers, "management_port": first + 1}
        server["drain_timeout_s"] = DRAIN_S
        fleet = Fleet(
            short=2,
            long=0,
            mock=("--speed", SPEED),
            config={"state": {"url": redis.url}},
            server=server,
            idle=True,
        )
        stack.enter_context(fleet)
        stack.enter_context(upgraded(found))
        service = SystemD(fleet.replicas[0].command, first, tmp_path)
        stack.callback(service.close)
        service.start()
        await eventually(lambda: service.heard("READY=1"))
        await eventually(
            lambda: service.heard("WATCHDOG=1") and service.said.count("WATCHDOG=1") > 2
        )
        restarting: list[asyncio.Future[None]] = []

        def swap() -> int:
            assert service.process is not None
            restarting.append(asyncio.ensure_future(service.restart()))
            return service.process.pid

        await upgrade_under_load(f"http://127.0.0.1:{first}", swap)
        await asyncio.gather(*restarting)
        await eventually(lambda: service.heard("READY=1"))
        assert service.process is not None
        pid = service.process.pid
        os.kill(pid, signal.SIGUSR2)
        found.append(await started(pid))
        await eventually(lambda: service.heard(f"MAINPID={found[0]}"))
        await eventually(lambda: gone(pid))
        assert serves(f"http://127.0.0.1:{first}")
