"""The state of one model's token pool: counters, buckets, leases."""
