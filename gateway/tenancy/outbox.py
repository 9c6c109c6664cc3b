"""The outbox of entitlement changes for the lease store: sent in slices, retried on failure.

An entitlement to remove that has requests in flight is suspended first, and removed when they
have ended.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Mapping
from typing import Final

import msgspec

from gateway.ports import TokenPools
from gateway.records.entitlement import Entitlement
from gateway.tenancy.rights import EntitlementInForce

SLICE: Final = 50
"""Entitlements sent between two pauses."""

_log = logging.getLogger("sluice.tenancy")


class EntitlementOutbox:
    """Entitlements whose definition or removal the store has not taken yet."""

    def __init__(
        self, store: TokenPools, managed: Container[str], changed: Callable[[str], None]
    ) -> None:
        """`changed` is called with each model whose entitlements changed in the store."""
        self._store = store
        self._managed = managed
        self._changed = changed
        self._due: dict[tuple[str, str], Entitlement] = {}
        """(model, name) -> its last terms."""
        self._failed = False

    def add(self, terms: Entitlement) -> None:
        """Queue an entitlement: to be defined if it is in force, otherwise removed."""
        if terms.model in self._managed:
            self._due[terms.model, terms.name] = terms

    async def settle(self, entries: Mapping[str, EntitlementInForce]) -> None:
        """Send all queued entitlements; those that fail or have requests in flight stay queued."""
        touched: dict[str, None] = {}
        todo = list(self._due)
        for start in range(0, len(todo), SLICE):
            keys = todo[start : start + SLICE]
            found = await asyncio.gather(
                *(self._send(key, entries.get(key[1])) for key in keys), return_exceptions=True
            )
            for (model, name), result in zip(keys, found, strict=True):
                if result is True:
                    del self._due[model, name]
                    touched[model] = None
                elif isinstance(result, BaseException):
                    self._note_failure(result)
            if any(isinstance(result, BaseException) for result in found):
                break
            self._failed = False
            await asyncio.sleep(0)
        for model in touched:
            self._changed(model)

    async def _send(self, key: tuple[str, str], entry: EntitlementInForce | None) -> bool:
        """Send one entitlement; False if its removal must wait for requests in flight."""
        model, name = key
        if model not in self._managed:  # any more: its token pool is gone
            return True
        if entry is not None and entry.terms.model == model:
            await self._store.define(entry.terms)
            return True
        if await self._store.remove(model, name):
            return True
        last = self._due[key]
        if not last.suspended:
            self._due[key] = msgspec.structs.replace(last, suspended=True)
            await self._store.define(self._due[key])
        return False

    def _note_failure(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            raise error
        if not self._failed:
            self._failed = True
            _log.error("the store did not take an entitlement, trying again", exc_info=error)
