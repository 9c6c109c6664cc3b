"""Keys of `sluice top`: each changes what is asked for, shown, or neither."""

from sluice.top.command import ENTITLEMENT_ORDERS, Controls


def pressed(*keys: str) -> tuple[Controls, list[bool]]:
    controls = Controls()
    return controls, [controls.press(key) for key in keys]


def test_q_and_control_c_end_it() -> None:
    for key in ("q", "\x03"):
        controls, asked = pressed(key)
        assert controls.done
        assert asked == [False]


def test_orders_go_round() -> None:
    controls, asked = pressed(*"s" * len(ENTITLEMENT_ORDERS), "w")
    assert all(asked)
    assert controls.query() == {"entitlements_order": "load", "workers_order": "load"}
    assert pressed("s")[0].query()["entitlements_order"] == "refused"
    assert "entitlements by refused" in pressed("s")[0].help()


def test_a_filter_is_typed_corrected_and_removed() -> None:
    controls, _ = pressed("/", *"aqx", "\x7f", "\r")
    assert not controls.done
    found = controls.query()
    assert (found["entitlements"], found["workers"], found["decisions"]) == ("aq", "aq", "aq")
    assert controls.note() == "/aq"
    assert controls.press("\x1b")
    assert "entitlements" not in controls.query()


def test_space_pauses_and_goes_on() -> None:
    controls, asked = pressed(" ")
    assert controls.paused
    assert controls.note() == "paused"
    assert asked == [False]
    controls.press(" ")
    assert not controls.paused
