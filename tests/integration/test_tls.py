"""TLS over real sockets: clients that speak it, misuse it or stall; engines that ask for it."""

import contextlib
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from openai import DefaultHttpxClient, OpenAI

from bench.common.fleet import MODEL, Fleet, consecutive_ports
from gateway.http import tls
from tests.asking import until

CHAT = "/v1/chat/completions"


def body(tokens: int = 4, **more: Any) -> dict[str, Any]:
    sizes = {"max_tokens": tokens, "mock_output_tokens": tokens}
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **sizes, **more}


class Files:
    """A certificate for 127.0.0.1 and localhost, as files."""

    def __init__(self, folder: Path, ca: trustme.CA, name: str = "server") -> None:
        self.cert, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        self.ca = folder / "ca.pem"
        ca.cert_pem.write_to_path(str(self.ca))
        self.write(ca)

    def write(self, ca: trustme.CA) -> trustme.LeafCert:
        made = ca.issue_cert("127.0.0.1", "localhost")
        self.key.write_bytes(made.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        return made


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, ca: trustme.CA) -> Files:
    return Files(tmp_path_factory.mktemp("tls"), ca)


def encrypted(files: Files, **more: Any) -> Fleet:
    server = {
        "tls": {"cert": str(files.cert), "key": str(files.key), **more},
        "management_port": consecutive_ports(1),
    }
    return Fleet(short=1, long=0, server=server)


@pytest.fixture(scope="module")
def fleet(files: Files) -> Iterator[Fleet]:
    with running(encrypted(files)) as found:
        yield found


@contextlib.contextmanager
def running(fleet: Fleet) -> Iterator[Fleet]:
    """A fleet whose gateway speaks TLS: it is asked for its readiness at the management port."""
    fleet.replicas[0].url = fleet.replicas[0].managed_at[0]
    with fleet:
        yield fleet


def trusting(files: Files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.ca))


def https(fleet: Fleet) -> str:
    return f"https://127.0.0.1:{fleet.port}"


def failures(fleet: Fleet, reason: str) -> float:
    name = f'sluice_tls_handshake_failures_total{{reason="{reason}"}}'
    return fleet.metrics().get(name, 0.0)


def test_the_openai_client_talks_and_streams_through_tls(fleet: Fleet, files: Files) -> None:
    http = DefaultHttpxClient(verify=trusting(files), trust_env=False)
    client = OpenAI(api_key="sk-x", base_url=https(fleet) + "/v1", http_client=http)
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    answer = client.chat.completions.create(**asked, max_tokens=5)
    assert answer.choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, max_tokens=30, stream=True))
    assert chunks[-1].choices[0].finish_reason is not None
    client.close()


def test_a_large_body_and_a_large_answer_cross_tls_whole(fleet: Fleet, files: Files) -> None:
    with httpx.Client(verify=trusting(files), trust_env=False, timeout=60) as client:
        text = "word " * 4_000
        asked = body(2_000, stream=True, messages=[{"role": "user", "content": text}])
        answer = client.post(https(fleet) + CHAT, json=asked)
        assert answer.status_code == 200
        assert answer.text.rstrip().endswith("data: [DONE]")
        big = body(messages=[{"role": "user", "content": "x" * 40_000_000}])
        assert client.post(https(fleet) + CHAT, json=big).status_code == 413


def test_curl_works(fleet: Fleet, files: Files) -> None:
    command = ["curl", "-sS", "--noproxy", "*", "--cacert", str(files.ca)]
    done = subprocess.run(
        [*command, https(fleet) + "/health"], capture_output=True, text=True, timeout=20, check=True
    )
    assert '"status"' in done.stdout


def test_plain_http_is_answered_with_the_mistake(fleet: Fleet) -> None:
    answer = httpx.post(f"http://127.0.0.1:{fleet.port}{CHAT}", json=body(), trust_env=False)
    assert answer.status_code == 400
    assert answer.headers["x-sluice-reason"] == "https_required"
    assert "https://" in answer.json()["error"]["message"]
    assert failures(fleet, "plain_http") >= 1


def test_old_versions_and_weak_ciphers_are_refused(fleet: Fleet, files: Files) -> None:
    old = trusting(files)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    weak = trusting(files)
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-SHA")
    for context in (old, weak):
        with (
            socket.create_connection(("127.0.0.1", fleet.port), timeout=10) as sock,
            pytest.raises(ssl.SSLError),
        ):
            context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_silent_and_slow_handshakes_end_in_time_and_keep_nobody_out(
    fleet: Fleet, files: Files
) -> None:
    """More stalled connections than may be in their handshake at once, silent or half way."""
    before = failures(fleet, "crowded")
    with contextlib.ExitStack() as stack:
        stalled = []
        for number in range(tls.MAX_HANDSHAKES + 100):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", fleet.port)))
            if number % 2:
                sock.sendall(b"\x16\x03\x01\x02\x00\x01")  # a hello that never ends
            stalled.append(sock)
        began_s = time.monotonic()
        with httpx.Client(verify=trusting(files), trust_env=False, timeout=8) as client:
            assert client.post(https(fleet) + CHAT, json=body()).status_code == 200
        assert failures(fleet, "crowded") >= before + 100
        last = stalled[-1]
        last.settimeout(tls.HANDSHAKE_S + 10)
        with contextlib.suppress(ConnectionResetError):
            while last.recv(1024):
                pass
        assert time.monotonic() - began_s < tls.HANDSHAKE_S + 5
        assert failures(fleet, "timeout") >= 1


def test_a_flood_of_handshakes_from_one_address_leaves_others_their_turn(
    fleet: Fleet, files: Files
) -> None:
    """Hellos that nobody answers, more at a time than may wait: another address is served."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = trusting(files).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    sent = outgoing.read()
    before = failures(fleet, "crowded")
    with contextlib.ExitStack() as stack:
        for _ in range(2 * tls.MAX_HANDSHAKES):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", fleet.port)))
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
        transport = httpx.HTTPTransport(verify=trusting(files), local_address="127.0.0.9")
        with httpx.Client(transport=transport, timeout=8) as client:
            early = stack.enter_context(socket.socket())
            early.bind(("127.0.0.8", 0))
            early.connect(("127.0.0.1", fleet.port))
            for _ in range(tls.MAX_HANDSHAKES):
                stack.enter_context(socket.create_connection(("127.0.0.1", fleet.port)))
            assert client.post(https(fleet) + CHAT, json=body()).status_code == 200
        early.setblocking(False)
        with pytest.raises(BlockingIOError):  # open still: its address has only this one
            early.recv(1)
    assert failures(fleet, "crowded") > before


def test_noise_instead_of_a_handshake_is_closed(fleet: Fleet) -> None:
    before = failures(fleet, "failed")
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=5) as sock:
        sock.sendall(b"\x16\x03\x01\x00\x05hello" + bytes(200))
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1024):
                pass
    until(lambda: failures(fleet, "failed") > before)


def test_a_new_certificate_is_used_without_a_restart_and_a_bad_pair_never(
    tmp_path: Path, ca: trustme.CA
) -> None:
    files = Files(tmp_path, ca)
    with running(encrypted(files)) as fleet:

        def shown() -> str:
            return ssl.get_server_certificate(("127.0.0.1", fleet.port), timeout=10)

        first = shown()
        expiry = fleet.metrics()["sluice_tls_certificate_expiry_timestamp_seconds"]
        assert expiry > time.time() + 86_400
        with httpx.Client(verify=trusting(files), trust_env=False, timeout=60) as client:
            asked = body(400, stream=True)
            with client.stream("POST", https(fleet) + CHAT, json=asked) as stream:
                lines = stream.iter_lines()
                next(lines)
                other = ca.issue_cert("127.0.0.1")
                files.cert.write_bytes(other.cert_chain_pems[0].bytes())  # the key comes later
                until(lambda: fleet.metrics()["sluice_tls_last_reload_successful"] == 0)
                assert shown() == first
                files.key.write_bytes(other.private_key_pem.bytes())
                until(lambda: shown() != first)
                assert fleet.metrics()["sluice_tls_last_reload_successful"] == 1
                assert [line for line in lines if line][-1] == "data: [DONE]", "it goes on"


def test_clients_without_a_certificate_are_refused_where_one_is_asked(
    files: Files, ca: trustme.CA
) -> None:
    with running(encrypted(files, client_ca=str(files.ca))) as fleet:
        bare, stranger, known = (trusting(files) for _ in range(3))
        trustme.CA().issue_cert("who@example.org").configure_cert(stranger)
        ca.issue_cert("app@example.org").configure_cert(known)
        for context in (bare, stranger):
            with (
                httpx.Client(verify=context, trust_env=False) as client,
                pytest.raises(httpx.TransportError),
            ):
                client.get(https(fleet) + "/health")
        with httpx.Client(verify=known, trust_env=False) as client:
            assert client.post(https(fleet) + CHAT, json=body()).status_code == 200


@contextlib.contextmanager
def behind_tls(fleet: Fleet, files: Files, *, mutual: bool) -> Iterator[int]:
    """A TLS end in front of the fleet's engine, as a process of its own."""
    port = consecutive_ports(1)
    command = [sys.executable, "-c", ENDS_TLS, str(port), str(fleet.engines[0].port)]
    command += [str(files.cert), str(files.key), str(files.ca) if mutual else ""]
    with subprocess.Popen(command) as process:
        try:
            yield port
        finally:
            process.terminate()


ENDS_TLS = """
import asyncio, ssl, sys

async def main(port, engine, cert, key, ca):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if ca:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED

    async def pump(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def serve(reader, writer):
        try:
            inner = await asyncio.open_connection("127.0.0.1", engine)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=context)
    await server.serve_forever()

port, engine, cert, key, ca = sys.argv[1:]
asyncio.run(main(int(port), int(engine), cert, key, ca))
"""


@pytest.mark.parametrize(
    ("tls", "works"),
    [
        ({"ca": True, "cert": True}, True),
        ({"ca": True}, False),
        ({"cert": True}, False),
        ({"cert": True, "system": True}, True),
        ({"ca": True, "cert": True, "server_name": "engines.internal"}, False),
        ({"ca": True, "cert": True, "server_name": "engines.internal", "verify": "chain"}, True),
        ({"ca": True, "cert": True, "server_name": "localhost"}, True),
    ],
    ids=["both", "no certificate", "unknown authority", "SSL_CERT_FILE", "name", "chain", "host"],
)
def test_engines_that_ask_for_a_certificate_get_requests_and_probes(
    tls: dict[str, Any], works: bool, tmp_path: Path, ca: trustme.CA
) -> None:
    files, mine = Files(tmp_path, ca), Files(tmp_path, ca, "gateway")
    fleet = Fleet(short=1, long=0, idle=True)
    with behind_tls(fleet, files, mutual=True) as port:
        section = {k: v for k, v in tls.items() if k in {"server_name", "verify"}}
        section |= {"ca": str(files.ca)} if tls.get("ca") else {}
        section |= {"cert": str(mine.cert), "key": str(mine.key)} if tls.get("cert") else {}
        pool = fleet.replicas[0].config["models"][0]["pools"]["short"]
        pool.update(workers=[f"https://127.0.0.1:{port}"], tls=section)
        with fleet:
            replica = fleet.replicas[0]
            replica.env = {"SSL_CERT_FILE": str(files.ca)} if tls.get("system") else None
            fleet.start_replica(replica)
            until(lambda: answers(replica.url + "/health"))
            if works:
                fleet.wait_ready(replica)
                answer = httpx.post(replica.url + CHAT, json=body(), trust_env=False)
                assert answer.status_code == 200
            else:
                time.sleep(1.0)
                ready = httpx.get(replica.url + "/ready", trust_env=False)
                assert ready.status_code == 503


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False
