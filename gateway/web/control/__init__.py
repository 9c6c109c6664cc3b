"""The control plane: health, admin, tenant API, OpenAPI, calls between replicas."""
