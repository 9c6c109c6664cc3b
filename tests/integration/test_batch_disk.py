"""A gateway whose disk is full: batches wait, and live chat goes on."""

import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import openai
import pytest

from bench.common.fleet import Fleet
from tests.asking import entitlement, get, post, until
from tests.batching import (
    USAGE,
    assert_once,
    assert_posted,
    client_of,
    create,
    done,
    item,
    items,
    output,
    upload,
)

ITEMS = 300
MOUNT = 'mount -t tmpfs -o size=3m none "$0" && exec "$@"'
"""A file system of 3 MiB that no other process sees, and that goes with the gateway."""


class Disk:
    """Where the gateway keeps everything, as the test sees it."""

    def __init__(
        self, root: Path, fill: Callable[[], None], empty: Callable[[], None], *, is_full: bool
    ) -> None:
        self.root = root
        self.is_full = is_full
        """Whether the system says so of it once it is filled."""
        self.fill = fill
        self.empty = empty


def mounted(pid: int, path: Path) -> Disk:
    """A tmpfs of the process's own."""
    root = Path(f"/proc/{pid}/root{path}")
    filler = root / "filler"

    def fill() -> None:
        with filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                with pytest.raises(OSError, match="No space left on device"):
                    write_on(file, bytes(size))

    return Disk(root, fill, filler.unlink, is_full=True)


def write_on(file: FileIO, data: bytes) -> None:
    while True:
        file.write(data)


def limited(pid: int, path: Path) -> Disk:
    """A directory in which the process may write no file."""

    def limit(most_bytes: int) -> None:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, hard))

    return Disk(path, lambda: limit(0), lambda: limit(resource.RLIM_INFINITY), is_full=False)


@pytest.fixture(params=["mounted", "limited"])
def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Fleet, Disk]]:
    path = tmp_path / "disk"
    path.mkdir()
    namespace = ["unshare", "-Urm", "sh", "-c", MOUNT, str(path)]
    own = request.param == "mounted"
    if own:
        tried = subprocess.run([*namespace, "true"], check=False, capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    config = {
        "entitlements": [entitlement("live", "guaranteed", concurrency=8), entitlement("batch")],
        "state": {"url": f"sqlite:///{path}/sluice.db"},
        "batches": {"url": f"file://{path}/files"},
        "ledger": {"path": str(path / "ledger.db")},
    }
    with Fleet(short=1, long=0, short_slots=24, config=config, idle=True) as fleet:
        replica = fleet.replicas[0]
        if own:
            replica.command = [*namespace, *replica.command]
        fleet.start_replica(replica)
        fleet.wait_ready(replica)
        assert replica.process is not None
        yield fleet, (mounted if own else limited)(replica.process.pid, path)


def test_a_full_disk_stops_batches_alone_and_for_its_time(gateway: tuple[Fleet, Disk]) -> None:
    fleet, disk = gateway
    client = client_of(fleet.url, max_retries=0)
    batch = create(client, upload(client, items(ITEMS, tokens=400)).id).id
    until(lambda: done(client, batch) > 0)
    files, names = client.files.list().data, set((disk.root / "files").iterdir())
    disk.fill()
    before, asked, end_s = done(client, batch), 0, time.monotonic() + 3
    assert 0 < before < ITEMS
    while time.monotonic() < end_s:  # in which the next part is due
        assert post(fleet.url, "sk-live").status_code == 200
        asked += 1
        assert_refused(lambda: upload(client, item(0)), disk)
        assert_refused(lambda: create(client, files[0].id), disk)
        time.sleep(0.2)
    assert client.files.list().data == files
    assert {name for name in (disk.root / "files").iterdir() if name.is_file()} <= names
    assert (client.batches.retrieve(batch).status, done(client, batch)) == ("in_progress", before)
    disk.empty()
    assert_posted(assert_once(output(client, batch, ITEMS), ITEMS), fleet.url)
    until(lambda: get(fleet.url, "sk-live", USAGE).json()["total"]["requests"] == asked)
    assert upload(client, item(0)).status == "processed"


def assert_refused(call: Callable[[], object], disk: Disk) -> None:
    """In OpenAI's shape, with words; 503 where SQLite hears of a failure, not of a full disk."""
    with pytest.raises(openai.InternalServerError) as refused:
        call()
    full = refused.value.status_code, refused.value.code
    assert full in {(507, "storage_full"), (503, "state_unavailable")}
    assert full[0] == 507 or not disk.is_full
    assert re.search("has no room left|cannot be read or written now", refused.value.message)
