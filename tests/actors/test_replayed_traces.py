"""R18: nodes of this machine come and go as on a spot trace; the run is judged, and its goodput is recomputed by a
script that has no code of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors.cli import main
from actors.cli.chaos_command import simulated
from elastic.job import Job
from elastic.report.goodput import of_fleet
from elastic.report.timeline import Timeline
from elastic.runs.run import Run
from elastic.sim.trace import numbers_of, rows_of, text_of
from tests.support import warm
from tests.support.chaos import exported_hash
from tests.support.commands import ROOT
from tests.support.goodput_by_hand import goodput
from tests.support.job_file import to_toml
from tests.support.toys import LIGHT, toy_job
from tests.support.warm import Warm

TRACES = Path(__file__).parents[1] / "sim" / "traces"


@pytest.fixture(scope="module", autouse=True)
def local_cluster(no_cluster_is_left: None, forks: Warm) -> Iterator[None]:
    """No cluster; the command starts its own, whose workers are forks."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm.SOCKET, forks.path)
        patch.setattr(ray._private.ray_constants, "SETUP_WORKER_FILENAME", warm.__file__)
        warm.lean(patch.setattr)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
    ray.shutdown()


def job_of(folder: Path, steps: int) -> Job:
    return toy_job(
        folder / "bucket",
        name="spot",
        **LIGHT | {"microbatch": 2},
        steps=steps,
        global_batch=24,
        data={"dataset": "tests.support.toys:Sums", "args": {"samples": 24 * steps, "read_s": 0.12}},
        checkpoint={"save_every": 20},
        workers={"min": 1, "max": 4},
        copies={"copy_every": 1, "buddy_every": 1},
        deadlines={"grow_debounce_s": 1, "stall_s": 20},
    )


def window(name: str, until_s: float) -> str:
    """Returns the first ``until_s`` seconds of a trace."""
    rows = rows_of((TRACES / f"{name}.csv").read_text())
    return text_of([row for row in rows if row.at < rows[0].at + until_s], name)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "until_s", "lead", "steps", "removals"),
    [("parcae_hh_55_65", 3600.0, 0.0, 100, 2), ("aws_g4dn_2020", 7000.0, 5.0, 70, 3)],
)
def test_r18_a_spot_trace_is_replayed_for_real(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    until_s: float,
    lead: float,
    steps: int,
    removals: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_of(tmp_path, steps)
    Path("job.toml").write_text(to_toml(job))
    Path("window.csv").write_text(window(name, until_s))
    words = ["--trace", "window.csv", "--speed", "60", "--nodes", "4", "--lead", f"{lead:g}"]
    code = main(["chaos", "job.toml", "-q", *words])
    print(shown := capsys.readouterr().out)
    assert code == 0, shown

    calm, struck = (job.replace(name=f"spot-{kind}-1") for kind in ("calm", "chaos"))
    assert exported_hash(calm) == exported_hash(struck) != "", "by a program of its own"
    timeline = Timeline().read(Run.find(struck).segments())
    paid, present = (rows_of(Path(f"spot-chaos-1.{each}.csv").read_text()) for each in ("trace", "present"))
    assert sum(not row.comes for row in paid) == removals
    if lead:
        assert [world.again for world in timeline.worlds.values()] == [0] * len(timeline.worlds)

    files = [f"spot-chaos-1.{each}" for each in ("present.csv", "trace.csv", "timeline.parquet")]
    by_hand = goodput(*files)
    ours = of_fleet(timeline.account.intervals, numbers_of(present), numbers_of(paid))
    assert by_hand == pytest.approx([ours.present, ours.paid], rel=1e-3)
    stay = [row for row in paid if row.comes]  # the control: nobody goes
    blind = of_fleet(timeline.account.intervals, numbers_of(stay), numbers_of(stay))
    assert by_hand != pytest.approx([blind.present, blind.paid], rel=1e-2)

    found = simulated(struck, timeline, paid, present, lead)
    print(f"by hand {by_hand}, simulated {found.goodput}, {found.goodput_paid}")
    assert [found.goodput, found.goodput_paid] == pytest.approx(by_hand, rel=0.1)
