"""A LiteLLM proxy's clients change nothing but the address: their keys open what they opened."""

import hashlib
import json
from pathlib import Path

import httpx
import yaml

from bench.common.fleet import MODEL, Fleet
from tests.running import sluice

PROXY = """\
model_list:
  - model_name: chat
    litellm_params: {{model: hosted_vllm/{model}, api_base: "{first}/v1", api_key: EMPTY}}
    model_info: {{max_input_tokens: 8192}}
  - model_name: code
    litellm_params: {{model: hosted_vllm/{model}, api_base: "{second}/v1", api_key: os.environ/K}}
    model_info: {{max_input_tokens: 8192}}
  - model_name: claude-*
    litellm_params: {{model: hosted_vllm/{model}, api_base: "{second}/v1", api_key: ""}}
router_settings: {{model_group_alias: {{gpt-4o: chat}}}}
general_settings: {{master_key: os.environ/MASTER}}
"""


def run(*arguments: str) -> str:
    result = sluice(*arguments, K="engine-key", MASTER="sk-master")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_old_key_works_unchanged_after_the_import(tmp_path: Path) -> None:
    fleet = Fleet(short=2, long=0)
    first, second = fleet.engines
    proxy, keys, output = (tmp_path / name for name in ("c.yaml", "k.json", "sluice.yaml"))
    proxy.write_text(PROXY.format(model=MODEL, first=first.url, second=second.url))
    rows = [
        {"token": hashlib.sha256(key.encode()).hexdigest(), "key_alias": name, "models": models}
        for key, name, models in (("sk-old", "old", []), ("sk-code", "code", ["code"]))
    ]
    keys.write_text(json.dumps({"keys": rows}))
    run("import", "litellm", str(proxy), "--keys", str(keys), "-o", str(output))
    run("check", "-c", str(output))

    replica = fleet.replicas[0]
    config = yaml.safe_load(output.read_text())
    config["server"] = {**config["server"], "host": "127.0.0.1", "port": replica.port}
    replica.config = config
    replica.env = {"K": "engine-key", "MASTER": "sk-master"}
    with fleet:

        def status(key: str, model: str) -> int:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
            headers = {"authorization": f"Bearer {key}"}
            url = f"{fleet.url}/v1/chat/completions"
            return httpx.post(url, json={**body, "max_tokens": 4}, headers=headers).status_code

        assert [status("sk-old", model) for model in ("chat", "gpt-4o", "code")] == [200] * 3
        assert [status("sk-code", model) for model in ("code", "chat")] == [200, 403]
        assert [status("sk-code", f"claude-{name}") for name in ("opus-4", "*")] == [200, 200]
        assert status("sk-unknown", "chat") == 401
