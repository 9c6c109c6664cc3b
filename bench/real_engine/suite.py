"""openai-python's own tests, against an engine and through the gateway before it."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.common.report import Row, at_least, equals

FILES: Final = (
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_completions.py",
    "tests/api_resources/test_models.py",
    "tests/api_resources/test_embeddings.py",
    "tests/api_resources/test_responses.py",
)
API_KEY: Final = "My API Key"
"""The key that its tests send."""
MIN_TESTS: Final = 20
"""Tests that must pass directly, lest nothing be compared."""
_LIMIT_S: Final = 900.0


def scene(python: Path, source: Path, direct: str, through: str) -> Iterator[Row]:
    """Tests that pass directly must pass through the gateway."""
    alone, relayed = passing(python, source, direct), passing(python, source, through)
    lost = sorted(alone - relayed)
    yield at_least("openai-python's tests that pass directly", len(alone), MIN_TESTS)
    yield equals("of these, tests that fail through the gateway", len(lost), 0, ", ".join(lost[:5]))
    yield Row("tests that pass through the gateway alone", len(relayed - alone))


def passing(python: Path, source: Path, url: str) -> set[str]:
    """The tests that pass against an API."""
    environment = {**os.environ, "TEST_API_BASE_URL": f"{url}/v1"}
    command = [str(python), "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(
        [*command, "-o", "addopts="],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return set(re.findall(r"^PASSED (\S+)", done.stdout, re.MULTILINE))
