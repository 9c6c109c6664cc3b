"""The state backends, chosen by the scheme of `state.url`."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gateway.ports import Directory, Documents
from gateway.replicas.bus import NoteStore
from gateway.store.sqlite_directory import SqliteDirectory
from gateway.store.sqlite_documents import SqliteDocuments
from gateway.store.sqlite_file import SqliteNotes

if TYPE_CHECKING:
    from gateway.store.redis.cluster import ClusterStore

Backend = Literal["memory", "sqlite", "redis"]


def backend_of(url: str) -> Backend:
    """The backend of a validated `state.url`."""
    scheme = url.partition("://")[0]
    return "memory" if scheme == "memory" else "sqlite" if scheme == "sqlite" else "redis"


def sqlite_path(url: str) -> Path:
    """The file of `sqlite:///PATH`."""
    return Path(url.partition("://")[2].removeprefix("/"))


def open_directory(url: str) -> Directory:
    """The directory of tenancy; it does not connect yet."""
    match backend_of(url):
        case "memory":
            return SqliteDirectory(None)
        case "sqlite":
            return SqliteDirectory(sqlite_path(url))
        case "redis":
            # An optional extra: only a gateway that uses Redis needs its client.
            module = importlib.import_module("gateway.store.redis.directory")
            directory: Directory = module.RedisDirectory(url)
            return directory


def open_documents(url: str) -> Documents:
    """The documents of batches; it does not connect yet."""
    match backend_of(url):
        case "memory":
            return SqliteDocuments(None)
        case "sqlite":
            return SqliteDocuments(sqlite_path(url))
        case "redis":
            module = importlib.import_module("gateway.store.redis.documents")
            documents: Documents = module.RedisDocuments(url)
            return documents


def open_cluster(url: str) -> "ClusterStore":
    """What a cluster's controller publishes in Redis; it does not connect yet."""
    store: ClusterStore = importlib.import_module("gateway.store.redis.cluster").ClusterStore(url)
    return store


def open_notes(url: str, replica: str) -> NoteStore | None:
    """The store of the bus, which does not connect yet; None without a bus."""
    match backend_of(url):
        case "memory":
            return None
        case "sqlite":
            return SqliteNotes(sqlite_path(url))
        case "redis":
            module = importlib.import_module("gateway.store.redis.exchange")
            notes: NoteStore = module.RedisExchange(url, replica)
            return notes
