"""A secret among the arguments of the user's code is named by its environment variable, and stands nowhere
else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from actors.cli import main
from elastic.engine.optim.base import Hyper, Part, Rule
from elastic.errors import JobError
from elastic.job import Job
from elastic.models import llama
from elastic.report.metrics import Row
from elastic.runs.run import Run
from elastic.train.checks.preflight import _check_secrets
from tests.support.job_file import to_toml
from tests.support.toys import LIGHT, Sums, toy_job

HUSH = "hush-5f2d81c3"
SHOWN = pytest.CaptureFixture[str]
taken: list[Row] = []


def build(api_key: str, **args: Any) -> nn.Module:
    assert api_key == HUSH, "it has no key"
    return llama.build(**args)


class Held(Sums):
    def __init__(self, reader: dict[str, str], **args: Any) -> None:
        assert reader == {"password": HUSH}
        super().__init__(**args)


def sgd(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
    assert hyper.settings.args == {"secret": HUSH}
    for part, grad in zip(parts, grads, strict=True):
        part.values.sub_(grad, alpha=hyper.lr)


SGD = Rule((), sgd)


def flat(step: int, steps: int, api_token: str) -> float:
    assert api_token == HUSH
    return 1.0


class Table:
    def __init__(self, run: object, token: str) -> None:
        assert token == HUSH and HUSH not in str(vars(run))

    def last(self) -> int:
        return int(taken[-1]["step"]) if taken else 0

    def write(self, rows: Sequence[Row]) -> None:
        taken.extend(rows)


def job_of(folder: Path, secret: str, variable: str, **others: str) -> str:
    """Writes a job file whose model has ``secret``, and whose other code has the environment variable;
    returns its path.
    """
    values: dict[str, Any] = {**LIGHT, "steps": 4, "checkpoint": {"save_every": 2}}
    values["model"], values["model_args"] = f"{__name__}:build", {**LIGHT["model_args"], "api_key": secret}
    values["data"] = {"dataset": f"{__name__}:Held", "args": {"reader": {"password": variable}}}
    values["metrics"] = {"sinks": {f"{__name__}:Table": {"token": variable}}}
    values["optim"] = {"kind": f"{__name__}:SGD", "args": {"secret": others.get("optim", variable)}}
    values["schedule"] = {"kind": f"{__name__}:flat", "args": {"api_token": others.get("schedule", variable)}}
    job = toy_job(folder / "bucket", **values)
    path = folder / "toy.toml"
    path.write_text(to_toml(job))
    return str(path)


def leaks(folder: Path) -> Iterator[Path]:
    """Yields the files that hold the secret."""
    return (path for path in folder.rglob("*") if path.is_file() and HUSH.encode() in path.read_bytes())


def said(shown: SHOWN) -> str:
    return " ".join(shown.readouterr().out.split())


def test_a_secret_is_refused_unless_an_environment_variable_names_it(
    tmp_path: Path, capsys: SHOWN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is a run of an older release, whose job.json holds the secret: it goes on, and is told to
    replace it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("API_KEY", raising=False)
    assert main(["train", job_of(tmp_path, HUSH, HUSH), "--local"]) == 1
    shown = said(capsys)
    assert (
        "model_args.api_key is a secret, and everybody could read it in toy/job.json in the bucket; write "
    ) in shown
    assert (
        "write model_args.api_key = '${API_KEY}', and set that environment variable" in shown
        and HUSH not in shown
    )
    for literal in ({"secret": "${API_KEY}", "variable": HUSH}, {"secret": HUSH, "variable": "${API_KEY}"}):
        assert main(["train", job_of(tmp_path, **literal), "--local"]) == 1
        assert "is a secret" in said(capsys)
    for section, name in (("optim", "secret"), ("schedule", "api_token")):
        assert (
            main(["train", job_of(tmp_path, "${API_KEY}", "${API_KEY}", **{section: HUSH}), "--local"]) == 1
        )
        assert f"{section}.args.{name} is a secret, and everybody could read it in " in said(capsys)
    assert not (tmp_path / "bucket").exists()

    path = job_of(tmp_path, "${API_KEY}", "${API_KEY}")
    assert main(["train", path, "--local"]) == 1
    assert "model_args.api_key = '${API_KEY}': the environment variable API_KEY is not set on " in said(
        capsys
    )
    monkeypatch.setenv("API_KEY", HUSH)
    assert main(["train", path, "--local"]) == 0
    assert [row["step"] for row in taken] == [1, 2, 3, 4]
    assert main(["report", path]) == main(["runs", path]) == 0
    assert (
        HUSH not in said(capsys)
        and not [*leaks(tmp_path)]
        and "${API_KEY}" in (tmp_path / "bucket/toy/job.json").read_text()
    )


def test_a_run_that_an_older_release_has_begun_with_a_secret_goes_on(
    tmp_path: Path, capsys: SHOWN, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", HUSH)
    path = job_of(tmp_path, HUSH, "${API_KEY}")
    Run.open(Job.load(path))
    assert [each.name for each in leaks(tmp_path / "bucket")] == ["job.json"]
    assert main(["train", path, "--local"]) == 0
    assert (
        "model_args.api_key is a secret, and has been in toy/job.json in the bucket since the run "
        "began: replace the secret"
    ) in said(capsys)
    assert main(["train", job_of(tmp_path, "${API_KEY}", "${API_KEY}"), "--local"]) == 0
    shown = said(capsys)
    assert (
        "one worker in this process, from step 4 of generation 1 (bucket)" in shown
        and "is a secret" not in shown
    )


def test_a_run_that_was_begun_with_a_secret_in_a_list_goes_on(tmp_path: Path) -> None:
    """The control: another list."""
    for first, told in (
        ("hush", "has been in toy/job.json"),
        ("hash", "everybody could read it in toy/job.json"),
    ):
        args = {"parts": [{"pwd": "hush"}, {"pwd": first}]}
        job = toy_job(tmp_path, data={"dataset": "tests.support.toys:Sums", "args": args})
        if first == "hush":
            Run.open(job)
        said = found_in({"bucket": str(tmp_path), "data": job.data.model_dump()})
        assert (
            "data.args.parts.pwd is a secret" in said
            and told in said
            and ("since the run began" in said) is (first == "hush")
        )


def test_a_bucket_whose_url_has_a_password_is_refused(
    tmp_path: Path, capsys: SHOWN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is the same URL without it."""
    monkeypatch.setenv("API_KEY", HUSH)
    path = Path(job_of(tmp_path, "${API_KEY}", "${API_KEY}"))
    for password, code in ((f":{HUSH}", 1), ("", 0)):
        path.write_text(
            re.sub(r"(?m)^bucket = .*", f"bucket = 'memory://me{password}@secrets/x'", path.read_text())
        )
        assert main(["train", str(path), "--local"]) == code
        shown = said(capsys)
        assert (
            "bucket has a secret in it, and everybody could read it in toy/job.json in the bucket" in shown
        ) is bool(password)
        assert HUSH not in shown


def found_in(settings: dict[str, Any]) -> str:
    """Returns what a job with these settings is told, or "" if nothing."""
    try:
        return "".join(_check_secrets(toy_job(**{"bucket": "memory://secrets-of-none", **settings})))
    except JobError as error:
        return str(error)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sk-baseline-experiment-3"},
        {"name": f"sk-{'0a' * 16}"},
        {
            "samples": {
                "every": 1000,
                "prompts": ["Open https://x.org/a?key=1 and", "Password=hunter2;", "https://me:you@x.org"],
            }
        },
        {"model_args": {"token": "cls", "pad_token": "<pad>", "pass": "<s>", "bypass": "relu"}},
        *(
            {"data": {"dataset": "tests.support.toys:Sums", "args": args}}
            for args in (
                {
                    "path": "/data/sk-wikipedia-20231101",
                    "other": "hf_datasets_of_wikipedia_en",
                    "third": "task-specific-0123456789-abcdef",
                },
                {
                    "prompt": "Open https://x.org/a?key=1 and ask the bearer internationalization",
                    "pwd": "/home/me",
                    "key_file": "x",
                },
                {
                    "secret": "s3://pail/where-it-is",
                    "tokens": ["a", "b"],
                    "keys": ["input_ids", "observation_224x224"],
                    "path": "s3://pail/a",
                },
                {
                    "api_key": "${API_KEY}",
                    "dsn": "${DSN}",
                    "api_keys": ["${ONE}", "${TWO}"],
                    "columns": "key=id;value=text",
                },
            )
        ),
    ],
)
def test_what_only_looks_like_a_secret_is_accepted(settings: dict[str, Any]) -> None:
    assert found_in(settings) == ""


SLACK = "https://hooks.slack.com/services/T01ABCDEF/B02ABCDEF/aZ09aZ09aZ09aZ09aZ09aZ09"


@pytest.mark.parametrize(
    "value",
    [
        *(f"sk-{kind}-{HUSH}-{HUSH}" for kind in ("proj", "ant", "svcacct")),
        *(
            f"sk-{'0aB4' * 8}",
            f"hf_{'aB' * 17}",
            f"ghp_{'aB3' * 12}",
            f"glpat-{'a1' * 10}",
            "AKIAIOSFODNN7EXAMPLE",
            f"see AIza{'Sy0' * 12}",
        ),
        *(
            SLACK,
            "https://discord.com/api/webhooks/123456789/abcdefgh",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        ),
        *(
            "Authorization: Basic dXNlcjpwYXNzd29yZA==",
            "authorization=Bearer abc",
            "Bearer 0123456789abcdef",
            "X-Api-Key: hush-5f2d81c3",
        ),
        *(
            "Server=db;User=u;Password=hunter2;",
            "host=db password=hunter2",
            "Account=a;AccountKey=aGVsbG8=",
            "Pwd=hunter2",
        ),
        *(
            "https://me:you@x.org/a",
            "redis://:you@x.org",
            "https://x.org/a?sv=2022&sig=abc",
            "https://x.org/?token=0123456789abcdef",
        ),
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_a_text_of_a_known_form_is_refused_whatever_its_name(value: str) -> None:
    """It is refused inside a list and a table too.  The control: the name alone."""
    for args in ({"path": value}, {"paths": ["/data", value]}, {"reader": {"of": [{"path": f"{value}"}]}}):
        said = found_in({"data": {"dataset": "tests.support.toys:Sums", "args": args}})
        assert (
            "is a secret, and everybody could read it in toy/job.json" in said
            and value not in said
            and "${PATH}" not in said
        )
    assert "metrics.sinks.wandb.url is a secret" in found_in(
        {"metrics": {"sinks": {"wandb": {"url": value}}}}
    )
    assert found_in({"data": {"dataset": "tests.support.toys:Sums", "args": {"path": "/data"}}}) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, "hunter2")
            for name in (
                "password",
                "passwd",
                "pwd",
                "db_pwd",
                "pass",
                "secret",
                "clientSecrets",
                "api_key",
                "authorization",
            )
        ),
        *((name, ["hunter2", "${OTHER}"]) for name in ("api_keys", "passwords", "credentials", "hf_tokens")),
        *((name, "q8Zr4tLw0Xn2Vb7c") for name in ("token", "key", "service_token", "aws_key")),
    ],
)
def test_a_text_under_a_name_of_secrets_is_refused(name: str, value: object) -> None:
    """The control: another name."""
    for there, told in ((name, f"schedule.args.{name} is a secret"), ("decay", "")):
        said = found_in({"schedule": {"kind": f"{__name__}:flat", "args": {there: value}}})
        assert told in said and bool(told) is bool(said) and "hunter2" not in said


def test_two_values_are_two_jobs_and_two_variables_of_a_secret_are_one(tmp_path: Path) -> None:
    """A literal secret of the model is the same job as its variable, since an older release may have begun
    the run with it.
    """

    def digest(table: str, **args: str) -> str:
        kind = (
            {}
            if table == "model_args"
            else {"kind": f"{__name__}:flat" if table == "schedule" else f"{__name__}:SGD"}
        )
        return toy_job(tmp_path, **{table: {**kind, "args": args} if kind else args}).digest

    for table in ("schedule", "optim"):
        assert (
            digest(table, token="${ONE}") == digest(table, token="${TWO}") != digest(table, token="hunter2")
        )
        assert digest(table, mode="${ONE}") != digest(table, mode="${TWO}")
        for one, other in (
            ("hunter2", "hunter3"),
            (f"sk-{'0a' * 16}", f"sk-{'0b' * 16}"),
            ("https://a:b@x", "https://a:c@x"),
        ):
            assert digest(table, password=one) != digest(table, password=other)
            assert digest(table, path=one) != digest(table, path=other)
    assert (
        digest("model_args", api_key="${ONE}")
        == digest("model_args", api_key=HUSH)
        == digest("model_args", api_key="hunter2")
    )
    assert digest("model_args", token="cls") != digest("model_args", token="mean")
