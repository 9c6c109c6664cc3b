"""FleetOpt's fleets: slots by window, and pages."""

from simulator.experiments.paper_fleets import by_slots, window_slots


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
