"""Every block of the README and of the guide that can run here is run in order, as a reader would, and must
print what the page shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.blocks import ROOT, Block, Shell, Wrong, blocks_of, matches, run_page
from tests.support.warm import Warm

PAGES = sorted((ROOT / "examples" / "guide").glob("*.md"))
README = ROOT / "README.md"


def read(page: Path) -> list[Block]:
    return blocks_of(page.read_text(encoding="utf-8"), page.name)


RUN = [
    page
    for page in (README, *PAGES)
    if any(block.runs and not block.full and not block.file for block in read(page))
]
"""The pages of which something is run by default.  Each block is read, and refused where it breaks the rules,
when this is imported.
"""
FULL = [page for page in (README, *PAGES) if any(block.full for block in read(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_do_what_it_says(page: Path, tmp_path: Path, forks: Warm) -> None:
    run_page(read(page), tmp_path / "project", full=False, warm=forks)


@pytest.mark.full
@pytest.mark.parametrize("page", FULL, ids=lambda page: page.stem)
def test_the_long_blocks_too(page: Path, tmp_path: Path) -> None:
    run_page(read(page), tmp_path / "project", full=True)


@pytest.mark.fast
def test_the_readme_shows_the_files_of_examples() -> None:
    shown = {block.file: block.text for block in read(README) if block.file}
    assert set(shown) == {"own_model.py", "own_model.toml", "gpus.toml"}
    assert shown == {name: (ROOT / "examples" / name).read_text(encoding="utf-8") for name in shown}


@pytest.mark.fast
def test_the_guide_has_the_pages_that_the_readme_names() -> None:
    text = README.read_text(encoding="utf-8")
    assert {page.name for page in PAGES} == {
        page.name for page in PAGES if f"(examples/guide/{page.name})" in text
    }


GOOD = """
```console
$ echo one; echo 12:00:00 of 3.25 s; echo end
one
11:11:11 of 1.5 s
end
$ exit 3   # exit 3
```
"""


def run(text: str, folder: Path) -> None:
    run_page(blocks_of(text, "page"), folder, full=False)


@pytest.mark.fast
def test_a_block_that_does_what_it_says_passes(tmp_path: Path) -> None:
    run(GOOD, tmp_path)
    run(
        (
            "```sh\ntrue\n```\n```python file=mine.py\nX = 3\n```\n```python\nimport mine\nassert mine.X == "
            "3\n```\n"
        ),
        tmp_path,
    )
    run(
        (
            "```console\n$ seq 9\n1\n…\n8\n9\n```\n<!-- not run: it would fail -->\n```sh "
            "norun\nfalse\n```\n```text\nanything\n```\n"
        ),
        tmp_path,
    )
    run("```console full\n$ false\n```\n```console\n$ false\n```\n", tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("\none\n", "\ntwo\n", "did not print"),
        ("\none\n", "\none\nand more\n", "did not print"),
        ("\nend\n", "\n", "did not print"),
        ("echo one", "echo 1", "did not print"),
        ("# exit 3", "# exit 2", "ended with code 3, not 2"),
        ("   # exit 3", "", "ended with code 3, not 0"),
        ("$ echo", "$ no-such-program;", "did not print"),
    ],
)
def test_a_broken_block_is_found(tmp_path: Path, was: str, becomes: str, said: str) -> None:
    """The control: each change in a page that passes is found."""
    assert was in GOOD
    with pytest.raises(Wrong, match=said):
        run(GOOD.replace(was, becomes), tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nraise SystemExit(1)\n```\n", "ended with code 1"),
        ("```sh\nfalse\n```\n", "ended with code 1"),
        ("```bash\ntrue\n```\n", "'bash' is none of"),
        ("```\ntrue\n```\n", "'' is none of"),
        ("```sh norun\ntrue\n```\n", "needs a comment"),
        ("<!-- a comment -->\n```sh norun\ntrue\n```\n", "needs a comment"),
        ("```sh noturn\ntrue\n```\n", "'noturn' is no word"),
        ("```toml\na = 1\n```\n", "needs file=NAME"),
        ("```console\ntrue\n```\n", "needs a command"),
        ("```text\n", "has no end"),
    ],
)
def test_a_block_that_would_not_be_run_unnoticed_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        run(text, tmp_path)


@pytest.mark.fast
def test_elastic_is_this_checkout(tmp_path: Path) -> None:
    code, printed = Shell(tmp_path).run("python -c 'import elastic; print(elastic.__file__)'")
    assert (code, printed.strip()) == (0, str(ROOT / "elastic" / "__init__.py"))


@pytest.mark.fast
def test_what_may_differ_and_what_may_not() -> None:
    line = "07:05:20 step   200/200  loss 0.0065      3,704 tokens/s  lr 3.00e-03"
    assert matches(
        [line], line.replace("07:05:20", "23:59:59").replace("0.0065", "1.25").replace("3,704", "99")
    )
    assert matches([line], f"{line}  local waits 31% for data")
    assert not matches([line], line.replace("200/200", "199/200"))
    assert not matches([line], line.replace("loss", "gain"))
    assert not matches([line], line.replace("tokens/s", "terms/s")) and matches(
        ["3 terms/s"], "1,234 terms/s"
    )
