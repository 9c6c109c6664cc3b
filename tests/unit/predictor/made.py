"""Made-up prefills: linear in what a router sees, with noise."""

from random import Random

from predictor.artifact import PoolSection, TreeArrays
from predictor.features import features
from predictor.prior import PriorRates
from predictor.rows import PrefillRow


def x_of(
    prompt: int = 2000,
    hit: int = 0,
    backlog: int = 0,
    active: int = 10,
    output: int = 100,
) -> tuple[float, ...]:
    return features(
        prompt_tokens=prompt,
        hit_tokens=hit,
        cap_tokens=None,
        output_tokens=output,
        stream=True,
        active=active,
        backlog_tokens=backlog,
        kv_usage=0.25,
    )


def true_s(x: tuple[float, ...]) -> float:
    """8,000 tokens/s, 30 ms, half of what is ahead."""
    return 0.03 + x[1] / 8000 + 0.5 * min(x[2], 4096) / 8000 + 0.0004 * x[3]


def rows_of(
    count: int, seed: int, *, slow: float = 1.0, slow_worker: str = "", workers: int = 4
) -> list[PrefillRow]:
    random = Random(seed)
    found = []
    for number in range(count):
        prompt = int(random.lognormvariate(7.3, 0.9)) + 20
        hit = int(prompt * random.choice((0.0, 0.0, 0.3, 0.8)))
        x = x_of(prompt, hit, random.choice((0, 0, random.randrange(6000))), random.randrange(60))
        worker = str(number % workers)
        factor = slow if slow_worker in {"", worker} else 1.0
        noise = random.lognormvariate(0.0, 0.25)
        found.append(PrefillRow(x=x, prefill_s=true_s(x) * factor * noise, worker=worker))
    return found


def small_tree() -> TreeArrays:
    """Short and long prompts."""
    return TreeArrays(
        feature=(0, -1, -1),
        threshold=(1000.0, 0.0, 0.0),
        left=(1, 0, 0),
        right=(2, 0, 0),
        mean_s=(0.0, 0.1, 1.0),
        quantile_s=(0.0, 0.2, 1.5),
    )


def small_section() -> PoolSection:
    return PoolSection(
        model="m",
        pool="short",
        alpha=0.95,
        tree=small_tree(),
        rates=PriorRates(),
        longest_uncached_tokens=8000,
        rows=1000,
    )
