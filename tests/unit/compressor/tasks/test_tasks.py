"""What may be compressed by `when: asked`: questions over retrieved passages, nothing else."""

from typing import Any

import pytest

from compressor import Compressed, Refused, compress
from tests.unit.compressor.tasks.hostile import TASKS
from tests.unit.compressor.tasks.retrieval import PROMPTS
from tests.unit.compressor.texts import size


def _bytes(messages: list[dict[str, Any]]) -> int:
    total = 0
    for message in messages:
        content = message["content"] or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        total += sum(map(size, parts))
    return total


def test_there_are_enough_of_both_kinds() -> None:
    assert len(TASKS) >= 60
    assert len(PROMPTS) >= 20


@pytest.mark.parametrize("share", [0.6, 0.85])
@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_needs_its_whole_text_is_refused(name: str, share: float) -> None:
    messages = TASKS[name]
    found = compress(messages, int(_bytes(messages) * share), 1.0, safety=1.0)
    assert isinstance(found, Refused), found.messages


@pytest.mark.parametrize("share", [0.6, 0.85])
@pytest.mark.parametrize("name", PROMPTS)
def test_a_question_over_passages_is_compressed_and_its_answer_stays(
    name: str, share: float
) -> None:
    prompt = PROMPTS[name]
    budget = int(_bytes(prompt.messages) * share)
    found = compress(prompt.messages, budget, 1.0, safety=1.0, tools=prompt.tools)
    assert isinstance(found, Compressed), found
    assert found.changed
    assert _bytes(found.messages) <= budget
    text = "\n".join(str(message["content"]) for message in found.messages)
    assert prompt.answer in text
