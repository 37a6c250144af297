"""Reads the fenced blocks of a page, and runs them one after the other in a folder of the page, as a reader
would.

The word after the fence says what is done with a block:

| block | what happens |
|---|---|
| ``console`` | each line that begins with ``$ `` is run by bash; the lines after it are what it must print |
| ``sh`` | is run by bash; it may print anything |
| ``python`` | is run as a script |
| ``python file=NAME``, ``toml file=NAME`` | is written to that file, for the blocks after it |
| ``text`` | is never run: a picture, or a form |

Two words may follow: ``full`` (the block, with all after it on the page, is run by ``pytest -m full`` only)
and ``norun`` (it is not run; the line before the fence must then be a comment ``<!-- not run: why -->``).

Clocks, rates and numbers with a decimal point may differ from what the page shows, since they depend on the
machine.  Within a line ``…`` stands for anything, and a line ``…`` for any number of lines.  A command must
end with code 0, or with 3 if ``# exit 3`` follows it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.warm import SOCKET, Warm

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(.*)$")
REASON = re.compile(r"^<!-- not run: \S.* -->$")
EXIT = re.compile(r"\s+# exit (\d+)$")
RUN = ("console", "sh", "python", "toml")
VOLATILE = re.compile(
    r"(?P<clock>\d\d:\d\d:\d\d)|(?P<flops>, [\d.]+ TFLOP/s a worker)|(?P<rate>[\d,]+(?= \w+/s))"
    r"|(?P<number>\d+\.\d+(?:e[+-]\d+)?)|(?P<any>…)| +"
)
WAITED = re.compile(r"  \S+ waits \d+% for data$")
"""The end of the line of a step whose data was slow, as on a busy machine."""
COMMAND_S = 300


class Wrong(Exception):
    """A page breaks the rules of this module, or a block does not do what the page says."""


@dataclass(frozen=True)
class Block:
    """One fenced block.  ``line`` is the line of its fence, from 1; ``before`` is the last line that is not
    empty before it.
    """

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    before: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        return next((word.removeprefix("file=") for word in self.words if word.startswith("file=")), "")

    @property
    def full(self) -> bool:
        return "full" in self.words

    @property
    def runs(self) -> bool:
        return self.language != "text" and "norun" not in self.words


def blocks_of(text: str, page: str) -> list[Block]:
    """Return the blocks of a page in order.  Raises :class:`Wrong` for one whose fence does not say what is
    done with it.
    """
    found: list[Block] = []
    before, inside, lines = "", None, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if fence is None:
            if inside is None:
                before = line or before
            else:
                lines.append(line)
        elif inside is None:
            inside, lines = (number, fence[1].split()), []
        else:
            start, (language, *words) = inside[0], inside[1] or [""]
            found.append(
                Block(page, start, language, tuple(words), before, "".join(f"{each}\n" for each in lines))
            )
            inside, before = None, line
    if inside is not None:
        raise Wrong(f"{page}:{inside[0]}: the block has no end")
    for block in found:
        _check(block)
    return found


def _check(block: Block) -> None:
    if block.language not in (*RUN, "text"):
        raise Wrong(f"{block.place}: {block.language!r} is none of {', '.join(RUN)}, text")
    if unknown := [
        word for word in block.words if word not in ("full", "norun") and not word.startswith("file=")
    ]:
        raise Wrong(f"{block.place}: {unknown[0]!r} is no word of a block")
    if not block.runs and block.language != "text" and not REASON.match(block.before):
        raise Wrong(
            f"{block.place}: a block that is not run needs a comment before it: <!-- not run: why -->"
        )
    if block.language == "toml" and block.runs and not block.file:
        raise Wrong(f"{block.place}: a toml block needs file=NAME, or norun")
    if block.language == "console" and not commands_of(block.text):
        raise Wrong(f"{block.place}: a console block needs a command, a line that begins with '$ '")


def commands_of(text: str) -> list[tuple[str, int, list[str]]]:
    """Return (command, exit code, expected lines) for each command of a console block."""
    found: list[tuple[str, int, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            code = EXIT.search(line)
            found.append(
                (EXIT.sub("", line.removeprefix("$ ")).partition("   # ")[0], int(code[1]) if code else 0, [])
            )
        elif found:
            found[-1][2].append(line)
    return found


def run_page(blocks: list[Block], folder: Path, *, full: bool, warm: Warm | None = None) -> None:
    """Run the blocks of one page in ``folder``; without ``full``, up to the first that only ``-m full`` runs.
    Raises :class:`Wrong`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shell = Shell(folder, warm)
    for block in blocks:
        if block.full and not full:
            return
        if block.runs:
            run_block(block, shell)


def run_block(block: Block, shell: Shell) -> None:
    if block.file:
        (shell.folder / block.file).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        (shell.folder / "block.py").write_text(block.text, encoding="utf-8")
        _run("python block.py", 0, None, block, shell)
    elif block.language == "sh":
        _run(block.text, 0, None, block, shell)
    else:
        for command, code, expected in commands_of(block.text):
            _run(command, code, expected, block, shell)


def _run(command: str, code: int, expected: list[str] | None, block: Block, shell: Shell) -> None:
    found, printed = shell.run(command)
    if found != code:
        raise Wrong(f"{block.place}: `{command}` ended with code {found}, not {code}:\n{printed}")
    if expected is not None and not matches(expected, printed):
        raise Wrong(f"{block.place}: `{command}` did not print what the page says, but:\n{printed}")


def matches(expected: list[str], printed: str) -> bool:
    """Return whether a command printed the ``expected`` lines.  Nothing expected means that anything may be
    printed.
    """
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "…" else _line(line) + r"\n" for line in expected if line.strip()
    )
    text = "".join(f"{WAITED.sub('', line).rstrip()}\n" for line in printed.splitlines() if line.strip())
    return not pattern or re.fullmatch(pattern, text) is not None


def _line(line: str) -> str:
    """Return the pattern of one expected line."""
    return "".join(_parts(line.rstrip()))


def _parts(line: str) -> Iterator[str]:
    # they are not shown of a machine so busy that they are next to nothing
    flops = r"(?:, [\d.]+ TFLOP/s a worker)?"
    volatile = {
        "clock": r"\d\d:\d\d:\d\d",
        "flops": flops,
        "rate": r"[\d,]+",
        "number": r"\d+\.\d+(?:e[+-]\d+)?",
        "any": ".*",
    }
    at = 0
    for found in VOLATILE.finditer(line):
        yield re.escape(line[at : found.start()])
        yield volatile.get(found.lastgroup or "", " +")
        at = found.end()
    yield re.escape(line[at:])


class Shell:
    """Runs commands in a folder in which ``elastic`` and ``python`` are those of this checkout, and forks of
    ``warm`` if it is given.
    """

    def __init__(self, folder: Path, warm: Warm | None = None) -> None:
        self.folder = folder
        programs = folder / ".bin"
        programs.mkdir(exist_ok=True)
        python = f"{sys.executable} {warm.program}" if warm is not None else sys.executable
        for name, line in {"elastic": f"{python} -m elastic", "python": python}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (programs / name).chmod(0o755)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        ours |= {"RAY_worker_niceness": "0"}  # as in ``tests/support/clusters.py``
        self.environment = {
            **ours,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self.environment |= {SOCKET: warm.path} if warm is not None else {}

    def run(self, command: str) -> tuple[int, str]:
        """Return the exit code of ``command`` and what it printed, with the folder written as ``~/project``."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        return done.returncode, done.stdout.replace(str(self.folder), "~/project")
