"""The sluice command; also `python -m sluice`."""

import signal
import sys


def main() -> None:
    """Run it. For `serve`, SIGHUP and SIGUSR2 wait from here until the gateway handles them."""
    if sys.argv[1:2] == ["serve"] and sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGUSR2})
    from sluice.cli import main as run

    run()


if __name__ == "__main__":
    main()
