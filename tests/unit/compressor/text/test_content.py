import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from compressor.text.content import unfit
from compressor.text.protect import blocks
from tests.unit.compressor.cut import ground
from tests.unit.compressor.texts import prose

HERE = Path(__file__)
ROOT = HERE.parents[4]


def reason(text: str) -> str | None:
    base = ground(text)
    found = unfit(base, blocks(base, [0], [len(text)]))
    return found[0] if found else None


@pytest.mark.parametrize("topic", ["types", "specialnames", "compound", "debugger", "import"])
def test_documentation_with_examples_may_be_compressed(topic: str) -> None:
    assert reason(topics[topic]) is None


@pytest.mark.parametrize("path", ["bench/common/native/engine.c", "compressor/text/segment.py"])
def test_sources_may_not(path: str) -> None:
    assert reason((ROOT / path).read_text(encoding="utf-8")) == "code"


def test_prose_with_dates_and_numbers_may() -> None:
    assert reason(prose(30).replace("river", "2024-11-05").replace("copper", "1,250")) is None


def test_numbers_hexadecimal_and_base64_may_not() -> None:
    rng = random.Random(1)
    assert (
        reason("\n".join(",".join(str(rng.random()) for _ in range(5)) for _ in range(99)))
        == "digits"
    )
    assert reason(rng.randbytes(3000).hex(" ")) == "digits"
    import base64

    assert reason(base64.b64encode(rng.randbytes(6000)).decode()) == "encoded"


def test_mostly_tables_may_not() -> None:
    table = "\n".join(f"| row {i} | value {i} |" for i in range(60))
    assert reason(f"A table.\n\n{table}\n\nThat was it.") == "tables"


def test_mostly_json_may_not() -> None:
    assert reason("Look:\n" + json.dumps([{"k": f"v{i}"} for i in range(99)]) + "\nEnd.") == "json"
