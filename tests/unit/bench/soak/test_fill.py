"""What the soak fills beforehand reaches every bound that it is for."""

from hashlib import sha256
from pathlib import Path

from bench.common.tools import MARK, everything
from bench.soak.gateway import PREFIXES
from bench.soak.visits import (
    BULK_REQUESTS,
    CHAT,
    CONVERSATIONS,
    LONG_PROMPTS,
    LONG_TEXT_BYTES,
    RESPONSES,
    bulk_body,
    visits,
)
from gateway.payload.members import by_name
from gateway.routing.routing import MAX_RESPONSES, RETAINED, Conversations
from gateway.scheduling.prefix_index import points_of
from gateway.settings import load
from gateway.settings.model import SchedulingConfig


def digests(endpoint: str, body: bytes) -> set[int]:
    return {digest for _, digest in points_of(endpoint, by_name(body), len(body))}


def test_the_bulk_fills_the_index_decisions_and_conversations(tmp_path: Path) -> None:
    texts = [bulk_body(tmp_path, part).read_bytes() for part in (0, 0, 1)]
    bodies = [
        text.replace(MARK.encode(), b"%08d" % number)
        for text, number in zip(texts, (0, 1, 0), strict=True)
    ]
    points = [digests("chat", body) for body in bodies]
    assert not points[0] & points[1]
    assert not points[0] & points[2], "another part begins to count anew"
    scheduling = SchedulingConfig()
    assert BULK_REQUESTS * len(points[0]) > scheduling.prefix_entries
    assert BULK_REQUESTS > RETAINED
    known = Conversations()
    for body in bodies:
        known.remember("bench", points_of("chat", by_name(body), len(body)))
    assert len(known) == len(bodies)
    file = everything(tmp_path, 1234, ["http://127.0.0.1:1", "http://127.0.0.1:9"])
    assert load(file).decisions_kept < BULK_REQUESTS


def test_visits_fill_conversations_locations_and_the_smaller_indexes() -> None:
    known, short, long_ = Conversations(), set[int](), set[int]()
    paths, bodies = [], set[bytes]()
    for visit in visits():
        endpoint = "responses" if visit.path == RESPONSES else "chat"
        known.remember("visitor", points_of(endpoint, by_name(visit.body), len(visit.body)))
        paths.append(visit.path)
        bodies.add(sha256(visit.body).digest())
        found = digests(endpoint, visit.body)
        (long_ if len(visit.body) > LONG_TEXT_BYTES else short).update(found)
    assert RETAINED // 2 <= len(known) <= RETAINED < CONVERSATIONS, "some have been forgotten"
    assert paths.count(RESPONSES) > MAX_RESPONSES
    assert paths.count(CHAT) + paths.count(RESPONSES) == len(bodies)
    assert len(paths) == CONVERSATIONS + LONG_PROMPTS
    assert min(len(short), len(long_)) > PREFIXES
