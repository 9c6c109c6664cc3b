"""Proves whole files: reads the log, runs every model with several seeds, collects the verdicts."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from gateway.records import proof as records
from gateway.records.entitlement import BACKFILL
from gateway.settings import Config, ModelConfig, load
from gateway.settings.config import digest_of
from gateway.settings.tenants import EntitlementConfig
from planner.errors import PlanError
from sluice.prove.budgets import budget_findings
from sluice.prove.door import turned_away
from sluice.prove.processes import Progress, run_all
from sluice.prove.scope import uncovered
from sluice.prove.trial import Engines, Sample, Trial, read_engines, sampled, states_transfer
from sluice.prove.verdict import (
    PROMISED,
    Change,
    Finding,
    Tally,
    beside,
    changes,
    judge,
    overall,
    withheld,
)
from sluice.simulated.recorded import NothingTimedError, RecordedTraffic, read_recorded

SEEDS: Final = 4
MOST: Final = 250_000
"""Most requests of a run; a longer log is sampled."""
GUESSED: Final = 0.05
"""Share of the prompts in the compression window that may be longer or shorter than the log's."""
LEFT_OUT: Final = 0.01
"""Share of the demand without lengths, times or tenant beyond which nothing can be told."""
ORDER: Final[Sequence[records.Verdict]] = ("breaks", "cannot tell", "holds")
"""Of findings: what breaks comes first."""
_LIMITS: Final = ("max_concurrency", "concurrency", "max_tokens_per_second", "tokens_per_second")


class Proof(records.Proof, frozen=True, kw_only=True):
    """The verdicts on one file, with what reports show besides."""

    findings: tuple[Finding, ...]
    changes: tuple[Change, ...] | None
    """What differs from another file; None where none was given."""
    notes: tuple[str, ...]


def prove_all(
    files: Sequence[Path], log: Path, *, rate: str | None, profile: Path | None, progress: Progress
) -> Proof:
    """Prove the first file, and show what differs from the second; PlanError for bad input."""
    configs = [load(file) for file in files]
    engines = None if profile is None else read_engines(profile)
    recorded, untimed = None, ""
    try:
        recorded = read_recorded(log)
    except NothingTimedError as error:
        untimed = error.problem
    samples: list[dict[str, Sample]] = [{} for _ in files]
    notes: list[str] = []
    faster = 1.0
    if recorded is not None:
        faster = _factor(rate, recorded)
        at_s = recorded.at_s / faster
        recorded = msgspec.structs.replace(recorded, at_s=at_s)
        samples = [_samples(config, recorded) for config in configs]
        notes = sorted({sample.words for each in samples for sample in each.values()} - {""})
        if recorded.left_out:
            notes.append(f"{recorded.left_out:,} requests of the log have no lengths or times")
        if recorded.leftovers is not None and (items := int(recorded.leftovers.sum())):
            notes.append(f"{items:,} items of batches are left out: they get what others leave")
        notes += _on_caches(recorded, engines)
    planned = [
        (side, Trial(file=file, model=model.name, sample=sample, engines=engines, seed=seed))
        for side, file in enumerate(files)
        for model in configs[side].models
        if engines is not None
        and (sample := samples[side].get(model.name))
        and not _unmodelled(model)
        for seed in range(SEEDS)
    ]
    runs: list[dict[str, list[Tally]]] = [{} for _ in files]
    tallies = run_all([trial for _, trial in planned], progress)
    for (side, trial), tally in zip(planned, tallies, strict=True):
        runs[side].setdefault(trial.model, []).append(tally)
    if len(runs) > 1:  # refusals by own limits, beyond those of the configuration in force
        runs = [
            {name: [*map(beside, mine, runs[1].get(name, mine))] for name, mine in each.items()}
            for each in runs
        ]
    found = [
        [*_findings(config, recorded, engines, mine, untimed), *_counted(config, recorded, faster)]
        for config, mine in zip(configs, runs, strict=True)
    ]
    settings = uncovered(configs[0], configs[1] if len(configs) > 1 else None)
    if len(configs) > 1:
        found[0] += [_cannot_tell("setting", path, "no proof covers it") for path in settings]
    elif settings:
        notes.append(f"taken to be as when the log was written: {', '.join(settings)}")
    findings = sorted(found[0], key=lambda entry: ORDER.index(entry.verdict))
    made_for = digest_of(files[0].read_bytes())
    content = msgspec.json.encode((made_for, findings))
    return Proof(
        id=hashlib.sha256(content).hexdigest()[:12],
        config_sha256=made_for,
        verdict=overall(found[0]),
        findings=tuple(findings),
        changes=tuple(changes(found[1], found[0])) if len(found) > 1 else None,
        notes=tuple(notes),
    )


def _on_caches(recorded: RecordedTraffic, engines: Engines | None) -> Iterator[str]:
    """Which prompts find nothing in prefix caches, though they may in truth."""
    models = () if engines is None else engines.models.values()
    why = ""
    if recorded.digests is None:
        why = "the log has no digests of prompts"
    elif not recorded.shows_caches:
        why = "the log shows no cached tokens"
    elif any(model.prefix_cache_tokens == 0 for model in models):
        why = "a profile has an engine without a prefix cache"
    if why:
        yield f"{why}: each prompt counts as new text there, which is stricter than a cache"
    elif recorded.digests is not None and (without := (recorded.digests.sizes == 0).mean()):
        yield f"{without:.0%} of the prompts have no digests in the log, and count as new text"


def _factor(rate: str | None, recorded: RecordedTraffic) -> float:
    """How much faster the log's requests come."""
    try:
        given = 1.0 if rate is None else float(rate.removesuffix("x"))
    except ValueError:
        given = 0.0
    if not 0 < given < float("inf"):
        raise PlanError(f"--rate {rate}", "give a factor such as 1.2x, or requests/s such as 40")
    if rate is None or rate.endswith("x"):
        return given
    return given * max(float(recorded.at_s[-1]), 1e-9) / max(1, len(recorded.at_s) - 1)


def _samples(config: Config, recorded: RecordedTraffic) -> dict[str, Sample]:
    """What each model of a file is sent, by entitlements that it has."""
    names = {entitlement.name for entitlement in config.entitlements}
    strangers = set(recorded.entitlements) - names - {""} if names else set()
    known = np.array([e not in strangers for e in recorded.entitlements or recorded.models])
    if recorded.leftovers is not None:
        known &= ~recorded.leftovers  # they wait for room, and give way
    found = {}
    for model in config.models:
        mine = np.array([_served(config, name) == model.name for name in recorded.models])
        index = np.flatnonzero(mine & known)
        if len(index) > 1:
            found[model.name] = sampled(recorded.of(index, recorded.at_s[index]), MOST)
    return found


def _served(config: Config, model: str) -> str:
    """The model of a request; the only one where the log does not say."""
    return model or (config.models[0].name if len(config.models) == 1 else "")


def _unmodelled(model: ModelConfig) -> str:
    """What of a model is not simulated, so that no figure of it would be true."""
    for name, pool in model.all_pools.items():
        if not pool.worker_count:
            return f"the engines of pool {name} are not listed in the file"
    return ""


def _findings(
    config: Config,
    recorded: RecordedTraffic | None,
    engines: Engines | None,
    tallies: Mapping[str, Sequence[Tally]],
    untimed: str,
) -> Iterator[Finding]:
    for model in config.models:
        runs, entitled = tallies.get(model.name, ()), _entitled(config, model)
        unknown = untimed or _unmodelled(model) or "the log has no request for it"
        if engines is None:
            unknown = "the engines' speed is not known: give --profile"
        pools = {name: [run.pools[name] for run in runs] for name in model.all_pools}
        doubts: list[str] = []
        if runs and recorded is not None and engines is not None:
            doubts = list(_doubts(model, recorded, engines, runs))
            if len(entitled) > 1 and _nameless(recorded):
                doubts.append("the log does not say whose requests these are")
        for entitlement in entitled:
            subject = msgspec.structs.replace(
                _cannot_tell("entitlement", entitlement.name, unknown, model.name),
                slo_ms=entitlement.slo_target_ms or 0,
                slo_tpot_ms=entitlement.slo_tpot_ms or 0,
                backfill=entitlement.service_class in BACKFILL,
            )
            if runs:
                counts = [run.entitlements[entitlement.name] for run in runs]
                promise, limits = _promise(entitlement)
                subject = judge(subject, promise, counts, limits=limits, pools=pools)
            own = [f"it expires at {entitlement.expires_at}"] * bool(entitlement.expires_at)
            subject = withheld(subject, [*doubts, *own])
            yield subject if recorded is None else _let_in(config, entitlement, recorded, subject)
        for name in model.all_pools:
            subject = _cannot_tell("pool", name, unknown, model.name)
            if runs:
                subject = judge(subject, "served", pools[name], pools={})
            yield withheld(subject, doubts)
    if recorded is not None:
        yield from _refused(config, recorded)
    yield from _unsimulated(config)


def _entitled(config: Config, model: ModelConfig) -> list[EntitlementConfig]:
    return [entry for entry in config.entitlements if entry.model == model.name]


def _nameless(recorded: RecordedTraffic) -> bool:
    missing = recorded.entitlements.count("") if recorded.entitlements else len(recorded.at_s)
    return missing > LEFT_OUT * len(recorded.at_s)


def _doubts(
    model: ModelConfig, recorded: RecordedTraffic, engines: Engines, runs: Sequence[Tally]
) -> Iterator[str]:
    """Why the figures of a model prove nothing."""
    for name, pool in model.all_pools.items():
        window = model.pools[name.removesuffix("/prefill")].max_model_len
        node, longest = engines.node(name), min(int(recorded.prompts.max()), window)
        if node.verified is False:
            yield f"the profile of {name} is not verified"
        if node.measured is not None:
            prompts, most = node.measured.longest_prompt_tokens, node.measured.most_sequences
            if longest > prompts or pool.max_num_seqs > most:
                yield (
                    f"the profile of {name} was measured on prompts up to {prompts:,} tokens and "
                    f"{most} sequences, not {longest:,} and {pool.max_num_seqs}"
                )
    boundary_mode = model.boundary.mode or model.mode
    if model.boundary.auto and boundary_mode == "enforce" and model.boundaries:
        yield "its boundaries move by themselves (boundary.auto), simulated ones stay"
    phased = len(model.all_pools) > len(model.pools)
    if phased and recorded.kv_tokens_per_s is None and not states_transfer(model):
        yield "neither the file nor the log says how fast KV is handed over (transfer)"
    if sum(run.guessed for run in runs) > GUESSED * sum(run.window for run in runs):
        yield "compression is on, and the log does not say which share of such prompts can be cut"
    if recorded.left_out > LEFT_OUT * len(recorded.at_s):
        yield f"{recorded.left_out:,} requests of the log have no lengths or times"


def _let_in(
    config: Config, entitlement: EntitlementConfig, recorded: RecordedTraffic, subject: Finding
) -> Finding:
    """The finding, or what follows for it from requests that the file turns away itself."""
    total = recorded.entitlements.count(entitlement.name)
    refused: Counter[str] = Counter()
    doubts: dict[str, None] = {}
    for verdict, why, count in turned_away(config, entitlement, recorded):
        if verdict == "breaks":
            refused[why] += count
        else:
            doubts[why] = None
    lost = refused.total()
    if lost:
        why = refused.most_common(1)[0][0]
        reason = f"{why}: {lost:,} of {total:,} requests are refused"
        if lost > (1 - PROMISED) * total:
            return msgspec.structs.replace(subject, verdict="breaks", reason=reason, kept=None)
        if subject.verdict == "holds":
            doubts[reason] = None
    return withheld(subject, list(doubts))


def _promise(entitlement: EntitlementConfig) -> tuple[str, str]:
    """What it is promised, and its own limits, in words."""
    first_ms, next_ms = entitlement.slo_target_ms, entitlement.slo_tpot_ms
    words = f"first token in {first_ms / 1000:g} s" if first_ms else "served"
    if next_ms:
        words += f", further ones in {next_ms:g} ms each"
    if entitlement.service_class in BACKFILL:
        words += ", where others leave room,"
    given = ((name, getattr(entitlement, name)) for name in _LIMITS)
    return words, ", ".join(f"{name} {value}" for name, value in given if value is not None)


def _refused(config: Config, recorded: RecordedTraffic) -> Iterator[Finding]:
    """Demand of the log that opens nothing in this file."""
    models = {model.name for model in config.models}
    names = {entitlement.name for entitlement in config.entitlements}
    lost: Counter[tuple[records.Kind, str]] = Counter()
    for name, count in Counter(_served(config, name) for name in recorded.models).items():
        if not name:
            reason = f"the log does not say which model {count:,} requests are for"
            yield _cannot_tell("model", "any", reason)
        elif name not in models:
            lost["model", name] += count
    for name, count in Counter(recorded.entitlements).items():
        if names and name and name not in names:
            lost["entitlement", name] += count
    for (kind, name), count in lost.items():
        reason = f"not in the file: {count:,} requests of the log are refused"
        yield Finding(kind=kind, name=name, verdict="breaks", reason=reason)


def _counted(config: Config, recorded: RecordedTraffic | None, faster: float) -> Iterator[Finding]:
    """Budgets, against the whole log."""
    if recorded is not None:
        served = [_served(config, name) for name in recorded.models]
        yield from budget_findings(config, recorded, served, faster)


def _unsimulated(config: Config) -> Iterator[Finding]:
    """Limits that no run covers."""
    keys = {f"{t.name}/{key.name}": key for t in config.tenants for key in t.keys}
    for name, key in keys.items():
        if key.budgets:
            yield _cannot_tell("budget", name, "budgets of keys are not counted")
        if key.requests_per_minute is not None or key.max_concurrency is not None:
            yield _cannot_tell("limit", name, "limits of keys are not simulated")
    for tenant in config.tenants:
        if tenant.suspended:
            yield Finding(kind="tenant", name=tenant.name, verdict="breaks", reason="suspended")
    if config.auth.jwt:
        yield _cannot_tell("tokens", "auth.jwt", "who brings which token is not simulated")


def _cannot_tell(kind: records.Kind, name: str, reason: str, model: str = "") -> Finding:
    return Finding(kind=kind, name=name, model=model, verdict="cannot tell", reason=reason)
