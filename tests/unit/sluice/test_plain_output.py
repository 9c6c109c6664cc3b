"""What a client names steers no terminal: every verb and log line spells it out."""

import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.records.record import plain

HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJmIC8=\x07",
    "colour": "\x1b[8mhidden\x1b[0m",
    "c1": "\x9d52;c;cm0=\x9c \x9b31m",
    "bidi": "\u202egnp.exe\u2066\u200b",
    "line": "x\r\nThe request was served",
    "markup": "[link=https://evil.example]here[/link]",
}


def shown_in_a_terminal(*arguments: str) -> bytes:
    own, other = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "sluice", *arguments],
        stdin=other,
        stdout=other,
        stderr=other,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "4000"},
    ):
        os.close(other)
        shown = b""
        try:
            while part := os.read(own, 65_536):
                shown += part
        except OSError:  # the other end is closed
            pass
    os.close(own)
    return shown


def test_a_client_s_model_name_is_spelled_out(tmp_path: Path) -> None:
    record = {"schema": 2, "time_unix_s": 1.0, "endpoint": "chat"}
    refused = {"outcome": "refused", "status": 404, "reason": "model_not_found"}
    log = tmp_path / "requests.jsonl"
    hostile = "".join(HOSTILE.values())
    log.write_text(json.dumps({**record, **refused, "request_id": "r", "asked_model": hostile}))
    explained = shown_in_a_terminal("why", "r", "--log", str(log))
    assert f"asked {plain(hostile)} for".encode() in explained
    message = shown_in_a_terminal("why", hostile, "--log", str(log))  # a plain one
    spelled_out = plain(hostile).replace("\\r\\n", "\\r\r\n")
    assert f"no request with the id '{spelled_out}'".encode() in message
    for text in (explained, message):
        assert not {0x1B, 0x07, 0x9B} & set(text.replace(b"\x1b[1m", b"").replace(b"\x1b[0m", b""))


def test_a_log_line_is_one_line_without_controls(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("sluice.test").warning("model %s", HOSTILE["clipboard"] + HOSTILE["line"])
    assert caplog.messages == [
        r"model \x1b]52;c;cm0gLXJmIC8=\x07x\r" + "\n    The request was served"
    ]
