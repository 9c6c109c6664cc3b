"""One YAML file -> Config, or every problem at once with place and fix."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema_rs
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.settings import Config, ConfigError, load, parse, remarks, schema
from gateway.settings.model import ModelConfig
from gateway.settings.tenants import EntitlementConfig
from gateway.settings.types import EnvValue, substitute
from tests.builders import OUT_OF_RANGE

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "docs/sluice.yaml"
ENVIRON = {"SLUICE_ADMIN_KEY": "sk-admin-secret", "LONG_KEY": "sk-long-secret"}
HASH_A = "sha256:" + "a" * 64
HASH_B = "sha256:" + "b" * 64

BASE = f"""\
version: 1
server:
  port: 8080
  admin_key: ${{SLUICE_ADMIN_KEY}}
models:
  - name: m
    aliases: [a]
    kv_bytes_per_token: 1048576
    boundary:
      b_short: 4096
      gamma: 1.5
    pools:
      short:
        max_model_len: 8192
        max_num_seqs: 4
        workers: ["http://10.0.0.1:8000"]
      long:
        max_model_len: 65536
        max_num_seqs: 2
        workers:
          - url: https://10.0.0.9:8000
            api_key: ${{LONG_KEY}}
entitlements:
  - name: e
    tenant: t
    model: m
    service_class: guaranteed
    concurrency: 2
    api_keys: ["{HASH_A}"]
"""


def read(text: str, environ: dict[str, str] | None = None) -> Config:
    return parse(text, "sluice.yaml", ENVIRON if environ is None else environ)


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, environ)
    return str(caught.value).splitlines()


def error_of(text: str, environ: dict[str, str]) -> ConfigError | None:
    try:
        read(text, environ)
    except ConfigError as error:
        return error
    return None


def edited(old: str, new: str) -> str:
    assert BASE.count(old) == 1, old
    return BASE.replace(old, new)


def test_a_file_is_read() -> None:
    config = read(BASE)
    (model,) = config.models
    assert config.server.admin_key is not None
    assert config.server.admin_key.get_secret_value() == "sk-admin-secret"
    assert (list(model.pools), model.boundaries) == (["short", "long"], (4096,))
    address = model.pools["long"].workers[0].address()
    assert (address.id, address.scheme, address.port) == ("10.0.0.9:8000", "https", 8000)
    assert address.api_key == "sk-long-secret"
    assert config.entitlements[0].api_keys == (HASH_A,)


def test_the_shipped_example_loads() -> None:
    config = load(EXAMPLE, ENVIRON)
    assert config.timeouts_for(config.models[0]).first_byte_s == 900
    assert config.timeouts_for(config.models[0]).idle_s == 120


def test_pools_are_ordered_by_window_whatever_the_file_says() -> None:
    text = """\
version: 1
models:
  - name: m
    boundary: {b_short: [10, 20]}
    pools:
      big: {max_model_len: 300, max_num_seqs: 1, workers: ["http://c:1"]}
      small: {max_model_len: 100, max_num_seqs: 1, workers: ["http://a:1"]}
      middle: {max_model_len: 200, max_num_seqs: 1, workers: ["http://b:1"]}
"""
    (model,) = read(text).models
    assert list(model.pools) == ["small", "middle", "big"]
    assert model.boundaries == (10, 20)
    (default,) = read(text.replace("    boundary: {b_short: [10, 20]}\n", "")).models
    assert default.boundaries == (100, 200)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", "h:80"),
        ("https://h/", "h:443"),
        ("http://h:1/engine-1/", "h:1/engine-1"),
        ("http://h:1/v1", "h:1"),
        ("http://h:1/engine-1/v1/", "h:1/engine-1"),
        ("http://h:1/engine-v1", "h:1/engine-v1"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("HTTP://Host:9", "host:9"),
    ],
)
def test_worker_ids(url: str, expected: str) -> None:
    config = read(edited('["http://10.0.0.1:8000"]', f'["{url}"]'))
    assert config.models[0].pools["short"].workers[0].id == expected


def test_anchors_and_merge_keys() -> None:
    text = """\
version: 1
models:
  - name: a
    pools:
      all: &pool {max_model_len: 10, max_num_seqs: 1, workers: ["http://h:1"]}
    timeouts: &times {idle_s: 7}
  - name: b
    pools: {all: {<<: *pool, max_num_seqs: 7, workers: ["http://h:2"]}}
    timeouts: *times
"""
    models = read(text).models
    assert models[1].pools["all"].max_num_seqs == 7
    assert models[1].pools["all"].max_model_len == 10
    assert models[1].timeouts == models[0].timeouts


# --- references to the environment


def test_a_reference_becomes_what_its_field_expects() -> None:
    text = edited("port: 8080", "port: ${PORT:-9090}")
    assert read(text).server.port == 9090
    config = read(text, {**ENVIRON, "PORT": "7070", "SLUICE_ADMIN_KEY": "12345"})
    assert config.server.port == 7070
    assert config.server.admin_key is not None
    assert config.server.admin_key.get_secret_value() == "12345"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "'::1'"])
def test_the_dashboard_may_be_open_to_this_host_alone(host: str) -> None:
    server = f"  host: {host}\n  open_dashboard: true\n  viewer_key: sk-viewer\n  admin_key:"
    config = read(edited("  admin_key:", server))
    assert config.server.open_dashboard
    assert config.server.viewer_key is not None
    assert config.server.viewer_key.get_secret_value() == "sk-viewer"


def test_empty_default_means_absent_and_double_dollar_is_literal() -> None:
    config = read(edited("${SLUICE_ADMIN_KEY}", "${NONE:-}"))
    assert config.server.admin_key is None
    literal = read(edited("${SLUICE_ADMIN_KEY}", "'$${X}'"))
    assert literal.server.admin_key is not None
    assert literal.server.admin_key.get_secret_value() == "${X}"


@given(st.text(), st.dictionaries(st.sampled_from(["A", "B"]), st.text(min_size=1)))
def test_substitution_looks_once(text: str, environ: dict[str, str]) -> None:
    assume("$${" not in text and not text.endswith("$"))  # these are escapes themselves
    escaped = text.replace("${", "$${") + "${A:-d}"
    expected = text + environ.get("A", "d")
    found = substitute(escaped, environ)
    assert isinstance(found, EnvValue)
    assert found == expected


# --- bad configurations: (name, text, line, words that the one line must have)

LONG_URL = "url: https://10.0.0.9:8000"
SHORT_WORKERS = 'workers: ["http://10.0.0.1:8000"]'
KEYS = f'api_keys: ["{HASH_A}"]'

PRICED = edited(SHORT_WORKERS, SHORT_WORKERS + "\n        tokens_per_second: 100").replace(
    "max_num_seqs: 2", "max_num_seqs: 2\n        tokens_per_second: 50"
)

BAD: list[tuple[str, str, int, list[str]]] = [
    ("misspelt key", edited("b_short: 4096", "b_shrot: 4096"), 10, ["models[0].boundary.b_shrot", "unknown key `b_shrot`", "did you mean `b_short`?"]),  # noqa: E501
    ("unknown key", edited("  port: 8080", "  zzz: 1"), 3, ["server.zzz", "unknown key `zzz`", "known here: host, port"]),  # noqa: E501
    ("unknown key in a pool", edited("max_num_seqs: 4", "max_num_seq: 4\n        max_num_seqs: 4"), 15, ["models[0].pools.short.max_num_seq", "did you mean `max_num_seqs`?"]),  # noqa: E501
    ("unknown key in a worker", edited("api_key: ${LONG_KEY}", "apikey: x"), 22, ["workers[0].apikey", "did you mean `api_key`?"]),  # noqa: E501
    ("unknown top key", BASE + "entitlement: []\n", 30, ["did you mean `entitlements`?"]),
    ("text for a number", edited("port: 8080", "port: eighty"), 3, ["a whole number, found text"]),
    ("quoted number", edited("port: 8080", 'port: "8080"'), 3, ["write digits, without quotes"]),
    ("flag for a number", edited("port: 8080", "port: true"), 3, ["found true or false"]),
    ("number for text", edited("name: m", "name: 7"), 6, ["expected text", "put it in quotes"]),
    ("fraction", edited("max_num_seqs: 4", "max_num_seqs: 1.5"), 15, ["a whole number"]),
    ("zero", edited("max_num_seqs: 4", "max_num_seqs: 0"), 15, ["at least 1, found 0"]),
    ("port", edited("port: 8080", "port: 70000"), 3, ["at most 65535"]),
    ("nan", edited("gamma: 1.5", "gamma: .nan"), 11, ["number"]),
    ("list for a mapping", edited("  port: 8080", "  - 1").replace("  admin_key: ${SLUICE_ADMIN_KEY}\n", ""), 3, ["server", "expected a mapping, found a list"]),  # noqa: E501
    ("mapping for a list", edited("[a]", "{a: 1}"), 7, ["expected a list, found a mapping"]),
    ("choice", edited("    aliases: [a]", "    mode: enfroce"), 7, ["`enfroce`", "`enforce`?"]),
    ("class", edited("guaranteed", "gold"), 27, ["not a choice", "dedicated, guaranteed"]),
    ("no version", BASE.replace("version: 1\n", ""), 1, ["`version` is missing", "add `version:`"]),
    ("version 2", edited("version: 1", "version: 2"), 1, ["version", "not a choice", "1"]),
    ("no pool window", edited("        max_model_len: 8192\n", ""), 13, ["`max_model_len` is missing", "add `max_model_len:`"]),  # noqa: E501
    ("no models", "version: 1\nmodels: []\n", 2, ["models", "at least one item"]),
    ("models absent", "version: 1\n", 1, ["`models` is missing"]),
    ("no workers", edited(SHORT_WORKERS, "workers: []"), 16, ["empty", "at least one item"]),
    ("duplicate key", edited("  port: 8080", "  port: 8080\n  port: 8081"), 4, ["duplicate key `port`, first on line 3", "keep one"]),  # noqa: E501
    ("tab", edited("  port: 8080", "\tport: 8080"), 3, ["not valid YAML", "tab", "indentation"]),
    ("unclosed list", edited("[a]", "[a"), 8, ["not valid YAML"]),
    ("unknown alias", edited("[a]", "*nowhere"), 7, ["not valid YAML", "alias", "quote values"]),
    ("tag", edited("name: m", "name: !!python/name:os.system m"), 6, ["YAML tag", "remove"]),
    ("two documents", BASE + "---\n{}\n", 30, ["not valid YAML"]),
    ("missing variable", edited("${LONG_KEY}", "${NO_KEY}"), 22, ["environment variable NO_KEY is not set", "export NO_KEY"]),  # noqa: E501
    ("admin key outside ASCII", edited("${SLUICE_ADMIN_KEY}", "schlüssel"), 4, ["server.admin_key", "header can carry", "openssl rand"]),  # noqa: E501
    ("viewer key like the admin key", edited("  admin_key:", "  viewer_key: sk-admin-secret\n  admin_key:"), 4, ["server.viewer_key", "same as admin_key", "another key"]),  # noqa: E501
    ("open dashboard on all addresses", edited("  admin_key:", "  host: 0.0.0.0\n  open_dashboard: true\n  admin_key:"), 5, ["server.open_dashboard", "everybody who reaches 0.0.0.0", "127.0.0.1"]),  # noqa: E501
    ("admin key with a blank", edited("${SLUICE_ADMIN_KEY}", "'two words'"), 4, ["server.admin_key", "no blanks"]),  # noqa: E501
    ("malformed reference", edited("${LONG_KEY}", '"${LONG KEY}"'), 22, ["malformed", "${NAME}"]),
    ("reference of a wrong type", edited("port: 8080", "port: ${LONG_KEY}"), 3, ["found text from the environment"]),  # noqa: E501
    ("alias of another model", edited("[a]", "[a, m]"), 7, ["`m` is taken on line 6"]),
    ("star as a name", edited("name: m", 'name: "*"').replace("model: m", 'model: "*"'), 6, ["`*` is a pattern", "aliases"]),  # noqa: E501
    ("long below short", edited("65536", "6000"), 18, ["long.max_model_len: below the window of pool `short`, 8192", "swap the pools' names"]),  # noqa: E501
    ("a target below a millisecond", edited("concurrency: 2", "concurrency: 2\n    slo_target_ms: 0.5"), 29, ["at least 1, found 0.5", "in milliseconds"]),  # noqa: E501
    ("KV with a unit", edited(SHORT_WORKERS, SHORT_WORKERS + "\n        kv_cache_gib: 240GB"), 17, ["write the number alone: the key's unit is GiB"]),  # noqa: E501
    ("equal windows", edited("65536", "8192"), 18, ["pool `short` has the same window", "8192"]),
    ("b_short list too long", edited("b_short: 4096", "b_short: [1, 2]"), 10, ["2 given for 2 pools (short, long)", "give 1 number"]),  # noqa: E501
    ("b_short over the window", edited("4096", "9000"), 10, ["9000 is over the window of pool `short`, 8192", "at most 8192"]),  # noqa: E501
    ("worker's scheme", edited(LONG_URL, "url: ftp://10.0.0.9"), 21, ["not an http or https URL", "http://host:port"]),
    ("worker's dns", edited(LONG_URL, "url: dns://engines:80"), 21, ["as `discover`"]),
    ("worker's credentials", edited(LONG_URL, "url: https://u:pw@h"), 21, ["credentials", "`api_key`"]),  # noqa: E501
    ("worker's port", edited(LONG_URL, "url: https://h:99999"), 21, ["not a URL"]),
    ("worker's query", edited(LONG_URL, "url: https://h/?a=1"), 21, ["no query"]),
    ("worker without host", edited(LONG_URL, "url: 'https://:80'"), 21, ["host"]),
    ("worker in two pools", edited(SHORT_WORKERS, 'workers: ["https://10.0.0.9:8000/v1"]'), 21, ["worker 10.0.0.9:8000 is in pool `short` of", "on line 16", "count twice", "engines of its own"]),  # noqa: E501
    ("worker in two pools by another name", edited(SHORT_WORKERS, 'workers: ["http://localhost:8000"]').replace(LONG_URL, 'url: "http://[::1]:8000/v1"'), 21, ["worker [::1]:8000 is in pool `short` of", "on line 16"]),  # noqa: E501
    ("worker twice by another name", edited(SHORT_WORKERS, 'workers: ["http://localhost:1", "http://127.0.0.1:1"]'), 16, ["worker 127.0.0.1:1 is listed twice", "remove one"]),  # noqa: E501
    ("worker twice", edited(SHORT_WORKERS, 'workers: ["http://h:1", "https://h:1"]'), 16, ["worker h:1 is listed twice", "remove one"]),  # noqa: E501
    ("no CA file", edited("api_key: ${LONG_KEY}", "ca_file: /nowhere/ca.pem"), 22, ["ca_file", "no such file", "PEM"]),  # noqa: E501
    ("CA without TLS", edited(LONG_URL, "url: http://h").replace("api_key: ${LONG_KEY}", "ca_file: c"), 22, ["without TLS"]),  # noqa: E501
    ("pool's name", edited("      short:", "      short pool:"), 13, ["not a usable name"]),
    ("entitlement's model", edited("model: m", "model: n"), 26, ["no model is named `n`", "m"]),
    ("entitlement's alias", edited("model: m", "model: a"), 26, ["an alias", "`m`"]),
    ("plain key", edited(KEYS, "api_keys: [sk-plain]"), 29, ["not the hash", "sluice hash-key"]),
    ("third key", edited(KEYS, f'api_keys: ["{HASH_A}", "{HASH_B}", "{HASH_A}"]'), 29, ["longer than 2"]),  # noqa: E501
    ("key twice", edited(KEYS, f'api_keys: ["{HASH_A}", "{HASH_A}"]'), 29, ["the same key as on line 29", "hash-key --new"]),  # noqa: E501
    ("entitlement twice", BASE + "  - {name: e, tenant: t, model: m}\n", 30, ["`e` is taken on line 24"]),  # noqa: E501
    ("too many slots", edited("concurrency: 2", "concurrency: 7"), 28, ["add up to 7", "6 slots", "add workers"]),  # noqa: E501
    ("too many slots in a pool", edited("concurrency: 2", "concurrency: {short: 1, long: 3}"), 28, ["pool `long` add up to 3", "2 slots"]),  # noqa: E501
    ("unknown pool", edited("concurrency: 2", "concurrency: {shrt: 1}"), 28, ["no pool `shrt`", "`short`?"]),  # noqa: E501
    ("too much KV", edited("concurrency: 2", "concurrency: 2\n    kv_cache_gib: 200"), 29, ["200 GiB", "160.0 GiB", "lower kv_cache_gib"]),  # noqa: E501
    ("limit below baseline", edited("concurrency: 2", "concurrency: 3\n    max_concurrency: 2"), 29, ["max_concurrency: below concurrency", "raise max_concurrency"]),  # noqa: E501
    ("reclaim", edited("    aliases: [a]", "    admission: {reclaim: spot}"), 7, ["`spot` is not a choice", "preemptible"]),  # noqa: E501
    ("replicas below the workers", edited(SHORT_WORKERS, 'workers: ["http://h:1", "http://h:2"]\n        replicas: {max: 1}'), 17, ["1 is below the 2 workers listed", "at least 2"]),  # noqa: E501
    ("replicas' min over max", edited(SHORT_WORKERS, SHORT_WORKERS + "\n        replicas: {min: 4, max: 3}"), 17, ["4 is over max, 3", "at most 3"]),  # noqa: E501
    ("a rate for one pool of two", edited(SHORT_WORKERS, SHORT_WORKERS + "\n        tokens_per_second: 9"), 18, ["pools.long", "no tokens_per_second here, but in pool `short`", "for none"]),  # noqa: E501
    ("a pool's KV without bytes per token", edited("    kv_bytes_per_token: 1048576\n", "").replace(SHORT_WORKERS, SHORT_WORKERS + "\n        kv_cache_gib: 9"), 16, ["what a token takes", "kv_bytes_per_token"]),  # noqa: E501
    ("KV without bytes per token", edited("    kv_bytes_per_token: 1048576\n", "").replace("concurrency: 2", "concurrency: 2\n    kv_cache_gib: 1"), 28, ["entitlements[0].kv_cache_gib", "what a token takes", "kv_bytes_per_token"]),  # noqa: E501
    ("a KV limit without bytes per token", edited("    kv_bytes_per_token: 1048576\n", "").replace("concurrency: 2", "concurrency: 2\n    max_kv_cache_gib: 1"), 28, ["entitlements[0].max_kv_cache_gib", "what a token takes"]),  # noqa: E501
    ("absurd KV", edited(SHORT_WORKERS, SHORT_WORKERS + "\n        kv_cache_gib: 1.0e+300"), 17, ["kv_cache_gib", "at most 8.38861e+06"]),  # noqa: E501
    ("KV limit below baseline", edited("concurrency: 2", "concurrency: 2\n    kv_cache_gib: 2\n    max_kv_cache_gib: 1"), 30, ["max_kv_cache_gib: below kv_cache_gib"]),  # noqa: E501
    ("more KV than stated", edited(SHORT_WORKERS, SHORT_WORKERS + "\n        kv_cache_gib: 1").replace("concurrency: 2", "concurrency: 2\n    kv_cache_gib: 130"), 30, ["130 GiB", "129.0 GiB"]),  # noqa: E501
    ("rate limit of guaranteed", edited("concurrency: 2", "concurrency: 2\n    max_tokens_per_second: 5"), 29, ["guaranteed entitlement never goes above", "dedicated, elastic or spot"]),  # noqa: E501
    ("rate limit below baseline", edited("guaranteed\n    concurrency: 2", "elastic\n    tokens_per_second: 6\n    max_tokens_per_second: 5"), 29, ["max_tokens_per_second: below tokens_per_second"]),  # noqa: E501
    ("guaranteed above its baseline", edited("concurrency: 2", "concurrency: 2\n    max_concurrency: 3"), 29, ["never goes above its baseline, 2"]),  # noqa: E501
    ("guaranteed without a baseline", edited("    concurrency: 2\n", ""), 24, ["without a baseline could never send", "sequences to reserve"]),  # noqa: E501
    ("split over a pool's slots", edited("concurrency: 2", "concurrency: {long: 2}") + "  - {name: f, tenant: t, model: m, service_class: dedicated, concurrency: 3}\n", 30, ["pool `long` add up to 3", "split 2/1 over the pools", "2 slots", "by pool"]),  # noqa: E501
    ("too high a rate", PRICED.replace("concurrency: 2", "concurrency: 2\n    tokens_per_second: 151"), 31, ["add up to 151", "150 (per worker x most workers)"]),  # noqa: E501
    ("expiry", edited("concurrency: 2", "expires_at: tomorrow"), 28, ["not a date", "2026-12-31T"]),
    *(
        (f"expiry {at}", edited("concurrency: 2", f'expires_at: "{at}"'), 28, ["not a date"])
        for at in OUT_OF_RANGE
    ),
    ("expiry as a number", edited("concurrency: 2", "expires_at: 5"), 28, ["not a date"]),
    ("sqlite without a path", BASE + "state: {url: 'sqlite://s.db'}\n", 30, ["not the path of a file", "sqlite:///sluice.db"]),  # noqa: E501
    ("sentinel without a service", BASE + "state: {url: 'redis+sentinel://:pw@h:6379/0'}\n", 30, ["no service and database", "HOST:26379/SERVICE/0"]),  # noqa: E501
    ("sentinel without a port", BASE + "state: {url: 'redis+sentinel://h,i:2/main/0'}\n", 30, ["not a list of HOST:PORT"]),  # noqa: E501
    ("cluster without a port", BASE + "state: {url: 'redis+cluster://h'}\n", 30, ["not a list of HOST:PORT", "redis+cluster://"]),  # noqa: E501
    ("cluster with a port out of range", BASE + "state: {url: 'redis+cluster://h:65536'}\n", 30, ["not a list of HOST:PORT"]),  # noqa: E501
    ("cluster with a database", BASE + "state: {url: 'redis+cluster://h:1/0'}\n", 30, ["a cluster has no databases"]),  # noqa: E501
    ("redis without a host", BASE + "state: {url: 'redis:///0'}\n", 30, ["no host"]),
    ("redis with a name", BASE + "state: {url: 'redis://h/main'}\n", 30, ["not the number of a database"]),  # noqa: E501
    ("redis with a time-out", BASE + "state: {url: 'redis://h/0?socket_timeout=60'}\n", 30, ["an option that is not supported"]),  # noqa: E501
    ("a controller without Redis", BASE + "state: {controller: {}}\n", 30, ["state.controller", "publishes through Redis", "redis://HOST:6379/0"]),  # noqa: E501
    ("a controller that is stale at once", BASE + "state: {url: 'redis://h/0', controller: {stale_after_s: 1}}\n", 30, ["at least 30"]),  # noqa: E501
    ("other state", BASE + "state: {url: 'mysql://h'}\n", 30, ["use memory://"]),
    ("ejection", BASE + "health: {eject_s: 90}\n", 30, ["below eject_s (90)", "at least 90"]),
    ("held bodies", edited("  port: 8080", "  max_held_body_bytes: 1000\n  port: 8080"), 3, ["below max_body_bytes", "at least 33554432"]),  # noqa: E501
    ("empty secret", edited("${SLUICE_ADMIN_KEY}", '""'), 4, ["server.admin_key: empty"]),
    ("a key that is no word", edited("  port: 8080", "  [1]: 2"), 3, ["a key must be a word"]),
    ("merge of a list", edited("  port: 8080", "  <<: [1]"), 3, ["merges mappings only"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_configuration(text: str, line: int, words: list[str]) -> None:
    (found,) = problems(text)
    assert re.match(rf"sluice\.yaml:{line}:\d+: ", found), found
    for word in words:
        assert word in found


@pytest.mark.parametrize(
    ("engines", "flag"),
    [("vllm", "--scheduling-policy priority"), ("sglang", "--enable-priority-scheduling")],
)
def test_what_engines_need_to_heed_a_priority_is_told(engines: str, flag: str) -> None:
    found = remarks(read(edited("    aliases: [a]", f"    engine_priority: {engines}")))
    assert any(f"engine_priority: {engines} has no effect unless" in line for line in found)
    assert any(flag in line for line in found)


def test_column_points_at_the_key_or_the_value() -> None:
    assert problems(edited("b_short: 4096", "b_shrot: 4096"))[0].startswith("sluice.yaml:10:7:")
    assert problems(edited("port: 8080", "port: x"))[0].startswith("sluice.yaml:3:9:")
    masked = "version: 1\nserver: {admin_key: ${SLUICE_ADMIN_KEY}, port: x}\nmodels: []\n"
    assert problems(masked)[0].startswith("sluice.yaml:2:48:")


def test_all_problems_come_at_once_in_order() -> None:
    text = (
        BASE.replace("port: 8080", "port: x")
        .replace("${SLUICE_ADMIN_KEY}", "${NO_KEY}")
        .replace("aliases: [a]", "aliases: [m]")
        .replace("b_short: 4096", "b_shrot: 4096\n      b_short: 9000")
        .replace("model: m\n", "model: nope\n")
        .replace("concurrency: 2", "concurrency: 3\n    max_concurrency: 1")
    )
    found = problems(text + "state: {url: redis+cluster://h}\n")
    lines = [int(line.split(":")[1]) for line in found]
    assert lines == sorted(lines)
    assert lines == [3, 4, 10, 27, 30, 32]
    # The model itself is invalid: its own relations wait until it is readable.
    assert "is over the window" not in "\n".join(found)


def test_a_valid_model_is_checked_although_another_part_is_not() -> None:
    found = problems(edited("port: 8080", "port: x").replace("[a]", "[m]"))
    assert len(found) == 2
    assert "`m` is taken" in found[1]


# --- files


def test_unreadable_files(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (Path("a\0b"), "not a usable path"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(path, {})


def test_files_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(b"version: 1\nx: \xff\n")
    with pytest.raises(ConfigError, match=r"s\.yaml:2:4: not UTF-8"):
        load(path, {})
    path.write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load(path, ENVIRON).models[0].name == "m"
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        load(path, {})


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_empty_files(text: str) -> None:
    (found,) = problems(text)
    assert "empty" in found or "expected a mapping" in found


# --- bounds


def test_alias_bombs_are_bounded() -> None:
    levels = "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 10)}]\n" for i in range(1, 12))
    (found,) = problems("b0: &b0 [x]\n" + levels)
    assert "expand without bound" in found


def test_merge_bombs_and_cycles_are_bounded() -> None:
    levels = "".join(
        f"b{i}: &b{i} {{<<: [{', '.join([f'*b{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
    )
    assert "expand without bound" in problems("b0: &b0 {x: 1}\n" + levels)[-1]
    assert "contain themselves" in problems("a: &a [*a]\n")[-1]
    assert "contain themselves" in problems("a: &a {<<: *a}\n")[-1]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_bounded(opening: str) -> None:
    (found,) = problems(opening * 20_000)
    assert "nested deeper" in found


# --- nothing but ConfigError, ever

FRAGMENTS = [
    *("version: 1\n", "models:\n", "  - name: m\n", "    pools: {", "}\n", "server: ", "&a ", "*a"),
    *("<<: ", "!!int ", "!x ", "? ", "- ", ": ", "[", "]", "${A}", "${", "$${", "|\n", ">-\n  "),
    *('"\\UFFFFFFFF"', "%YAML 9.9\n---\n", "---\n", "...\n", "\t", "0x", "1e999", "9" * 40, "~"),
    *("entitlements: [{", "api_keys: ", "concurrency: ", "workers: [http://[", "2026-13-41"),
]
garbage = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.builds(
        lambda at, cut, new: BASE[:at] + new + BASE[at + cut :],
        st.integers(0, len(BASE)),
        st.integers(0, 30),
        st.one_of(st.text(max_size=8), st.sampled_from(FRAGMENTS)),
    ),
)


@settings(max_examples=400, deadline=None)
@given(garbage)
def test_garbage_raises_only_config_errors(text: str) -> None:
    found = error_of(text, ENVIRON)
    if found is not None:
        assert found.problems
        assert all(p.line >= 1 and p.column >= 1 and p.fix for p in found.problems)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.just(HASH_A)
)
names = st.sampled_from(
    (
        *("version", "server", "models", "entitlements", "name", "pools", "workers", "url", "x"),
        *("aliases", "boundary", "b_short", "concurrency", "api_keys", "expires_at", "health"),
    )
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=5)),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_any_tree_raises_only_config_errors(tree: Any) -> None:
    with pytest.raises(ConfigError):
        read(yaml.safe_dump(tree, allow_unicode=True))


# --- secrets


def test_secrets_stand_in_no_repr() -> None:
    config = read(BASE)
    for text in (repr(config), str(config), repr(config.entitlements), config.model_dump_json()):
        assert "sk-admin-secret" not in text
        assert "sk-long-secret" not in text
    assert HASH_A not in repr(config)


SECRET = "hunter2-Zx9"


@pytest.mark.parametrize(
    "text",
    [
        edited("${SLUICE_ADMIN_KEY}", f"[{SECRET}]"),
        edited("${SLUICE_ADMIN_KEY}", f"*{SECRET}"),
        edited("${SLUICE_ADMIN_KEY}", f"!{SECRET}"),
        edited("${SLUICE_ADMIN_KEY}", f"{SECRET}: {SECRET}: x"),
        edited("${SLUICE_ADMIN_KEY}", f"'{SECRET}"),
        edited("  admin_key: ${SLUICE_ADMIN_KEY}", f"  admin_kee: {SECRET}"),
        edited(KEYS, f"api_keys: [{SECRET}]"),
        edited(KEYS, f"api_keys: {SECRET}"),
        edited(LONG_URL, f"url: https://u:{SECRET}@h"),
        edited(LONG_URL, f"url: {SECRET}://h"),
        edited(LONG_URL, f"url: http://[{SECRET}"),
        BASE + f"state: {{url: 'redis://:{SECRET}@h:6379/x'}}\n",
        BASE + f"state: {{url: 'redis+cluster://:{SECRET}@h:6379/0'}}\n",
        BASE + f"state: {{url: 'redis://:{SECRET}@h:99999/0'}}\n",
        BASE + f"state: {{url: 'redis+cluster://:a/{SECRET}@h:1'}}\n",
        BASE + f"state: {{url: 'redis+sentinel://:{SECRET}@h:1/s'}}\n",
        BASE + f"state: {{url: '{SECRET}://h'}}\n",
        BASE + f"request_log: {SECRET}\n",
        f"version: {SECRET} and more text than a choice has\nmodels: []\n",
    ],
)
def test_secrets_stand_in_no_error(text: str) -> None:
    assert SECRET not in "\n".join(problems(text))


@pytest.mark.parametrize(
    "url",
    [
        "memory://",
        "sqlite:///sluice.db",
        "sqlite:////var/lib/sluice/sluice.db",
        "redis://h",
        f"redis://user:{SECRET}@h:6379/3",
        f"rediss://:{SECRET}@h:6380/0?ssl_ca_certs=/etc/ca.pem",
        "redis+cluster://h:7000",
        f"redis+cluster://user:{SECRET}@a:7000,10.0.0.2:7001,[::1]:7002",
        "redis+sentinel://h:26379/main/0",
        f"redis+sentinel://:{SECRET}@a:26379,b:26379/my-service/3",
    ],
)
def test_state_urls_are_taken_and_shown_without_a_password(url: str) -> None:
    state = read(BASE + f"state: {{url: '{url}'}}\n").state
    assert state.address == url
    assert SECRET not in f"{state}{state!r}{state.model_dump()}"
    assert str(state.url).startswith(url.partition("//")[0])


def test_a_password_of_its_own_may_have_any_signs() -> None:
    password = "p/a:s@s#%40?"
    for url, user in (("redis://h:1/0", None), ("redis://me@h:1/0", "me")):
        state = read(BASE + f"state: {{url: '{url}', password: '{password}'}}\n").state
        parts = urlsplit(state.address)
        assert unquote(parts.password or "") == password
        assert (parts.username or None, parts.hostname, parts.port) == (user, "h", 1)
        assert password not in repr(state)
    assert read(BASE + "state: {url: 'memory://', password: ''}\n").state.address == "memory://"
    (found,) = problems(BASE + "state: {url: 'redis://:x@h', password: p}\n")
    assert "keep one of them" in found


def test_a_missing_redis_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = problems(BASE + "state: {url: 'redis://h:6379/0'}\n")
    assert "pip install '.[redis]'" in found


@pytest.mark.parametrize("missing", ["the exporter", "all of it"])
def test_a_missing_exporter_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def find_spec(name: str) -> None:
        if missing == "all of it":
            raise ModuleNotFoundError(name)

    monkeypatch.setattr("gateway.settings.checks.find_spec", find_spec)
    (found,) = problems(BASE + "telemetry: {otlp: true}\n")
    assert "pip install '.[otel]'" in found
    assert not read(BASE + "telemetry: {otlp: false}\n").telemetry.otlp


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([line for line in BASE.splitlines() if ": " in line]),
    st.booleans(),
)
def test_no_value_from_the_environment_stands_in_an_error(line: str, quoted: bool) -> None:
    key = line.split(": ", maxsplit=1)[0]
    reference = '"${LONG_KEY}"' if quoted else "${LONG_KEY}"
    text = BASE.replace(line, f"{key}: {reference}", 1)
    found = error_of(text, {**ENVIRON, "LONG_KEY": SECRET})
    names = {"name", "model"}  # names are not secrets, wherever they come from
    assert found is None or key.strip(" -") in names or SECRET not in str(found)


# --- notices


def test_a_model_that_nobody_is_limited_on_is_remarked() -> None:
    plain = edited("    service_class: guaranteed\n    concurrency: 2\n", "")
    (line,) = remarks(read(plain))
    assert line.startswith("model m: no entitlement states a service_class or a limit")
    assert remarks(read(BASE)) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "guaranteed\n",
            "spot\n",
            "entitlement e: spot reserves nothing: concurrency only says where its burst begins",
        ),
        (
            "concurrency: 2",
            "concurrency: 1",
            "entitlement e: no baseline in long, so what belongs there is refused",
        ),
    ],
)
def test_terms_that_may_surprise_are_remarked(old: str, new: str, words: str) -> None:
    assert remarks(read(edited(old, new))) == [words]


def test_an_open_gateway_is_remarked() -> None:
    text = BASE[: BASE.index("entitlements:")].replace("  admin_key: ${SLUICE_ADMIN_KEY}\n", "")
    assert remarks(read(text)) == [
        "no entitlements: the gateway is open to any key, or none",
        "no server.admin_key: the admin routes are closed",
    ]
    keyless = edited(KEYS, "api_keys: []")
    assert remarks(read(keyless)) == ["entitlement e: no api_keys, so nobody can use it"]


# --- schema


@pytest.fixture(scope="module")
def validator() -> jsonschema_rs.Draft202012Validator:
    document = schema()
    jsonschema_rs.meta.validate(document)
    return jsonschema_rs.Draft202012Validator(document)


@pytest.mark.parametrize("text", [BASE, EXAMPLE.read_text(encoding="utf-8")])
def test_the_schema_takes_good_files(
    validator: jsonschema_rs.Draft202012Validator, text: str
) -> None:
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        edited("b_short: 4096", "b_shrot: 4096"),
        edited("port: 8080", "port: eighty"),
        edited("guaranteed", "gold"),
        edited(KEYS, "api_keys: [sk-plain]"),
        edited("      short:", "      short pool:"),
    ],
)
def test_the_schema_refuses_bad_files(
    validator: jsonschema_rs.Draft202012Validator, text: str
) -> None:
    assert not validator.is_valid(yaml.safe_load(text))


def test_the_schema_takes_references_and_describes_every_key(
    validator: jsonschema_rs.Draft202012Validator,
) -> None:
    text = edited("port: 8080", "port: ${PORT:-1}").replace("concurrency: 2", "concurrency: ${C}")
    validator.validate(yaml.safe_load(text))
    document = schema()
    sections = [document, *document["$defs"].values()]
    for section in sections:
        for name, part in section.get("properties", {}).items():
            assert part.get("description") or "$ref" in part, name


def test_a_valid_file_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[object] = []
    for section in (ModelConfig, EntitlementConfig):
        monkeypatch.setattr(section, "model_validate", again.append)
    assert len(parse(BASE, "sluice.yaml", ENVIRON).entitlements) == 1
    assert again == []


ONE_POOL = """\
version: 1
models:
  - name: m
    pools: {all: {max_model_len: 10, max_num_seqs: 1, workers: ["http://h:1"]}}
"""
WORKERS = "server: {workers: 3, management_port: 9100}\nstate: {url: 'redis://h:1/0'}\n"


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ("redis://h:1/0", "memory://", "through Redis, and state.url names none"),
        ("redis://h:1/0", "sqlite:///x.db", "set state.url to redis://HOST:6379/0, or give 1"),
        (", management_port: 9100", "", "a free port with 3 free ones after it"),
        ("9100", "65533", "a free port with 3 free ones after it"),
        ("workers: 3, management_port: 9100", "management_port: 8080", "the clients' port"),
        ("9100", "8077", "give one below 8077 or above 8080"),
        ("9100", "8080", "give one below 8077 or above 8080"),
    ],
)
def test_what_several_replicas_lack_is_said(was: str, now: str, said: str) -> None:
    assert read(ONE_POOL + WORKERS).server.workers == 3
    with pytest.raises(ConfigError, match=said):
        read(ONE_POOL + WORKERS.replace(was, now))


@pytest.mark.parametrize("port", ["8076", "8081"])
def test_the_clients_port_may_be_beside_those_of_the_replicas(port: str) -> None:
    read(ONE_POOL + WORKERS.replace("9100", port))


def test_fallbacks_and_split_aliases_name_models() -> None:
    second = (
        "models:\n  - name: n\n    pools: {only: {max_model_len: 1, max_num_seqs: 1, "
        'workers: ["http://n:1"]}}\n'
    )
    two = BASE.replace("models:\n", second, 1)
    good = two.replace("    aliases: [a]", "    aliases: [a]\n    fallbacks: [n]")
    good += "aliases:\n  - {name: both, split: {m: 90, n: 10}}\n"
    config = read(good)
    assert config.models[1].fallbacks == ("n",)
    assert dict(config.aliases[0].split) == {"m": 90, "n": 10}
    for was, now, problem in (
        ("[n]", "[m]", "the model itself"),
        ("[n]", "[a]", "no model is named `a`"),
        (", n: 10", ", o: 10", "no model is named `o`"),
        (", n: 10", ", n: 0", "must be at least 1"),
        ("name: both", "name: a", "`a` is taken on line"),
        ("name: both", "name: n", "`n` is taken on line"),
    ):
        with pytest.raises(ConfigError) as caught:
            read(good.replace(was, now))
        assert problem in str(caught.value), now


def test_loras_are_names_of_their_own() -> None:
    assert read(edited("    aliases: [a]", "    loras: [sql]")).models[0].loras == ("sql",)
    for loras, problem, fix in (
        ("aliases: [sql]\n    loras: [sql]", "is a LoRA adapter, named on line", "remove it here"),
        ("loras: [m]", "`m` is taken on line", "name of its own"),
        ("loras: [sql, sql]", "`sql` is", "adapter"),
    ):
        with pytest.raises(ConfigError) as caught:
            read(edited("    aliases: [a]", f"    {loras}"))
        assert problem in str(caught.value), loras
        assert fix in str(caught.value), loras
