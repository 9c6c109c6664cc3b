"""Traces and logs as text."""

import msgspec
import numpy as np
import pytest

from planner.errors import PlanError
from planner.readers.fields import parse_field_map
from planner.readers.traces import read_workload
from planner.workload.workload import Workload
from tests.builders import decision

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.9799600,3180,8
2023-11-16 18:17:07.9799600,110,27
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
"""
LITELLM = """\
[{"spend": 0.1, "prompt_tokens": 12, "completion_tokens": 3, "startTime": "2024-05-01T10:00"},
 {"spend": 0.2, "prompt_tokens": 30, "completion_tokens": 9, "startTime": "2024-05-01T10:01"}]
"""


def lengths(workload: Workload) -> tuple[list[float], list[float]]:
    assert workload.pairs is not None
    return workload.pairs.prompts.tolist(), workload.pairs.answers.tolist()


def test_azure() -> None:
    found = read_workload(AZURE, name="azure.csv")
    assert lengths(found) == ([4808, 3180, 110], [10, 8, 27])
    assert found.rate_per_s == pytest.approx(0.5)
    assert found.longest_tokens == 4818


def test_mooncake_counts_milliseconds() -> None:
    found = read_workload(MOONCAKE, name="mooncake.jsonl")
    assert lengths(found) == ([6758, 7322], [500, 490])
    assert found.rate_per_s == pytest.approx(2.0)


def test_litellm_as_a_list() -> None:
    found = read_workload(LITELLM, name="spend.json")
    assert found.source == "LiteLLM spend log"
    assert lengths(found) == ([12, 30], [3, 9])
    assert found.rate_per_s == pytest.approx(1 / 60)


def test_the_gateway_s_own_log() -> None:
    records = [
        decision("refused", time_unix_s=1000.0, outcome="refused", status=429),
        decision(
            "a",
            time_unix_s=1000.0,
            prompt_tokens=100,
            completion_tokens=20,
            cap_tokens=4096,
            category="code",
        ),
        decision(
            "b",
            time_unix_s=1004.0,
            prompt_tokens=300,
            completion_tokens=40,
            cached_tokens=100,
            category="prose",
        ),
    ]
    text = b"\n".join(msgspec.json.encode(record) for record in records).decode()
    found = read_workload(text, name="requests.jsonl")
    assert found.source == "gateway log, prompts as clients sent them"
    assert lengths(found) == ([100, 300], [20, 40])
    assert found.categories == ("code", "prose")
    assert found.asked is not None
    assert found.asked[0] == 4096
    assert np.isnan(found.asked[1])
    assert found.cached_share == pytest.approx(100 / 400)
    assert found.rate_per_s == pytest.approx(0.5)  # the refused request was asked for, too
    assert "1 of 3 requests were refused or not served" in found.notes[0]


def test_any_fields_by_a_map() -> None:
    fields = parse_field_map("prompt=in,answer=out,asked=max,time=at")
    text = "in,out,max,at\n10,5,64,0\n20,0,,2\n"
    found = read_workload(text, name="own.csv", fields=fields)
    # An answer of no tokens occupies a slot for one step all the same.
    assert lengths(found) == ([10, 20], [5, 1])
    assert found.asked is not None
    assert found.asked[0] == 64
    assert found.rate_per_s == pytest.approx(0.5)


def test_a_distribution() -> None:
    found = read_workload("[[64, 0.5], [128, 1.0]]", name="cdf.json")
    assert found.cdf is not None
    assert found.share(96) == pytest.approx(0.75)
    assert "80 % of every total" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests with both lengths"),
        ("[]", "no requests with both lengths"),
        ("a,b\n1,2\n", "fields of no known trace"),
        ('{"input_length": 5, "output_length": 2}\n{broken', "line 2 is not a JSON object"),
        ("ContextTokens,GeneratedTokens\n5,-2\n", "record 1: GeneratedTokens is '-2'"),
        ("ContextTokens,GeneratedTokens\nfive,2\n", "record 1: ContextTokens is 'five'"),
        ("[[64, 0.5]]", "last share is 0.5"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        read_workload(text, name="trace")


@pytest.mark.parametrize("text", ["prompt=a", "prompt=a,answer=b,x=c", "prompt", ""])
def test_field_maps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--fields"):
        parse_field_map(text)
