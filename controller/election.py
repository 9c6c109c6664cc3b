"""Which of several controllers acts: the holder of a Lease object.

A holder writes the time into the Lease every few seconds. A candidate takes the Lease once it has
seen no such write for the Lease's duration, by its own clock: clocks of machines are never
compared. All writes name the version that they are based on, so that of two candidates one wins.

- A holder that could not renew for `RENEWAL_LIMIT_S`, counted from before the last renewal was
  sent, stops its work. Others see that renewal later than it was sent and wait for `DURATION_S`,
  which is longer, so that the work has ended before theirs begins.
- The epoch is the Lease's `leaseTransitions`. It rises with each acquisition, also by the former
  holder, and is kept in the Lease when nobody holds it. A store that refuses lower epochs thus
  refuses what a former holder still sends.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, NoReturn

from controller.kube import ApiFailure, Conflict, KubeApi, NotFound
from controller.records import LEASES, Call, Object

DURATION_S: Final = 15
RENEWAL_LIMIT_S: Final = 10.0
RENEW_EVERY_S: Final = 2.0
_log = logging.getLogger("sluice.controller")


def micro_time(unix_s: float) -> str:
    """A time as Leases and events have it."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Superseded(Exception):
    """The work found that a controller of a greater epoch has written."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"a controller of epoch {epoch} has written")
        self.epoch = epoch


class Election:
    """A candidate. Times are of the event loop's clock, but for those written into the Lease."""

    def __init__(
        self, api: KubeApi, *, name: str, identity: str, unix_s: Callable[[], float]
    ) -> None:
        """`name` of the Lease; `identity` differs between all processes that ever ran."""
        self._api = api
        self._name = name
        self._identity = identity
        self._unix_s = unix_s
        self._version = ""
        """Of the Lease, as last written by this holder."""
        self._renewed_s = 0.0
        """When the last renewal that succeeded was sent."""
        self._floor = 0
        """The greatest epoch known from elsewhere; a Lease may have been deleted meanwhile."""
        self.epoch: int | None = None
        """While it holds the Lease."""

    @property
    def leads(self) -> bool:
        """Whether the work may still act."""
        now_s = asyncio.get_running_loop().time()
        return self.epoch is not None and now_s < self._renewed_s + RENEWAL_LIMIT_S

    async def run(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> NoReturn:
        """Be a candidate for ever; `work` runs with the epoch while the Lease is held.

        It is cancelled when the Lease is lost. When this is cancelled, the work ends first, and
        then the Lease is given back. Failures of the work are raised, except Superseded.
        """
        while True:
            self.epoch = await self._acquired()
            _log.info("leading, epoch %d", self.epoch)
            working = asyncio.get_running_loop().create_task(work(self.epoch))
            try:
                await self._hold(working)
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                epoch, self.epoch = self.epoch, None
                _log.info("not leading any more, epoch %d has ended", epoch)
                await self._give_back()
            if not working.cancelled() and (error := working.exception()) is not None:
                if not isinstance(error, Superseded):
                    raise error
                _log.warning("%s", error)
                self._floor = max(self._floor, error.epoch)
            await _pause()

    async def _acquired(self) -> int:
        """Wait until this candidate holds the Lease; returns the epoch."""
        loop = asyncio.get_running_loop()
        seen: Mapping[str, Any] | None = None
        seen_s, failing = 0.0, False
        while True:
            try:
                lease = await self._looked_up()
                spec = {} if lease is None else lease.get("spec") or {}
                if seen is None or spec != seen:
                    seen, seen_s = spec, loop.time()
                holder = spec.get("holderIdentity") or ""
                patience_s = float(spec.get("leaseDurationSeconds") or DURATION_S)
                if holder in ("", self._identity) or loop.time() - seen_s >= patience_s:
                    epoch = max(int(spec.get("leaseTransitions") or 0), self._floor) + 1
                    await self._take(lease, epoch)
                    return epoch
                failing = False
            except Conflict:  # another one was faster
                pass
            except ApiFailure as error:
                if not failing:
                    _log.warning("the Lease %s cannot be taken: %s", self._name, error)
                failing = True
            await _pause()

    async def _looked_up(self) -> Object | None:
        try:
            return await self._api.get(LEASES, self._name)
        except NotFound:
            return None

    async def _write(
        self, body: Mapping[str, Any], *, verb: Literal["create", "patch"] = "patch"
    ) -> Object:
        return await self._api.make(Call(verb=verb, resource=LEASES, name=self._name, body=body))

    async def _take(self, lease: Object | None, epoch: int) -> None:
        now = micro_time(self._unix_s())
        body: dict[str, Any] = {
            "metadata": {"name": self._name},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": DURATION_S,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": epoch,
            },
        }
        began_s = asyncio.get_running_loop().time()
        if lease is None:
            body |= {"apiVersion": LEASES.api_version, "kind": LEASES.kind}
        else:
            body["metadata"] = {"resourceVersion": lease["metadata"]["resourceVersion"]}
        taken = await self._write(body, verb="create" if lease is None else "patch")
        self._renewed_s, self._version = began_s, taken["metadata"]["resourceVersion"]

    async def _hold(self, working: asyncio.Task[None]) -> None:
        """Renew until the work ends or the Lease is lost."""
        while not working.done():
            left_s = self._renewed_s + RENEWAL_LIMIT_S - asyncio.get_running_loop().time()
            pause_s = RENEW_EVERY_S * random.uniform(0.8, 1.0)
            await asyncio.wait({working}, timeout=max(0.0, min(pause_s, left_s)))
            try:
                async with asyncio.timeout_at(self._renewed_s + RENEWAL_LIMIT_S):
                    if not working.done() and not await self._renewed():
                        _log.warning("the Lease %s was lost", self._name)
                        return
            except ApiFailure as error:
                _log.debug("the Lease %s was not renewed: %s", self._name, error)
            except TimeoutError:
                pass
            if not self.leads:
                _log.warning("the Lease %s could not be renewed in time", self._name)
                return

    async def _renewed(self) -> bool:
        """Renew once; False if another one holds the Lease. Raises ApiFailure."""
        began_s = asyncio.get_running_loop().time()
        body: dict[str, Any] = {
            "metadata": {"resourceVersion": self._version},
            "spec": {"renewTime": micro_time(self._unix_s())},
        }
        try:
            renewed = await self._write(body)
        except NotFound:
            return False
        except Conflict:
            # Somebody labelled it, or an earlier renewal arrived whose answer did not.
            lease = await self._looked_up()
            spec = {} if lease is None else lease.get("spec") or {}
            if lease is None or spec.get("holderIdentity") != self._identity:
                return False
            if spec.get("leaseTransitions") != self.epoch:
                return False
            self._version = lease["metadata"]["resourceVersion"]
            return True  # the next renewal counts from this version
        self._renewed_s, self._version = began_s, renewed["metadata"]["resourceVersion"]
        return True

    async def _give_back(self) -> None:
        """Let another one take the Lease at once, if it is still this one's."""
        body = {
            "metadata": {"resourceVersion": self._version},
            "spec": {"holderIdentity": "", "renewTime": micro_time(self._unix_s())},
        }
        try:
            async with asyncio.timeout(RENEW_EVERY_S):
                await self._write(body)
        except (ApiFailure, TimeoutError) as error:
            _log.debug("the Lease %s was not given back: %s", self._name, error)


async def _pause() -> None:
    await asyncio.sleep(RENEW_EVERY_S * random.uniform(0.8, 1.2))
