"""`auth.jwt` and `server.admin_keys`: what is read, and what is refused with the fix."""

import pytest

from gateway.settings import Config, ConfigError, parse
from gateway.settings.checks import remarks

HASH = "35f01bd51f5d2ab9e7e9f0d9d22c8e2b4a6b8c30f9d0e4e9f2f3f1b8b7e7a111"
FILE = f"""\
version: 1
server:
  admin_key: k
  admin_keys:
    - {{name: oncall, sha256: {HASH}, role: operator}}
auth:
  jwt:
    - issuer: https://id.example
      jwks: https://id.example/jwks
      audience: [sluice]
      tenants: [acme]
models:
  - name: m
    pools: {{p: {{max_model_len: 8192, max_num_seqs: 8, workers: ["http://127.0.0.1:1"]}}}}
entitlements:
  - {{name: b, tenant: acme, model: m}}
  - {{name: a, tenant: acme, model: m}}
"""


def read(text: str = FILE) -> Config:
    return parse(text, "sluice.yaml", {})


def test_tokens_use_what_has_no_key_and_close_the_gateway() -> None:
    (said,) = remarks(read())
    assert said.startswith("model m: no entitlement states a service_class or a limit")
    assert sum("nobody can use it" in line for line in remarks(read(without_auth()))) == 2


def without_auth() -> str:
    return FILE[: FILE.index("auth:")] + FILE[FILE.index("models:") :]


def test_who_may_change_entitlements_is_known() -> None:
    def administered(text: str) -> bool:
        return read(text).administered

    assert administered(FILE)
    unnamed = FILE.replace("  admin_key: k\n", "")
    assert not administered(unnamed)
    assert administered(unnamed.replace("operator", "owner"))
    assert administered(unnamed.replace("tenants: [acme]", "role_claim: groups"))


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("https://id.example/jwks", "http://id.example/jwks", "can be replaced on the way; write"),
        ("https://id.example/jwks", "no-such-file.json", "cannot read the file: No such file"),
        ("tenants: [acme]", "algorithms: [HS256]", "RS256"),
        ("tenants: [acme]", "algorithms: [none]", "RS256"),
        ("tenants: [acme]", "tenants: [acne]", "no tenant is named `acne`; did you mean `acme`"),
        ("tenants: [acme]", "ca_file: no-such.pem", "cannot read the file"),
        ("tenants: [acme]", "leeway_s: 601", "600"),
        ("tenants: [acme]", "refresh_s: 1", "10"),
        ("tenants: [acme]", "roles: {staff: admin}", "viewer"),
        ("audience: [sluice]", "audience: []", "audience"),
        (
            "models:",
            "    - {issuer: https://id.example, jwks: https://x, audience: [s]}\nmodels:",
            "`https://id.example` is taken on line 8; list an issuer once",
        ),
        ("role: operator", "role: admin", "viewer"),
        (
            "auth:",
            f"    - {{name: oncall, sha256: {HASH}, role: owner}}\nauth:",
            "`oncall` is taken on line 5",
        ),
        (
            HASH,
            "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a",
            "the same key as on line 3; make another",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_the_fix(was: str, now: str, said: str) -> None:
    assert was in FILE
    with pytest.raises(ConfigError) as refused:
        read(FILE.replace(was, now, 1))
    assert said in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1:9", "[::1]:9"])
def test_keys_may_come_over_plain_http_from_this_host(host: str) -> None:
    text = FILE.replace("https://id.example/jwks", f"'http://{host}/jwks'")
    assert read(text).auth.jwt[0].jwks == f"http://{host}/jwks"
