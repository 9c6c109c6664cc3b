"""What the worker processes of one `sluice serve` share: they talk, the parent keeps."""
