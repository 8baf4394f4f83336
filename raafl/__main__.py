"""`python -m raafl`, the same as `raafl`."""

from raafl.commands.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
