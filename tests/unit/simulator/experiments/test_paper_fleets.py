"""FleetOpt's fleets: slots by window, and pages."""

import numpy as np

from simulator.experiments.paper_fleets import OneMore, by_slots, paged, window_slots
from simulator.fleet.traffic import CdfLengths

LENGTHS = CdfLengths([(10, 0.5), (40, 1.0)], 0.5)


def test_slots_are_kv_cache_over_window() -> None:
    assert [window_slots(w) for w in (1536, 4096, 8192, 65_536)] == [682, 256, 128, 16]
    short, long = by_slots((3, 2), boundary=1536, gamma=1.5).pools
    assert (short.profile.max_num_seqs, long.profile.max_num_seqs) == (682, 16)
    # Whole windows fit in every slot: blocks never bind before slots.
    for pool in (short, long):
        p = pool.profile
        assert p.kv_blocks >= p.max_num_seqs * -(-p.max_model_len // p.block_tokens)
    (one,) = by_slots((5,), boundary=1536).pools
    assert (one.name, one.instances, one.boundary_tokens) == ("all", 5, None)


def test_paged_engines_hold_more_than_their_windows_would() -> None:
    (one,) = paged((2,), boundary=4096).pools
    assert one.profile.load == "growing"
    assert one.profile.max_num_seqs > window_slots(65_536)
    short, long = paged((3, 2), boundary=4096).pools
    assert (short.profile.max_model_len, long.profile.max_model_len) == (4097, 65_537)


def test_one_more_adds_a_token_to_the_answer_only() -> None:
    plain = LENGTHS.sample(100, np.random.default_rng(0))
    more = OneMore(LENGTHS).sample(100, np.random.default_rng(0))
    assert (more[0] == plain[0]).all()
    assert (more[1] == plain[1] + 1).all()
