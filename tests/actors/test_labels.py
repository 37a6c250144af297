"""Labels of nodes: workers start where they want to, and a node on which workers die gets none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors import cluster
from actors.view import View
from elastic.config.sections import Workers
from elastic.errors import PlatformGaveUp, Refused
from elastic.ids import NodeId
from elastic.runs.run import Run
from tests.support.chaos import Story, Witness, act_by, assert_nothing_left, comes, trial
from tests.support.nodes import Node, joined
from tests.support.toys import LIGHT, toy_job

CPUS = 5
SPOT = {cluster.MARKET: "spot"}


@pytest.mark.parametrize(
    ("selector", "spot", "on_demand", "unlabelled"),
    [
        ("spot", True, False, False),
        ("!spot", False, True, True),
        ("in(spot, other)", True, False, False),
        ("!in(spot,other)", False, True, True),
        ("in(spot,on-demand)", True, True, False),
    ],
)
def test_selectors_choose_as_ray_does(selector: str, spot: bool, on_demand: bool, unlabelled: bool) -> None:
    wanted = {cluster.MARKET: selector}
    assert cluster.has_labels(SPOT, wanted) is spot
    assert cluster.has_labels({cluster.MARKET: "on-demand"}, wanted) is on_demand
    assert cluster.has_labels({}, wanted) is unlabelled


def test_workers_start_on_nodes_with_their_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has room, too; a label that no node has is refused before anything starts."""
    with joined(tmp_path, Node("spot", 2 * CPUS, labels=SPOT)) as nodes:
        node, workers = NodeId(nodes["spot"]), Workers(cpus=CPUS, labels=SPOT)
        assert cluster.slots(workers) == 2 < cluster.slots(Workers(cpus=CPUS))
        assert cluster.slots(workers, {node}) == 0
        monkeypatch.setattr(cluster, "ROOM_S", 0.0)
        with pytest.raises(PlatformGaveUp) as none:
            cluster.check_room(Workers(cpus=CPUS, labels={cluster.MARKET: "reserved"}))
        assert str(none.value) == (
            "workers.labels = {'ray.io/market-type': 'reserved'}, but no node of the cluster has these labels (there "
            "are: ray.io/market-type = none, ray.io/market-type = spot): start nodes with ray start --labels, or "
            "change workers.labels"
        )
        with pytest.raises(
            Refused, match=r"workers\.labels = \{'ray\.io/market-type': 'a b'\}: Invalid label"
        ):
            cluster.check_room(Workers(labels={cluster.MARKET: "a b"}))
        settings = {"min": 2, "max": 2, "cpus": CPUS, "labels": SPOT}
        run = trial(toy_job(tmp_path / "bucket", workers=settings, steps=3, **LIGHT), hash_it=False)
    assert run.result.state == "Finished"
    records = [json.dumps(record["event"]) for record in Run.open(run.job).records()]
    homes = [text for text in records if '"Joined"' in text]
    assert homes and all(node in text for text in homes)
    assert_nothing_left(run)


def kills_on(node: NodeId) -> Story:
    """Kills three workers on the node, each once it is a member of a world that steps."""
    killed = set[str]()

    def there(witness: Witness, view: View) -> list[str]:
        here = {each for each, home in view.workers.items() if home == node and each in witness.seen}
        return sorted(here - killed) if view.state == "Running" else []

    while len(killed) < 3:
        witness, view = yield from comes(there)
        (worker,) = there(witness, view)
        witness.seen[worker].process.kill()
        killed.add(worker)
    yield from comes(lambda witness, view: False)


@pytest.mark.full
def test_a_node_on_which_workers_die_gets_no_worker_for_a_while(tmp_path: Path) -> None:
    with joined(tmp_path, Node("lemon", CPUS)) as nodes:
        node = NodeId(nodes["lemon"])
        job = toy_job(
            tmp_path / "bucket",
            workers={"min": 1, "max": 2, "cpus": CPUS},
            steps=900,
            deadlines={"grow_debounce_s": 1},
            **LIGHT,
        )
        run = trial(job, act_by(kills_on(node)), hash_it=False)
    assert run.result.state == "Finished"
    story = [record["reason"] for record in Run.open(job).records()]
    closed = [number for number, reason in enumerate(story) if "gets no worker for 600 s" in reason]
    assert len(closed) == 1, story
    after = Run.open(job).records()[closed[0] :]
    asked = [action for record in after for action in record["actions"] if action["$"] == "StartWorkers"]
    assert all(node in action["avoid"] for action in asked)
    assert_nothing_left(run)
