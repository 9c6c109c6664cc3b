"""`sluice serve`: run the gateway, one replica or several."""

import logging
import signal
from typing import Annotated, Literal

import typer

from gateway.settings import Config, unfit_ports, unfit_workers
from sluice.config_file import DEFAULT, ConfigOption, load_or_exit

Level = Literal["debug", "info", "warning", "error"]


def serve(
    config: ConfigOption = DEFAULT,
    host: Annotated[str | None, typer.Option(help="Address; the file's when absent.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; the file's when absent.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=128, help="Replicas; the file's when absent.")
    ] = None,
    log_level: Annotated[Level, typer.Option(help="Least level logged to stderr.")] = "info",
) -> None:
    """Serve until SIGTERM; then running streams finish, up to drain_timeout_s."""
    # The kernel ignores what the first process of a container does not handle, which would then be
    # killed once it may take no longer. The server drains from when it serves on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    loaded = listening_on(load_or_exit(config), host, port, workers)
    for option, unfit in (("--workers", unfit_workers), ("server.management_port", unfit_ports)):
        if (found := unfit(loaded)) is not None:
            typer.echo(f"{option}: {found[0]}; {found[1]}", err=True)
            raise typer.Exit(2)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("httpx", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Audit records of changes are logged at every level.
    logging.getLogger("sluice.audit").setLevel(logging.INFO)
    from gateway.wiring.supervisor import run

    log = logging.getLogger("sluice")
    address = loaded.server.host
    address = f"[{address}]" if ":" in address else address
    address = f"http{'' if loaded.server.tls is None else 's'}://{address}"
    raise typer.Exit(
        run(loaded, on_ready=lambda bound: log.info("serving on %s:%d", address, bound))
    )


def listening_on(
    config: Config, host: str | None, port: int | None, workers: int | None = None
) -> Config:
    """The configuration with address and number of replicas replaced if given."""
    given = {"host": host, "port": port, "workers": workers}
    update = {name: value for name, value in given.items() if value is not None}
    return config.listening(**update)
