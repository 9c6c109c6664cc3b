"""`python -m bench compressor`: answers preserved by compression, its cost, and its fit.

Published figures: FleetOpt (analytical fleet provisioning with compress-and-route), Tables 4
and 7. Prompts are generated when the bench runs (bench.compressor.prompts). Nothing is started.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

import compressor
from bench.common.report import Report, Row, at_least, at_most, beside, judged, without_target
from bench.compressor.prompts import PLACES, Messages, PromptCase, prompts
from bench.compressor.trials import (
    METHODS,
    REDUCTIONS,
    ROUNDS,
    TOKEN_RANGES,
    VOCABULARIES,
    Trial,
    bag,
    best_ms,
    cjk_prompts,
    cosine,
    hostile,
    inverse_frequencies,
    kept_in,
    kinds,
    measured,
    prompts_of,
    quantiles,
    rouge_l_recall,
    size_of,
    trial,
)
from bench.compressor.trials import REDUCTIONS as SAFETY_REDUCTIONS

_PAPER_CUT: Final = 0.154
_DEEP_CUT: Final = 0.50
_GATES: Final = {("qa", _PAPER_CUT): 0.97, ("qa", _DEEP_CUT): 0.95, ("multi-hop", _DEEP_CUT): 0.95}
_OVER: Final = 0.01
_RECOGNISED: Final = 0.9
_TABLE_7: Final = {
    "ROUGE-L recall": (0.856, 0.783, 0.861, 0.921),
    "TF-IDF cosine": (0.981, 0.963, 0.984, 0.996),
}


def run() -> Report:
    """All rows."""
    # One thread: nothing here multiplies matrices, and the cores may be shared.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    compressor.warm()
    made = prompts()
    trials = [trial(p, m, r) for m in METHODS for r in REDUCTIONS for p in made]
    latencies = _latencies()
    rows = [
        _made(made),
        *_fit(trials),
        *_retention(trials),
        *_places(trials),
        *_cross_lingual(trials),
        *_asked(made),
        *_table_7(made),
        *_latency_rows(latencies),
        *_safety(),
    ]
    return Report(name="compressor", rows=rows)


def _made(made: list[PromptCase]) -> Row:
    languages = {p.language for p in made}
    kinds_made = {k: sum(p.kind == k for p in made) for k in ("qa", "multi-hop", "cross-lingual")}
    sizes = sorted(size_of(p.messages) for p in made)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds_made.items())
    holds = kinds_made["qa"] >= 200 and len(languages) >= 5
    note = (
        f"{len(languages)} languages; {sizes[0]} to {sizes[-1]} bytes; questions on "
        "documentation that this Python does not have are left out"
    )
    return judged("Prompts", told, ">= 200 qa in >= 5 languages", holds, note)


def share(trials: Iterable[Trial]) -> float:
    """Of the trials, those with every gold sentence kept; a refusal counts as lost."""
    found = list(trials)
    return sum(t.kept for t in found) / len(found)


def _shares(trials: list[Trial], kind: str, reduction: float, place: str = "") -> dict[str, float]:
    """By method."""
    chosen = [
        t
        for t in trials
        if (t.prompt.kind, t.reduction) == (kind, reduction) and place in {"", t.prompt.place}
    ]
    return {m: share(t for t in chosen if t.method == m) for m in METHODS}


def _others(found: dict[str, float]) -> str:
    return ", ".join(f"{m} {found[m]:.3f}" for m in METHODS[1:])


def _fit(trials: list[Trial]) -> Iterator[Row]:
    ours = [t for t in trials if t.method == "default"]
    yield at_least("Fits its budget or is refused", sum(t.fits for t in ours) / len(ours), 1.0)
    yield Row("Refused", sum(bool(t.refused) for t in ours) / len(ours), "counted as lost below")
    odd = hostile()
    note = ", ".join(f"{o.name}: {o.outcome}" for o in odd)
    metric = "Hostile texts: fit or refused"
    yield at_least(metric, sum(o.holds for o in odd) / len(odd), 1.0, note)
    yield Row("Hostile texts: slowest, ms", max(o.ms for o in odd), "50 KB each")


def _retention(trials: list[Trial]) -> Iterator[Row]:
    for kind, text in (("qa", "Answer sentence kept"), ("multi-hop", "Both sentences kept")):
        for reduction in REDUCTIONS:
            found = _shares(trials, kind, reduction)
            metric, ours = f"{text}, {100 * reduction:g} % reduction", found["default"]
            limit = _GATES.get((kind, reduction))
            row = at_least(metric, ours, limit or 0.0, _others(found))
            yield row if limit else without_target(row)


def _places(trials: list[Trial]) -> Iterator[Row]:
    for place in PLACES:
        found = _shares(trials, "qa", _DEEP_CUT, place)
        yield Row(f"Answer in the {place}, 50 % reduction", found["default"], _others(found))


def _cross_lingual(trials: list[Trial]) -> Iterator[Row]:
    for reduction in (_PAPER_CUT, _DEEP_CUT):
        found = _shares(trials, "cross-lingual", reduction)
        metric = f"Question in English, text not, {100 * reduction:g} % reduction"
        note = "the limit is random's; " + _others(found)
        yield at_least(metric, found["default"], found["random"], note)


def _asked(made: list[PromptCase]) -> list[Row]:
    """What `when: asked`, the default, lets through: questions over passages with headers."""
    same = [p for p in made if p.kind != "cross-lingual"]
    headed = [p for p in same if p.form != "blank"]
    kept = [found for p in headed if (found := _let_through(p)) is not None]
    rows = [
        at_least("Asked, with headers: compressed", len(kept) / len(headed), _RECOGNISED),
        at_least("Asked, with headers: answer kept of those", sum(kept) / len(kept), 0.95),
    ]
    others = {
        "without headers": [p for p in same if p.form == "blank"],
        "in another language": [p for p in made if p.kind == "cross-lingual"],
    }
    for name, cases in others.items():
        refused = sum(_let_through(p) is None for p in cases) / len(cases)
        rows.append(at_least(f"Asked, {name}: refused", refused, 0.95))
    return rows


def _let_through(prompt: PromptCase) -> bool | None:
    """Whether half of the prompt holds the answer; None if it is refused."""
    budget = int(size_of(prompt.messages) * (1 - _DEEP_CUT))
    found = compressor.compress(prompt.messages, budget, 1.0, safety=1.0)
    return kept_in(found.messages, prompt.gold) if found else None


def _table_7(made: list[PromptCase]) -> Iterator[Row]:
    chosen = [p.messages for p in made if p.kind == "qa" and p.language == "English"]
    bags = [bag(messages) for messages in chosen]
    idf = inverse_frequencies(bags)
    note = "needs RoBERTa-large, which is neither shipped nor fetched"
    yield Row("Table 7: BERTScore F1", "not computed", note, 0.884)
    for profile in ("paper", "default"):
        recalls, cosines = [], []
        for messages, words in zip(chosen, bags, strict=True):
            budget = int(size_of(messages) * (1 - _PAPER_CUT))
            found = compressor.compress(
                messages, budget, 1.0, safety=1.0, profile=profile, when="any"
            )
            if found:
                recalls.append(rouge_l_recall(messages, found.messages))
                cosines.append(cosine(words, bag(found.messages), idf))
        metric, compressed = "Table 7: compressibility", len(recalls) / len(chosen)
        yield Row(f"{metric}, profile {profile}", compressed, published=1.0)
        for (name, (published, *theirs)), values in zip(
            _TABLE_7.items(), (recalls, cosines), strict=True
        ):
            mean, *rest = quantiles(values)
            note = (
                f"p10, p50, p90: {', '.join(f'{value:.3f}' for value in rest)}; published "
                f"{', '.join(map(str, theirs))}; it measures the cut, not what was lost"
            )
            yield beside(f"Table 7: {name}, profile {profile}", mean, published, note)


def _latencies() -> dict[str, list[tuple[int, float]]]:
    """Bytes and best time of each prompt, by band."""

    def timed(texts: list[Messages], profile: compressor.Profile) -> list[tuple[int, float]]:
        return list(zip(map(size_of, texts), best_ms(texts, profile), strict=True))

    found = {
        of.name: timed(prompts_of(of)[:: 1 if of.tokens[1] < 16_000 else 4], "default")
        for of in TOKEN_RANGES
    }
    found["Agent-heavy, 8K-12K, profile paper"] = timed(prompts_of(TOKEN_RANGES[2]), "paper")
    found["Chinese and Japanese, 8K-12K"] = timed(cjk_prompts(), "default")
    return found


def _latency_rows(latencies: dict[str, list[tuple[int, float]]]) -> Iterator[Row]:
    published = {token_range.name: token_range.published_ms for token_range in TOKEN_RANGES}
    note = f"best of {ROUNDS} rounds for each prompt; the machine may be shared"
    for name, points in latencies.items():
        found = np.quantile([ms for _, ms in points], (0.5, 0.95, 0.99)).tolist()
        theirs = published.get(name.removesuffix(", profile paper")) or (None,) * 3
        for label, ours, known in zip(("p50", "p95", "p99"), found, theirs, strict=True):
            yield beside(f"Latency, {name}: {label}, ms", ours, known, note)


def _safety() -> list[Row]:
    return [
        _safety_row(kind, vocabulary, exact=exact)
        for kind in kinds()
        for vocabulary in VOCABULARIES
        for exact in (False, True)
    ]


def _safety_row(kind: str, vocabulary: str, *, exact: bool) -> Row:
    how = "with the tokenizer" if exact else "by the mean ratio"
    metric = f"Over T_c, {kind}, {vocabulary}, {how}"
    found = [measured(vocabulary, kind, r, exact=exact) for r in SAFETY_REDUCTIONS]
    known = [f for f in found if f is not None]
    if not known:
        return Row(metric, "not measured", "quicktok is not installed")
    made = sum(f.prompts - f.refused for f in known)
    over = sum(f.over for f in known) / made
    note = (
        f"{made} prompts, {sum(f.refused for f in known)} refused; fullest "
        f"{max(f.worst for f in known):.3f} of T_c; {known[0].ratio:.2f} bytes/token"
    )
    return at_most(metric, over, 0.0 if exact else _OVER, note)
