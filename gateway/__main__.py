"""`python -m gateway sluice.yaml`: the gateway without the rest of the command."""

import logging
import signal
import sys
from pathlib import Path

from gateway.settings import ConfigError, load
from gateway.wiring.supervisor import run


def main(arguments: list[str]) -> int:
    """Serve the configuration file named first; exit status 2 for a bad one."""
    if sys.platform != "win32":  # until the gateway handles them
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR2})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `sluice serve` does
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = load(Path(arguments[0] if arguments else "sluice.yaml"))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
