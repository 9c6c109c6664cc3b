"""Engines behind a DNS name: its A and AAAA records, or SRV records, which name the ports.

The answer is asked for again when its TTL is over. A name without records is an empty set: so
cluster DNS shows a service without ready pods. A server that fails keeps the last set.
"""

import asyncio
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from gateway.ports import DiscoveryFailure, Sets
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


async def sets_of_dns(source: DiscoverySource, scheme: str) -> Sets:
    """The engines behind a DNS name."""
    try:  # anew after each failure: the system's servers may be other ones by then
        resolver = _resolver(source)
    except (dns.exception.DNSException, OSError) as error:
        raise DiscoveryFailure(f"no DNS server: {type(error).__name__}") from error
    while True:
        urls, ttl_s = await _look_up(resolver, source, scheme)
        yield tuple(FoundEngine(urls=(url,)) for url in sorted(urls))
        await asyncio.sleep(min(max(ttl_s, MIN_TTL_S), MAX_TTL_S))


async def _look_up(
    resolver: dns.asyncresolver.Resolver, source: DiscoverySource, scheme: str
) -> tuple[set[str], float]:
    """The engines' URLs, and how long they hold, in seconds."""

    async def ask(name: str, kind: str) -> tuple[list[Any], float]:
        try:
            answer = await resolver.resolve(name, kind, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return [], EMPTY_TTL_S
        except (dns.exception.DNSException, OSError) as error:
            message = f"no answer for {name} {kind}: {type(error).__name__}"
            raise DiscoveryFailure(message) from error
        ttl_s = EMPTY_TTL_S if answer.rrset is None else float(answer.rrset.ttl)
        return list(answer), ttl_s

    at_once = asyncio.Semaphore(AT_ONCE)

    async def looked_up(host: str) -> tuple[set[str], float]:
        """A host's addresses as URLs have them; IPv6 only for a host without IPv4."""
        async with at_once:
            four, four_ttl_s = await ask(host, "A")
            if four:
                return {record.address for record in four}, four_ttl_s
            six, six_ttl_s = await ask(host, "AAAA")
            return {f"[{record.address}]" for record in six}, min(four_ttl_s, six_ttl_s)

    targets, ttl_s = {(source.name, source.port)}, MAX_TTL_S
    if source.name.startswith("_"):
        records, ttl_s = await ask(source.name, "SRV")
        best = min((record.priority for record in records), default=0)
        targets = {
            (record.target.to_text(), str(record.port))  # absolute: no search list applies
            for record in records
            if record.priority == best
        }
    if len(targets) > MAX_TARGETS:
        raise DiscoveryFailure(f"{source.name} names over {MAX_TARGETS} hosts")
    urls: set[str] = set()
    answers = await asyncio.gather(*(looked_up(host) for host, _ in targets))
    for (_, port), (addresses, host_ttl_s) in zip(targets, answers, strict=True):
        ttl_s = min(ttl_s, host_ttl_s)
        urls |= {f"{scheme}://{address}:{port}" for address in addresses}
    return urls, ttl_s


def _resolver(source: DiscoverySource) -> dns.asyncresolver.Resolver:
    resolver = dns.asyncresolver.Resolver(configure=source.server is None)
    if source.server is not None:
        resolver.nameservers = [source.server[0]]
        resolver.port = source.server[1]
    resolver.lifetime = LIFETIME_S
    return resolver
