"""Builds what serves and runs files and batches, where the file has a section `batches`."""

import logging
import secrets
import time
from collections.abc import Callable

import msgspec

from gateway.background_task import BackgroundTasks, PeriodicTask
from gateway.batches.contents import Contents
from gateway.batches.forecaster import Forecaster
from gateway.batches.intake import Bounds
from gateway.batches.rights import BatchModels
from gateway.batches.run import Around
from gateway.batches.runner import Runner
from gateway.batches.service import TEND_S, BatchService
from gateway.http.problems import error_body
from gateway.metrics import Metrics
from gateway.pipeline.pipeline import Pipeline
from gateway.settings import Config
from gateway.store.backends import backend_of, open_documents
from gateway.tenancy.keyring import Keyring
from gateway.usage.usage_export import UsageExport
from gateway.wiring.models import Served

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
        if backend_of(config.state.address) == "memory":
            _log.warning("batches end with this process: set state.url to sqlite:///PATH or Redis")
        self._store = open_documents(config.state.address)
        self._contents = Contents(section.url)
        # Windows and expiries are times that replicas compare.
        wall_clock = self._store.unix_s
        models = BatchModels(served.by_name, served.splits)
        self._forecaster = Forecaster(
            models=models,
            store=self._store,
            running=lambda name: self.runner.running(name),  # noqa: PLW0108 - made below
            clock=time.monotonic,
            wall_clock=wall_clock,
            request_log=config.request_log.path,
        )
        around = Around(
            pipeline=pipeline,
            keyring=keyring,
            models=models,
            store=self._store,
            contents=self._contents,
            export=export,
            metrics=metrics,
            error_body=error_body,
            new_id=new_id,
            clock=time.monotonic,
            wall_clock=wall_clock,
            owner=secrets.token_hex(8),
            currency=config.currency,
            forecaster=self._forecaster,
        )
        self.runner = Runner(around, draining)
        self.service = BatchService(
            self._store,
            self._contents,
            Bounds(
                max_file_bytes=section.max_file_bytes,
                max_line_bytes=config.server.max_body_bytes,
                max_files=section.max_files,
                max_open=section.max_open,
                keep_s=section.keep_days * 86_400,
            ),
            models=models,
            wall_clock=wall_clock,
            promise=self._forecaster.promise,
            poke=self.runner.poke,
        )
        self._tending = PeriodicTask(self.service.tend, TEND_S)
        self._observing = BackgroundTasks()

    def note(self, record: msgspec.Struct) -> None:
        """A RecordSink."""
        self.runner.note(record)
        self._forecaster(record)

    async def start(self) -> None:
        """Start what runs batches, forecasts, and removes expired files."""
        self._tending.start()
        self._observing.start(self._forecaster.run())
        self.runner.start()

    async def close(self) -> None:
        """Commit what is done, stop, and close the store. Idempotent."""
        await self.runner.close()
        await self._observing.close()
        await self._tending.close()
        await self._store.close()
        self._contents.close()
