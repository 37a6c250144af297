"""The command line: what an option takes, and a command whose own options have the names of settings."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from elastic.config.command_line import Options, list_settings, read_options, take_options
from elastic.config.settings import leaves, merge, read_toml, source_of
from elastic.errors import JobError
from elastic.job import Job

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--optim.lr -1e-3 --seed -.5", {"optim.lr": -1e-3, "seed": -0.5}),
        ("--name=--x --bucket=a=b", {"name": "--x", "bucket": "a=b"}),
        ("--checkpoint.save-every 3 --checkpoint.save_every 4", {"checkpoint.save_every": 4}),
        (
            "--model-args.rope-theta 1e4 --model_args.a.b=_x",
            {"model_args.rope_theta": 1e4, "model_args.a.b": "_x"},
        ),
        (
            "--data.args.path /x --no-compile --reproducible",
            {"data.args.path": "/x", "compile": False, "reproducible": True},
        ),
        ("--optim.betas .8 0.9 --steps 1", {"optim.betas": [0.8, 0.9], "steps": 1}),
    ],
)
def test_an_option_takes_its_words(line: str, options: dict[str, object]) -> None:
    assert read_options(line.split(), Job) == options


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--samples.prompts", "hello"], ["hello"]),
        (["--samples.prompts", "hello", "[b]"], ["hello", "[b]"]),
        (["--samples.prompts", '["hello"]'], ["hello"]),
        (["--samples.prompts", "['a', \"b\",]"], ["a", "b"]),
        (["--samples.prompts", '["\\u00e9\\/"]'], ["é/"]),
        (["--data.weights", "0.5"], [0.5]),
        (["--data.weights", "1", "2"], [1, 2]),
        (["--faults", '[{"point": "save", "step": 3}]'], [{"point": "save", "step": 3}]),
        (["--faults", "{point = 'save', step = 3}"], [{"point": "save", "step": 3}]),
        (["--model-args", '{"dim": 3, "x": [null, {"y": true}]}'], {"dim": 3, "x": [None, {"y": True}]}),
        (["--model-args", "{dim = 3, x = {y = true}}"], {"dim": 3, "x": {"y": True}}),
        (["--model-args.x", '{"y": 1}'], {"y": 1}),
        (["--model-args.x", '"{y: 1}"'], "{y: 1}"),
    ],
)
def test_lists_and_tables_are_read_as_toml_and_as_json(words: list[str], value: object) -> None:
    assert [*read_options(words, Job).values()] == [value]


@pytest.mark.parametrize(
    ("option", "word", "said"),
    [
        (
            "samples.prompts",
            "[hello]",
            """must be a list; write --samples.prompts "one" "two", or --samples.prompts '["one", "two"]'""",
        ),
        ("optim.betas", "0.9,0.95", "must be a list; write --optim.betas 1 2, or --optim.betas '[1, 2]'"),
        ("optim.betas", "(0.9, 0.95)", "must be a list; write --optim.betas 1 2, or --optim.betas '[1, 2]'"),
        ("faults", "save", "must be a list; write --faults '[{ key = value }]'"),
        (
            "model_args",
            "{dim: 3}",
            "must be a table of settings; write --model-args '{ key = value }', or --model-args.key value",
        ),
        (
            "data.args",
            "path=x",
            "must be a table of settings; write --data.args '{ key = value }', or --data.args.key value",
        ),
    ],
)
def test_what_is_no_list_or_table_is_told_with_the_form_that_is(
    tmp_path: Path, option: str, word: str, said: str
) -> None:
    (tmp_path / "job.toml").write_text('name = "a"\nbucket = "/b"\n')
    with pytest.raises(JobError) as refused:
        Job.load(tmp_path / "job.toml", [f"--{option}", word])
    assert str(refused.value) == f"command line: {option} = {word!r} {said}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (text, code)
        for text in ("# für\n", "# für\r\n")
        for code in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be with its mark")
    ],
)
def test_a_file_of_a_windows_editor_is_read(tmp_path: Path, text: str, code: str) -> None:
    """Notepad and PowerShell write such marks."""
    text += 'name = "a"\nbucket = "/bücket"\n'
    data = "\ufeff".encode("utf-16-be") + text.encode("utf-16-be") if "mark" in code else text.encode(code)
    (tmp_path / "job.toml").write_bytes(data)
    assert Job.load(tmp_path / "job.toml").bucket == "/bücket"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "latin-1",
            (
                "is not text in UTF-8: line 2 has the byte 0xfc, which may be a letter of Latin-1; save it "
                "as UTF-8 ("
            ),
        ),
        (
            "utf-16-le",
            ("is not text in UTF-8: it has bytes of value 0, so it may be UTF-16, or no text at all; "),
        ),
        (
            "utf-32",
            (
                "is text in UTF-32, and TOML is UTF-8; save it as UTF-8 (in an editor: Save As, encoding "
                "UTF-8; in PowerShell: Out-File"
            ),
        ),
    ],
)
def test_a_file_in_another_encoding_says_how_to_save_it(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "job.toml").write_bytes('name = "a"\nbucket = "/bücket"\n'.encode(code))
    with pytest.raises(JobError) as refused:
        Job.load(tmp_path / "job.toml")
    assert str(refused.value).startswith(f"job.toml {said}") and "\n" not in str(refused.value)


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be"])
def test_ascii_in_utf_16_without_a_mark_is_told_too(tmp_path: Path, code: str) -> None:
    """Its bytes are valid UTF-8.  The control: with the mark it is read."""
    text = 'name = "a"\nbucket = "/b"\n'
    (tmp_path / "job.toml").write_bytes(text.encode(code))
    with pytest.raises(
        JobError,
        match=(r"^job\.toml is not text in UTF-8: it has bytes of value 0, so it may be UTF-16, .*; save it"),
    ):
        Job.load(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_bytes(f"\ufeff{text}".encode(code))
    assert Job.load(tmp_path / "job.toml").bucket == "/b"


@pytest.mark.parametrize(
    "line",
    [
        "--steps 1 2",
        "--model_args.dim 1 2",
        "--no-compile yes",
        "--stepz 3",
        "--step 3",
        "--model_args.",
        "-s 3",
        "-h",
    ],
)
def test_and_no_others(line: str) -> None:
    """Abbreviations are not guessed either."""
    with pytest.raises(
        JobError,
        match=(
            r"^command line: ('\S+' is no option; write|unknown setting '--\S+'; "
            r"did you mean)"
        ),
    ):
        read_options(line.split(), Job)


def test_a_commands_own_option_comes_before_a_setting_of_that_name() -> None:
    options, rest = take_options(["--seed", "7", "--steps", "3"], Job, {"--seed": True})
    assert (rest, options) == (["--seed", "7"], Options({"steps": 3}, {"steps": ["--steps", "3"]}))
    with pytest.raises(JobError, match=r"^command line: --seed has no value; write '--seed value'"):
        take_options(["--seed", "--steps", "3", "7"], Job, {"--seed": True})
    options, rest = take_options(["--seed", "7"], Job)
    assert (rest, options.settings) == ([], {"seed": 7}), "the control"


FILE = 'name = "a"\nbucket = "/b"\nmodel = "a.b:c"\nsteps = 9\nglobal_batch = 8\n[data]\ndataset = "a.b:c"\n'


@pytest.mark.parametrize(
    ("line", "sources"),
    [
        ("--optim.lr -3", ["command line"]),
        ("--optim.betas 1 2", ["command line", "command line"]),
        ("--data.weights 1 -2", ["command line"]),
        ("--faults [{}]", ["command line"]),
        ("--microbatch 3", ["job.toml with --microbatch"]),
        ("--workers.min 5 --workers.max 2 --seed 3", ["job.toml with --workers.min and --workers.max"]),
        ("--batch_ramp.start 3", ["job.toml with --batch-ramp.start"]),
        (
            "--global-batch 7 --microbatch 1 --schedule.warmup-steps 99",
            ["job.toml with --schedule.warmup-steps"],
        ),
    ],
)
def test_what_is_wrong_says_which_option_gave_it(tmp_path: Path, line: str, sources: list[str]) -> None:
    """A value of the file that does not fit one of an option is told with both.  The control: all from the
    file.
    """
    path = tmp_path / "job.toml"
    path.write_text(FILE)
    with pytest.raises(JobError) as refused:
        Job.load(path, line.split())
    assert [each.partition(": ")[0] for each in str(refused.value).splitlines()] == sources
    given = merge(read_toml(path), read_options(line.split(), Job), "job.toml")
    with pytest.raises(JobError) as other:
        Job(source_of("job.toml", ()), **given)
    assert [each.partition(": ")[2] for each in str(other.value).splitlines()] == [
        each.partition(": ")[2] for each in str(refused.value).splitlines()
    ]
    assert {each.partition(": ")[0] for each in str(other.value).splitlines()} == {"job.toml"}


def test_a_setting_in_a_section_too_many_is_found() -> None:
    """The control: without the section's name in it, the last part alone decides."""
    with pytest.raises(
        JobError,
        match=(
            r"unknown setting '--optim[.]schedule[.]kind'; did you mean "
            r"'--schedule[.]kind'\?"
        ),
    ):
        read_options(["--optim.schedule.kind", "linear"], Job)
    with pytest.raises(
        JobError,
        match=(
            r"unknown setting '--optimizer[.]kind'; did you mean "
            r"'--optim[.]kind'\?"
        ),
    ):
        read_options(["--optimizer.kind", "sgd"], Job)
    with pytest.raises(
        JobError,
        match=(
            r"schedule.kind = 'cosin' must be 'cosine', .* or 'rsqrt', or name "
            r"code as 'package.module:name'"
        ),
    ):
        Job(schedule={"kind": "cosin"}, name="a", bucket="/b")


def test_the_words_of_a_line_say_the_same_again(tmp_path: Path) -> None:
    """A command tells the next one by these words which job it means."""
    path = tmp_path / "job.toml"
    path.write_text('name = "a"\nbucket = "/b"\n')
    line = ["--optim.betas", ".8", "0.9", "--no-reproducible", "--model_args.kv_heads=2", "--name", "-1"]
    options, _ = take_options(line, Job)
    assert Job.load(path, options.to_show()) == Job.load(path, line) == Job.load(path, options.settings)
    assert Job.load(path, options.settings).model_args == {"kv_heads": 2}


def test_the_words_to_show_have_no_secret_and_lack_a_value_in_its_place() -> None:
    """Pasted, they are refused.  The control: all others say the same again."""
    line = [
        "--steps",
        "3",
        "--data.args.api-key",
        "hush",
        "--metrics.sinks",
        '{"mlflow": {"uri": "hush"}}',
        "--data.args.dir=/keys",
    ]
    options, _ = take_options(line, Job)
    shown = options.to_show()
    assert shown == ["--steps", "3", "--data.args.api-key", "--metrics.sinks", "--data.args.dir", "/keys"]
    assert options.settings["data.args.api_key"] == "hush" and options.words["data.args.api_key"] == [
        "--data.args.api-key",
        "hush",
    ]
    for words, option in ((shown, "--data.args.api_key"), (shown[3:], "--metrics.sinks")):
        with pytest.raises(JobError, match=f"^command line: {option} has no value; write '{option} value'"):
            read_options(words, Job)
    assert read_options(shown[4:], Job) == {"data.args.dir": "/keys"}


def test_help_groups_settings_by_section_with_meaning_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    parser = ArgumentParser()
    list_settings(parser, Job)
    parser.print_help()
    shown = capsys.readouterr().out
    for name in leaves(Job):
        if "[]" not in name:
            assert re.search(
                rf"^  --{name.replace('_', '-')} .*?\w\S* \((default: .+|required)\)$", shown, re.M | re.S
            ), name
    assert re.search(
        (
            r"^settings in \[workers\]:\n  The number of worker processes.*\n\n  --workers\.min "
            r"INTEGER"
        ),
        shown,
        re.M,
    )
    assert "--parallel.dp-shard INTEGER|auto\n" in shown and "--compile [true|false]" in shown
