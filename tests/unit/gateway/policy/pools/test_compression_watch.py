import pytest

from gateway.policy.pools.compression_watch import BINS, MEMORY, CompressionWatch, bin_of
from gateway.records.decision import CompressionSection


@pytest.mark.parametrize(
    ("depth", "at"), [(1.0, 0), (1.05, 0), (1.1, 0), (1.11, 1), (1.5, 4), (2.0, 9), (9.0, BINS - 1)]
)
def test_depths_are_counted_by_the_step_that_ends_with_them(depth: float, at: int) -> None:
    assert bin_of(depth) == at


CUT = CompressionSection(compressed="9->4", kept_share=0.5)


def test_success_is_the_share_of_all_prompts_in_the_window_that_somebody_looked_at() -> None:
    watch = CompressionWatch()
    for reason in (None, "not_busy", "spilled"):
        watch.settled(CompressionSection(not_compressed=reason))
    assert watch.success is None
    for reason in ("tools", "category", "not_retrieval", "observed", "other_pool"):
        watch.settled(CompressionSection(not_compressed=reason))
    watch.settled(CUT)
    assert watch.success == pytest.approx(0.5)
    for _ in range(20 * MEMORY):
        watch.settled(CUT)
    assert watch.success == pytest.approx(1.0, abs=0.01)


def test_only_what_depends_on_the_depth_is_counted_by_depth() -> None:
    watch = CompressionWatch()
    for reason in ("", "too_coarse", "no_question", "timeout"):
        watch.noted(reason, 1.35, 0.25)
    assert (watch.tried, watch.compressed, watch.seconds) == (4, 1, 1.0)
    assert (watch.tried_at[3], watch.fitted[3]) == (2, 1)
    assert sum(watch.tried_at) == 2
