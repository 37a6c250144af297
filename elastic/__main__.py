"""The entry of ``python -m elastic`` and of the command ``elastic``, which ``actors/cli.py`` implements."""

from __future__ import annotations

import sys

from elastic.errors import STOPPED, CodeError
from elastic.imports import check_packages


def main() -> int:
    """Checks that nothing on the path shadows our packages, then imports and runs the command.  Returns the exit code."""
    try:
        check_packages()
    except CodeError as error:
        print(f"elastic: {error}", file=sys.stderr)
        return error.exit_code
    try:
        from actors.cli import main as command

        return command()
    except KeyboardInterrupt:  # before the command had begun, while it was imported
        print("elastic: interrupted before it began", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
