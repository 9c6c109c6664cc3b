"""The chart: what it renders is golden, valid and what the code is; what is wrong is refused."""

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import celpy
import jsonschema_rs
import pytest
import yaml
from celpy.adapter import json_to_cel

from controller.virtual_node import node_name
from gateway.control.roles import Role, role_for
from gateway.settings import load
from tests.chart import CHART, HELM, VALUES, Manifest, generated, golden_of, golden_text
from tests.chart import helm as run_helm
from tests.chart import rendered as render
from tests.crds import definitions, misfits
from tests.unit.deploy.files import ROOT, alerts, instruction, load_yaml, parse, rules

needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed (make helm)")
pytestmark = [pytest.mark.helm, needs_helm]

API = json.loads((ROOT / "tests/kubernetes.schema.json").read_text(encoding="utf-8"))
KEYS = {
    f"SLUICE_{name}": f"sha256:{number:064x}"
    for number, name in enumerate(("GUARANTEED_KEY_HASH", "ELASTIC_KEY_HASH", "SPOT_KEY_HASH"))
} | {"SLUICE_ADMIN_KEY": "sk-admin", "REDIS_PASSWORD": "p/a:s@s"}
POOL = {"max_model_len": 1024, "max_num_seqs": 8, "workers": "http://w:8000"}
MODEL = {"name": "m", "pools": {"a": POOL}}
RECIPES = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))


@functools.cache
def _rendered(values: Path, *options: str) -> list[Manifest]:
    return render(f"--values={values}", *options)


def rendered(values: Path, *options: str) -> list[Manifest]:
    """What Helm makes of the values, a tenth of a second once for all tests."""
    return copy.deepcopy(_rendered(values, *options))


def values_named(name: str) -> Path:
    return next(path for path in VALUES if path.stem == name)


def one(manifests: list[Manifest], kind: str, name: str = "sluice") -> Any:
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def problems_of(manifest: Manifest) -> list[str]:
    """What the Kubernetes API refuses about a manifest."""
    if manifest["kind"] in definitions():
        return misfits(manifest)
    schema = {"$ref": f"#/$defs/{API['kinds'][manifest['kind']]}", "$defs": API["$defs"]}
    found = jsonschema_rs.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{manifest['kind']}: {error.message} at {error.instance_path}" for error in found]


def gateway_of(manifests: list[Manifest], name: str = "sluice") -> Any:
    (container,) = one(manifests, "Deployment", name)["spec"]["template"]["spec"]["containers"]
    return container


# -- what is rendered


def test_helm_lint_has_nothing_to_say() -> None:
    for values in VALUES:
        done = run_helm("lint", "--strict", str(CHART), f"--values={values}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_twelve_files_of_values_render_as_before(values: Path) -> None:
    golden = golden_of(values).read_text(encoding="utf-8")
    assert golden_text(rendered(values)) == golden, "if that is meant: make chart"
    assert len(VALUES) == 12


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_kubernetes_api_accepts_what_is_rendered(values: Path) -> None:
    assert [problem for each in rendered(values) for problem in problems_of(each)] == []


@pytest.mark.parametrize("base", ["https://git.example.com/sluice/blob/main", "https://d.example/"])
def test_alerts_link_their_runbooks(base: str) -> None:
    (values,) = [path for path in VALUES if path.stem == "monitoring"]
    found = one(
        rendered(values, f"--set=monitoring.prometheusRule.docsUrl={base}"), "PrometheusRule"
    )
    links = {
        rule["annotations"]["runbook_url"]
        for group in found["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    page = f"{base.rstrip('/')}/docs/operate/runbooks.md#"
    assert links == {f"{page}{alert['alert'].lower()}" for alert in alerts()}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_kubernetes_api_accepts_the_recipes(recipe: Path) -> None:
    manifests = list(yaml.safe_load_all(recipe.read_text(encoding="utf-8")))
    assert [problem for each in manifests for problem in problems_of(each)] == []


def test_the_kubernetes_api_accepts_what_the_page_shows() -> None:
    page = (ROOT / "docs/operate/kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = [m for block in blocks for m in yaml.safe_load_all(block) if "apiVersion" in m]
    assert {m["kind"] for m in shown} == {"TokenPool", "TokenEntitlement"}
    assert [problem for each in shown for problem in problems_of(each)] == []
    recipe = (ROOT / "deploy/kubernetes/tokenpool.yaml").read_text(encoding="utf-8")
    pool, entitlement, _ = yaml.safe_load_all(recipe)
    del pool["spec"]["scaling"]
    assert shown == [pool, entitlement]
    (model,) = load_yaml(CHART / "values.yaml")["config"]["models"]
    own = model["pools"][pool["spec"]["pool"]]
    assert pool["spec"]["model"] == model["name"]
    assert pool["spec"]["perReplica"] == {
        "concurrency": own["max_num_seqs"],
        "tokensPerSecond": own["tokens_per_second"],
        "kvCacheGiB": own["kv_cache_gib"],
    }


def test_autoscalers_of_a_token_pool_scale_the_one_that_is_shown() -> None:
    def recipe(name: str) -> Any:
        text = (ROOT / f"deploy/kubernetes/{name}.yaml").read_text(encoding="utf-8")
        return next(yaml.safe_load_all(text))

    pool = recipe("tokenpool")
    reference = {"apiVersion": pool["apiVersion"], "kind": pool["kind"], **pool["metadata"]}
    for name in ("hpa-tokenpool", "keda-tokenpool"):
        assert recipe(name)["spec"]["scaleTargetRef"] == reference


def test_engines_drain_with_an_operator_s_key_and_see_no_secret_of_the_gateway() -> None:
    path = ROOT / "deploy/kubernetes/engines.yaml"
    text = path.read_text(encoding="utf-8")
    (engines,) = [m for m in yaml.safe_load_all(text) if m["kind"] == "Deployment"]
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    secrets = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]["name"]
        for variable in container["env"]
        if "secretKeyRef" in variable["valueFrom"]
    }
    (command,) = container["lifecycle"]["preStop"]["exec"]["command"][2:]
    assert re.findall(r"Bearer \$(\w+)", command) == list(secrets)
    assert load_yaml(CHART / "values.yaml")["keys"]["secretName"] not in secrets.values()
    assert "envFrom" not in container
    # The key that the comment has the operator name to the chart.
    (values,) = re.findall(r"^#   (config: .*)$", text, re.MULTILINE)
    named = yaml.safe_load(values.replace("HASH", f"sha256:{1:064x}"))
    (key,) = named["config"]["server"]["admin_keys"]
    assert Role(key["role"]).may(role_for("POST", "/admin/workers/{worker:path}/drain"))
    assert not Role(key["role"]).may(Role.OWNER)
    assert one(render(f"--set-json=config.server.admin_keys={json.dumps([key])}"), "Deployment")


def test_the_kubernetes_api_refuses_misspelled_and_mistyped_fields() -> None:
    service = one(rendered(values_named("defaults")), "Service")
    assert problems_of({**service, "spec": {**service["spec"], "port": []}})
    assert problems_of({**service, "apiVersion": "v2"})
    monitor = one(rendered(values_named("monitoring")), "ServiceMonitor")
    assert problems_of({**monitor, "spec": {"endpoint": [], **monitor["spec"]}})


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_sluice_check_accepts_every_rendered_configuration(values: Path, tmp_path: Path) -> None:
    maps = [m for m in rendered(values) if "sluice.yaml" in m.get("data", {})]
    assert len(maps) == (values.stem != "existing-configmap")
    for manifest in maps:
        path = tmp_path / "sluice.yaml"
        path.write_text(manifest["data"]["sluice.yaml"], encoding="utf-8")
        load(path, environ={**KEYS, "SLUICE_STATE_URL": "redis://redis:6379/0"})


def test_the_generated_files_are_up_to_date() -> None:
    for name, text in generated().items():
        assert (CHART / name).read_text(encoding="utf-8") == text, "run make chart"


def test_rules_and_dashboard_are_those_that_are_tested() -> None:
    manifests = rendered(values_named("monitoring"))
    groups = one(manifests, "PrometheusRule")["spec"]["groups"]
    assert [rule for group in groups for rule in group["rules"]] == rules()
    assert {rule["alert"] for g in groups for rule in g["rules"] if "alert" in rule} == {
        alert["alert"] for alert in alerts()
    }
    shown = one(manifests, "ConfigMap", "sluice-dashboard")["data"]["sluice.json"]
    dashboard = (ROOT / "deploy/grafana/dashboards/sluice.json").read_text(encoding="utf-8")
    assert json.loads(shown) == json.loads(dashboard)


# -- the pod is what the image is


def test_the_pod_runs_the_image_s_command_as_the_image_s_user_on_a_read_only_root() -> None:
    manifests = rendered(values_named("defaults"))
    container = gateway_of(manifests)
    spec = one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert container["args"] == json.loads(instruction("CMD"))
    user = [int(number) for number in instruction("USER").split(":")]
    assert [spec["securityContext"][k] for k in ("runAsUser", "runAsGroup")] == user
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/etc/sluice", instruction("WORKDIR"), "/tmp"}


def test_a_gateway_with_tls_is_probed_in_plain_http_and_finds_its_certificate() -> None:
    files = {"cert": "/etc/sluice-tls/tls.crt", "key": "/etc/sluice-tls/tls.key"}
    option = f"--set-json=config.server.tls={json.dumps(files)}"
    manifests = rendered(values_named("placement"), option)
    container = gateway_of(manifests, "llm-gateway")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "management"
        assert "scheme" not in container[probe]["httpGet"]
    spec = one(manifests, "Deployment", "llm-gateway")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes[mounted["/etc/sluice-tls"]]["secret"] == {"secretName": "gateway-tls"}


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_every_pod_fits_the_restricted_standard_with_limits(values: Path) -> None:
    for manifest in rendered(values):
        if manifest["kind"] in {"Deployment", "StatefulSet"}:
            spec = manifest["spec"]["template"]["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in spec["containers"]:
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_grace_period_holds_the_sleep_and_the_drain(values: Path) -> None:
    manifests = rendered(values)
    deployment = next(m for m in manifests if m["kind"] == "Deployment" and "gateway" in str(m))
    name = "llm-gateway" if values.stem == "placement" else "sluice"
    spec = one(manifests, deployment["kind"], name)["spec"]["template"]["spec"]
    slept = int(gateway_of(manifests, name)["lifecycle"]["preStop"]["exec"]["command"][1])
    merged = {**load_yaml(CHART / "values.yaml")["config"]["server"]}
    merged |= load_yaml(values).get("config", {}).get("server", {})
    assert spec["terminationGracePeriodSeconds"] == slept + merged["drain_timeout_s"] + 10


def test_mocks_are_what_the_default_pools_expect() -> None:
    manifests = rendered(values_named("mocks"))
    (model,) = load_yaml(CHART / "values.yaml")["config"]["models"]
    for pool, settings in model["pools"].items():
        name = f"engines-{pool}"
        args = dict(a[2:].split("=") for a in gateway_of(manifests, name)["args"][1:])
        assert args["model"] == model["name"]
        assert args["max-model-len"] == str(settings["max_model_len"])
        assert args["max-num-seqs"] == str(settings["max_num_seqs"])
        workers = json.dumps(settings["workers"])
        assert f"k8s://service/{name}:{args['port']}" in workers
        assert f'"ranks": {args.get("dp-ranks", 1)}' in workers or "ranks" not in workers
        assert one(manifests, "Service", name)["spec"]["ports"][0]["port"] == int(args["port"])


def test_the_role_reads_only_what_discovery_needs_and_where() -> None:
    def roles(name: str) -> dict[str, set[str]]:
        return {
            m["metadata"]["namespace"]: {r for rule in m["rules"] for r in rule["resources"]}
            for m in rendered(values_named(name), "--namespace=front")
            if m["kind"] == "Role"
        }

    everything = {"endpointslices", "pods", "inferencepools"}
    assert roles("defaults") == {"front": {"endpointslices"}}
    assert roles("discovery") == {
        "front": {"endpointslices"},
        "prod": {"pods", "inferencepools"},
    }
    assert roles("existing-configmap") == {"front": {"endpointslices"}, "engines": everything}
    assert roles("placement") == {}


def test_pods_roll_only_for_what_a_reload_cannot_change() -> None:
    def digest(*options: str) -> str:
        deployment = one(rendered(values_named("discovery"), *options), "Deployment")
        found = deployment["spec"]["template"]["metadata"]["annotations"]
        return str(found["sluice/restart-digest"])

    model = "config.models[0]"
    pools = load_yaml(values_named("discovery"))["config"]["models"][0]["pools"]
    more = {**pools, "long": {**pools["long"], "max_num_seqs": 9}}
    assert digest() == digest(f"--set-json={model}={json.dumps({'name': 'llama', 'pools': more})}")
    issuer = {"issuer": "https://id.example", "jwks": "https://id.example/keys", "audience": ["s"]}
    key = {"name": "oncall", "sha256": f"sha256:{'a' * 64}", "role": "operator"}
    for reloaded in (
        "--set=config.health.interval_s=3",
        f"--set-json=config.auth={json.dumps({'jwt': [issuer]})}",
        f"--set-json=config.server.admin_keys={json.dumps([key])}",
        f"--set-json=config.tenants={json.dumps([{'name': 'acme'}])}",
    ):
        assert digest() == digest(reloaded)

    def of_phases(engines: dict[str, Any]) -> str:
        phased = {"max_model_len": 1, "prefill": engines, "decode": engines}
        phased["transfer"] = {"kind": "vllm"}
        return digest(f"--set-json={model}={json.dumps({'name': 'llama', 'pools': {'p': phased}})}")

    engines = {"max_num_seqs": 1, "workers": ["http://a:1"]}
    assert of_phases(engines) == of_phases({"max_num_seqs": 2, "workers": ["http://b:1"]})
    assert of_phases(engines) != of_phases({**engines, "gpu_hour": 2.0})
    renamed = {"name": "llama", "pools": {**pools, "longer": pools["long"]}}
    assert digest() != digest(f"--set-json={model}={json.dumps(renamed)}")
    assert digest() != digest("--set=config.server.max_connections=99")


# -- the control plane

CONTROLLER = ("--set=redis.enabled=true", "--set=controller.enabled=true")


def verbs_of(manifests: list[Manifest], kind: str = "Role") -> dict[str, set[str]]:
    """Namespace and resource -> verbs, of the controller's roles."""
    found: dict[str, set[str]] = {}
    for manifest in manifests:
        if manifest["kind"] == kind and manifest["metadata"]["name"].endswith("-controller"):
            for rule in manifest["rules"]:
                for resource in rule["resources"]:
                    place = f"{manifest['metadata'].get('namespace', '')}/{resource}"
                    found.setdefault(place, set()).update(rule["verbs"])
    return found


def test_the_controller_has_rights_in_one_namespace_until_it_keeps_nodes() -> None:
    internal = render(*CONTROLLER, "--set=controller.namespace=tokens")
    own = verbs_of(internal)
    assert {place.partition("/")[0] for place in own} == {"tokens"}
    assert own["tokens/pods"] == own["tokens/secrets"] == {"list", "watch"}
    assert verbs_of(internal, "ClusterRole") == {}
    assert not {"ClusterRole", "ClusterRoleBinding", "PriorityClass"} & {
        manifest["kind"] for manifest in internal
    }
    virtual = render(
        *CONTROLLER, "--set=controller.namespace=tokens,controller.allocator=virtual-node"
    )
    more = verbs_of(virtual)
    assert {k: v - own.get(k, set()) for k, v in more.items() if v != own.get(k)} == {
        "tokens/pods": {"create", "delete"},
        "kube-node-lease/leases": {"create", "patch"},
    }
    assert set(verbs_of(virtual, "ClusterRole")) == {"/nodes", "/nodes/status"}
    for manifest in virtual:
        if manifest["kind"].endswith("Binding") and "subjects" in manifest:
            (subject,) = manifest["subjects"]
            expected = "sluice-controller" if "controller" in str(manifest["roleRef"]) else "sluice"
            assert (subject["name"], subject["namespace"]) == (expected, "prod")


def test_nodes_that_are_no_pool_s_are_out_of_the_controller_s_reach() -> None:
    option = "--set=controller.namespace=tokens,controller.allocator=virtual-node"
    policy = one(render(*CONTROLLER, option), "ValidatingAdmissionPolicy", "prod-sluice-controller")
    spec = policy["spec"]
    (condition,) = spec["matchConditions"]
    assert "'system:serviceaccount:prod:sluice-controller'" in condition["expression"]
    (validation,) = spec["validations"]
    environment = celpy.Environment()
    program = environment.program(environment.compile(validation["expression"]))

    def allowed(operation: str, name: str) -> bool:
        node = json_to_cel({"metadata": {"name": name}})
        given = {"object": None, "oldObject": node} if operation == "DELETE" else {"object": node}
        request = json_to_cel({"operation": operation})
        return bool(program.evaluate({"oldObject": None, **given, "request": request}))

    for operation in ("CREATE", "UPDATE", "DELETE"):
        assert allowed(operation, node_name("tokens", "qwen3-8b"))
        assert not allowed(operation, "gpu-node-7")
        assert not allowed(operation, node_name("other", "qwen3-8b"))
    (rule,) = spec["matchConstraints"]["resourceRules"]
    verbs = verbs_of(render(*CONTROLLER, option), "ClusterRole")
    assert set(rule["resources"]) == {place.strip("/") for place in verbs}
    older = render(*CONTROLLER, option, "--kube-version=1.29.0")
    assert "ValidatingAdmissionPolicy" not in {manifest["kind"] for manifest in older}


def test_the_controller_runs_with_the_gateways_redis_and_sees_no_key_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICE_STATE_URL", "redis://r:6379/0")
    for options in (
        ("--set=redis.enabled=true", "--set=redis.passwordSecret.name=p"),
        ("--set=redis.url=redis://r:6379/0",),
        ("--set=redis.urlSecret.name=url",),
    ):
        manifests = render("--set=controller.enabled=true", *options)
        container = gateway_of(manifests, "sluice-controller")
        assert container["env"] == gateway_of(manifests)["env"]
        assert "envFrom" not in container
        parse(container["args"])
    policy = one(render(*CONTROLLER), "NetworkPolicy", "sluice-redis")
    admitted = [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in policy["spec"]["ingress"][0]["from"]
    ]
    assert admitted == ["gateway", "controller"]


def test_gateways_listen_to_the_controller_once_it_is_there() -> None:
    def state(*options: str) -> Any:
        config = one(render(*options), "ConfigMap")["data"]["sluice.yaml"]
        return yaml.safe_load(config)["state"].get("controller")

    assert state() is None
    assert state(*CONTROLLER) == {"stale_after_s": 3600}
    own = "--set=config.state.controller.stale_after_s=600"
    assert state(*CONTROLLER, own) == {"stale_after_s": 600}

    def digest(*options: str) -> str:
        annotations = one(render(*options), "Deployment")["spec"]["template"]["metadata"]
        return str(annotations["annotations"]["sluice/restart-digest"])

    assert digest(*CONTROLLER[:1]) != digest(*CONTROLLER)


def test_what_is_the_cluster_s_is_installed_once() -> None:
    option = "--set=controller.allocator=virtual-node"
    manifests = render(*CONTROLLER, option)
    kinds = {m["metadata"]["name"]: m for m in manifests if m["kind"].endswith("Definition")}
    assert list(kinds.values()) == sorted(definitions().values(), key=lambda c: str(c["metadata"]))
    classes = {
        m["metadata"]["name"]: (m["value"], m["preemptionPolicy"])
        for m in manifests
        if m["kind"] == "PriorityClass"
    }
    assert classes["sluice-reserved"][1] == "PreemptLowerPriority"
    assert classes["sluice-elastic"][1] == "Never"
    assert classes["sluice-reserved"][0] > classes["sluice-elastic"][0] > 0
    second = render(
        *CONTROLLER, option, "--set=controller.crds=false,controller.priorityClasses=false"
    )
    assert not {"CustomResourceDefinition", "PriorityClass"} & {m["kind"] for m in second}
    off = {m["kind"] for m in render("--set=redis.enabled=true")}
    assert not {"CustomResourceDefinition", "PriorityClass", "ClusterRole"} & off


# -- what is refused


def refusal(*options: str) -> str:
    """What Helm says about values that it refuses."""
    done = run_helm("template", "sluice", str(CHART), *options)
    assert done.returncode, "nothing was refused"
    return done.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--set=replica=2", "additional properties 'replica' not allowed"),
        ("--set=replicas=many", "/replicas"),
        ("--set=image.tags=1", "/image"),
        ("--set=config.sever.port=1", "/config"),
        ("--set=config.server.admin_key=sk-admin", "/config/server/admin_key"),
        ("--set=config.server.admin_key=${ADMIN:-sk-admin}", "/config/server/admin_key"),
        ("--set=config.server.drain_timeout_s=100000", "/config/server/drain_timeout_s"),
        ("--set=config.state.url=redis://:secret@redis/0", "/config/state/url"),
        ("--set-json=config.models=[]", "/config/models"),
        (
            "--set-json=config.models=" + json.dumps([{**MODEL, "scheduling": {"policy": "best"}}]),
            "/scheduling/policy",
        ),
        (
            '--set-json=config.entitlements=[{"name":"e","tenant":"t","service_class":"gold"}]',
            "/service_class",
        ),
        ("--set-json=config.entitlements=[{}]", "missing propert"),
        ("--set=redis.url=redis://:secret@redis:6379/0", "/redis/url"),
        ("--set=service.type=Ingress", "/service/type"),
        ("--set=controller.allocator=kubelet", "/controller/allocator"),
        ("--set=controller.namespace=A_b", "/controller/namespace"),
    ],
)
def test_the_schema_refuses_mistakes_and_names_their_place(option: str, said: str) -> None:
    assert said in refusal(option)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (
            ["replicas=2"],
            "Set redis.enabled=true, redis.url or redis.urlSecret.name, or replicas=1",
        ),
        (["autoscaling.enabled=true"], "redis.enabled=true"),
        (["redis.enabled=true", "redis.url=redis://redis:6379/0"], "keep one of them"),
        (["redis.enabled=true", "config.state.url=memory://"], "leave config.state.url at"),
        (["terminationGracePeriodSeconds=37"], "must be 38 or more"),
        (['env=[{"name":"SLUICE_STATE_URL","value":"sqlite:///s"}]'], "Set config.state.url"),
        (["controller.enabled=true"], "or controller.enabled=false"),
        (
            ["controller.enabled=true", "config.state.url=redis://r:6379/0"],
            "Set redis.enabled=true, redis.url or redis.urlSecret.name",
        ),
        (["config.state.controller.stale_after_s=60"], "or leave it out"),
        (["config.server.workers=2"], "set replicas"),
        (["config.server.management_port=0"], "must be a number above 0"),
        (["config.server.host=127.0.0.1"], "must be 0.0.0.0"),
        (["config.server.drain_timeout_s=${DRAIN_S}"], "must be a number"),
        ([f"config.models={json.dumps([MODEL])}"], "Set config.entitlements together with"),
        (
            [
                "autoscaling.enabled=true",
                "autoscaling.minReplicas=9",
                "redis.url=redis://redis:6379/0",
            ],
            "lower it",
        ),
    ],
)
def test_values_that_disagree_are_refused_with_the_fix(options: list[str], fix: str) -> None:
    flags = ["--set-json=" + o if "[" in o else "--set=" + o for o in options]
    assert fix in refusal(*flags)


def test_one_replica_may_have_its_state_in_memory_and_several_share_a_redis() -> None:
    assert one(render("--set=replicas=1"), "Deployment")
    for option in ("redis.enabled=true", "redis.url=redis://r:6379/0", "redis.urlSecret.name=url"):
        container = gateway_of(render("--set=replicas=2", f"--set={option}"))
        assert [e["name"] for e in container["env"]] == ["SLUICE_STATE_URL"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([], None),
        (["replicas=2", "redis.enabled=true"], None),
        (["config.state.url=sqlite:////var/lib/sluice/state.db"], "Recreate"),
        (["config.state.url=${SLUICE_STATE_URL:-sqlite:////var/lib/sluice/s.db}"], "Recreate"),
        (
            [
                "config.state.url=${SLUICE_STATE_URL:-sqlite:////var/lib/sluice/s.db}",
                "redis.enabled=true",
            ],
            None,
        ),
        (["data.existingClaim=disk"], "Recreate"),
        (["data.existingClaim=disk", "replicas=2", "redis.enabled=true"], None),
    ],
)
def test_no_two_pods_have_one_sqlite_file_or_volume(options: list[str], kind: str | None) -> None:
    strategy = one(render(*(f"--set={o}" for o in options)), "Deployment")["spec"]["strategy"]
    assert strategy.get("type") == kind
    assert ("rollingUpdate" in strategy) == (kind is None), "the API refuses both"


def test_keys_come_from_secrets_only() -> None:
    for values in VALUES:
        manifests = rendered(values)
        assert "Secret" not in {manifest["kind"] for manifest in manifests}
        for manifest in manifests:
            for text in re.findall(
                r"\w*key: (\S+)", manifest.get("data", {}).get("sluice.yaml", "")
            ):
                assert re.fullmatch(r"\$\{\w+\}", text)


def test_every_value_is_documented_where_it_stands_and_named_on_the_page() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = load_yaml(CHART / "values.yaml")
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, part in schema["properties"].items():
        if name in values and "properties" in part:
            assert set(values[name]) == set(part["properties"]), name
    page = (ROOT / "docs/operate/kubernetes.md").read_text(encoding="utf-8")
    assert [name for name in values if f"`{name}" not in page] == []
