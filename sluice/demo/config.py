"""The demo's configuration files, its sample keys, and the shape of its fleet.

Runs from real configuration files. Their paths are printed, so that newcomers can read, copy and
change them.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

MODEL: Final = "demo-model"
"""Name under which the unmanaged gateway serves the long engine."""
PHASES_MODEL: Final = "demo-phases"
"""The same, by a pool whose prompts an engine of its own computes."""
SHORT_WINDOW, LONG_WINDOW = 8192, 65536
SHORT_SLOTS: Final = 32
PREFILL_SLOTS: Final = 8
RANKS, SLOTS_PER_RANK = 4, 4
KEYS: Final = {
    "guaranteed": "sk-demo-guaranteed",
    "elastic": "sk-demo-elastic",
    "spot": "sk-demo-spot",
}
"""By tenant."""
ADMIN_KEY: Final = "sk-demo-admin"


def _batches(folder: Path) -> str:
    """Files of batches, where what keeps them is installed."""
    if importlib.util.find_spec("fsspec") is None:
        return ""
    return f'batches: {{url: "file://{folder / "batches"}"}}\n'


def managed(
    port: int, short: Sequence[str], long: str, apart: Mapping[str, str], folder: Path
) -> str:
    """Everything on: two pools, three tenants, and each of the five systems.

    `apart`: the engines of a further pool by phase.
    """
    entitlements = "\n".join(_entitlements())
    tenants = "\n".join(_tenants())
    return f"""\
# Written by `sluice demo`. The commented example in docs/ explains every key.
version: 1
server: {{host: 127.0.0.1, port: {port}, admin_key: "{ADMIN_KEY}", open_dashboard: true}}
state: {{url: "memory://"}}
health: {{interval_s: 0.5, timeout_s: 5}} # an engine is back soon; a busy laptop is no fault
compressor: {{time_limit_ms: 2000}} # it may be slow, too
request_log: {{path: "{folder / "requests.jsonl"}"}}
{_batches(folder)}models:
  - name: {MODEL}
    aliases: [gpt-4o-mini]
    kv_bytes_per_token: 327680
    boundary: {{b_short: {SHORT_WINDOW}, auto: true, mode: observe}}
    compression: {{enabled: true, only_when_busy: false}} # so that it is seen
    pools:
      short:
        max_model_len: {SHORT_WINDOW}
        max_num_seqs: {SHORT_SLOTS}
        tokens_per_second: 40000
        kv_cache_gib: 320
        scheduling: {{policy: quartz}}
        workers: [{", ".join(f'"{url}"' for url in short)}]
      long:
        max_model_len: {LONG_WINDOW}
        max_num_seqs: {SLOTS_PER_RANK} # of each rank
        tokens_per_second: 20000
        kv_cache_gib: 320
        scheduling: {{policy: bfio}}
        workers: [{{url: "{long}", ranks: {RANKS}}}]
  - name: {PHASES_MODEL} # its prompts are computed by one engine, its answers by the other
    kv_bytes_per_token: 327680
    pools:
      apart:
        max_model_len: {SHORT_WINDOW}
        prefill: {{max_num_seqs: {PREFILL_SLOTS}, workers: ["{apart["prefill"]}"]}}
        decode: {{max_num_seqs: {SHORT_SLOTS}, kv_cache_gib: 320, workers: ["{apart["decode"]}"]}}
        transfer: {{kind: vllm, skip_below_tokens: 512}} # decode computes short prompts itself
entitlements:
{entitlements}
tenants:
{tenants}
"""


def _entitlements() -> Iterator[str]:
    limits = {
        "guaranteed": "tokens_per_second: 40000, kv_cache_gib: 480, "
        "concurrency: 32, max_concurrency: 32, slo_target_ms: 500",
        "elastic": "tokens_per_second: 20000, kv_cache_gib: 320, "
        "concurrency: 16, max_concurrency: 64",
        "spot": "max_concurrency: 48",
    }
    for name in KEYS:
        of = f"tenant: demo-{name}, service_class: {'spot' if name == 'spot' else 'elastic'}"
        yield (
            f"  - {{name: demo-{name}, tenant: demo-{name}, service_class: {name},\n"
            f"     model: {MODEL}, {limits[name]}}}\n"
            f"  - {{name: demo-{name}-phases, {of}, model: {PHASES_MODEL}}}"
        )


def _tenants() -> Iterator[str]:
    for name, key in KEYS.items():
        digest = sha256(key.encode()).hexdigest()
        yield f'  - {{name: demo-{name}, keys: [{{name: demo, sha256: "{digest}"}}]}}'


def unmanaged(port: int, short: Sequence[str]) -> str:
    """A plain relay before the same engines: no tenants, no estimate, each worker in turn."""
    return f"""\
# Written by `sluice demo`, for comparison: the same engines, nothing managed.
version: 1
server: {{host: 127.0.0.1, port: {port}}}
models:
  - name: {MODEL}
    scheduling: {{policy: round-robin}}
    pools:
      one:
        max_model_len: {SHORT_WINDOW}
        max_num_seqs: {SHORT_SLOTS}
        workers: [{", ".join(f'"{url}"' for url in short)}]
"""
