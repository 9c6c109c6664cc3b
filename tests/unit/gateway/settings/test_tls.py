"""TLS in the file: what is read, and what is refused with the fix."""

from pathlib import Path

import pytest
import trustme

from gateway.settings import Config, ConfigError, parse

FILE = """
version: 1
server: {{{server}}}
state: {{url: "{state}"}}
models:
  - name: m
    pools:
      only:
        max_model_len: 4096
        max_num_seqs: 8
        workers: [{{url: "{url}"{ca}}}]
        tls: {{{tls}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    ca.cert_pem.write_to_path(str(made / "ca"))
    for name in ("one", "other"):
        leaf = ca.issue_cert(name)
        leaf.private_key_pem.write_to_path(str(made / f"{name}.key"))
        leaf.cert_chain_pems[0].write_to_path(str(made / f"{name}.crt"))
    (made / "empty").write_text("")
    return made


def read(
    folder: Path,
    *,
    server: str = "",
    tls: str = "ca: DIR/ca",
    url: str = "https://h:1",
    state: str = "memory://",
    ca: str = "",
) -> Config:
    text = FILE.format(server=server, tls=tls, url=url, state=state, ca=ca)
    return parse(text.replace("DIR", str(folder)), "sluice.yaml", {})


def test_a_pool_s_tls_reaches_its_workers_and_their_own_ca_comes_first(folder: Path) -> None:
    tls = "ca: DIR/ca, cert: DIR/one.crt, key: DIR/one.key, server_name: n, verify: chain"
    (address,) = read(folder, tls=tls).models[0].pools["only"].addresses
    assert address.tls.ca_file == f"{folder}/ca"
    assert address.tls.cert_file == f"{folder}/one.crt"
    assert (address.tls.verify, address.tls.server_name) == ("chain", "n")
    own = read(folder, tls=tls, ca=", ca_file: DIR/one.crt").models[0].pools["only"].addresses
    assert own[0].tls.ca_file == f"{folder}/one.crt"
    assert own[0].tls.cert_file == f"{folder}/one.crt"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tls": "ca: DIR/none"}, ["pools.only.tls.ca", "No such file"]),
        ({"tls": "ca: DIR/empty"}, ["pools.only.tls.ca", "no certificate"]),
        ({"tls": "cert: DIR/one.crt"}, ["tls.cert", "go together"]),
        ({"tls": "cert: DIR/one.crt, key: DIR/other.key"}, ["tls.cert", "MISMATCH"]),
        ({"tls": "verify: chain"}, ["tls.verify", "`ca`"]),
        ({"tls": "verify: none"}, ["tls.verify"]),
        ({"tls": "ca: DIR/ca", "url": "http://h:1"}, ["pools.only.tls", "https"]),
        ({"server": "tls: {cert: DIR/one.crt}"}, ["server.tls", "`key`"]),
        ({"server": "tls: {cert: DIR/one.crt, key: DIR/other.key}"}, ["tls.cert", "MISMATCH"]),
        ({"server": "tls: {cert: DIR/empty, key: DIR/one.key}"}, ["server.tls.cert"]),
        ({"server": "tls: {cert: DIR/none, key: DIR/one.key}"}, ["tls.cert", "No such file"]),
        (
            {"server": "tls: {cert: DIR/one.crt, key: DIR/one.key, client_ca: DIR/empty}"},
            ["server.tls.client_ca", "no certificate"],
        ),
        (
            {
                "server": "tls: {cert: DIR/one.crt, key: DIR/one.key}",
                "state": "redis://127.0.0.1:1/0",
            },
            ["server.tls", "management_port"],
        ),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, str], said: list[str], folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read(folder, **wrong)
    for part in said:
        assert part in str(refused.value)


@pytest.mark.parametrize("name", ["a..b", "x" * 64])
def test_a_name_that_no_certificate_can_have_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a host's name"):
        read(folder, tls=f"ca: DIR/ca, server_name: {name}")
