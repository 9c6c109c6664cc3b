"""A log too long to run whole is sampled; one that is being written is read up to its last line."""

from pathlib import Path

import msgspec
import numpy as np

from sluice.prove.trial import PIECE_S, sampled
from sluice.simulated.recorded import ENOUGH_CUT, LENGTHS, RecordedTraffic, read_recorded
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


def test_the_share_that_can_be_cut_is_known_by_length_where_the_log_has_enough(
    tmp_path: Path,
) -> None:
    def read(count: int) -> RecordedTraffic:
        """Half of them could be cut, the shorter ones; two more were in no window."""
        path = tmp_path / "log.jsonl"
        lines = [
            decision(time_unix_s=float(t), prompt_tokens=1000 + t, completion_tokens=1)
            if t in {0, count + 1}
            else decision(
                time_unix_s=float(t),
                prompt_tokens=1000 + t,
                completion_tokens=1,
                not_compressed="observed" if t <= count / 2 else "too_little",
            )
            for t in range(count + 2)
        ]
        path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
        return read_recorded(path)

    count = LENGTHS * ENOUGH_CUT
    shares = read(count).compressible()
    assert np.isnan(shares[[0, -1]]).all()
    assert shares[1 : count // 2].tolist() == [1.0] * (count // 2 - 1)
    assert shares[count // 2 + 1 : -1].tolist() == [0.0] * (count // 2)
    few = read(ENOUGH_CUT - 2).compressible()  # each tells of itself alone
    assert np.isnan(few).nonzero()[0].tolist() == [0, ENOUGH_CUT - 1]


def test_prompts_that_no_compressor_takes_do_not_count_for_the_share_that_can_be_cut(
    tmp_path: Path,
) -> None:
    """They are in no simulated window either: they would count twice. Others tell of themselves."""
    path = tmp_path / "log.jsonl"
    lines = [
        decision(
            time_unix_s=float(t),
            prompt_tokens=1000,
            completion_tokens=1,
            category="code" if t % 2 else "prose",
            not_compressed="category" if t % 2 else "observed",
        )
        for t in range(2 * ENOUGH_CUT)
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    assert read_recorded(path).cut_shares == ((1000.0 + 1, 1000.0 + 1, 1.0),)
