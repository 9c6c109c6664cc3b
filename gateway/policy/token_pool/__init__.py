"""The state of one model's token pool: counters, token buckets and leases."""
