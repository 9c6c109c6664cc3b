"""Run the sluice command by `python -m sluice`."""

from sluice.cli import main

if __name__ == "__main__":
    main()
