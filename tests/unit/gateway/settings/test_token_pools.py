"""The file's part in token pools: shapes, terms and tenancy, as policy and adapters take them."""

from typing import Any

import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gateway.admission.entitlement_terms import BadTerms, check_fit, terms_from
from gateway.fleet.fleet import DECODE_TOKENS_PER_S
from gateway.records.entitlement import PROFILES
from gateway.records.tenancy import FileTenant
from gateway.settings import Config, ConfigError, parse, remarks
from gateway.settings.loading import read_admin_fields
from gateway.settings.token_pools import (
    LIMITS,
    base_terms,
    managed,
    shape_of,
    slot_tokens_per_s,
    tenancy_file,
    terms_of,
    worker_shares,
)

GIB = 1 << 30
HASH = "a" * 64
FLEET = """\
version: 1
models:
  - name: m
    kv_bytes_per_token: 65536
    spill_queue: 3
    pools:
      short:
        max_model_len: 8192
        max_num_seqs: 4
        workers: ["http://a:1", "http://a:2"]
        tokens_per_second: 100
        kv_cache_gib: 4
        replicas: {min: 1, max: 5}
      long:
        max_model_len: 65536
        max_num_seqs: 2
        workers: ["http://b:1"]
        tokens_per_second: 50
  - name: other
    pools: {only: {max_model_len: 1024, max_num_seqs: 1, workers: ["http://c:1"]}}
"""
ENTITLED = (
    FLEET
    + f"""\
entitlements:
  - name: prod
    tenant: acme
    model: m
    service_class: guaranteed
    slo_target_ms: 500
    tokens_per_second: 120
    kv_cache_gib: 1.5
    concurrency: {{short: 3, long: 1}}
    api_keys: ["sha256:{HASH}"]
    expires_at: 2030-01-01T00:00:00Z
  - {{name: batch, tenant: acme, model: m, service_class: spot, max_concurrency: 6,
     max_tokens_per_second: 40, max_kv_cache_gib: 2, mode: observe}}
  - {{name: plain, tenant: acme, model: other}}
"""
)


def read(text: str) -> Config:
    return parse(text, "sluice.yaml", {})


def test_a_model_is_managed_when_an_entitlement_states_a_class_or_a_limit() -> None:
    config = read(ENTITLED)
    assert [managed(config, model) for model in config.models] == [True, False]
    assert not managed(read(FLEET), read(FLEET).models[0])


@pytest.mark.parametrize("stated", ["service_class: elastic", *(f"{name}: 1" for name in LIMITS)])
def test_each_of_them_alone_is_enough(stated: str) -> None:
    config = read(FLEET + f"entitlements: [{{name: e, tenant: t, model: m, {stated}}}]\n")
    assert managed(config, config.models[0])


def test_with_a_clusters_controller_every_model_is() -> None:
    state = "state: {url: 'redis://h:6379/0', controller: {}}\n"
    config = read(FLEET + state)
    assert all(managed(config, model) for model in config.models)


def test_base_terms_are_those_of_every_listed_worker() -> None:
    terms = base_terms(read(ENTITLED).models[0])
    assert terms.slots == (8, 2)
    assert terms.kv_bytes == (8 * GIB, 0), "what the long pool has, its engines say"
    assert terms.tokens_per_s == 250
    assert terms.largest_tokens == 65536
    assert (terms.headroom, terms.spill_queue, terms.mean_slo_ms) == (1, 3, 0)
    assert (terms.reclaim_spot, terms.profile) == (False, PROFILES["default"])


def test_a_slot_has_a_price_where_no_pool_states_tokens_per_second() -> None:
    stated, unstated = read(FLEET).models
    assert slot_tokens_per_s(stated) == 25
    assert slot_tokens_per_s(unstated) == DECODE_TOKENS_PER_S > 0


def test_base_terms_take_the_rules_of_admission() -> None:
    rules = "{headroom: 3, profile: paper, mean_slo_ms: 15250, reclaim: cancel, mode: observe}"
    model = read(FLEET.replace("spill_queue: 3", f"admission: {rules}")).models[0]
    terms = base_terms(model)
    assert (terms.headroom, terms.mean_slo_ms, terms.reclaim_spot) == (3, 15250, True)
    assert terms.profile == PROFILES["paper"]
    assert model.observes_admission
    assert model.mode == "enforce"


@pytest.mark.parametrize(
    ("replicas", "bounds"),
    [("{}", (2, 2)), ("{min: 1}", (1, 2)), ("{max: 4}", (2, 4)), ("{min: 3}", (3, 3)),
     ("{min: 0, max: 9}", (0, 9))],
)  # fmt: skip
def test_replica_bounds_are_the_workers_listed_unless_given(
    replicas: str, bounds: tuple[int, int]
) -> None:
    model = read(FLEET.replace("{min: 1, max: 5}", replicas)).models[0]
    assert worker_shares(model)[0].replicas == bounds


def test_the_shape_counts_the_most_replicas() -> None:
    shape = shape_of(read(FLEET).models[0])
    assert (shape.pools, shape.slots, shape.max_slots) == (("short", "long"), (8, 2), (20, 2))
    assert shape.max_tokens_per_s == 550
    assert shape.max_kv_bytes == 5 * 4 * GIB + 2 * 65536 * 65536, "unsaid: all slots filled"


def test_tenancy_has_the_file_s_entitlements_with_their_keys_in_its_order() -> None:
    config = read(ENTITLED)
    found = tenancy_file(config)
    prod, batch, plain = found.entitlements.values()
    assert (prod.digests, batch.digests) == ((HASH,), ())
    assert [e.place for e in (prod, batch, plain)] == [1, 2, 3]
    assert found.order == {"acme": ("prod", "batch", "plain")}
    shape = shape_of(config.models[0])
    terms, spot = (terms_from(e.fields, shape, e.place) for e in (prod, batch))
    assert (terms.service_class, terms.baseline, terms.limit) == ("guaranteed", (3, 1), 4)
    assert (terms.tokens_per_s, terms.kv_bytes, terms.slo_ms) == (120, 3 * GIB // 2, 500)
    assert (terms.expires_unix_s, terms.created) == (1893456000, 1)
    assert (spot.limit, spot.tokens_per_s, spot.tokens_per_s_limit) == (6, 0, 40)
    assert (spot.kv_bytes, spot.kv_bytes_limit, spot.observe) == (0, 2 * GIB, True)


def test_tenancy_has_the_file_s_tenants_with_their_keys() -> None:
    tenants = (
        "tenants:\n  - {name: acme, display_name: Acme, labels: {at: x}, entitlements: [batch],\n"
        f"     suspended: true, keys: [{{name: web, sha256: '{HASH.replace('a', 'b')}'}}]}}\n"
        "  - {name: idle}\n"
    )
    acme, idle = tenancy_file(read(ENTITLED + tenants)).tenants.values()
    assert (acme.display_name, acme.labels, acme.suspended) == ("Acme", {"at": "x"}, True)
    assert acme.entitlements == ("batch",)
    (key,) = acme.keys
    assert (key.name, key.sha256.hex(), key.entitlements) == ("web", "b" * 64, ("batch",))
    assert idle == FileTenant()


def digests(text: str) -> list[str]:
    """Of each entitlement's section."""
    return [each.section for each in tenancy_file(read(text)).entitlements.values()]


def test_a_section_s_digest_is_the_same_however_it_is_written() -> None:
    one = digests(ENTITLED)
    assert len(set(one)) == 3
    moved = ENTITLED.replace("    tenant: acme\n    model: m\n", "    model: m\n    tenant: acme\n")
    spelt = moved.replace("model: other}", "model: other, service_class: elastic, mode: enforce}")
    assert digests(spelt) == one


@pytest.mark.parametrize(
    ("old", "new"),
    [("slo_target_ms: 500", "slo_target_ms: 501"), (HASH, "b" * 64), ("long: 1", "long: 2")],
)
def test_a_section_that_says_something_else_has_another_digest(old: str, new: str) -> None:
    assert digests(ENTITLED)[0] != digests(ENTITLED.replace(old, new))[0]


baselines = st.one_of(
    st.integers(1, 12).map(str),
    st.tuples(st.integers(0, 12), st.integers(0, 3)).map(
        lambda p: f"{{short: {p[0]}, long: {p[1]}}}"
    ),
)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dedicated", "guaranteed", "elastic"]),
            baselines,
            st.integers(1, 300),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_file_and_the_admin_api_agree_on_what_fits(
    rows: list[tuple[str, str, int, int]],
) -> None:
    lines = [
        f"  - {{name: e{i}, tenant: t, model: m, service_class: {kind}, concurrency: {baseline}, "
        f"tokens_per_second: {rate}, kv_cache_gib: {kv}}}\n"
        for i, (kind, baseline, rate, kv) in enumerate(rows)
    ]
    taken: list[str] = []
    for line in lines:
        before = read(FLEET + "entitlements:\n" + "".join(taken)) if taken else read(FLEET)
        try:
            after = read(FLEET + "entitlements:\n" + "".join([*taken, line]))
        except ConfigError:
            with pytest.raises(BadTerms):
                _post(before, line)
        else:
            _post(before, line)
            assert len(after.entitlements) == len(taken) + 1
            taken.append(line)


def _post(config: Config, line: str) -> None:
    """The line as the admin API would judge it."""
    model = config.models[0]
    fields = read_admin_fields(config, "entitlement", yaml.safe_load(line)[0])
    terms = terms_from(fields, shape_of(model), 1)
    check_fit(terms, shape_of(model), [terms_of(e, model) for e in config.entitlements])


huge = st.sampled_from([1 << 23, 1 << 31, 1 << 53, 1 << 60, 10**40])
sizes = st.one_of(st.integers(1, 40), st.integers(1, 40), st.integers(-1, 40), huge)
bounds = st.fixed_dictionaries({}, optional={"min": sizes, "max": sizes})
amounts = st.one_of(sizes, st.floats(0, 9), st.floats(allow_nan=True, allow_infinity=True))
classes = st.sampled_from(["dedicated", "guaranteed", "elastic", "spot", "preemptible"])


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Configurations whose numbers know no measure."""
    pools = {
        name: {
            "max_model_len": draw(st.sampled_from([window, 1 << 53])),
            "max_num_seqs": draw(sizes),
            "workers": [f"http://{name}:{port + 1}" for port in range(draw(st.integers(1, 3)))],
            **draw(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "tokens_per_second": amounts,
                        "kv_cache_gib": amounts,
                        "replicas": bounds,
                    },
                )
            ),
        }
        for name, window in (("short", 8192), ("long", 65536))
    }
    entitlement = st.fixed_dictionaries(
        {"tenant": st.just("t"), "model": st.just("m"), "service_class": classes},
        optional={
            "slo_target_ms": amounts,
            "tokens_per_second": amounts,
            "max_tokens_per_second": amounts,
            "kv_cache_gib": amounts,
            "max_kv_cache_gib": amounts,
            "concurrency": st.one_of(sizes, st.fixed_dictionaries({"short": sizes})),
            "max_concurrency": sizes,
        },
    )
    model: dict[str, Any] = {"name": "m", "pools": pools}
    if draw(st.booleans()):
        model["kv_bytes_per_token"] = draw(st.sampled_from([1, 327680, 1 << 53]))
    listed = draw(st.lists(entitlement, max_size=4))
    return {
        "version": 1,
        "models": [model],
        "entitlements": [{"name": f"e{i}", **e} for i, e in enumerate(listed)],
    }


@settings(max_examples=300, deadline=None)
@given(trees())
def test_whatever_the_numbers_a_file_is_refused_or_has_terms(tree: dict[str, Any]) -> None:
    try:
        config = read(yaml.safe_dump(tree, sort_keys=False))
    except ConfigError:
        event("refused")
        return
    event("taken")
    model = config.models[0]
    terms = base_terms(model)
    assert all(slots > 0 for slots in terms.slots)
    assert len(terms.kv_bytes) == len(worker_shares(model)) == 2
    shape = shape_of(model)
    made = [terms_of(each, model) for each in config.entitlements]
    for e in made:
        check_fit(e, shape, made)
        assert e.limit >= sum(e.baseline) or not e.limit
    assert remarks(config) is not None
    assert managed(config, model) == bool(made)
