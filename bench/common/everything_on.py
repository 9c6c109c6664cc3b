"""One gateway with every stage on, as the cost, scale and endurance benches run it.

Keys, entitlements whose limits are enforced, the length estimate, compression of borderline
prompts, token pools, QUARTZ with its prefix index, telemetry of the engines, metering, the
request log, metrics.
"""

import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

MODEL: Final = "bench-model"
KEY: Final = "sk-bench"
KEY_SHA256: Final = sha256(KEY.encode()).hexdigest()

_TENANTS: Final = f"""ledger: {{{{path: "{{folder}}/ledger-{{port}}.db"}}}}
tenants:
  - name: bench
    budgets: [{{{{tokens: 9000000000000}}}}, {{{{money: 9000000}}}}]
    keys:
      - name: app
        sha256: {KEY_SHA256}
        models: [{MODEL}]
        requests_per_minute: 1000000000
        max_concurrency: 1000000
"""


def everything(
    folder: Path,
    port: int,
    engine_urls: Sequence[str],
    *,
    state: str = "memory://",
    concurrency: int = 20_000,
    tenants: bool = False,
) -> Path:
    """Write the configuration to `folder`, give its path.

    The first half of the engines (at least two) serves the short pool, the rest the long one.
    `concurrency`: sequences that the entitlement may run at once,
    half of what each pool has; its limits of tokens/s and KV bytes are as wide. `state`: URL of
    the store. `tenants`: the key is a tenant's, with budgets, limits of its own, prices and ledger.
    """
    half = max(1, len(engine_urls) // 2)
    short, long = (
        ", ".join(f'"{url}"' for url in urls) for urls in (engine_urls[:half], engine_urls[half:])
    )
    slots = 2 * concurrency // half
    each = f"max_num_seqs: {slots}, tokens_per_second: 100000000, kv_cache_gib: {slots}"
    price = "price: {input: 0.6, cached_input: 0.15, output: 1.8}" if tenants else ""
    keys = "" if tenants else f'api_keys: ["sha256:{KEY_SHA256}"]'
    file = folder / f"sluice-{port}.yaml"
    file.write_text(
        f"""version: 1
server: {{host: 127.0.0.1, port: {port}, max_connections: 20000}}
state: {{url: "{state}"}}
request_log: {{path: "{folder}/requests-{port}.jsonl"}}
usage_export: {{path: "{folder}/usage-{port}.jsonl"}}
models:
  - name: {MODEL}
    kv_bytes_per_token: 131072
    {price}
    compression: {{enabled: true}}
    scheduling: {{policy: quartz}}
    admission: {{mode: enforce}}
    pools:
      short: {{max_model_len: 8192, {each}, workers: [{short}]}}
      long: {{max_model_len: 131072, {each}, workers: [{long}]}}
entitlements:
  - name: bench
    tenant: bench
    model: {MODEL}
    service_class: guaranteed
    tokens_per_second: 50000000
    kv_cache_gib: {concurrency}
    concurrency: {concurrency}
    {keys}
"""
        + (_TENANTS.format(folder=folder, port=port) if tenants else "")
    )
    return file


def serve_command(file: Path) -> list[str]:
    """Runs the gateway with this configuration."""
    return [sys.executable, "-m", "sluice", "serve", "-c", str(file), "--log-level", "error"]
