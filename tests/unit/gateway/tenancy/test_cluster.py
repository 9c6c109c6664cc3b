"""A gateway that a cluster grants entitlements, which administrators restrict."""

import logging
from typing import Any

import pytest

from gateway.errors import Conflict, Forbidden, Refusal, StateFailure, Unauthorized, Unavailable
from gateway.records.tenancy import NO_FILE, ClusterEntitlement, ClusterState, TenancyFile
from gateway.tenancy.cluster_sync import ClusterSync
from gateway.tenancy.keyring import CLUSTER_GRANTS, authenticate
from tests.fakes import FakeClock
from tests.tenancy_fakes import WHO, TenancyRig, digest, entitling, section

STALE_AFTER_S = 100.0
KEY = "sk-search"


def granted(name: str = "search", key: str = KEY, **more: Any) -> ClusterEntitlement:
    record = {f: more.pop(f) for f in ("verdict", "message", "suspended", "uid") if f in more}
    return ClusterEntitlement(
        name=name,
        fields={"name": name, "tenant": "acme", "model": "m", **more},
        digests=(digest(key).hex(),),
        created=1_800_000_000_000,
        source=f"TokenEntitlement team/{name}",
        **record,
    )


class Published:
    """What a controller publishes, read by one gateway."""

    def __init__(self, rig: TenancyRig, clock: FakeClock | None = None) -> None:
        self.rig = rig
        self.revision = 1
        self.entitlements: tuple[ClusterEntitlement, ...] = ()
        self.epoch = 1
        self.age_s = 0.0
        self.away = False
        self.beats = 0
        self.silent = False
        """Nobody writes any more; Redis answers."""
        self.sync = ClusterSync(
            self.read, rig.tenancy, stale_after_s=STALE_AFTER_S, clock=clock or rig.clock
        )

    async def read(self, known: tuple[int, int]) -> ClusterState | None:
        if self.away:
            raise StateFailure("away")
        whole, version = known[1] < self.revision, (self.epoch, self.revision)
        self.beats += not self.silent
        return ClusterState(
            version=version,
            whole=whole,
            entitlements=self.entitlements if whole else (),
            age_s=self.age_s,
            seen_us=self.beats,
        )

    async def publish(self, *entitlements: ClusterEntitlement) -> None:
        self.entitlements, self.revision = entitlements, self.revision + 1
        await self.sync.poll()


async def started(file: TenancyFile = NO_FILE) -> Published:
    rig = TenancyRig()
    rig.keyring.unread = {CLUSTER_GRANTS}
    return Published(await rig.start(file))


def refused(published: Published, key: str = KEY) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        published.rig.asks(key)
    return caught.value.status, caught.value.reason


def reserves(rig: TenancyRig) -> list[str]:
    """What the token pool counts with."""
    return [terms.name for terms in rig.store.defined.values() if not terms.suspended]


async def test_a_key_opens_what_the_cluster_grants_until_it_is_withdrawn() -> None:
    published = await started()
    await published.publish(granted(), granted("batch", "sk-batch", service_class="spot"))
    rig = published.rig
    assert (rig.asks(KEY), rig.asks("sk-batch")) == ("search", "batch")
    assert rig.names() == ["batch", "search"]
    await published.publish(granted("batch", "sk-batch"))
    assert refused(published) == (401, "invalid_api_key")
    assert rig.names() == ["batch"]


async def test_before_the_first_set_is_read_unknown_keys_wait_and_a_key_is_always_needed() -> None:
    published = await started(entitling(section("f", digest("sk-file").hex())))
    published.away = True
    await published.sync.poll()
    assert refused(published) == (503, "keys_not_read")
    assert published.rig.asks("sk-file") == "f"
    published.away = False
    await published.publish()
    assert refused(published) == (401, "invalid_api_key")
    empty = await started()
    with pytest.raises(Unauthorized):
        authenticate(empty.rig.keyring, None, 1.0)
    await empty.publish()
    with pytest.raises(Unauthorized):
        authenticate(empty.rig.keyring, None, 1.0)


@pytest.mark.parametrize("verdict", ["pending", "degraded"])
async def test_a_verdict_is_told_with_the_controllers_words(verdict: str) -> None:
    published = await started()
    message = "waits for 2 of 3 replicas of pool qwen3-8b."
    await published.publish(granted(verdict=verdict, message=message))
    rig = published.rig
    authenticate(rig.keyring, digest(KEY), rig.clock())  # its pages and models still answer
    with pytest.raises(Unavailable) as caught:
        rig.asks(KEY)
    told = caught.value
    assert (told.reason, told.retry_after_s) == (f"entitlement_{verdict}", 5.0)
    assert told.message == (
        f"The entitlement 'search' is {verdict}: waits for 2 of 3 replicas of pool qwen3-8b."
    )
    assert reserves(rig) == []
    shown = await rig.entitlements.get("search")
    assert {f: shown[f] for f in ("origin", "source", "state", "message", "suspended")} == {
        "origin": "kubernetes",
        "source": "TokenEntitlement team/search",
        "state": verdict,
        "message": message,
        "suspended": False,
    }
    await published.publish(granted())
    assert rig.asks(KEY) == "search"
    assert reserves(rig) == ["search"]
    assert (await rig.entitlements.get("search"))["state"] == "bound"


async def test_suspension_and_expiry_in_the_cluster_are_final_for_clients() -> None:
    """Whatever else the controller says."""
    published = await started()
    await published.publish(granted(suspended=True, verdict="pending"))
    assert refused(published) == (403, "entitlement_suspended")
    await published.publish(granted(expires_at="2020-01-01T00:00:00Z", verdict="degraded"))
    assert refused(published) == (403, "entitlement_expired")


async def test_a_tenants_key_uses_what_the_cluster_grants_its_tenant() -> None:
    published = await started()
    rig = published.rig
    await rig.tenants.create({"name": "acme"}, WHO)
    key = await rig.add("web")
    await published.publish(granted())
    assert rig.asks(key) == "search"
    await published.publish(granted(verdict="degraded"))
    assert refused(published, key) == (503, "entitlement_degraded")


async def test_administrators_restrict_it_like_any_other() -> None:
    published = await started()
    rig, admin = published.rig, published.rig.entitlements
    await published.publish(granted(), granted("two", "sk-two"))
    await admin.suspend("search", WHO)
    assert refused(published) == (403, "entitlement_suspended")
    await published.publish(granted(slo_target_ms=7), granted("two", "sk-two"))
    assert refused(published) == (403, "entitlement_suspended")
    await admin.suspend("search", WHO, undo=True)
    assert rig.asks(KEY) == "search"
    await admin.expire("search", None, WHO)
    assert refused(published) == (403, "entitlement_expired")
    await admin.change("search", {"expires_at": None}, WHO)
    assert rig.asks(KEY) == "search"
    await admin.revoke_key("two", digest("sk-two").hex()[:8], WHO)
    await published.publish(granted(), granted("two", "sk-two", slo_target_ms=7))
    assert refused(published, "sk-two") == (401, "invalid_api_key")
    assert [row for row in rig.tenancy.known.rows if row[0] == "entitlement"] == []


async def test_its_terms_and_keys_are_the_clusters() -> None:
    published = await started()
    rig, admin = published.rig, published.rig.entitlements
    await rig.tenants.create({"name": "acme"}, WHO)
    await published.publish(granted())
    for call in (
        admin.change("search", {"slo_target_ms": 5}, WHO),
        admin.change("search", {"slo_target_ms": 5, "expires_at": None}, WHO),
        admin.delete("search", WHO),
        admin.add_key("search", WHO),
    ):
        with pytest.raises(Conflict, match="TokenEntitlement team/search in the cluster") as caught:
            await call
        assert caught.value.code == "entitlement_in_cluster"
    with pytest.raises(Conflict) as caught:
        await admin.create({"name": "search", "tenant": "acme", "model": "m"}, WHO)
    assert caught.value.code == "entitlement_exists"
    with pytest.raises(Conflict, match="stated by TokenEntitlement team/search: delete that"):
        await rig.tenants.delete("acme", WHO, force=True)
    assert rig.asks(KEY) == "search"


async def test_of_one_name_the_file_counts_and_then_the_cluster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    published = await started(entitling(section("search", digest("sk-file").hex())))
    rig = published.rig
    await published.publish(granted())
    made = ""
    for _ in range(2):
        assert rig.asks("sk-file") == "search"
        assert refused(published) == (401, "invalid_api_key")
        await published.publish(granted(slo_target_ms=9))
    assert caplog.text.count("entitlement search is stated by TokenEntitlement team/search") == 1
    await rig.tenancy.adopt(NO_FILE)
    assert rig.asks(KEY) == "search"
    assert refused(published, "sk-file") == (401, "invalid_api_key")
    await published.publish()
    made = await rig.entitle("search")
    await published.publish(granted())
    assert rig.asks(KEY) == "search"
    assert refused(published, made) == (401, "invalid_api_key")
    assert caplog.text.count("entitlement search is stated by TokenEntitlement team/search") == 2
    await published.publish()
    assert rig.asks(made) == "search"


async def test_keys_that_administrators_added_do_not_open_what_the_cluster_states() -> None:
    published = await started(entitling(section("search")))
    rig = published.rig
    added = str((await rig.entitlements.add_key("search", WHO))["key"])
    await published.publish(granted())
    assert rig.asks(added) == "search"
    await rig.tenancy.adopt(NO_FILE)
    assert rig.asks(KEY) == "search"
    assert refused(published, added) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("service_class", "times"),
    [("preemptible", 1), ("spot", 1), ("elastic", 2), ("guaranteed", 3), ("dedicated", 3)],
)
async def test_what_nobody_confirms_is_degraded_by_class(service_class: str, times: int) -> None:
    published = await started(entitling(section("f", digest("sk-file").hex())))
    rig = published.rig
    await published.publish(granted(service_class=service_class, concurrency=1))
    for away in (True, False):  # nothing is heard, or heartbeats of one who hears nothing himself
        published.away = away
        for said_s in (STALE_AFTER_S * times, 1.0):
            rig.clock.advance(said_s * away)
            published.age_s = (1.0 if said_s == 1.0 else 0.0) + STALE_AFTER_S * times
            await published.sync.poll()
            if said_s == 1.0:
                assert refused(published) == (503, "entitlement_degraded")
            else:
                assert rig.asks(KEY) == "search"
        assert rig.asks("sk-file") == "f"
        published.away, published.age_s = False, 0.0
        await published.sync.poll()
        assert rig.asks(KEY) == "search"


async def test_what_is_stale_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    published = await started()
    await published.publish(granted())
    published.away = True
    for _ in range(350):
        published.rig.clock.advance(1.0)
        await published.sync.poll()
    assert published.sync.age_s == 350.0
    told = [record.args for record in caplog.records if "classes get 503" in record.message]
    assert [args and args[1] for args in told] == [  # type: ignore[index]
        "preemptible, spot",
        "elastic, preemptible, spot",
        "dedicated, elastic, guaranteed, preemptible, spot",
    ]


async def test_an_older_set_changes_nothing_and_is_no_news() -> None:
    published = await started()
    published.epoch = 5
    await published.publish(granted(service_class="spot"))
    published.epoch, published.entitlements = 4, ()
    published.revision += 1
    published.rig.clock.advance(STALE_AFTER_S / 2)
    await published.sync.poll()
    assert published.rig.asks(KEY) == "search"
    assert published.sync.age_s == STALE_AFTER_S / 2
    published.rig.clock.advance(STALE_AFTER_S)
    await published.sync.poll()
    assert refused(published) == (503, "entitlement_degraded")


async def test_what_makes_no_sense_is_left_out_and_the_rest_serves() -> None:
    published = await started()
    await published.publish(
        granted("other", "sk-other", model="unheard-of"),
        granted("wrong", "sk-wrong", concurrency={"nowhere": 2}),
        granted("typed", "sk-typed", tokens_per_second="many"),
        granted("classed", "sk-classed", service_class="platinum"),
        ClusterEntitlement(
            name="hex", fields={"tenant": "acme", "model": "m"}, digests=("zz" * 32, "ab")
        ),
        granted(),
    )
    assert published.rig.asks(KEY) == "search"
    assert published.rig.names() == ["hex", "search"]
    for key in ("sk-other", "sk-wrong", "sk-typed", "sk-classed"):
        assert refused(published, key) == (401, "invalid_api_key")
    with pytest.raises(Forbidden):
        published.rig.asks(KEY, model="n")


@pytest.mark.parametrize("set_by_s", [-5000.0, 5000.0])
async def test_its_age_grows_whatever_the_stores_clock_says(set_by_s: float) -> None:
    """Which somebody sets, or which is another server's since a failover."""
    published = await started()
    await published.publish(granted(service_class="spot"))
    published.silent = True
    published.age_s = max(0.0, set_by_s)
    await published.sync.poll()
    assert published.rig.asks(KEY) == "search"
    published.rig.clock.advance(STALE_AFTER_S + 1.0)
    published.age_s = max(0.0, STALE_AFTER_S + 1.0 + set_by_s)
    await published.sync.poll()
    assert refused(published) == (503, "entitlement_degraded")
    published.silent = False
    published.age_s = 0.0
    await published.sync.poll()
    assert published.rig.asks(KEY) == "search"


async def test_what_is_refused_to_be_read_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A Redis that answers, but not this: the directory would not log it."""
    caplog.set_level(logging.WARNING)
    published = await started()
    published.away = True
    for _ in range(3):
        await published.sync.poll()
    assert [record.getMessage() for record in caplog.records] == [
        "what the cluster grants cannot be read: away"
    ]


async def test_a_cluster_takes_no_key_from_the_file_or_administrators() -> None:
    """Whoever may create objects there may know the digest of a key, which is no secret."""
    published = await started(entitling(section("zeta", digest("sk-file").hex())))
    rig = published.rig
    await rig.tenants.create({"name": "team"}, WHO)
    await rig.entitle("yota", tenant="team")
    web = await rig.add("web", "team")
    await published.publish(
        granted("alpha", "sk-file", verdict="pending"), granted("beta", web), granted()
    )
    assert (rig.asks("sk-file"), rig.asks(web), rig.asks(KEY)) == ("zeta", "yota", "search")
    await rig.tenancy.adopt(NO_FILE)
    assert refused(published, "sk-file") == (503, "entitlement_pending")


async def test_one_that_is_withheld_and_suspended_is_told_as_suspended() -> None:
    published = await started()
    await published.publish(granted(verdict="degraded", message="no replica"))
    suspended = await published.rig.entitlements.suspend("search", WHO)
    assert (suspended["state"], suspended["message"]) == ("suspended", None)
    assert refused(published) == (403, "entitlement_suspended")
    resumed = await published.rig.entitlements.suspend("search", WHO, undo=True)
    assert (resumed["state"], resumed["message"]) == ("degraded", "no replica")
