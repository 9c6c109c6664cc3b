"""The entitlements in force, oldest first."""

from gateway.records.entitlement import Entitlement
from gateway.tenancy.rights import EntitlementInForce
from gateway.tenancy.tenancy import EntitlementIndex


def test_it_keeps_order_when_older_ones_come_late() -> None:
    index = EntitlementIndex()

    def put(name: str, created: int) -> None:
        terms = Entitlement(name=name, model="m", created=created)
        index.put(EntitlementInForce(terms=terms))

    for name, created in (("c", 3), ("a", 1), ("b", 3), ("d", 9)):
        put(name, created)
    assert [t.name for t in index.terms("m")] == ["a", "b", "c", "d"]
    assert [e.terms.name for e in index.after((1, "a"), 2)] == ["b", "c"]
    put("a", 12)
    assert [t.name for t in index.terms("m")] == ["b", "c", "d", "a"]
    index.remove("a")
    index.remove("nobody")
    assert [t.name for t in index.terms("m")] == ["b", "c", "d"]
