"""What simulated prompts share is what their texts share, to the digested places; never more."""

import random
from itertools import takewhile

import numpy as np

from gateway.scheduling.prefix_index import digests, keyed_digests
from simulator.pipeline.prompts import SharedPrompts, joined, packed

KEY = b"a key"
BLOCK = 16


def texts(seed: int, count: int) -> list[tuple[bytes, list[int]]]:
    """Prompts of parts, and where the parts end; many begin as an earlier one or its beginning."""
    draw = random.Random(seed)
    made: list[tuple[bytes, list[int]]] = []
    for _ in range(count):
        before, edges = draw.choice(made) if made and draw.random() < 0.8 else (b"", [0])
        kept = edges[: draw.randint(1, len(edges))]
        text = before[: kept[-1]]
        for _ in range(draw.randint(1, 4)):
            text += draw.randbytes(draw.choice((40, 300, 5_000, 40_000)))
            kept.append(len(text))
        made.append((text, kept))
    return made


def common(one: bytes, other: bytes) -> int:
    """Bytes with which both begin."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if one[:middle] == other[:middle] else (least, middle - 1)
    return least


def test_prompts_share_blocks_as_far_as_a_digested_beginning_is_common() -> None:
    """Here a token is a byte."""
    for seed in range(4):
        prompts = texts(seed, 60)
        points = [keyed_digests(digests(t, edges[1:], 7), KEY) for t, edges in prompts]
        lengths = np.array([len(text) for text, _ in prompts])
        shared = SharedPrompts(joined([packed(each) for each in points]), lengths)
        blocks = [shared.blocks(i, len(text), BLOCK) for i, (text, _) in enumerate(prompts)]
        for i, (text, _) in enumerate(prompts):
            assert len(blocks[i]) == len(set(blocks[i])) == len(text) // BLOCK
            for j in range(i):
                same = common(text, prompts[j][0])
                pairs = zip(blocks[i], blocks[j], strict=False)
                alike = BLOCK * len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                assert alike <= same
                both = {n for n, _ in points[i] if n <= same} & {n for n, _ in points[j]}
                assert alike >= max(both, default=0) // BLOCK * BLOCK
                assert not set(blocks[i][alike // BLOCK :]) & set(blocks[j])


def test_tenants_whose_caches_are_apart_and_prompts_that_were_cut_share_nothing() -> None:
    text = random.Random(1).randbytes(3_000)
    same = joined([packed(keyed_digests(digests(text, [3_000], 7), KEY))] * 2)
    lengths = np.array([750, 750])
    together = SharedPrompts(same, lengths)
    assert together.blocks(0, 750, BLOCK) == together.blocks(1, 750, BLOCK)
    assert not set(together.blocks_of_cut(1, 400, BLOCK)) & set(together.blocks(0, 750, BLOCK))
    apart = SharedPrompts(same, lengths, np.array([0, 1]))
    assert not set(apart.blocks(0, 750, BLOCK)) & set(apart.blocks(1, 750, BLOCK))
    assert apart.points(0)[-1][1] != apart.points(1)[-1][1]
    assert [n for n, _ in apart.points(1)][-1] == 3_000
