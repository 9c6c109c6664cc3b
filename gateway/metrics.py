"""The gateway's metrics: plain numbers by label values, rendered only when scraped.

Counting on the request path is a dict or list update, without locks (there is one event loop)
or label objects. A counter holds at most `MAX_SERIES` series, because clients can cause new
ones; it counts the rest under "other". A histogram drops values of further series.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import Any

MAX_SERIES = 2000
NANO = 1e9


class Counter:
    """A family of monotonic counts by label values."""

    __slots__ = ("help", "labels", "name", "unit", "values")

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...] = (), unit: float = 1.0
    ) -> None:
        """`unit`: what is counted for each 1 that the page shows, so that small parts add up."""
        self.unit = unit
        self.name = name
        self.help = text
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, by: float = 1) -> None:
        """Add `by` to a series; `labels` in the family's order."""
        values = self.values
        held = values.get(labels)
        if held is None:
            if len(values) >= MAX_SERIES:
                labels = ("other",) * len(self.labels)
            held = values.get(labels, 0)
        values[labels] = held + by


class Histogram:
    """A family of cumulative histograms by label values."""

    __slots__ = ("bounds", "help", "labels", "name", "series")

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> None:
        self.name = name
        self.help = text
        self.labels = labels
        self.bounds = bounds
        self.series: dict[tuple[str, ...], list[float]] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Add one value; `labels` in the family's order."""
        row = self.series.get(labels)
        if row is None:
            if len(self.series) >= MAX_SERIES:
                return
            row = self.series[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value


SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TENANT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Coarse: every tenant has a series of each."""
FAST_SECONDS = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0,
)  # fmt: skip
SHARES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
RATIOS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)


class Metrics:
    """Every metric family of the gateway; docs/operate/metrics.md explains them."""

    def __init__(self) -> None:
        self.requests = Counter(
            "sluice_requests", "Requests by how they ended.", ("model", "pool", "outcome")
        )
        self.overhead = Histogram(
            "sluice_overhead_seconds", "Time in the gateway by stage.", ("stage",), FAST_SECONDS
        )
        self.ttft = Histogram(
            "sluice_ttft_seconds",
            "Arrival to first byte of the answer.",
            ("model", "pool"),
            SECONDS,
        )
        self.tenant_ttft = Histogram(
            "sluice_entitlement_ttft_seconds",
            "Arrival to first token of streams.",
            ("model", "entitlement"),
            TENANT_SECONDS,
        )
        self.tpot = Histogram(
            "sluice_tpot_seconds",
            "Time per output token after the first.",
            ("model", "pool"),
            SECONDS,
        )
        self.queue = Histogram(
            "sluice_queue_seconds",
            "Waiting time in the gateway of requests that had to wait for a worker.",
            ("model", "pool"),
            SECONDS,
        )
        self.estimate_error = Histogram(
            "sluice_estimate_error_ratio",
            "Estimated over reported prompt tokens.",
            ("category",),
            RATIOS,
        )
        self.misroutes = Counter(
            "sluice_misroutes",
            "overflow: an engine refused, rescued; long_fitted_short: sent long, fitted short.",
            ("kind",),
        )
        self.spillovers = Counter(
            "sluice_spillovers", "Requests admitted to an alternate pool.", ("model", "pool")
        )
        self.admission = Counter(
            "sluice_admission", "Admission decisions.", ("entitlement", "decision", "reason")
        )
        self.budget_warnings = Counter(
            "sluice_budget_warnings", "Budgets that reached their warn_at.", ("scope",)
        )
        self.slo_requests = Counter(
            "sluice_slo_requests",
            "Streams of entitlements with a target time to first token, by whether it was kept.",
            ("entitlement", "met"),
        )
        self.slo_tpot_requests = Counter(
            "sluice_slo_tpot_requests",
            "Streams of entitlements with a target time per token, by whether it was kept.",
            ("entitlement", "met"),
        )
        self.proved_requests = Counter(
            "sluice_proved_requests",
            "Requests since a proof was attached, by whether it was as promised.",
            ("entitlement", "result"),
        )
        self.would = Counter(
            "sluice_would", "Decisions computed in observe mode, not applied.", ("what",)
        )
        self.tokens = Counter("sluice_tokens", "Tokens metered.", ("model", "entitlement", "kind"))
        self.cost = Counter(
            "sluice_cost", "Cost of usage, in the gateway's currency.", ("model", "tenant"), NANO
        )
        self.fleet_cost = Counter(
            "sluice_fleet_cost",
            "Cost of workers with a price by the hour, idle or not, in the gateway's currency.",
            ("model", "pool"),
            NANO,
        )
        self.prefills = Counter(
            "sluice_prefills",
            "First phases of requests in pools in phases: ok, or why decode computed the prompt.",
            ("pool", "result"),
        )
        self.prefill = Histogram(
            "sluice_prefill_seconds",
            "From a request to a prefill worker to its answer.",
            ("pool",),
            TENANT_SECONDS,
        )
        self.transfer = Histogram(
            "sluice_transfer_seconds",
            "From a request to a decode worker to its first token.",
            ("pool",),
            TENANT_SECONDS,
        )
        self.retries = Counter("sluice_retries", "Further attempts by cause.", ("cause",))
        self.usage_rejected = Counter(
            "sluice_usage_rejected",
            "Implausible usage reports by engines.",
            ("pool",),
        )
        self.ejections = Counter("sluice_ejections", "Workers ejected.", ("pool", "worker"))
        self.kv_events = Counter(
            "sluice_kv_events", "Events that engines sent of their caches.", ("pool", "kind")
        )
        self.compressions = Counter(
            "sluice_compressions",
            "Prompts in the compression window: compressed, or why not.",
            ("model", "result"),
        )
        self.kept_share = Histogram(
            "sluice_compression_kept_ratio", "Share of the text's bytes that was kept.", (), SHARES
        )
        self.evictions = Counter(
            "sluice_evictions", "Requests evicted for protected ones.", ("model", "pool")
        )
        self.batch_items = Counter(
            "sluice_batch_items", "Items of batches that are done, by how.", ("model", "result")
        )
        self.batch_retries = Counter(
            "sluice_batch_retries", "Tries of batches' items that engines failed.", ("model",)
        )
        self.batch_promises = Counter(
            "sluice_batch_promises", "Promised batches that ended, by whether in time.", ("kept",)
        )
        self.tokens_verified = Counter(
            "sluice_jwt_checks", "Tokens that were verified, by what was found.", ("result",)
        )
        self.token_key_reads = Counter(
            "sluice_jwt_key_reads", "Reads of an issuer's keys.", ("issuer", "result")
        )
        self.log_dropped = Counter("sluice_request_log_dropped", "Records not written.")
        self.usage_dropped = Counter(
            "sluice_usage_export_dropped", "Usage lines not written: requests not billed."
        )
        self.tls_failures = Counter(
            "sluice_tls_handshake_failures", "TLS connections that never began.", ("reason",)
        )
        self.telemetry_dropped = Counter(
            "sluice_telemetry_dropped", "Requests whose spans were not exported.", ("cause",)
        )

    def forget(self, **labels: str | Collection[str]) -> None:
        """Drop the series with these labels, of one or several values, in all families."""
        for family in self.families():
            names = family.labels
            if labels.keys() <= set(names):
                wanted = [
                    (names.index(name), {value} if isinstance(value, str) else value)
                    for name, value in labels.items()
                ]
                series: dict[tuple[str, ...], Any] = (
                    family.values if isinstance(family, Counter) else family.series
                )
                for key in [k for k in series if all(k[at] in v for at, v in wanted)]:
                    del series[key]

    def families(self) -> list[Counter | Histogram]:
        """All families, for the renderer."""
        values = [getattr(self, name) for name in dir(self)]  # compiled, it has no __dict__
        return [value for value in values if isinstance(value, (Counter, Histogram))]


class GoneSeries:
    """Drops the series of what was deleted: late, for requests that still run and for scrapes."""

    def __init__(self, metrics: Metrics, label: str, exists: Callable[[str], bool]) -> None:
        self._metrics = metrics
        self._label = label
        self._exists = exists
        self._newly: set[str] = set()
        """Deleted since the last sweep."""
        self._gone: set[str] = set()

    def note(self, value: str) -> None:
        """What the label names was deleted."""
        self._newly.add(value)

    def sweep(self) -> None:
        """Drop what was deleted before the last sweep and did not come back."""
        gone = {value for value in self._gone if not self._exists(value)}
        if gone:
            self._metrics.forget(**{self._label: gone})
        self._gone, self._newly = self._newly, set()


class StageTimer:
    """Measures the stages of one request in `SAMPLED_ONE_IN`; of the others it measures nothing."""

    __slots__ = ("_began_s", "_clock", "_overhead")

    def __init__(self, overhead: Histogram | None, clock: Callable[[], float]) -> None:
        """Without `overhead` nothing is measured; `clock` in seconds."""
        self._overhead = overhead
        self._clock = clock
        self._began_s = 0.0 if overhead is None else clock()

    def begin(self) -> None:
        """A stage begins; what went before belongs to none."""
        if self._overhead is not None:
            self._began_s = self._clock()

    def end(self, stage: str) -> None:
        """A stage ends, and the next one begins."""
        if self._overhead is not None:
            now_s = self._clock()
            self._overhead.observe(now_s - self._began_s, stage)
            self._began_s = now_s


SAMPLED_ONE_IN = 16
"""Requests of which one is measured stage by stage: measuring one takes some microseconds."""
UNTIMED = StageTimer(None, float)
"""The timer of every request that is not measured."""
