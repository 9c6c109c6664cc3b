"""Prefix caches in a proof: by digests of the log, in engines and in the gateway's own index."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import Result

from planner.profile import NodeProfile
from simulator.engine.profiles import EngineProfile
from tests.builders import decision
from tests.running import sluice

FILE = """\
version: 1
models:
  - name: m
    pools:
      all:
        max_model_len: 8192
        max_num_seqs: 32
        workers: ["http://127.0.0.1:1", "http://127.0.0.1:2"]
entitlements:
  - {name: one, tenant: a, model: m, concurrency: 64, slo_target_ms: 60}
  - {name: other, tenant: b, model: m, concurrency: 64, slo_target_ms: 60}
"""
PHASES = """\
        max_model_len: 8192
        prefill: {max_num_seqs: 32, workers: ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
        decode: {max_num_seqs: 32, workers: ["http://127.0.0.1:3"]}
        transfer: {kind: vllm, bytes_per_second: 100e9}
    kv_bytes_per_token: 10000
"""
ENGINE = EngineProfile(
    name="e",
    w_s=0.004,
    h_s=0.0001,
    prefill_s_per_token=3e-5,
    kv_blocks=4096,
    max_model_len=8192,
    max_num_seqs=32,
    prefix_cache_tokens=24_000,
)
NODE = NodeProfile(
    name="e", gpu="cpu", model="m", gpus=1, w_s=0.004, h_s_per_token=1e-8, kv_tokens=2**16
)
BEGINNING, BEGINNINGS = 2_700, 12
"""Tokens of each, and how many: two engines hold them all, one does not."""
BYTES = 4.2
"""A token."""
ENOUGH = 1_100
"""Requests to say that 99 % of either tenant's hold."""


def requests(count: int = 400, *, digests: bool = True, cached: int = 2_688) -> list[Any]:
    """Prompts of a beginning that many share and some tokens of their own."""
    random = np.random.default_rng(1)
    made = []
    for number, at_s in enumerate(np.cumsum(random.exponential(1 / 12, count)).tolist()):
        tokens = BEGINNING + int(random.integers(50, 150))
        beginning = [int(BYTES * BEGINNING), int(random.integers(BEGINNINGS))]
        whole = [int(BYTES * tokens), 1_000 + number]
        record = decision(
            time_unix_s=at_s,
            prompt_tokens=tokens,
            completion_tokens=10,
            cached_tokens=cached,
            text_bytes=int(BYTES * tokens),
            entitlement=("one", "other")[number % 2],
            model="m",
            prompt_digests=[beginning, whole] if digests else [],
        )
        made.append(record)
    return made


def proved(
    folder: Path, log: list[Any], file: str = FILE, cache_tokens: int | None = 24_000
) -> Result:
    (folder / "new.yaml").write_text(file)
    (folder / "log.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, log)))
    engine = msgspec.structs.replace(ENGINE, prefix_cache_tokens=cache_tokens)
    profile = {**msgspec.structs.asdict(NODE), "engine": engine}
    (folder / "node.json").write_bytes(msgspec.json.encode(profile))
    paths = ("-c", folder / "new.yaml", "--log", folder / "log.jsonl")
    return sluice("prove", *paths, "--profile", folder / "node.json", "--json")


def test_a_log_with_digests_holds_where_engines_keep_what_prompts_share(tmp_path: Path) -> None:
    result = proved(tmp_path, requests(ENOUGH))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["notes"] == []


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"log": requests(digests=False)}, "has no digests of prompts: each prompt counts as new"),
        ({"log": requests(cached=0)}, "shows no cached tokens: each prompt counts as new text"),
        ({"cache_tokens": 12_000}, ""),
        ({"cache_tokens": 0}, "has an engine without a prefix cache: each prompt counts as new"),
        (
            {
                "file": FILE.replace(
                    "    pools:", "    scheduling: {policy: round-robin}\n    pools:"
                )
            },
            "",
        ),
        ({"file": FILE.replace("    pools:", "    cache_salt: true\n    pools:")}, ""),
    ],
    ids=["no digests", "no hits", "cache halved", "no cache", "another policy", "tenants apart"],
)
def test_what_leaves_fewer_hits_breaks_it(
    change: dict[str, Any], note: str, tmp_path: Path
) -> None:
    result = proved(tmp_path, **{"log": requests(), **change})
    assert result.exit_code == 1, result.output
    proof = json.loads(result.stdout)
    assert (proof["findings"][0]["verdict"], len(proof["notes"])) == ("breaks", len(note) > 0)
    assert note in "".join(proof["notes"])


def test_prompts_computed_apart_find_their_beginnings_too(tmp_path: Path) -> None:
    begin = FILE.index("        max_model_len")
    apart = FILE[:begin] + PHASES + FILE[FILE.index("entitlements") :]
    assert proved(tmp_path, requests(ENOUGH), apart).exit_code == 0
    assert proved(tmp_path, requests(), apart, 0).exit_code == 1
