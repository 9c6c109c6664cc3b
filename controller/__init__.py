"""The control plane on Kubernetes: token pools and entitlements as objects of the cluster."""
