"""L2: what Prometheus gets of a run, as a real scrape of Ray's metrics port shows it, and the dashboard that draws it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from actors import cluster
from actors.prometheus import COUNTED, OF_A_STEP, OF_THE_RUN
from tests.actors.test_failover import GATE, job_of
from tests.support.chaos import trial

DASHBOARD = Path(__file__).parents[2] / "examples/grafana/elastic.json"
EXPORTED = {f"ray_{name}" for name in {**OF_A_STEP, **OF_THE_RUN}} | {f"ray_{name}_total" for name in COUNTED}


def named(text: str) -> set[str]:
    """Returns the names of numbers of a run in a text."""
    return set(re.findall(r"\bray_elastic_\w+", text))


@pytest.mark.fast
def test_l2_the_dashboard_names_exactly_the_numbers_that_there_are() -> None:
    """L2: in both directions.  The controls are a name that there is not, and one that nothing draws."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    drawn = named("\n".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"]))
    asked = named(json.dumps(dashboard))
    assert drawn == EXPORTED and asked == EXPORTED
    assert named('ray_elastic_stepp{run="a"} / ray_elastic_step') - EXPORTED == {"ray_elastic_stepp"}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(set(places)) == len(places)


def scraped(port: int, run: str) -> Mapping[str, float]:
    """Returns the newest numbers of a run that the port exports, by name, with nothing of ours."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (URLError, OSError):
        return {}
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {each.name: each.value for each in samples if each.labels.get("run") == run}


@pytest.mark.full
def test_l2_a_scrape_of_rays_metrics_port_has_every_number_of_a_run(tmp_path: Path) -> None:
    """L2: real HTTP, of a run that has lost a worker and waits at a gate.  The control is the name of a run that there is not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.shutdown()
    system = {"metrics_report_interval_ms": 500}
    ray.init("local", namespace=cluster.NAMESPACE, num_cpus=8, include_dashboard=False, _metrics_export_port=port, _system_config=system)
    found = dict[str, float]()

    def act(witness: object, view: object) -> bool:
        found.update(scraped(port, "scraped"))
        if found.get("ray_elastic_step") != GATE - 1 or not found.keys() >= EXPORTED or found["ray_elastic_saved_step"] < 30:
            return False
        assert not scraped(port, "another")
        (tmp_path / "gate").touch()
        return True

    held_out = {"every": 6, "samples": 21, "dataset": "tests.support.toys:Sums", "args": {"samples": 50, "seq_len": 16}}
    job = job_of(tmp_path, "scraped", faults=[{"point": "backward", "step": 20, "world_rank": 1}], validation=held_out)
    try:
        chaos = trial(job, act, hash_it=False)
    finally:
        ray.shutdown()
    assert chaos.result.state == "Finished"
    assert {name for name in found if "elastic" in name} == EXPORTED
    assert found["ray_elastic_loss"] in [step.loss for step in chaos.ledger.values()], "bit for bit"
    assert (found["ray_elastic_target_step"], found["ray_elastic_saved_step"], found["ray_elastic_skipped_steps"]) == (job.steps, 30, 0)
    assert (
        found["ray_elastic_lost_workers_total"] >= 1 and found["ray_elastic_generation"] >= 2 and found["ray_elastic_tokens_per_second"] > 0
    )
