"""Table 7 of FleetOpt (appendix C), as far as it can be computed.

ROUGE-L recall: an extract in order is a subsequence of the prompt, so the longest common
subsequence is the extract itself and the recall is the share of words kept, whichever they are.
TF-IDF cosine: of the two bags of words, idf ln(N / df) + 1 over the set's prompts. BERTScore
needs RoBERTa-large, which is neither shipped nor fetched: it is not computed.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bench.compressor.prompts import Messages

_WORD = re.compile(r"\w+")


def rouge_l_recall(before: Messages, after: Messages) -> float:
    """Words of the extract over words of the prompt."""
    return sum(bag(after).values()) / max(sum(bag(before).values()), 1)


def bag(messages: Messages) -> Counter[str]:
    """Lower-case words and how often they occur."""
    return Counter(
        word for message in messages for word in _WORD.findall(message["content"].lower())
    )


def inverse_frequencies(bags: Sequence[Counter[str]]) -> dict[str, float]:
    """ln(N / df) + 1 of each word."""
    spread = Counter(word for found in bags for word in found)
    return {word: math.log(len(bags) / count) + 1 for word, count in spread.items()}


def cosine(before: Counter[str], after: Counter[str], idf: dict[str, float]) -> float:
    """Cosine of two bags weighted by `idf`."""
    dot = sum(count * before[word] * idf[word] ** 2 for word, count in after.items())
    norms = [
        math.sqrt(sum((count * idf[word]) ** 2 for word, count in found.items()))
        for found in (before, after)
    ]
    return dot / (norms[0] * norms[1]) if all(norms) else 0.0


def quantiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, p10, p50, p90, as the table has them."""
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
    return float(np.mean(values)), low, middle, high
