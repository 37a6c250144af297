"""``python -m elastic``, and the command ``elastic``: see ``actors/cli.py``."""

from __future__ import annotations

import sys

from elastic.errors import CodeError
from elastic.imports import check_packages


def main() -> int:
    """Runs the command.  First it checks that no folder shadows one of our packages, before anything is imported from there."""
    try:
        check_packages()
    except CodeError as error:
        print(f"elastic: {error}", file=sys.stderr)
        return error.exit_code
    from actors.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
