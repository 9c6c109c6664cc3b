"""Builds what serves files and batches, where the file has a section `batches`."""

import logging
import time

from gateway.background_task import PeriodicTask
from gateway.batches.batch_store import BatchStore
from gateway.batches.contents import Contents
from gateway.batches.service import TEND_S, BatchService, Bounds
from gateway.settings import Config
from gateway.store.backends import backend_of, open_documents
from gateway.wiring.models import Served

_log = logging.getLogger("sluice.batches")


class Batches:
    """The store of files and batches, and the service of their routes."""

    def __init__(self, config: Config, served: Served) -> None:
        """Nothing is opened before the first call; call it only with a section `batches`."""
        section = config.batches
        assert section is not None  # noqa: S101 - as called
        options: dict[str, str] = {}
        if section.endpoint is not None:
            options["endpoint_url"] = section.endpoint
        if section.access_key is not None and section.secret_key is not None:
            options["key"] = section.access_key.get_secret_value()
            options["secret"] = section.secret_key.get_secret_value()
        if backend_of(config.state.address) == "memory":
            _log.warning("batches end with this process: set state.url to sqlite:///PATH or Redis")
        contents = Contents(section.url, options)
        self.store = BatchStore(open_documents(config.state.address), contents)
        self.service = BatchService(
            self.store,
            Bounds(
                max_file_bytes=section.max_file_bytes,
                max_line_bytes=config.server.max_body_bytes,
                max_files=section.max_files,
                max_open=section.max_open,
                keep_s=section.keep_days * 86_400,
            ),
            models=served.by_name,
            splits=served.splits,
            wall_clock=time.time,
        )
        self._tending = PeriodicTask(self.service.tend, TEND_S)

    async def start(self) -> None:
        """Start what removes expired files."""
        self._tending.start()

    async def close(self) -> None:
        """Stop, and close the store. Idempotent."""
        await self._tending.close()
        await self.store.close()
