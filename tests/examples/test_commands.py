"""The guide's table of commands has every command and every option of `elastic train`, as the command line
itself lists them.
"""

from __future__ import annotations

import re

import pytest

from actors.cli import main
from tests.support.commands import ROOT

GUIDE = ROOT / "examples" / "guide" / "commands.md"
GROUPS = ("data", "checkpoint")
Shown = pytest.CaptureFixture[str]


def helped(capsys: Shown, *words: str) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


def listed(text: str) -> list[str]:
    """Returns the commands that a help lists."""
    return re.findall(r"(?m)^    (\w+)(?:  |$)", text.partition("  command\n")[2] or text)


def commands(capsys: Shown) -> set[str]:
    alone = {name for name in listed(helped(capsys)) if name not in GROUPS}
    return alone | {f"{group} {name}" for group in GROUPS for name in listed(helped(capsys, group))}


def told(page: str) -> set[str]:
    """Returns the commands in the first column of the page's table; `ls\\|show` are two."""
    found = set[str]()
    for row in re.findall(r"(?m)^\| (`elastic .*?) \| ", page):
        for command, more in re.findall(r"`elastic (\w+)((?: [a-z]+(?:\\\|[a-z]+)*)?)(?![\w.])", row):
            found |= (
                {f"{command} {each}" for each in more.strip().split("\\|")}
                if command in GROUPS
                else {command}
            )
    return found


def test_the_guide_has_every_command(capsys: Shown) -> None:
    """The control: a page without the row of one of them."""
    page, known = GUIDE.read_text(), commands(capsys)
    assert len(known) > 20 and {"train", "checkpoint diff", "data show"} <= known
    assert told(page) == known
    less = re.sub(r"(?m)^\| `elastic (rollback|checkpoint diff) .*\n", "", page)
    assert known - told(less) == {"rollback", "checkpoint diff"}


def test_the_table_has_every_option_of_train(capsys: Shown) -> None:
    options = set(re.findall(r"--[a-z-]+", helped(capsys, "train").partition("\n\n")[0])) - {
        "--section",
        "--help",
    }
    long = {"--quiet" if each == "-q" else each for each in options}
    rows = "".join(re.findall(r"(?m)^\| `elastic train .*", GUIDE.read_text()))
    assert {"--prints", "--accept-code", "--again", "--resume"} <= long
    assert {each for each in long if each not in rows} == set()
