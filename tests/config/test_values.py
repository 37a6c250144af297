"""Values that a setting cannot have, and deadlines that nobody can keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.config.sections import Deadlines
from elastic.config.settings import ELSEWHERE, leaves
from elastic.config.values import HIDDEN, is_secret, literal_secrets, place, same_place, shown
from elastic.errors import JobError
from elastic.job import Job

pytestmark = pytest.mark.fast


TOGETHER = """
name = "a"
bucket = "/b"
validation = { every = 50, samples = 7 }
checkpoint = { keep_last = 2, keep_best = true }
samples = { every = 50, prompts = ["a"] }
export = { every = 50 }
workers = { spares = 1 }
copies = { copy_every = 2, buddy_every = 4 }
schedule = { kind = "wsd", decay_steps = 10, warmup_steps = 3 }
batch_ramp = { start = 4, increment = 4, samples = 100 }
spikes = { action = "skip", microbatch_z = 3.0 }
"""

ON = """
name = "a"
bucket = "/b"
[validation]
every = 50
by = "spares"
samples = 7
dataset = "tests.support.toys:Sums"
args = { path = "held-out" }
[samples]
every = 50
prompts = ["a"]
tokens = 3
temperature = 0.5
seed = 4
[checkpoint]
keep_last = 2
keep_every = 100
keep_best = true
keep_younger = "1h"
[workers]
spares = 1
"""


def job(**settings: Any) -> Job:
    return Job(**{"name": "run", "bucket": "/bucket", **settings})


def test_a_name_that_can_be_none_of_python_is_told() -> None:
    with pytest.raises(
        JobError,
        match=(
            r"model = 'my-proj\.v2:build' must name code as 'package\.module:name'; 'my-proj' is not a "
            r"name in Python, so rename"
        ),
    ):
        job(model="my-proj.v2:build")
    with pytest.raises(JobError, match=r"must name code as 'package\.module:name'$"):
        job(model="my.v2.build")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "a\n"])
def test_a_run_has_the_name_of_a_folder(name: str) -> None:
    with pytest.raises(JobError, match="must be a legal folder name"):
        job(name=name)


def test_a_run_has_a_name_that_fits_into_names_of_files() -> None:
    assert job(name="a" * 200).name == "a" * 200
    with pytest.raises(JobError, match="must have 200 letters or fewer"):
        job(name="a" * 201)


def test_a_path_is_made_absolute_and_a_url_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert job(bucket="out").bucket == str(tmp_path / "out")
    assert job(bucket="~/out").bucket == str(Path.home() / "out")
    assert job(bucket="file:///out").bucket == "/out"
    for url in ("s3://bucket/prefix", "memory://x", "/bucket"):
        assert job(bucket=url).bucket == url
    with pytest.raises(JobError, match="bucket = ' ' must be a folder"):
        job(bucket=" ")


@pytest.mark.parametrize("bucket", ["s3:/bucket/x", "s3//bucket/x", "s4://bucket/x"])
def test_a_bucket_that_looks_like_a_url_is_not_taken_for_a_folder(bucket: str) -> None:
    with pytest.raises(JobError, match=rf"^Job: bucket = '{bucket}' .*s3://bucket/x"):
        job(bucket=bucket)


@pytest.mark.parametrize(
    ("deadlines", "said"),
    [
        (
            {"lease_s": 0.01},
            (
                "deadlines.lease_s = 0.01 is less than 1: a worker renews its lease four times in "
                "this time, and healthy workers would stop"
            ),
        ),
        ({"stall_s": 0.1}, "deadlines.stall_s = 0.1 is less than 1: "),
        ({"driver_s": 0.001}, "deadlines.driver_s = 0.001 is less than 1: "),
        ({"wait_s": 1e-9}, "deadlines.wait_s = 1e-09 is less than 1: "),
        (
            {"silence_s": 1.9},
            "deadlines.silence_s = 1.9 is less than 2: each node sends a sign of life every 0.5 s",
        ),
        (
            {"fence_s": 1000, "lease_s": 1},
            "deadlines.fence_s = 1000 is more than 4 × deadlines.lease_s = 1: ",
        ),
    ],
)
def test_deadlines_that_strike_those_that_are_well_are_refused(deadlines: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as caught:
        job(deadlines=deadlines)
    assert str(caught.value).startswith(f"Job: {said}") and "\n" not in str(caught.value)


def test_short_deadlines_that_can_be_kept() -> None:
    job(deadlines=Deadlines(lease_s=1, stall_s=1, silence_s=2, driver_s=1, wait_s=1, fence_s=4))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"spikes": {"action": "quarantne"}},
            "spikes.action = 'quarantne' must be 'none', .* or 'forget'; did you mean 'quarantine'\\?",
        ),
        (
            {"optim": {"kind": "Adam"}},
            "optim.kind = 'Adam' must be 'adamw', .*; Adam is optim.kind = 'adamw' with optim.decay = 'l2'",
        ),
        (
            {"attention": "flash4"},
            "attention = 'flash4' must be 'auto' or 'flash-4'; did you mean 'flash-4'\\?",
        ),
        (
            {"parallel": {"zero": "atuo"}},
            "parallel.zero = 'atuo' must be 0, 1, 2 or 3, or 'auto'; did you mean 'auto'\\?",
        ),
        ({"recompute": "blokc"}, "recompute = 'blokc' must be .*; did you mean 'block'\\?"),
        (
            {"init": "run@bset"},
            "init = 'run@bset' must name a checkpoint .*'run@400'; did you mean 'run@best'\\?",
        ),
        (
            {"faults": [{"point": "sav"}]},
            (
                r"faults\[0\].point = 'sav' must be one of forward, .*; did you "
                r"mean 'save'\?"
            ),
        ),
        (
            {"spikes": {"action": "xyzzy"}},
            "spikes.action = 'xyzzy' must be 'none', 'warn', 'skip', 'quarantine' or 'forget'",
        ),
        ({"parallel": {"zero": 7}}, "parallel.zero = 7 must be 0, 1, 2 or 3, or 'auto'"),
    ],
)
def test_a_misspelt_word_is_told_with_the_nearest_one(settings: dict[str, Any], said: str) -> None:
    """The control: nothing is near the last two."""
    with pytest.raises(JobError, match=f"^Job: {said}$"):
        job(**settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim.lr = '1e-2'", "optim.lr = '1e-2' must be a finite number; write 1e-2 without quotes"),
        ("steps = '5'", "steps = '5' must be a whole number; write 5 without quotes"),
        (
            "checkpoint.keep_best = 'true'",
            "checkpoint.keep_best = 'true' must be true or false; write true without quotes",
        ),
        (
            "parallel.zero = '1'",
            "parallel.zero = '1' must be 0, 1, 2 or 3, or 'auto'; write 1 without quotes",
        ),
        (
            "optim.betas = ['0.9', 0.95]",
            "optim.betas[0] = '0.9' must be a finite number; write 0.9 without quotes",
        ),
        (
            "data.weights = [0.5, '1']",
            "data.weights[1] = '1' must be a finite number; write 1 without quotes",
        ),
        (
            "faults = [{ point = 'save', step = '7' }]",
            "faults[0].step = '7' must be a whole number; write 7 without quotes",
        ),
        ("optim.betas = [0.9, '1.5']", "optim.betas[1] = '1.5' must be a finite number"),
        ("optim.betas = [0.9, 'high']", "optim.betas[1] = 'high' must be a finite number"),
        ("data.weights = ['-1']", "data.weights[0] = '-1' must be a finite number"),
        ("optim.lr = 'inf'", "optim.lr = 'inf' must be a finite number"),
        ("steps = '5 s'", "steps = '5 s' must be a whole number"),
        ("parallel.zero = '7'", "parallel.zero = '7' must be 0, 1, 2 or 3, or 'auto'"),
        ("workers = 2", "workers = 2 must be a table of settings; did you mean 'workers.max'?"),
        ("optim = 'sgd'", "optim = 'sgd' must be a table of settings; did you mean 'optim.kind'?"),
        ("spikes = 2", "spikes = 2 must be a table of settings"),
        (
            "validation.data = 'x'",
            "unknown setting 'validation.data'; did you mean 'validation.dataset' or 'validation.args'?",
        ),
        (
            "checkpoint.keep = { last = 3 }",
            "unknown setting 'checkpoint.keep'; did you mean 'checkpoint.keep_last' or "
            "'checkpoint.keep_every' or 'checkpoint.keep_best' or 'checkpoint.keep_younger'?",
        ),
    ],
)
def test_what_newcomers_write_is_told_with_what_they_mean(tmp_path: Path, text: str, said: str) -> None:
    """The controls: what would be wrong without its quotes, too, and a section with no such setting, are told
    without it.
    """
    (tmp_path / "job.toml").write_text(f'name = "a"\nbucket = "/b"\n{text}\n')
    with pytest.raises(JobError) as refused:
        Job.load(tmp_path / "job.toml")
    assert str(refused.value) == f"job.toml: {said}"


@pytest.mark.parametrize(
    "value", ["[" * 100_000, "9" * 10_000, "1e9999", "=", "\x00", " ", "1\nsteps = 2", "1979-05-27"]
)
def test_a_text_that_is_no_number_is_refused_as_text(value: str) -> None:
    with pytest.raises(JobError, match=r"steps = .* must be a whole number$"):
        job(steps=value)


def test_what_a_suggestion_names_are_settings() -> None:
    assert {name for names in ELSEWHERE.values() for name in names} <= leaves(Job).keys()


@pytest.mark.parametrize("name", [name for name in leaves(Job) if "[]" not in name and name != "faults"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_number_that_is_refused_names_its_setting(tmp_path: Path, name: str, value: str) -> None:
    """The file has what stands beside each of them, and the refusal is not about that alone."""
    (tmp_path / "job.toml").write_text(TOGETHER)
    Job.load(tmp_path / "job.toml")
    try:
        Job.load(tmp_path / "job.toml", [f"--{name}", value])
    except JobError as error:
        own = [f"{name} = ", f"{name}[0] = "]
        assert [line for line in str(error).splitlines() if not any(each in line for each in own)] == []


@pytest.mark.parametrize(
    ("option", "idle"),
    [
        (
            "--validation.every",
            [
                "validation.by",
                "validation.samples",
                "validation.dataset",
                "validation.args",
                "checkpoint.keep_best",
            ],
        ),
        ("--samples.every", ["samples.prompts", "samples.tokens", "samples.temperature", "samples.seed"]),
        (
            "--checkpoint.keep-last",
            ["checkpoint.keep_every", "checkpoint.keep_best", "checkpoint.keep_younger"],
        ),
    ],
)
def test_one_option_turns_something_off(tmp_path: Path, option: str, idle: list[str]) -> None:
    """The rest of its section is told as notes.  The control: who has left it out, and not turned it off, has
    made a mistake.
    """
    (tmp_path / "job.toml").write_text(ON)
    whole = Job.load(tmp_path / "job.toml")
    assert not any("while" in each for each in whole.warnings())
    job = Job.load(tmp_path / "job.toml", [option, "0"])
    assert [each.partition(" = ")[0] for each in job.warnings()] == idle
    assert Job.from_json(job.to_json()) == job and job.digest == whole.digest
    section, name = option.removeprefix("--").replace("-", "_").split(".")
    before, there, after = ON.partition(f"[{section}]")
    line = next(line for line in after.splitlines() if line.startswith(name))
    (tmp_path / "job.toml").write_text(f"{before}{there}{after.replace(line, '', 1)}")
    with pytest.raises(JobError, match=f"{section}.*{name} = 0"):
        Job.load(tmp_path / "job.toml")


def test_a_validation_that_is_turned_off_names_all_that_must_go_with_it() -> None:
    """One command tells all, so nobody leaves one out and is then told of the next."""
    with pytest.raises(
        JobError,
        match=(
            r"validation\.samples = 7 and validation\.args = \{'path': 't'\} have no effect; .* "
            r"leave all of these"
        ),
    ):
        Job(name="run", bucket="/b", validation={"samples": 7, "args": {"path": "t"}})


def test_a_place_keeps_its_links_and_is_the_same_by_any_of_them(tmp_path: Path) -> None:
    """The controls: another folder, and another prefix of the same bucket."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    there, link = (str(tmp_path / name) for name in ("there", "link"))
    assert place(f"{link}/") == place(f"file://{link}") == link != there
    assert same_place(place(f"{link}/new"), f"{there}/new") and same_place("s3://one/two/", "s3://one/two")
    assert (
        not same_place(link, f"{there}/new")
        and not same_place("s3://one/two", "s3://one/three")
        and not same_place("s3://one", there)
    )


@pytest.mark.parametrize(
    ("setting", "secret", "public"),
    [
        ("data.args.api_key", "hush", None),
        ("data.args.token", "hush", None),
        ("model_args.reader.Password", "hush", None),
        ("metrics.sinks.wandb.project", "hush", None),
        ("metrics.sinks", {"wandb": {"project": "hush"}}, {}),
        ("data.args", {"parts": [{"path": "a", "secret": "hush"}]}, {"parts": [{"path": "a", "secrets": 3}]}),
        ("data.args.path", "ftp://me:hush@host/x", "ftp://me@host:21/x"),
        (
            "data.args.paths",
            ["/a", "https://host/x?X-Amz-Signature=hush&b=3"],
            ["/a@b:c", "https://host/x?page=3", "s3://pail/a:b@c"],
        ),
        ("model_args.tokens", None, 3),
        ("optim.keys", None, "first"),
    ],
)
def test_a_value_that_may_be_a_secret_is_not_shown(setting: str, secret: object, public: object) -> None:
    """The control: what only looks like one is shown."""
    if secret is not None:
        assert is_secret(setting, secret) and shown(setting, secret) == HIDDEN
    if public is not None:
        assert not is_secret(setting, public) and shown(setting, public) == repr(public)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({"api_key": "hush"}, ["api_key"]),
        ({"token": "hush-5f2d81c39a7e4b60", "reader": {"Password": "hush"}}, ["token", "reader.Password"]),
        (
            {
                "hf_token": "a",
                "accessToken": "b",
                "aws_secret_access_key": "c",
                "client-secret": "d",
                "apikey": "e",
            },
            None,
        ),
        ({"parts": [{"args": {"credentials": "hush"}}]}, ["parts.args.credentials"]),
        ({"key": "9f86d081884c7d659a2f", "service_token": "q8Zr4tLw0Xn2Vb7"}, ["key", "service_token"]),
        (
            {"path": "https://me:hush@host/x", "urls": ["https://host/x?X-Amz-Signature=hush"]},
            ["path", "urls"],
        ),
        (
            {"headers": {"Authorization": "Bearer hush"}, "other": "hf_abcdefghijklmnopqrst"},
            ["headers.Authorization", "other"],
        ),
        ({"api_key": "${API_KEY}", "path": "${URL}", "password": "", "secret": True, "token": 3}, []),
        (
            {
                "token_dim": 8,
                "max_tokens": "100",
                "tokenizer": "gpt2",
                "key_dim": "64",
                "keys": ["a"],
                "tokens": "s3://pail/tokens",
            },
            [],
        ),
        (
            {
                "pad_token": "<pad>",
                "eos_token": "</s>",
                "token": "<unk>",
                "text_key": "text",
                "key": "input_ids",
            },
            [],
        ),
        (
            {"image_key": "observation_224x224", "path": "ftp://me@host:21/x", "stop_token": "<|endoftext|>"},
            [],
        ),
    ],
)
def test_a_literal_secret_is_told_from_what_only_looks_like_one(
    args: dict[str, object], names: list[str] | None
) -> None:
    assert [*literal_secrets("model_args", args)] == [
        f"model_args.{name}" for name in (args if names is None else names)
    ]
