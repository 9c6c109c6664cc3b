"""Form bodies: one model field, everything else untouched."""

import contextlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.policy.multipart import read_form, with_model


def form(**fields: str) -> bytes:
    """A form as the official client sends it: fields, then the file."""
    request = httpx.Request(
        "POST", "http://x", data=fields, files={"file": ("a.wav", b"RIFF\r\n--not-a-boundary\x00")}
    )
    return request.read()


def test_the_model_is_found_among_other_fields() -> None:
    facts = read_form(form(language="en", model="whisper-large", response_format="json"))
    assert facts.model == "whisper-large"
    assert facts.measure.media_parts == 1
    assert facts.measure.text_bytes == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not a form",
        form(language="en"),
        form(model=""),
        form(model="a") + form(model="b"),
        form(model="m" * 300),
    ],
)
def test_a_form_without_exactly_one_usable_model_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        read_form(body)
    assert refused.value.param == "model"


def test_the_model_is_replaced_and_nothing_else() -> None:
    body = form(model="gpt-4o-transcribe", language="en")
    assert with_model(body, "whisper") == body.replace(b"gpt-4o-transcribe", b"whisper")


@given(st.binary(max_size=2000))
def test_hostile_forms_are_refused_or_read(body: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert read_form(body).model
