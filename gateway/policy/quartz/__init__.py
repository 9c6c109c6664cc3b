"""QUARTZ: predicted prefill quantiles choose the worker and order the queue."""
