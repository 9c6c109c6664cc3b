"""A log too long to run whole is sampled; one that is being written is read up to its last line."""

from pathlib import Path

import msgspec
import numpy as np

from sluice.prove.trial import PIECE_S, sampled
from sluice.simulated.recorded import RecordedTraffic, read_recorded
from tests.builders import decision


def day(per_piece: list[int]) -> RecordedTraffic:
    """Requests at even times within each piece."""
    at_s = np.concatenate([PIECE_S * (i + np.arange(n) / n) for i, n in enumerate(per_piece)])
    ones = np.ones(len(at_s), dtype=np.int64)
    return RecordedTraffic(at_s=at_s, prompts=ones, answers=ones, categories=())


def test_a_sample_has_the_busiest_pieces_and_stands_for_the_whole_log() -> None:
    log = day([100] * 90 + [500] * 4 + [100] * 6)
    sample = sampled(log, 4000)
    assert 3000 < len(sample.weights) < 5000
    assert "the 4 busiest" in sample.words
    assert sample.weights.sum() == len(log.at_s)
    assert (sample.weights == 1.0).sum() == 2000
    assert sample.span_s == log.at_s[-1]
    gaps = np.diff(sample.recorded.at_s)
    assert gaps.min() >= 0
    assert gaps.max() <= 2 * PIECE_S / 100  # what lies between pieces is left out


def test_a_short_log_is_not_sampled() -> None:
    sample = sampled(day([50, 50]), 4000)
    assert sample.words == ""
    assert sample.weights.tolist() == [1.0] * 100


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    lines = [
        msgspec.json.encode(decision(time_unix_s=float(t), prompt_tokens=9, completion_tokens=4))
        for t in range(3)
    ]
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert len(read_recorded(path).at_s) == 3
    path.write_bytes(b"\n".join([*lines[:2], lines[2][:-40]]))
    assert len(read_recorded(path).at_s) == 2
