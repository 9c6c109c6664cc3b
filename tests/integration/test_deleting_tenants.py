"""Nothing opens after a delete, and whoever deletes learns what would still open."""

from pathlib import Path

from bench.common.fleet import MODEL
from tests.integration.test_tenants_at_run_time import fleet_on, made, sluice, status


def test_a_deleted_tenant_leaves_nothing_that_opens(tmp_path: Path) -> None:
    with fleet_on(f"sqlite:///{tmp_path}/sluice.db") as fleet:

        def make() -> list[str]:
            """Keys of a new tenant: its own, and that of its entitlement."""
            made(fleet, "tenant", "create", "beta")
            entitlement = ("entitlement", "create", "beta-chat", "--tenant", "beta")
            own = made(fleet, *entitlement, "--model", MODEL)["key"]
            return [own, made(fleet, "key", "add", "beta", "web")["key"]]

        def open_to(keys: list[str]) -> list[int]:
            return [status(fleet.url, key) for key in keys]

        keys = make()
        refused = sluice(fleet, "tenant", "delete", "beta")
        assert refused.exit_code != 0
        assert "beta-chat" in refused.output
        assert "--force" in refused.output
        assert open_to(keys) == [200, 200], "what was refused changes nothing"
        assert "beta" in [row["name"] for row in made(fleet, "tenant", "list")]

        made(fleet, "tenant", "delete", "beta", "--force")
        assert open_to(keys) == [401, 401]
        assert "beta" not in [row["name"] for row in made(fleet, "tenant", "list")]
        assert "beta" not in [row["tenant"] for row in made(fleet, "entitlement", "list")]

        fresh = make()
        assert open_to([*keys, *fresh]) == [401, 401, 200, 200], "old keys open no namesake"
        fleet.kill_replica(fleet.replicas[0])
        fleet.start_replica(fleet.replicas[0])
        fleet.wait_ready(fleet.replicas[0])
        assert open_to([*keys, *fresh]) == [401, 401, 200, 200]
