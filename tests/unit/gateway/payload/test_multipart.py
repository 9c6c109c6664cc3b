"""Form bodies: the model that decides is the one that is sent, whatever the form's spelling."""

import contextlib
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart.multipart import File, FormParser

from gateway.errors import BadRequest
from gateway.payload.multipart import MAX_PARTS, read_form, written
from gateway.records.request import BodyFacts
from tests.growth import assert_linear

KIND = b"multipart/form-data; boundary=b"


def form(**fields: str) -> tuple[bytes, bytes]:
    """A form as the official client sends it, fields, then the file; and its content type."""
    request = httpx.Request(
        "POST", "http://x", data=fields, files={"file": ("a.wav", b"RIFF\r\n--not-a-boundary\x00")}
    )
    return request.read(), request.headers["content-type"].encode()


def parts(*spelled: bytes, boundary: bytes = b"b") -> bytes:
    """A form of parts that are given with their headers."""
    return b"".join(b"--%b\r\n%b\r\n" % (boundary, p) for p in spelled) + b"--%b--\r\n" % boundary


def field(name: bytes, value: bytes) -> bytes:
    return b'content-disposition: form-data; name="%b"\r\n\r\n%b' % (name, value)


def read(*spelled: bytes) -> BodyFacts:
    return read_form(parts(*spelled), [KIND])


def refused(body: bytes, *kinds: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_form(body, kinds or (KIND,))
    return caught.value


def engine_reads(body: bytes, facts: BodyFacts, model: str) -> Mapping[bytes, bytes | None]:
    """Fields and files of what is sent, as the parser of FastAPI's engines reads them."""
    found: dict[bytes, bytes | None] = {}

    def on_field(read: Any) -> None:
        found[read.field_name or b""] = read.value

    def on_file(read: Any) -> None:
        assert isinstance(read, File)
        read.file_object.seek(0)
        found[read.field_name or b""] = read.file_object.read()

    reader = FormParser("multipart/form-data", on_field, on_file, boundary=b"gateway")
    reader.write(b"".join(written(body, facts.parts, model, b"gateway")))
    reader.finalize()
    return found


def test_a_form_is_sent_with_its_contents_and_the_decided_model() -> None:
    body, kind = form(model="gpt-4o-transcribe", language="en", prompt="Namen: Zoë, 李")
    assert engine_reads(body, read_form(body, [kind]), "whisper") == {
        b"model": b"whisper",
        b"language": b"en",
        b"prompt": "Namen: Zoë, 李".encode(),
        b"file": b"RIFF\r\n--not-a-boundary\x00",
    }


def test_text_of_fields_counts_as_prompt() -> None:
    body, kind = form(model="m", prompt="word " * 1000)
    assert read_form(body, [kind]).measure.text_bytes == 5000


def test_fields_that_steer_an_engine_do_not_travel() -> None:
    body, kind = form(model="m", priority="0", vllm_xargs="{}", language="en")
    facts = read_form(body, [kind])
    assert facts.steering_fields == ("priority", "vllm_xargs")
    assert set(engine_reads(body, facts, "m")) == {b"model", b"language", b"file"}


@pytest.mark.parametrize(
    "decoy",
    [
        b'content-disposition: form-data; x-name="model"; name="x"\r\n\r\ncheap',
        b"content-disposition: form-data; name=\"x\"; name*=utf-8''model\r\n\r\ncheap",
        (
            b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            b'content-disposition: form-data; name="model"\r\n\r\ncheap\r\n--'
        ),
        b'content-disposition: form-data; name="file"; filename="a\\"; name=model; x=\\""\r\n\r\nc',
    ],
)
def test_what_only_looks_like_the_model_is_not(decoy: bytes) -> None:
    body = parts(decoy, b"Content-Disposition: form-data; name=model\r\n\r\ndear")
    facts = read_form(body, [KIND])
    assert facts.model == "dear"
    assert engine_reads(body, facts, facts.model)[b"model"] == b"dear"


def test_another_charset_does_not_change_what_the_engine_reads() -> None:
    body = parts(b"content-type: text/plain; charset=utf-7\r\n" + field(b"model", b"+AGQ-"))
    facts = read_form(body, [KIND + b"; charset=utf-7"])
    assert facts.model == "+AGQ-"
    assert b"utf-7" not in written(body, facts.parts, "m", b"x")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (parts(field(b"language", b"en")), "model"),
        (parts(field(b"model", b"")), "model"),
        (parts(field(b"model", b"m" * 300)), "model"),
        (parts(field(b"model", b"\xff")), "model"),
        (parts(field(b"model", b"a"), field(b"model", b"a")), "model"),
        (parts(field(b"model", b"a"), field(b"mod\xffel", b"a")), None),
        (parts(b'content-disposition: form-data; name="model"; filename="m"\r\n\r\na'), "model"),
        (parts(*[field(b"a", b"")] * (MAX_PARTS + 1)), "form"),
        (b"", None),
        (b"not a form", None),
        (parts(field(b"model", b"m"))[:-6], None),
        (parts(b"x: y\r\n\r\nz", field(b"model", b"m")), None),
        (parts(b'content-disposition: attachment; name="model"\r\n\r\nz'), None),
        (parts(b"content-disposition: x\r\n" + field(b"model", b"m")), None),
        (parts(b"content-transfer-encoding: base64\r\n" + field(b"model", b"bQ==")), None),
        (parts(field(b"a\x01", b""), field(b"model", b"m")), None),
    ],
)
def test_unclear_forms_are_refused(body: bytes, param: str | None) -> None:
    error = refused(body)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "kinds",
    [
        (b"multipart/form-data",),
        (b"multipart/form-data; boundary=",),
        (KIND, KIND),
        (b"multipart/form-data; boundary=" + b"b" * 5000,),
        (b"multipart/form-data; boundary=" + b"b" * 500,),
        (b"multipart/form-data; boundary=other",),
    ],
)
def test_unclear_boundaries_are_refused(kinds: tuple[bytes, ...]) -> None:
    assert refused(parts(field(b"model", b"m")), *kinds).reason == "invalid_form"


def test_the_last_of_two_boundaries_counts_and_none_of_them_travels() -> None:
    body = parts(field(b"model", b"m"))
    facts = read_form(body, [b"multipart/form-data; boundary=a; boundary=b"])
    assert b"".join(written(body, facts.parts, "m", b"x")).startswith(b"--x\r\n")


@given(st.binary(max_size=2000))
def test_hostile_forms_are_refused_or_read(body: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert read_form(body, [KIND]).model


_PIECES = st.sampled_from(
    [b"--b", b"--", b"\r\n", b"\r", b"\n", b": ", b'"', b"model", b"name=", b"; ", b"form-data",
     b"content-disposition", b"\x00", b"--b--", field(b"model", b"m"), b"filename="]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=60))
def test_the_engine_reads_the_model_that_was_decided_on(pieces: list[bytes]) -> None:
    body = b"--b\r\n" + b"".join(pieces)
    with contextlib.suppress(BadRequest):
        facts = read_form(body, [KIND])
        read_again = engine_reads(body, facts, "decided")
        assert read_again[b"model"] == b"decided"
        assert set(read_again) == {part.name.encode() for part in facts.parts}


WORST = [
    b'content-disposition: name="model"',
    b"\r\n--b",
    b"\r\n--b\r",
    b"\r\n",
    b"\r",
    b"--b\r\n\r\n",
    b"a:b\r\n",
    b"a: ;;;;",
]


@pytest.mark.parametrize("unit", WORST)
@pytest.mark.parametrize("lead", [b"", b"--b\r\n", b"--b\r\n" + field(b"model", b"m")])
def test_twice_the_form_takes_twice_the_time(lead: bytes, unit: bytes) -> None:
    def run(body: bytes) -> None:
        with contextlib.suppress(BadRequest):
            read_form(body, [KIND])

    assert_linear(lambda n: lead + unit * (n // len(unit)), run, 2**15, 2**25)
