"""The control plane: health, admin, tenants' API, external admission, metrics, OpenAPI."""
