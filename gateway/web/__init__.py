"""HTTP surface: data plane, control plane, metrics. Only this package knows the web framework."""
