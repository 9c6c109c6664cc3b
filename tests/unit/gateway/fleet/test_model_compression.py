"""p_c, as the gateway sees it."""

import pytest

from gateway.fleet.model_runtime import MEMORY, ModelCompression
from gateway.records.decision import CompressionSection
from gateway.routing.routing import CompressionRules

CUT = CompressionSection(compressed="9->4", kept_share=0.5)


def test_success_is_the_share_of_all_prompts_in_the_window_that_somebody_looked_at() -> None:
    seen = ModelCompression(rules=CompressionRules())
    for reason in (None, "not_busy", "spilled"):
        seen.settled(CompressionSection(not_compressed=reason))
    assert seen.success is None
    for reason in ("tools", "category", "not_retrieval", "observed", "other_pool"):
        seen.settled(CompressionSection(not_compressed=reason))
    seen.settled(CUT)
    assert seen.success == pytest.approx(0.5)
    for _ in range(20 * MEMORY):
        seen.settled(CUT)
    assert seen.success == pytest.approx(1.0, abs=0.01)
