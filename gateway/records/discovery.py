"""Where a pool's engines are found at run time, and an engine that was found."""

from typing import Literal

from gateway.records.record import Record


class DiscoverySource(Record, frozen=True, kw_only=True):
    """A place that names engines: a checked discovery URL."""

    url: str
    """As the configuration has it; shown in logs and metrics."""
    kind: Literal["dns", "file", "service", "pods", "inferencepool"]
    name: str = ""
    """Host name, path of the file, or name of the Kubernetes object."""
    namespace: str = ""
    """Of Kubernetes; "" for the gateway's own."""
    port: str = ""
    """Number or name; "" where the source says it itself."""
    selector: str = ""
    """Label selector of pods."""
    server: tuple[str, int] | None = None
    """DNS server to ask; None for the system's."""


class ClusterAccess(Record, frozen=True, kw_only=True):
    """How the Kubernetes API is reached."""

    url: str
    """Base URL without a trailing slash."""
    namespace: str
    """Of objects that are named without one."""
    token_file: str | None = None
    """The service account's token, which changes while the gateway runs; None sends none."""
    ca_file: str | None = None


class FoundEngine(Record, frozen=True, kw_only=True):
    """An engine that a source named."""

    urls: tuple[str, ...]
    """Base URLs: one, or one for each rank where ranks listen on ports of their own."""
    model: str | None = None
    """Model name that it serves; None as configured."""
    ranks: int = 0
    """Data-parallel ranks behind its one URL; 0 as configured."""
