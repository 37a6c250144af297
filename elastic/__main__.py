"""``python -m elastic``, and the command ``elastic``: see ``actors/cli.py``."""

from __future__ import annotations

import sys

from elastic.errors import CodeError
from elastic.imports import check_packages


def main() -> int:
    """The command.  Before anything is imported from a folder that takes the place of one of our packages, it is named."""
    try:
        check_packages()
    except CodeError as error:
        print(f"elastic: {error}", file=sys.stderr)
        return error.exit_code
    from actors.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
