"""The scheme of a state URL chooses the backend of all that is kept."""

import pytest

from gateway.settings.server import StateConfig, StateUrl
from gateway.store.backends import backend_of, open_directory, open_notes, sqlite_path

REDIS = (
    "redis://:secret@h:1/0",
    "rediss://h:1/0",
    "redis+cluster://h:1,h:2",
    "redis+sentinel://h:1,h:2/main/0",
)


@pytest.mark.parametrize("url", REDIS)
def test_every_url_of_redis_that_settings_accept_is_shared_and_opens_redis(url: str) -> None:
    assert StateConfig(url=StateUrl(url)).shared
    assert backend_of(url) == "redis"
    assert type(open_directory(url)).__name__ == "RedisDirectory"
    assert type(open_notes(url, "r")).__name__ == "RedisExchange"


@pytest.mark.parametrize("url", ["memory://", "sqlite:///a.db"])
def test_memory_and_a_file_are_one_gateway_s(url: str) -> None:
    assert not StateConfig(url=StateUrl(url)).shared
    assert backend_of(url) == url.partition(":")[0]


def test_a_file_is_relative_with_three_slashes_and_absolute_with_four() -> None:
    assert str(sqlite_path("sqlite:///a/b.db")) == "a/b.db"
    assert str(sqlite_path("sqlite:////a/b.db")) == "/a/b.db"
