"""`python -m gateway.wiring.replica_process`: one replica of several on a host.

`gateway.wiring.supervisor` starts it and sends the length of the checked configuration and the
configuration on standard input. The file is thus read and checked once, and no secret is on disk.
Standard input stays open until the supervisor is gone. The replica reports on standard output when
it listens.
"""

import json
import logging
import pickle
import sys
from io import RawIOBase

from gateway.wiring.handover import Parent
from gateway.wiring.serving import run
from gateway.wiring.supervisor import READY


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM, or until the supervisor is gone."""
    reported = json.loads(arguments[0])
    for name, level in reported["levels"].items():
        logging.getLogger(name or None).setLevel(level)
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s replica {reported['index']} %(name)s: %(message)s"
    )
    pipe = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 - kept open
    packed = _exactly(pipe, int.from_bytes(_exactly(pipe, 8)))
    # Trusted: it comes from our own supervisor over a private pipe.
    config = pickle.loads(packed)  # noqa: S301
    parent = Parent(pipe.fileno(), tuple(reported["sockets"]), reported["succeeds"])
    return run(config, on_ready=_ready, parent=parent, warns=reported["index"] == 1)


def _exactly(pipe: RawIOBase, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = pipe.read(count - len(found))
        if not part:
            raise SystemExit(1)  # the supervisor is gone
        found += part
    return found


def _ready(_port: int) -> None:
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
