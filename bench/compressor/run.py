"""`python -m bench compressor`: answers preserved by compression, its cost, and its fit.

Published figures: FleetOpt (analytical fleet provisioning with compress-and-route), Tables 4
and 7. Prompts are generated when the bench runs (bench.compressor.prompts). Nothing is started.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import compressor
from bench.common.report import Report, Row, at_least, at_most
from bench.compressor.fidelity import (
    bag,
    cosine,
    inverse_frequencies,
    quantiles,
    rouge_l_recall,
)
from bench.compressor.hostile import hostile
from bench.compressor.latency import (
    ROUNDS,
    TOKEN_RANGES,
    best_ms,
    cjk_prompts,
    percentiles,
    prompts_of,
)
from bench.compressor.prompts import PLACES, PromptCase, prompts
from bench.compressor.safety import REDUCTIONS as SAFETY_REDUCTIONS
from bench.compressor.safety import VOCABULARIES, kinds, measured
from bench.compressor.trials import METHODS, REDUCTIONS, Trial, kept_in, size_of, trial

_PAPER_CUT: Final = 0.154
_DEEP_CUT: Final = 0.50
_GATES: Final = {("qa", _PAPER_CUT): 0.97, ("qa", _DEEP_CUT): 0.95, ("multi-hop", _DEEP_CUT): 0.95}
_OVER: Final = 0.01
_RECOGNISED: Final = 0.9
_TABLE_7: Final = {
    "ROUGE-L recall": (0.856, 0.783, 0.861, 0.921),
    "TF-IDF cosine": (0.981, 0.963, 0.984, 0.996),
}


def run(plot: Path | None = None) -> Report:
    """All rows; `plot` is a folder for the plots."""
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
    detail: dict[str, Any] = {"retention": _curves(trials)}
    if plot is not None:
        from bench.compressor.plot import draw

        detail["plots"] = [
            str(f) for f in draw(plot, _curves(trials), _by_place(trials), latencies)
        ]
    return Report(name="compressor", rows=rows, detail=detail)


def _made(made: list[PromptCase]) -> Row:
    languages = {p.language for p in made}
    kinds_made = {k: sum(p.kind == k for p in made) for k in ("qa", "multi-hop", "cross-lingual")}
    sizes = sorted(size_of(p.messages) for p in made)
    return Row(
        "Prompts",
        ", ".join(f"{count} {kind}" for kind, count in kinds_made.items()),
        target=">= 200 qa in >= 5 languages",
        holds=kinds_made["qa"] >= 200 and len(languages) >= 5,
        note=f"{len(languages)} languages; {sizes[0]} to {sizes[-1]} bytes; questions on "
        "documentation that this Python does not have are left out",
    )


def share(trials: Iterable[Trial]) -> float:
    """Of the trials, those with every gold sentence kept; a refusal counts as lost."""
    found = list(trials)
    return sum(t.kept for t in found) / len(found)


def _fit(trials: list[Trial]) -> list[Row]:
    ours = [t for t in trials if t.method == "default"]
    odd = hostile()
    return [
        at_least("Fits its budget or is refused", sum(t.fits for t in ours) / len(ours), 1.0),
        Row(
            "Refused",
            sum(bool(t.refused) for t in ours) / len(ours),
            "counted as lost below"
        ),
        at_least(
            "Hostile texts: fit or refused", sum(o.holds for o in odd) / len(odd), 1.0,
            note=", ".join(f"{o.name}: {o.outcome}" for o in odd),
        ),
        Row(
            "Hostile texts: slowest, ms", max(o.ms for o in odd), "50 KB each"
        ),
    ]  # fmt: skip


def _retention(trials: list[Trial]) -> list[Row]:
    rows = []
    for kind, text in (("qa", "Answer sentence kept"), ("multi-hop", "Both sentences kept")):
        for reduction in REDUCTIONS:
            found = {
                m: share(
                    t
                    for t in trials
                    if (t.prompt.kind, t.method, t.reduction) == (kind, m, reduction)
                )
                for m in METHODS
            }
            note = ", ".join(f"{m} {found[m]:.3f}" for m in METHODS[1:])
            metric = f"{text}, {100 * reduction:g} % reduction"
            limit = _GATES.get((kind, reduction))
            if limit is None:
                rows.append(Row(metric, found["default"], note))
            else:
                rows.append(at_least(metric, found["default"], limit, note))
    return rows


def _by_place(trials: list[Trial]) -> dict[str, dict[str, float]]:
    return {
        m: {
            place: share(
                t
                for t in trials
                if t.prompt.kind == "qa"
                and t.method == m
                and t.reduction == _DEEP_CUT
                and t.prompt.place == place
            )
            for place in PLACES
        }
        for m in METHODS
    }


def _places(trials: list[Trial]) -> list[Row]:
    found = _by_place(trials)
    return [
        Row(
            f"Answer in the {place}, 50 % reduction",
            found["default"][place],
            ", ".join(f"{m} {found[m][place]:.3f}" for m in METHODS[1:]),
        )
        for place in PLACES
    ]


def _cross_lingual(trials: list[Trial]) -> list[Row]:
    rows = []
    for reduction in (_PAPER_CUT, _DEEP_CUT):
        found = {
            m: share(
                t
                for t in trials
                if (t.prompt.kind, t.method, t.reduction) == ("cross-lingual", m, reduction)
            )
            for m in METHODS
        }
        rows.append(
            at_least(
                f"Question in English, text not, {100 * reduction:g} % reduction",
                found["default"],
                found["random"],
                "the limit is random's; " + ", ".join(f"{m} {found[m]:.3f}" for m in METHODS[1:]),
            )
        )
    return rows


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


def _table_7(made: list[PromptCase]) -> list[Row]:
    chosen = [p.messages for p in made if p.kind == "qa" and p.language == "English"]
    bags = [bag(messages) for messages in chosen]
    idf = inverse_frequencies(bags)
    rows = [
        Row(
            "Table 7: BERTScore F1",
            "not computed",
            published=0.884,
            note="needs RoBERTa-large, which is neither shipped nor fetched",
        )
    ]
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
        rows.append(
            Row(
                f"Table 7: compressibility, profile {profile}",
                len(recalls) / len(chosen),
                published=1.0,
            )
        )
        rows += [
            _table_7_row(name, profile, values)
            for name, values in (("ROUGE-L recall", recalls), ("TF-IDF cosine", cosines))
        ]
    return rows


def _table_7_row(name: str, profile: str, values: list[float]) -> Row:
    mean, *rest = quantiles(values)
    published, *quantiles_published = _TABLE_7[name]
    return Row(
        f"Table 7: {name}, profile {profile}",
        mean,
        published=published,
        ratio=mean / published,
        note=f"p10, p50, p90: {', '.join(f'{value:.3f}' for value in rest)}; published "
        f"{', '.join(map(str, quantiles_published))}; it measures the cut, not what was lost",
    )


def _latencies() -> dict[str, list[tuple[int, float]]]:
    """Bytes and best time of each prompt, by band."""
    found = {}
    for token_range in TOKEN_RANGES:
        texts = prompts_of(token_range)[:: 1 if token_range.tokens[1] < 16_000 else 4]
        found[token_range.name] = list(
            zip(map(size_of, texts), best_ms(texts, "default"), strict=True)
        )
    texts = prompts_of(TOKEN_RANGES[2])
    found["Agent-heavy, 8K-12K, profile paper"] = list(
        zip(map(size_of, texts), best_ms(texts, "paper"), strict=True)
    )
    texts = cjk_prompts()
    found["Chinese and Japanese, 8K-12K"] = list(
        zip(map(size_of, texts), best_ms(texts, "default"), strict=True)
    )
    return found


def _latency_rows(latencies: dict[str, list[tuple[int, float]]]) -> list[Row]:
    rows = []
    published = {token_range.name: token_range.published_ms for token_range in TOKEN_RANGES}
    beside = TOKEN_RANGES[2].published_ms
    note = f"best of {ROUNDS} rounds for each prompt; the machine may be shared"
    for name, points in latencies.items():
        found = percentiles([ms for _, ms in points])
        theirs = published.get(name) or (beside if "paper" in name else None)
        for index, label in enumerate(("p50", "p95", "p99")):
            known = theirs[index] if theirs else None
            rows.append(
                Row(
                    f"Latency, {name}: {label}, ms",
                    found[index],
                    published=known,
                    ratio=found[index] / known if known else None,
                    note=note,
                )
            )
    return rows


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


def _curves(trials: list[Trial]) -> dict[str, dict[str, list[float]]]:
    """Kind -> method -> share kept at each reduction."""
    return {
        kind: {
            m: [
                share(
                    t
                    for t in trials
                    if (t.prompt.kind, t.method, t.reduction) == (kind, m, reduction)
                )
                for reduction in REDUCTIONS
            ]
            for m in METHODS
        }
        for kind in ("qa", "multi-hop", "cross-lingual")
    }
