"""One fleet of real processes for the end-to-end tests: 2 short engines, 1 long, a gateway."""

from collections.abc import Iterator
from hashlib import sha256

import openai
import pytest

from bench.common.fleet import MODEL, Fleet

KEY = "sk-test-e2e"


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    entitlement = {
        "name": "e2e",
        "tenant": "e2e",
        "model": MODEL,
        "api_keys": ["sha256:" + sha256(KEY.encode()).hexdigest()],
    }
    with Fleet(model={"aliases": ["gpt-4o-mini"]}, config={"entitlements": [entitlement]}) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY) as client:
        yield client
