"""L8: what the user's code prints in real workers reaches the terminal of who trains, if it is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ray

from actors.cli.prints import MOST
from tests.support.commands import Command, assert_no_actor_left
from tests.support.job_file import to_toml
from tests.support.toys import toy_job

CODE = """
from elastic.engine.loss import next_token

def loss(model, batch):
    if model.training:
        for number in range(100):
            print("said by the user", number)
    return next_token(model, batch)
"""


@pytest.mark.full  # in test_run_commands.py logs are written by hand
@pytest.mark.parametrize(
    ("asked", "shown"), [("first", {"w1"}), ("all", {"w1", "w2"}), ("w2", {"w2"}), (None, set())]
)
def test_l8_the_prints_of_a_running_loss_reach_the_terminal(
    tmp_path: Path, asked: str | None, shown: set[str]
) -> None:
    """L8: each line has its worker's name, and a look shows a page of them, however much is printed.  The
    control asks for none.
    """
    name = f"prints-{asked or 'none'}"
    data = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.02}}
    workers = {"min": 2, "max": 2}
    (tmp_path / "loud.py").write_text(CODE)
    (tmp_path / "job.toml").write_text(
        to_toml(
            toy_job(
                tmp_path / "bucket",
                name=name,
                loss="loud:loss",
                steps=10_000,
                log_every=1,
                data=data,
                workers=workers,
            )
        )
    )
    words = [] if asked is None else ["--prints", asked]
    command = Command(
        tmp_path, "train", "job.toml", "--address", ray.get_runtime_context().gcs_address, *words
    )

    def lines() -> list[str]:
        return re.findall(r"(?m)^(w\d) (?:said by the user \d+|\d+ lines are left out here)", command.text)

    command.until(lambda: "step    20/" in command.text and shown <= {worker for worker in lines()})
    for worker in shown:  # until a second look
        command.until(
            lambda worker=worker: (
                len(re.findall(rf"(?m)^{worker} \d+ lines are left out here", command.text)) > 1
            )
        )
    command.interrupt()
    assert command.wait() == 3
    assert set(lines()) == shown
    for worker in shown:
        its = [line for line in command.text.splitlines() if line.startswith(f"{worker} ")]
        looks = "\n".join(its).split(" lines are left out here; `elastic logs job.toml` has the newest\n")
        sizes = [look.count("said by the user") for look in looks]
        assert max(sizes) == MOST // len(shown), "what a look shows is bounded"
    if not shown:
        assert "said by the user" not in command.text
        logs = Command(tmp_path, "logs", "job.toml")
        assert logs.wait() == 0 and "said by the user" in logs.text, "though it was printed"
    assert_no_actor_left(name)
