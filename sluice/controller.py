"""`sluice controller`: the control plane on Kubernetes."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from gateway.settings.server import StateConfig
from sluice.serve import Level
from sluice.terminal import needs_extra, refuse

if TYPE_CHECKING:
    from controller.loop import Controller

PASSWORD: str = "REDIS_PASSWORD"  # noqa: S105 - the variable's name


def controller(
    namespace: Annotated[
        str, typer.Option(help="Of TokenPools, TokenEntitlements, their Secrets and engines.")
    ],
    state_url: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_STATE_URL",
            show_envvar=True,
            help="The gateways' Redis; its password may come from REDIS_PASSWORD.",
            show_default=False,
        ),
    ],
    allocator: Annotated[
        Literal["internal", "virtual-node"],
        typer.Option(help="Who decides what fits: this process, or the cluster's scheduler."),
    ] = "internal",
    host: Annotated[str, typer.Option(help="Address of health and metrics.")] = "0.0.0.0",  # noqa: S104
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of health and metrics.")] = 9101,
    log_level: Annotated[Level, typer.Option(help="Least level logged to stderr.")] = "info",
) -> None:
    """Grant TokenEntitlements of one namespace, and tell the gateways; until SIGTERM.

    The API server is that of the pod's service account, else of KUBECONFIG. Several may run: the
    holder of the Lease sluice-controller acts.
    """
    try:
        import lightkube  # noqa: F401
        import redis  # noqa: F401
    except ImportError:
        needs_extra("the controller needs lightkube and redis", "k8s")
    password = os.environ.get(PASSWORD) if "@" not in state_url else None
    try:
        state = StateConfig.model_validate({"url": state_url, "password": password})
    except ValidationError:
        state = None
    if state is None or not state.shared:
        refuse("--state-url: not the gateways' Redis", "give redis://HOST:6379/0, as state.url")
    from controller.kube import KubeApi, connection
    from controller.loop import Controller
    from gateway.store.redis.cluster import ClusterStore

    try:
        cluster = connection()
    except ValueError as error:
        refuse(str(error), "run as a pod with a service account, or set KUBECONFIG")
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def serve() -> None:
        api, store = KubeApi(cluster, namespace), ClusterStore(state.address, namespace)
        identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        served = Controller(api, store, allocator=allocator, identity=identity)
        try:
            await _until_told(served, host, port)
        finally:
            await api.close()
            await store.close()

    asyncio.run(serve())


async def _until_told(served: "Controller", host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C; then the leadership is given back."""
    from controller.health import HealthPort

    shown = HealthPort(healthy=served.healthy, ready=served.ready, metrics=served.metrics)
    try:
        bound = await shown.start(host, port)
    except OSError as error:
        refuse(f"--port {port}: {error.strerror}", "choose a free port")
    logging.getLogger("sluice").info("health and metrics on %s:%d", host, bound)
    running = asyncio.ensure_future(served.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await shown.close()
