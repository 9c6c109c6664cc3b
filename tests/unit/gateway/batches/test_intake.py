"""The checks of an input file's lines, and the form around it."""

import json
from typing import Any

import pytest

from gateway.batches.intake import LineChecks, UploadForm
from gateway.errors import BadRequest


def line(number: object = 1, **body: Any) -> bytes:
    asked = {"custom_id": f"{number}", "url": "/v1/completions", "body": {"model": "m", **body}}
    return json.dumps(asked).encode()


def checked(text: bytes, piece: int = 1 << 20, most: int = 1 << 10) -> LineChecks:
    checks = LineChecks(most)
    for at in range(0, len(text), piece):
        checks.feed(text[at : at + piece])
    checks.end()
    return checks


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_lines_are_counted_however_they_come(piece: int) -> None:
    text = b"\r\n".join((line(1, max_tokens=5), b"", line(2, max_tokens=7, n=2), line(3)))
    checks = checked(text, piece)
    assert checks.problems == []
    assert (checks.lines, checks.model, checks.endpoint) == (3, "m", "/v1/completions")
    assert (checks.output_tokens, checks.unlimited) == (19, 1)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"[]", "invalid_type"),
        (b"\xff", "invalid_json_line"),
        (b'{"x": ' + b"[" * 900, "invalid_json_line"),
        (b'{"custom_id": "x", "url": "/v1/completions"}', "missing_required_parameter"),
        (line("x" * 513), "invalid_custom_id"),
        (line("")[:-1] + b"}", "invalid_custom_id"),
        (line(5, model="other"), "mismatched_model"),
        (line(5, model=3), "invalid_type"),
        (line(5, stream=True), "invalid_value"),
        (line(5, pad="y" * 2000), "line_too_long"),
        (line(1), "duplicate_custom_id"),
    ],
)
@pytest.mark.parametrize("piece", [9, 1 << 20])
def test_a_bad_line_is_named(bad: bytes, code: str, piece: int) -> None:
    checks = checked(line(1) + b"\n\n" + bad + b"\n" + line(2), piece)
    assert [(p.line, p.code) for p in checks.problems] == [(3, code)]
    assert checks.lines == 3


def test_a_line_without_end_is_not_held() -> None:
    checks = LineChecks(1 << 10)
    for _ in range(100):
        checks.feed(b"x" * 1000)
        assert len(checks.rest) <= (1 << 10) + 1
    checks.end()
    assert [p.code for p in checks.problems] == ["line_too_long"]


def test_the_first_hundred_problems_are_noted() -> None:
    checks = checked(b"{}\n" * 1000)
    assert [p.line for p in checks.problems] == list(range(1, 101))
    assert checks.lines == 1000


def read(form: bytes) -> None:
    reader = UploadForm("multipart/form-data; boundary=B")
    reader.write(form)
    reader.end()


@pytest.mark.parametrize(
    "form",
    [
        b"no boundary",
        b"--B\r\n\r\nx\r\n--C--",
        b'--B\r\ncontent-disposition: form-data; name="x"\r\n\r\n' + b"y" * 5000,
        b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n' * 2,
    ],
)
def test_a_malformed_form_is_refused(form: bytes) -> None:
    with pytest.raises(BadRequest):
        read(form)


LONG = "multipart/form-data; boundary=" + 900 * "B"


@pytest.mark.parametrize("kind", ["", "text/plain; boundary=B", "multipart/form-data", LONG])
def test_another_kind_of_body_is_refused(kind: str) -> None:
    with pytest.raises(BadRequest):
        UploadForm(kind)


def test_a_file_name_is_a_text_to_show_alone() -> None:
    reader = UploadForm("multipart/form-data; boundary=B")
    head = (
        b'--B\r\ncontent-disposition: form-data; name="file"; filename="../../etc/a\x1b[2J"\r\n\r\n'
    )
    reader.write(head + b"x")
    assert reader.filename == "../../etc/a\\x1b[2J"
    with pytest.raises(BadRequest):
        UploadForm("application/json")
