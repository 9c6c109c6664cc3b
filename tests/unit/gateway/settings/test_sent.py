"""A configuration that a caller sent is compared without the environment and without files."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.settings import Config, ConfigError, parse
from gateway.settings.compare import Comparison, compare

CANARY = "canary-8c1f"
FILE = """
version: ${VERSION:-1}
server: {port: "${PORT}", admin_key: "${KEY}", open_dashboard: "${OPEN}"}
state: {url: "redis://:${KEY}@redis:6379/0"}
health: {interval_s: "${INTERVAL}"}
auth:
  jwt:
    - {issuer: "${ISSUER}", jwks: "https://${HOST}/keys", audience: [s], refresh_s: "${REFRESH}"}
models:
  - name: ${MODEL}
    mode: ${MODE}
    pools:
      short:
        max_model_len: 8192
        max_num_seqs: ${SLOTS}
        workers: ["http://${HOST}:${PORT}", "${URL}", {url: "http://b:1", api_key: "${KEY}"}]
      long: {max_model_len: "${LONG}", max_num_seqs: 4, workers: "${URLS}"}
entitlements:
  - name: e
    tenant: t
    model: ${MODEL}
    api_keys: ["${HASH}"]
    expires_at: ${END}
    concurrency: {short: "${SLOTS}"}
    budgets: [{tokens: 1, window: "${WINDOW}", warn_at: "${SHARE}"}]
"""
ENVIRON = {
    "PORT": "8080",
    "KEY": CANARY,
    "OPEN": "true",
    "INTERVAL": "1.5",
    "ISSUER": "https://id",
    "HOST": CANARY,
    "REFRESH": "60",
    "MODEL": CANARY,
    "MODE": "observe",
    "SLOTS": "16",
    "URL": f"http://{CANARY}:2",
    "LONG": "65536",
    "URLS": f"http://{CANARY}:3",
    "HASH": f"sha256:{'ab' * 32}",
    "END": "2031-01-01T00:00:00Z",
    "WINDOW": "day",
    "SHARE": "0.8",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


def running(text: str = FILE) -> Config:
    return parse(text, "sluice.yaml", ENVIRON)


def compared(text: str, before: str = FILE) -> Comparison:
    return compare(running(before), parse(text, "sent", None))


def told(text: str) -> str:
    try:
        return repr(compared(text))
    except ConfigError as error:
        return str(error)


def test_the_same_references_change_nothing_whatever_they_stand_for() -> None:
    found = compared(FILE)
    assert found.changes == []
    assert "server.port: ${PORT}" in found.not_compared


def test_a_changed_reference_is_shown_as_written() -> None:
    found = compared(FILE.replace("${SLOTS}", "${OTHER:-8}", 1).replace("${MODE}", "enforce"))
    assert {(c.path.rpartition(".")[2], c.before, c.after) for c in found.changes} == {
        ("max_num_seqs", "${SLOTS}", "${OTHER:-8}"),
        ("mode", "${MODE}", "enforce"),
    }


def test_a_secret_that_stands_in_the_text_is_not_compared() -> None:
    text = FILE.replace('admin_key: "${KEY}"', "admin_key: sk-guess")
    (change,) = compared(text).changes
    assert (change.path, change.before, change.after) == (
        *("server.admin_key", "${KEY}", "a secret"),
    )
    found = compared(text.replace("sk-guess", "sk-other"), text)
    assert found.changes == []
    assert "server.admin_key" in found.not_compared


def test_what_stands_beside_a_reference_in_a_secret_is_not_shown() -> None:
    for was, now, shown in (
        ("redis://:${KEY}@redis", "redis://:half-${KEY}@other", "redis://***@other:6379/0"),
        ("redis://:${KEY}@redis:6379/0", "${R:-redis://:half@h}", "${R:-redis://***@h}"),
        ('admin_key: "${KEY}"', 'admin_key: "${KEY:-half}"', "a secret with ${KEY}"),
    ):
        text = FILE.replace(was, now)
        (change,), (back,) = compared(text).changes, compared(FILE, text).changes
        assert (change.after, back.before) == (shown, shown)
        assert "half" not in f"{compared(text)}{compared(FILE, text)}"


@pytest.mark.parametrize(
    "edit",
    [
        ("model: ${MODEL}\n    api", "model: unknown\n    api"),
        ("    mode: ${MODE}", "    aliases: ['${KEY}', '${KEY}']\n    fallbacks: ['${KEY}']"),
        ("name: e\n", "name: ${KEY}\n"),
        ("${MODE}", "${KEY}"),
        ("${MODE}", "${NONE:-x}"),
        ("${SLOTS}", "${KEY}"),
        ("version: ${VERSION:-1}", "version: 1\n${KEY}: 1"),
        ("version: ${VERSION:-1}", "version: ${KEY}\nunknown: ${KEY}"),
        ("tenant: t", "tenant: ${KEY}\n    service: ${KEY}"),
        ('"${HASH}"', '"${KEY}", "${KEY}"'),
        ('"${END}"', '"${KEY}"'),
        ("audience: [s]", "audience: [s], ca_file: '/proc/self/environ'"),
        ("audience: [s]", "audience: [s], ca_file: '${KEY}'"),
        ('"redis://:${KEY}@redis:6379/0"', '"sqlite:///${KEY}"'),
        ('"redis://:${KEY}@redis:6379/0"', '"redis+cluster://${KEY}"'),
    ],
)
def test_nothing_of_the_environment_is_told(edit: tuple[str, str]) -> None:
    for text in (FILE.replace(*edit), FILE.replace(*edit).replace("version", "verzion")):
        assert CANARY not in told(text)


def test_relations_are_checked_where_references_are_secrets_only() -> None:
    plain = """
version: 1
server: {admin_key: "${KEY}"}
models:
  - {name: m, pools: {a: {max_model_len: 8192, max_num_seqs: 8, workers: ["http://a:1"]}}}
entitlements: [{name: e, tenant: t, model: n}]
"""
    assert "no model is named `n`" in told(plain)
    assert "no model is named" not in told(plain.replace("name: m,", 'name: "${MODEL}",'))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every value of a file, by its path."""
    if isinstance(value, dict | list):
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, step))
    elif value is not None:
        yield path


WHOLE = Path("docs/sluice.yaml").read_text()
KEYS = {"SLUICE_ADMIN_KEY": "sk-an-admin", "LONG_KEY": "sk-an-engine"}
LEAVES = list(leaves(yaml.safe_load(WHOLE)))


def referring(places: Iterable[tuple[Any, ...]]) -> tuple[str, dict[str, str]]:
    """The documented file with references at these places, and the environment they need."""
    file, environ = yaml.safe_load(WHOLE), dict(KEYS)
    for number, path in enumerate(places):
        inner = file
        for step in path[:-1]:
            inner = inner[step]
        value = KEYS.get(str(inner[path[-1]])[2:-1], inner[path[-1]])
        environ[f"R{number}"] = str(value).lower() if isinstance(value, bool) else str(value)
        inner[path[-1]] = f"${{R{number}}}"
    return yaml.safe_dump(file), environ


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: ".".join(map(str, path)))
def test_every_setting_may_be_a_reference(path: tuple[Any, ...]) -> None:
    text, environ = referring([path])
    assert compare(parse(text, "f", environ), parse(text, "sent", None)).changes == []


@given(places=st.sets(st.sampled_from(LEAVES), min_size=2, max_size=12))
@settings(max_examples=25, deadline=None)
def test_many_settings_may_be_references(places: set[tuple[Any, ...]]) -> None:
    text, environ = referring(places)
    assert compare(parse(text, "f", environ), parse(text, "sent", None)).changes == []


FILES = """
version: 1
server: {tls: {cert: PATH, key: PATH, client_ca: PATH}}
auth: {jwt: [{issuer: i, jwks: PATH, audience: [s], ca_file: PATH}]}
models:
  - name: m
    scheduling: {predictor: PATH}
    compression: {enabled: true, tokenizer: PATH}
    pools:
      short:
        max_model_len: 8192
        max_num_seqs: 8
        workers: [{url: "https://a:1", ca_file: PATH}]
        tls: {ca: PATH, cert: PATH, key: PATH}
      long: {max_model_len: 65536, max_num_seqs: 8, workers: ["file://PATH"]}
"""


def test_no_file_that_a_sent_text_names_is_opened(tmp_path: Path) -> None:
    """A FIFO in its place: whoever opened it would wait for ever."""
    os.mkfifo(tmp_path / "fifo")
    code = "import sys; from gateway.settings import parse; parse(sys.stdin.read(), 'sent', None)"
    text = FILES.replace("PATH", str(tmp_path / "fifo"))
    subprocess.run([sys.executable, "-c", code], input=text, text=True, check=True, timeout=60)
    for path in ("/no/such/file", "/etc/passwd"):
        assert compare(running(), parse(FILES.replace("PATH", path), "sent", None)).changes
