"""The entry of ``python -m elastic`` and of the command ``elastic``, which :mod:`actors.cli` implements."""

from __future__ import annotations

import signal
import sys

from elastic.code.imports import check_packages
from elastic.errors import STOPPED, CodeError


def main() -> int:
    """Checks that nothing on the path shadows our packages, then imports and runs the command.  Returns the
    exit code.
    """
    try:
        check_packages()
    except CodeError as error:
        print(f"elastic: {error}", file=sys.stderr)
        return error.exit_code
    code = STOPPED
    try:
        from actors.cli import main as command

        code = command()
    # while the command was imported, or once more while it said that it was interrupted
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("elastic: interrupted; give the same command again to go on", file=sys.stderr)
    # Python's end takes a while, and would print where a further Ctrl-C finds it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if starting := sys.modules.get("actors.own_cluster"):
        starting.leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
