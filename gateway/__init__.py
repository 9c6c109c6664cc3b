"""Sluice's gateway: the request path from an OpenAI client to an LLM engine."""

import logging

from gateway.records.record import plain


class PlainLogRecord(logging.LogRecord):
    """A log line whose message steers no terminal and looks like no second line."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        """The message; its further lines are indented."""
        return "\n    ".join(map(plain, super().getMessage().split("\n")))


logging.setLogRecordFactory(PlainLogRecord)  # of every process: no log line is written otherwise
