"""values.yaml of the production-stack -> sluice.yaml."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import parse
from gateway.settings.worker import source_of
from tests.running import sluice

STATIC = """\
servingEngineSpec:
  enableEngine: true
  vllmApiKey: {secretName: vllm, secretKey: key}
  modelSpec:
    - name: llama
      modelURL: meta-llama/Llama-3.1-8B-Instruct
      replicaCount: 2
      vllmConfig: {maxModelLen: 16384, extraArgs: ["--max-num-seqs=64", "--disable-log-requests"]}
    - {name: other, modelURL: other/model}
routerSpec:
  serviceDiscovery: static
  staticBackends: "http://a:8000, http://b:8000/v1,http://c:8000"
  staticModels: "meta-llama/Llama-3.1-8B-Instruct,meta-llama/Llama-3.1-8B-Instruct,qwen"
  routingLogic: session
  sessionKey: x-user-id
  resources: {limits: {cpu: 4}}
"""


def run(tmp_path: Path, text: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "values.yaml"
    file.write_text(text)
    said = sluice("import", "production-stack", file, "--json")
    return said.exit_code, json.loads(said.stdout)


def test_static_backends_become_workers_with_the_charts_figures(tmp_path: Path) -> None:
    code, report = run(tmp_path, STATIC)
    assert code == 0
    config = parse(report["text"], "sluice.yaml", {"VLLM_API_KEY": "k"})
    llama, qwen = config.models
    (pool,) = llama.pools.values()
    assert (llama.name, pool.max_model_len, pool.max_num_seqs) == (
        *("meta-llama/Llama-3.1-8B-Instruct", 16384, 64),
    )
    assert [worker.id for worker in pool.workers] == ["a:8000", "b:8000"]
    assert all(worker.api_key is not None for worker in pool.workers)
    assert (qwen.name, qwen.mode) == ("qwen", "observe")


def test_each_value_is_accounted_for(tmp_path: Path) -> None:
    _, report = run(tmp_path, STATIC)
    fates: dict[str, set[str]] = {}
    for line in report["lines"]:
        fates.setdefault(line["path"], set()).add(line["fate"])
    assert fates == {
        "servingEngineSpec.enableEngine": {"left out"},
        "servingEngineSpec.vllmApiKey": {"approximated", "left out"},
        "servingEngineSpec.modelSpec[0]": {"approximated"},
        "servingEngineSpec.modelSpec[1]": {"left out"},
        "routerSpec.staticBackends": {"taken"},
        "routerSpec.staticModels": {"approximated"},
        "routerSpec.routingLogic": {"left out"},
        "routerSpec.sessionKey": {"left out"},
        "routerSpec.resources": {"left out"},
    }


DISCOVERED = """\
servingEngineSpec:
  labels: {environment: prod, release: "7"}
  containerPort: 8100
  vllmApiKey: key
  modelSpec:
    - name: llama
      modelURL: meta-llama/Llama-3.1-8B-Instruct
      vllmConfig:
        maxModelLen: "16384"
        extraArgs: [--served-model-name, llama-3, llama, --max_model_len=32k, --max-num-seqs, "64"]
    - {name: qwen, modelURL: Qwen/Qwen3-8B}
    - {name: big, modelURL: big/big, raySpec: {headNode: {}}}
routerSpec:
  extraArgs: ["--static-aliases", "gpt-4:llama-3,old:gone", "--log-stats"]
"""


@pytest.mark.parametrize("how", ["", "  serviceDiscovery: k8s\n"])
def test_engines_that_kubernetes_finds_get_a_source(tmp_path: Path, how: str) -> None:
    code, report = run(tmp_path, DISCOVERED + how)
    assert code == 0
    llama, qwen = parse(report["text"], "sluice.yaml", {"VLLM_API_KEY": "k"}).models
    (pool,) = llama.pools.values()
    (found,) = pool.workers
    source = source_of(found.discover or "")
    labels = "environment=prod,release=7"
    assert (source.kind, source.selector, source.port) == (
        *("pods", f"model=llama,{labels}", "8100"),
    )
    assert found.api_key is not None
    assert (pool.max_model_len, pool.max_num_seqs) == (32_000, 64)
    assert (llama.name, llama.aliases) == ("llama-3", ("llama", "gpt-4"))
    (found,) = qwen.pools["main"].workers
    assert (qwen.name, source_of(found.discover or "").selector) == (
        "Qwen/Qwen3-8B",
        f"model=qwen,{labels}",
    )
    notes = {line["path"]: f"{line['fate']}: {line['note']}" for line in report["lines"]}
    assert notes["routerSpec.extraArgs"] == "left out: the router's own arguments: log-stats"
    assert notes["routerSpec.extraArgs.old"].startswith("left out: its model")
    assert "Ray cluster" in notes["servingEngineSpec.modelSpec[2]"]


def test_backends_and_models_must_pair(tmp_path: Path) -> None:
    code, report = run(tmp_path, STATIC.replace(",qwen", ""))
    assert code == 1
    assert any("3 backends, but 2 models" in line["note"] for line in report["lines"])
