import pytest

from gateway.policy.pools.compression_watch import BINS, MEMORY, CompressionWatch, bin_of


@pytest.mark.parametrize(
    ("depth", "at"), [(1.0, 0), (1.05, 0), (1.1, 0), (1.11, 1), (1.5, 4), (2.0, 9), (9.0, BINS - 1)]
)
def test_depths_are_counted_by_the_step_that_ends_with_them(depth: float, at: int) -> None:
    assert bin_of(depth) == at


def test_success_is_the_share_of_the_latest_results() -> None:
    watch = CompressionWatch()
    assert watch.success is None
    for reason in ("", "", "not_retrieval", "cut_too_deep"):
        watch.noted(reason, 1.2, 0.01)
    assert watch.success == pytest.approx(0.5)
    for _ in range(20 * MEMORY):
        watch.noted("", 1.2, 0.01)
    assert watch.success == pytest.approx(1.0, abs=0.01)


def test_only_what_depends_on_the_depth_is_counted_by_depth() -> None:
    watch = CompressionWatch()
    for reason in ("", "too_coarse", "no_question", "timeout"):
        watch.noted(reason, 1.35, 0.25)
    assert (watch.tried, watch.compressed, watch.seconds) == (4, 1, 1.0)
    assert (watch.tried_at[3], watch.fitted[3]) == (2, 1)
    assert sum(watch.tried_at) == 2
