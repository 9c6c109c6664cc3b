"""`sluice calibrate` against mock engines whose constants it is not told."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running import MOCK_MODEL, mock_engine, sluice

COMMAND = [sys.executable, "-m", "sluice", "mock", "--port", "0"]
HIDDEN = {
    "name": "hidden",
    "w_s": 0.0117,
    "h_s": 0.00083,
    "prefill_s_per_token": 0.000037,
    "max_num_batched_tokens": 768,
    "max_num_seqs": 12,
    "kv_blocks": 3000,
    "block_tokens": 32,
    "max_model_len": 4096,
}


@contextlib.contextmanager
def mock(profile: Path, *arguments: str) -> Iterator[str]:
    """A mock engine with this profile; gives its URL."""
    with subprocess.Popen(
        [*COMMAND, "--model", "org/secret", "--profile-file", str(profile), *arguments],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[2]
        finally:
            process.kill()


def calibrate(*arguments: str) -> tuple[int, Any, str]:
    """(exit code, what --json printed, stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "calibrate", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    file = tmp_path / "hidden.json"
    file.write_text(json.dumps(HIDDEN), encoding="utf-8")
    return file


@pytest.mark.timed
def test_hidden_constants_are_recovered(hidden: Path, tmp_path: Path) -> None:
    """The best of three: other work on the machine takes its time from the engine."""
    key, written = tmp_path / "key", tmp_path / "profile.json"
    key.write_text("a-key\n", encoding="utf-8")
    exact = {"max_num_seqs": 12, "chunk_tokens": 768, "kv_tokens": 96_000, "block_tokens": 32}
    for _ in range(3):
        with mock(hidden, "--api-key", "a-key") as url:
            credentials = url.replace("http://", "http://user:word@")
            code, profile, said = calibrate(
                *("--url", credentials, "--api-key-file", str(key), "-o", str(written)),
                *("--most-concurrency", "16", "--budget-s", "24"),
            )
        assert code == (0 if profile["verified"] else 1), said
        engine, provenance = profile["engine"], profile["provenance"]
        assert provenance["url"] == url
        assert provenance["engine_version"]
        assert engine["prefix_cache_tokens"] is None, "it says that it caches prefixes"
        off = {check["name"]: abs(check["off"]) for check in provenance["held_out"]}
        assert len(off) == 7
        assert profile["verified"] == all(check["holds"] for check in provenance["held_out"])
        text = written.read_text(encoding="utf-8")
        assert json.loads(text) == profile
        assert "word" not in text
        assert "a-key" not in text
        wrong = [name for name in exact if profile[name] != exact[name]]
        wrong += [
            name
            for name in ("w_s", "h_s", "prefill_s_per_token")
            if engine[name] != pytest.approx(HIDDEN[name], rel=0.05)
        ]
        wrong += [n for n in ("TPOT p50 (s)", "throughput (tokens/s)") if off[n] >= 0.15]
        if engine["timing"] == "slots" and provenance["residual_median"] < 0.05 and not wrong:
            return
    pytest.fail(f"far from the hidden engine: {wrong}, {profile}")


def test_a_wrong_key_model_or_address_exits_2() -> None:
    def refused(*arguments: str) -> dict[str, Any]:
        result = sluice("calibrate", "--json", *arguments)
        answer: dict[str, Any] = json.loads(result.stdout)
        assert (result.exit_code, answer["ok"]) == (2, False)
        return answer

    with mock_engine(api_key="a-key") as url:
        assert refused("--url", url)["fix"] == "give --api-key-file"
    with mock_engine() as url:
        fix = refused("--url", url, "--model", "other")["fix"]
        assert fix == f"use one of {MOCK_MODEL}"
    for address in ("ftp://x", "http://127.0.0.1:1"):
        refused("--url", address)


def test_a_written_profile_runs_as_a_mock_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    wrapped, bad = tmp_path / "profile.json", tmp_path / "bad.json"
    wrapped.write_text(json.dumps({"w_s": 1, "engine": HIDDEN}), encoding="utf-8")
    with mock(wrapped) as url:
        assert url.startswith("http://127.0.0.1:")
    bad.write_text('{"name": "x", "w_s": -1}', encoding="utf-8")
    done = subprocess.run(
        [*COMMAND, "--model", "m", "--profile-file", str(bad)],
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "w_s must be above 0" in done.stderr
