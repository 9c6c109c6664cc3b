"""What the bench counts as a whole trace; no processes."""

from bench.telemetry.collectors import SpanIds, complete

ROOT = SpanIds("chat m", b"t1", b"s1", b"client")
ATTEMPT = SpanIds("attempt", b"t1", b"s2", b"s1")


def test_a_trace_is_whole_with_an_attempt_under_a_span_under_the_client_s() -> None:
    assert complete([ATTEMPT, ROOT], b"client") == 1
    assert complete([ROOT], b"client") == 0
    assert complete([ROOT, ATTEMPT._replace(trace=b"t2")], b"client") == 0
    assert complete([ROOT._replace(parent=b""), ATTEMPT], b"client") == 0
