"""A DNS server on this host for tests, by dnspython's messages over UDP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """Records by (name, type); what has none is NXDOMAIN."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl_s = 0
        self.away = False
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["NameServer"]:
        """Serve on a free port during the block."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]
        try:
            yield self
        finally:
            transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """See asyncio.DatagramProtocol."""
        asked = dns.message.from_wire(data)
        question = asked.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        answer = dns.message.make_response(asked)
        answer.flags |= dns.flags.RA
        values = self.records.get((name, kind), [])
        if self.away:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif values:
            rrset = dns.rrset.from_text(question.name, self.ttl_s, "IN", kind, *values)
            answer.answer.append(rrset)
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        if self._transport is not None:
            self._transport.sendto(answer.to_wire(), addr)
