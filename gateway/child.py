"""`python -m gateway.child`: one worker process, started by `gateway.supervisor`.

Its arguments say which it is and which descriptors it was given; the checked configuration comes
through its standard input, so that it is read and checked once, and no secret is on disk.
"""

import json
import logging
import pickle
import sys

from gateway.adapters.shared.seat import Place
from gateway.serving import run


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM, or until the parent is gone."""
    told = json.loads(arguments[0])
    place = Place(**told["place"])
    for name, level in told["levels"].items():
        logging.getLogger(name or None).setLevel(level)
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s worker {place.index} %(name)s: %(message)s"
    )
    # From our own parent, over a pipe that nobody else has.
    config = pickle.loads(sys.stdin.buffer.read())  # noqa: S301
    return run(config, place=place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
