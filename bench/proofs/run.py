"""`python -m bench proofs`: are the verdicts of `sluice prove` true?

Yesterday's log comes from a real gateway before mock engines, with the base configuration. Every
mutation is proved from it, and lived: the same demand is sent to a real gateway with the changed
configuration, its busiest cycle first, until it is decided whether each entitlement keeps 99 %.

Targets: no false "holds", at most 2 false "breaks", "cannot tell" for at most 20 %; attainment of
six within 3 points. `--share .2`: a fifth of the mutations.
"""

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.common.report import Report, Row, at_most, equals, scaled, tracked
from bench.proofs.live import NOTHING, Attainment, Site
from bench.proofs.scene import CYCLES, MUTATIONS, Mutation, busiest, written
from gateway.records.proof import Verdict
from sluice.prove.proof import prove_all
from sluice.prove.verdict import PROMISED, Finding

COMPARED: Final = (
    "short 12 slots",
    "long 5 slots",
    "long one engine of 7 slots",
    "chat concurrency 6 instead of 30",
    "tools concurrency 6 instead of 27 to 36",
    "docs .4 GiB of KV at most",
)
"""Mutations whose attainment is compared: they are sent all of the log's demand."""
SITES: Final = 3
"""Gateways with engines of their own that live mutations side by side."""
BEHIND: Final = 7
"""How much nicer than live cycles the process of proofs is: it takes what they leave."""
LOSSES: Final = 10
"""Of an entitlement, surely more than 1 % of all its requests."""
COUNTED_APART: Final = frozenset({"budget", "budget_reserved", "key_requests", "key_concurrency"})
"""Refusals on which a budget or a limit has a verdict of its own, as in reviews."""
WITHIN: Final = 0.03
MOST_FALSE_BREAKS: Final = 2
MOST_UNTOLD: Final = 0.2
PLOT: Final = Path("docs/images/proofs.png")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A mutation, or an entitlement of one: the verdict, and what came of it."""

    name: str
    verdict: Verdict
    live: Attainment
    finding: Finding | None
    """Of the entitlement; of the one that kept least for the mutation as a whole."""

    @property
    def judged(self) -> str:
        """right, cannot tell, false holds or false breaks."""
        truth = "breaks" if self.live.share < PROMISED else "holds"
        if self.verdict == "cannot tell":
            return self.verdict
        return "right" if self.verdict == truth else f"false {self.verdict}"


def lived(site: Site, mutation: Mutation) -> dict[str, Attainment]:
    """What each entitlement kept, by name, of all the log's demand or as much of it as decides.

    The busiest cycle comes first: who loses nothing there holds.
    """
    live: dict[str, Attainment] = {}
    for cycle in sorted(range(CYCLES), key=busiest, reverse=True):
        lived_now = site.run(mutation, cycle)
        live = {name: live.get(name, NOTHING) + more for name, more in lived_now.items()}
        if mutation.name not in COMPARED and all(map(_decided, live.values())):
            break
    return live


def _decided(live: Attainment) -> bool:
    """Whether nothing was lost, or more than all the cycles may lose."""
    return not live.losses or live.losses > LOSSES


def proved(mutation: Mutation, log: Path, profile: Path) -> tuple[Verdict, tuple[Finding, ...]]:
    """As `sluice prove` says."""
    config = mutation.config()
    urls = {
        name: [f"http://{name}-{place}.invalid" for place in range(pool["workers"])]
        for name, pool in config["model"]["pools"].items()
    }
    file = log.with_suffix(".yaml")
    file.write_text(written(config, urls), "utf-8")
    rate = f"{mutation.rate}x"
    proof = prove_all([file], log, rate=rate, profile=profile, progress=lambda **_: None)
    return proof.verdict, proof.findings


def compared(
    mutation: Mutation, proof: tuple[Verdict, tuple[Finding, ...]], live: dict[str, Attainment]
) -> list[Result]:
    """The mutation as a whole, then each entitlement."""
    verdict, findings = proof
    named = {finding.name: finding for finding in findings if finding.kind == "entitlement"}
    least = min(live, key=lambda name: live[name].share)
    whole = Result(name=mutation.name, verdict=verdict, live=live[least], finding=named[least])
    each = [
        Result(name=name, verdict=named[name].verdict, live=_own(attained), finding=named[name])
        for name, attained in live.items()
    ]
    return [whole, *each]


def _own(live: Attainment) -> Attainment:
    """Without what has a verdict of its own."""
    lost = {why: count for why, count in live.lost.items() if why not in COUNTED_APART}
    return Attainment(live.requests - live.losses + sum(lost.values()), lost)


def judged_by(mutations: Sequence[Mutation]) -> tuple[list[list[Result]], list[str]]:
    """The mutations, each proved in a process of its own while it is lived; repeated cycles."""
    spawn = multiprocessing.get_context("spawn")
    with Site() as site, ProcessPoolExecutor(1, spawn, os.nice, (BEHIND,)) as pool:
        log = site.folder / "yesterday.jsonl"
        with log.open("wb") as file:
            for cycle in range(CYCLES):
                site.run(MUTATIONS[0], cycle)
                file.write(site.recorded)
        proofs = [pool.submit(proved, each, log, site.profile) for each in mutations]
        lives = [lived(site, each) for each in mutations]
        judged = [
            compared(mutation, proof.result(), live)
            for mutation, proof, live in zip(mutations, proofs, lives, strict=True)
        ]
        return judged, site.starved


def run() -> Report:
    """All mutations, the totals, and the plot."""
    count = scaled(len(MUTATIONS), 4)
    mutations = [MUTATIONS[i * len(MUTATIONS) // count] for i in range(count)]
    shares = [mutations[first::SITES] for first in range(SITES)]
    with ProcessPoolExecutor(SITES, multiprocessing.get_context("spawn")) as pool:
        done = list(tracked(pool.map(judged_by, shares), "sites", SITES))
    judged = [result for results, _ in done for result in results]
    starved = [words for _, cycles in done for words in cycles]
    if count == len(MUTATIONS):
        plot(judged)
    detail: dict[str, Any] = {"results": msgspec.to_builtins(judged), "starved": starved}
    return Report(name="proofs", rows=[*map(row, judged), *totals(judged)], detail=detail)


def row(results: Sequence[Result]) -> Row:
    """The verdict beside the truth, by the entitlement that kept least."""
    whole = results[0]
    owner = "nobody" if whole.finding is None else whole.finding.name
    lost = ", ".join(f"{count} {reason}" for reason, count in whole.live.lost.items())
    live = f"{owner} {100 * whole.live.share:.1f} % of {whole.live.requests} live ({lost or 'all'})"
    kept = whole.finding.kept if whole.finding else None
    bounds = f"{100 * kept.low:.1f} to {100 * kept.high:.1f} %" if kept else "by the file alone"
    return Row(whole.name, whole.verdict, f"{live}; proved {bounds}; {whole.judged}")


def totals(judged: Sequence[Sequence[Result]]) -> Iterator[Row]:
    """The floors."""
    count = Counter(whole.judged for whole, *_ in judged)
    harmless = sum(whole.live.share >= PROMISED for whole, *_ in judged)
    yield Row("mutations", len(judged), f"{harmless} of them harmless")
    lies = [
        f"{whole.name}: {each.name}"
        for whole, *rest in judged
        for each in (whole, *rest)
        if each.judged == "false holds"
    ]
    yield equals("false holds, entitlements included", len(lies), 0, "; ".join(lies))
    yield at_most("false breaks", count["false breaks"], MOST_FALSE_BREAKS)
    yield at_most("cannot tell, share", count["cannot tell"] / len(judged), MOST_UNTOLD)
    for whole, *rest in judged:
        if whole.name in COMPARED:
            off, name = max((_off(result), result.name) for result in rest)
            yield at_most(f"{whole.name}: proved off live by", off, WITHIN, f"most for {name}")


def _off(result: Result) -> float:
    """How far the proved attainment is from the live one."""
    if result.finding is None or result.finding.kept is None:
        return 0.0
    return abs(result.finding.kept.value - result.live.share)


def plot(judged: Sequence[Sequence[Result]]) -> None:
    """Proved over live, for every entitlement that was simulated."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6.2, 5.2))
    colours = {"holds": "tab:green", "breaks": "tab:red", "cannot tell": "0.55"}
    for verdict, colour in colours.items():
        points = [
            (result.live.share, kept.value, kept.value - kept.low, kept.high - kept.value)
            for _, *each in judged
            for result in each
            if result.finding and (kept := result.finding.kept) and result.verdict == verdict
        ]
        live, value, below, above = (
            [100 * max(0.0, at) for at in column] for column in zip(*points, strict=True)
        )
        style: dict[str, Any] = {"fmt": "o", "markersize": 4, "color": colour, "label": verdict}
        axis.errorbar(live, value, yerr=[below, above], elinewidth=0.8, **style)
    axis.plot([0, 100], [0, 100], color="0.7", linewidth=1)
    axis.set(xlabel="kept live, %", ylabel="proved, % (95 %)")
    axis.legend(loc="upper left", title="verdict")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)
