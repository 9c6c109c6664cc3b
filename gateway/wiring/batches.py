"""Builds what serves and runs files and batches, where the file has a section `batches`."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.background_task import BackgroundTasks, PeriodicTask
from gateway.batches.batch_store import BatchStore
from gateway.batches.contents import Contents
from gateway.batches.forecaster import Forecaster
from gateway.batches.promise import urgent
from gateway.batches.run import Around
from gateway.batches.runner import Runner
from gateway.batches.service import TEND_S, BatchService, Bounds
from gateway.errors import StateFailure
from gateway.http.problems import error_body
from gateway.metrics import Metrics
from gateway.pipeline.pipeline import Pipeline
from gateway.records.batch import Batch, Promise, StoredFile
from gateway.settings import Config
from gateway.store.backends import backend_of, open_documents
from gateway.tenancy.keyring import Keyring
from gateway.usage.usage_export import UsageExport
from gateway.wiring.models import Served

_AGAIN_S: Final = 5.0
_log = logging.getLogger("sluice.batches")


class Batches:
    """The store of files and batches, the service of their routes, and what runs them.

    A RecordSink, too: it hears what was decided of items.
    """

    def __init__(
        self,
        config: Config,
        served: Served,
        *,
        pipeline: Pipeline,
        keyring: Keyring,
        export: UsageExport | None,
        metrics: Metrics,
        new_id: Callable[[], str],
        draining: Callable[[], bool],
    ) -> None:
        """Nothing is opened before the first call; call it only with a section `batches`.

        While `draining` no item begins.
        """
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
        self._models = served.by_name
        self.forecaster = Forecaster(
            models=served.by_name,
            store=self.store,
            running=lambda name: self.runner.running(name),  # noqa: PLW0108 - made below
            clock=time.monotonic,
            wall_clock=time.time,
            request_log=config.request_log.path,
        )
        around = Around(
            pipeline=pipeline,
            keyring=keyring,
            store=self.store,
            export=export,
            metrics=metrics,
            error_body=error_body,
            new_id=new_id,
            clock=time.monotonic,
            wall_clock=time.time,
            owner=secrets.token_hex(8),
            currency=config.currency,
            urgent=urgent,
            forecast=self._forecast,
            learn=self._learn,
        )
        self.runner = Runner(around, served.by_name, served.splits, draining)
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
            promise=self._promise,
            poke=self.runner.poke,
        )
        self._tending = PeriodicTask(self.service.tend, TEND_S)
        self._beginning = BackgroundTasks()

    def note(self, record: msgspec.Struct) -> None:
        """A RecordSink."""
        self.runner.note(record)
        self.forecaster(record)

    async def start(self) -> None:
        """Start what runs batches, forecasts, and removes expired files."""
        self._tending.start()
        self._beginning.start(self._observe())
        self.runner.start()

    async def close(self) -> None:
        """Commit what is done, stop, and close the store. Idempotent."""
        await self.runner.close()
        await self._beginning.close()
        await self.forecaster.close()
        await self._tending.close()
        await self.store.close()

    async def _observe(self) -> None:
        """Begin to observe demand; before the state can be read nothing is known of it."""
        while True:
            try:
                await self.forecaster.start()
            except StateFailure as error:
                _log.error("batches are forecast without what was known before: %s", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    # A name of several models, a pattern or an adapter has no forecast.

    async def _promise(self, batch: Batch, file: StoredFile) -> Batch:
        known = batch.model in self._models
        return await self.forecaster.promise(batch, file) if known else batch

    async def _forecast(self, batch: Batch) -> Promise | None:
        return await self.forecaster.forecast(batch) if batch.model in self._models else None

    async def _learn(self, batch: Batch) -> None:
        if batch.model in self._models:
            await self.forecaster.learn(batch)
