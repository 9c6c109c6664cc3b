"""Engines behind a DNS name: its A and AAAA records, or SRV records, which name the ports.

The answer is asked for again when its TTL is over. A name without records is an empty set: so
cluster DNS shows a service without ready pods. A server that fails keeps the last set.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from gateway.ports import DiscoveryFailure
from gateway.records.attempt import DiscoverySource, FoundEngine

MIN_TTL_S: Final = 1.0
MAX_TTL_S: Final = 60.0
EMPTY_TTL_S: Final = 5.0
"""For a name without records, whose TTL resolvers often do not pass on."""
LIFETIME_S: Final = 5.0
"""Time limit of one question, all servers and retries included."""

MAX_TARGETS: Final = 2_000
"""Hosts of SRV records."""
AT_ONCE: Final = 16
"""Hosts asked for side by side: one after another, slow answers would add up."""

Answer = tuple[list[Any], float]
"""Records and their TTL in seconds."""


class DnsDiscovery:
    """The Discovery of a DNS name."""

    def __init__(self, source: DiscoverySource, scheme: str) -> None:
        self._source = source
        self._scheme = scheme
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def sets(self) -> AsyncGenerator[tuple[FoundEngine, ...], None]:
        while True:
            found, ttl_s = await self._look_up()
            yield tuple(FoundEngine(urls=(url,)) for url in sorted(found))
            await asyncio.sleep(min(max(ttl_s, MIN_TTL_S), MAX_TTL_S))

    async def _look_up(self) -> tuple[set[str], float]:
        name = self._source.name
        if name.startswith("_"):
            records, ttl_s = await self._ask(name, "SRV")
            best = min((record.priority for record in records), default=0)
            targets = {
                (record.target.to_text(), str(record.port))  # absolute: no search list applies
                for record in records
                if record.priority == best
            }
        else:
            targets, ttl_s = {(name, self._source.port)}, MAX_TTL_S
        found: set[str] = set()
        if len(targets) > MAX_TARGETS:
            raise DiscoveryFailure(f"{name} names over {MAX_TARGETS} hosts")
        at_once = asyncio.Semaphore(AT_ONCE)

        async def looked_up(host: str) -> tuple[set[str], float]:
            """A host's addresses as URLs have them; IPv6 only for a host without IPv4."""
            async with at_once:
                four, four_ttl_s = await self._ask(host, "A")
                if four:
                    return {record.address for record in four}, four_ttl_s
                six, six_ttl_s = await self._ask(host, "AAAA")
                return {f"[{record.address}]" for record in six}, min(four_ttl_s, six_ttl_s)

        for (_, port), (addresses, host_ttl_s) in zip(
            targets, await asyncio.gather(*(looked_up(host) for host, _ in targets)), strict=True
        ):
            ttl_s = min(ttl_s, host_ttl_s)
            found |= {f"{self._scheme}://{address}:{port}" for address in addresses}
        return found, ttl_s

    async def _ask(self, name: str, kind: str) -> Answer:
        try:
            resolver = self._resolver = self._resolver or _resolver(self._source)
            answer = await resolver.resolve(name, kind, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return [], EMPTY_TTL_S
        except (dns.exception.DNSException, OSError) as error:
            self._resolver = None  # the system's servers may be other ones by now
            message = f"no answer for {name} {kind}: {type(error).__name__}"
            raise DiscoveryFailure(message) from error
        ttl_s = EMPTY_TTL_S if answer.rrset is None else float(answer.rrset.ttl)
        return list(answer), ttl_s


def _resolver(source: DiscoverySource) -> dns.asyncresolver.Resolver:
    resolver = dns.asyncresolver.Resolver(configure=source.server is None)
    if source.server is not None:
        resolver.nameservers = [source.server[0]]
        resolver.port = source.server[1]
    resolver.lifetime = LIFETIME_S
    return resolver
