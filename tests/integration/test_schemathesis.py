"""Generated requests from the gateway's own OpenAPI description: never a 5xx."""

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bench.common.fleet import Fleet
from gateway.control.openapi import openapi_document

EXAMPLES = 40


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(short=1, long=1) as fleet:
        yield fleet


SCHEMA = schemathesis.openapi.from_dict(openapi_document("test"))
OPERATIONS = {
    f"{operation.method.upper()} {operation.path}": operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())  # type: ignore[union-attr]
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_generated_requests_never_cause_a_5xx(fleet: Fleet, operation: str) -> None:
    cases = OPERATIONS[operation]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]

    @given(data=st.data())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(data: st.DataObject) -> None:
        mode = data.draw(st.sampled_from(modes))
        case = data.draw(cases.as_strategy(generation_mode=mode))
        answer = case.call(base_url=fleet.url)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400 and not case.path.startswith("/v1/messages"):
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    check()


def test_the_description_is_served(fleet: Fleet) -> None:
    served = httpx.get(f"{fleet.url}/openapi.json").json()
    assert set(served["paths"]) == set(openapi_document("x")["paths"])
