"""The official Node client streams through the gateway."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.common.fleet import MODEL, Fleet
from tests.e2e.conftest import KEY

FOLDER = Path(__file__).parent / "node"


@pytest.mark.node
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js and npm")
def test_the_node_client_streams(fleet: Fleet) -> None:
    if not (FOLDER / "node_modules" / "openai").exists():
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"],
            cwd=FOLDER,
            check=True,
            capture_output=True,
            timeout=180,
        )
    done = subprocess.run(
        ["node", "stream.mjs"],
        cwd=FOLDER,
        check=True,
        capture_output=True,
        timeout=60,
        env={**os.environ, "BASE_URL": f"{fleet.url}/v1", "API_KEY": KEY, "MODEL": MODEL},
    )
    found = json.loads(done.stdout)
    assert found["finish"] == "length"
    assert found["chunks"] >= 12
    assert found["text"]
