"""The control plane: health, admin, tenants, OpenAPI, other replicas."""
