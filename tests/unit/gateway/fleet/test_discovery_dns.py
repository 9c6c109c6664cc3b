"""DNS names: TTLs are honoured, SRV records choose, IPv6 is for hosts without IPv4."""

import asyncio
from contextlib import aclosing

import pytest
from dns.asyncresolver import Resolver
from dns.name import from_text

from gateway.fleet import discovery_dns as dns
from gateway.fleet.discovery_dns import sets_of_dns
from gateway.ports import DiscoveryFailure, Sets
from gateway.records.attempt import DiscoverySource
from gateway.settings.worker import source_of
from tests.name_server import NameServer


def discovery(server: NameServer, name: str, scheme: str = "http") -> Sets:
    return sets_of_dns(source_of(f"dns://{name}?server=127.0.0.1:{server.port}"), scheme)


async def first(named: Sets) -> list[str]:
    async with asyncio.timeout(10), aclosing(named) as sets:
        return [url for engine in await anext(sets) for url in engine.urls]


async def test_the_best_srv_records_name_hosts_and_ports() -> None:
    async with NameServer().serving() as server:
        server.records = {
            ("_http._tcp.e.test", "SRV"): ["1 0 80 a.test.", "1 0 81 a.test.", "2 0 82 a.test."],
            ("a.test", "A"): ["10.0.0.1"],
        }
        found = await first(discovery(server, "_http._tcp.e.test", "https"))
        assert found == ["https://10.0.0.1:80", "https://10.0.0.1:81"]


async def test_ipv6_is_taken_where_there_is_no_ipv4() -> None:
    async with NameServer().serving() as server:
        server.records = {("six.test", "AAAA"): ["fd00::1"], ("both.test", "AAAA"): ["fd00::2"]}
        server.records["both.test", "A"] = ["10.0.0.2"]
        assert await first(discovery(server, "six.test:80")) == ["http://[fd00::1]:80"]
        assert await first(discovery(server, "both.test:80")) == ["http://10.0.0.2:80"]
        assert ("both.test", "AAAA") not in server.asked, "its failure would hide the A record"


async def test_hosts_of_srv_records_are_no_names_to_search_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = dns._resolver

    def resolver(source: DiscoverySource) -> Resolver:
        found = made(source)
        found.search = [from_text("cluster.test")]
        return found

    monkeypatch.setattr(dns, "_resolver", resolver)
    async with NameServer().serving() as server:
        server.records = {("_http._tcp.e.test", "SRV"): ["1 0 80 gone.test."]}
        server.records["gone.test.cluster.test", "A"] = ["10.0.0.1"]
        assert await first(discovery(server, "_http._tcp.e.test")) == []


@pytest.mark.parametrize(("ttl_s", "questions"), [(0, 4), (1, 1), (600, 1)])
async def test_a_name_is_asked_for_again_when_its_ttl_is_over(
    ttl_s: int, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns, "MIN_TTL_S", 0.01)
    async with NameServer().serving() as server:
        server.ttl_s = ttl_s
        server.records = {("e.test", "A"): ["10.0.0.1"]}

        async def follow() -> None:
            async with aclosing(discovery(server, "e.test:80")) as sets:
                async for _ in sets:
                    pass

        following = asyncio.ensure_future(follow())
        await asyncio.sleep(0.5)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        asked = server.asked.count(("e.test", "A"))
        assert asked >= questions if ttl_s == 0 else asked == questions


async def test_a_server_that_fails_is_a_failure_and_a_name_without_records_is_not() -> None:
    async with NameServer().serving() as server:
        assert await first(discovery(server, "none.test:80")) == []
        server.away = True
        with pytest.raises(DiscoveryFailure, match=r"no answer for none\.test"):
            await first(discovery(server, "none.test:80"))
