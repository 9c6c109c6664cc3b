"""The control plane on Kubernetes, at scale."""
