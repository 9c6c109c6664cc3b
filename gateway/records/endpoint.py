"""The data plane's routes."""

from dataclasses import dataclass
from enum import StrEnum


class Dialect(StrEnum):
    """The API whose error and stream format an endpoint uses."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One data-plane route.

    `generates` is false if no output tokens are counted. `computes` is false if the model does not
    read the prompt either; the request is then charged no tokens. `multipart` is true if the body
    is a form with a file. `body` names the endpoint that has bodies of the same shape; "" for none.
    Engines are asked at `path`; clients may also use the paths in `also`.
    """

    name: str
    path: str
    also: tuple[str, ...] = ()
    body: str = ""
    dialect: Dialect = Dialect.OPENAI
    generates: bool = True
    computes: bool = True
    multipart: bool = False


CHAT = Endpoint(name="chat", path="/v1/chat/completions")
COMPLETIONS = Endpoint(name="completions", path="/v1/completions")
EMBEDDINGS = Endpoint(name="embeddings", path="/v1/embeddings", generates=False)
RESPONSES = Endpoint(name="responses", path="/v1/responses")
MESSAGES = Endpoint(name="messages", path="/v1/messages", dialect=Dialect.ANTHROPIC)
COUNT_TOKENS = Endpoint(
    name="count_tokens",
    path="/v1/messages/count_tokens",
    dialect=Dialect.ANTHROPIC,
    generates=False,
    computes=False,
)
TOKENIZE = Endpoint(name="tokenize", path="/tokenize", generates=False, computes=False)
DETOKENIZE = Endpoint(name="detokenize", path="/detokenize", generates=False, computes=False)
RERANK = Endpoint(name="rerank", path="/v1/rerank", also=("/v2/rerank",), generates=False)
SCORE = Endpoint(name="score", path="/v1/score", generates=False)
COHERE_EMBED = Endpoint(name="cohere_embed", path="/v2/embed", generates=False)
CLASSIFY = Endpoint(name="classify", path="/classify", body="embeddings", generates=False)
POOLING = Endpoint(name="pooling", path="/pooling", body="embeddings", generates=False)
SPEECH = Endpoint(name="speech", path="/v1/audio/speech", body="embeddings", generates=False)
TRANSCRIPTIONS = Endpoint(
    name="transcriptions", path="/v1/audio/transcriptions", generates=False, multipart=True
)
TRANSLATIONS = Endpoint(
    name="translations", path="/v1/audio/translations", generates=False, multipart=True
)
ENDPOINTS: dict[str, Endpoint] = {
    e.path: e
    for e in (
        *(CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE),
        *(DETOKENIZE, RERANK, SCORE, COHERE_EMBED, CLASSIFY, POOLING),
        *(SPEECH, TRANSCRIPTIONS, TRANSLATIONS),
    )
}
_BARE = {p.removeprefix("/v1"): e for e in ENDPOINTS.values() for p in (e.path, *e.also)}
ROUTES: dict[str, Endpoint] = {
    path: e for bare, e in _BARE.items() for path in (bare, f"/v1{bare}")
}
"""Endpoints by every accepted path; base URLs of clients end in /v1 or not."""


def matches(pattern: str, name: str) -> bool:
    """Whether a name is of a pattern, which may be a name itself; as long as the two at most."""
    first, *inner = pattern.split("*")
    if not inner:
        return name == pattern
    last = inner.pop()
    at, end = len(first), len(name) - len(last)
    if end < at or not (name.startswith(first) and name.endswith(last)):
        return False
    for part in inner:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True
