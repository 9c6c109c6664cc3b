"""One verb a file: each joins a decision (policy) to a port."""
