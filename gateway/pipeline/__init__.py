"""The ten stages in order, the attempts at engines, and settlement."""
