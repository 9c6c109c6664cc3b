"""How this process reaches the Kubernetes API: as a pod does, or through a proxy that is named."""

import os
from pathlib import Path
from typing import Final

from gateway.records.discovery import ClusterAccess

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
URL_VARIABLE: Final = "SLUICE_KUBERNETES_URL"
"""For a gateway outside a cluster: the URL of `kubectl proxy`, which needs no token."""


def cluster_access(account: Path = ACCOUNT) -> ClusterAccess | None:
    """The access that the environment describes; None outside a cluster."""
    if url := os.environ.get(URL_VARIABLE):
        namespace = os.environ.get("SLUICE_KUBERNETES_NAMESPACE", "default")
        return ClusterAccess(url=url.rstrip("/"), namespace=namespace)
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not (account / "token").exists():
        return None
    host = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        url=f"https://{host}:{port or 443}",
        namespace=(account / "namespace").read_text(encoding="utf-8").strip() or "default",
        token_file=str(account / "token"),
        ca_file=str(account / "ca.crt"),
    )
