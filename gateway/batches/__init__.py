"""Batches: files of requests that run on what live traffic leaves."""
