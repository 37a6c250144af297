"""L2: what Prometheus gets of a run, as a real scrape of Ray's metrics port shows it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from actors import cluster
from actors.prometheus import COUNTED, OF_A_STEP, OF_THE_RUN, OF_TIME
from tests.actors.test_failover import GATE, job_of
from tests.support.chaos import trial

EXPORTED = {f"ray_{name}" for name in {**OF_A_STEP, **OF_THE_RUN, **OF_TIME}} | {
    f"ray_{name}_total" for name in COUNTED
}


@pytest.fixture(scope="module", autouse=True)
def local_cluster() -> Iterator[int]:
    """Starts a cluster whose metrics are at a known port, and yields that."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.shutdown()
    system = {"metrics_report_interval_ms": 500}
    ray.init(
        "local",
        namespace=cluster.NAMESPACE,
        num_cpus=8,
        include_dashboard=False,
        _metrics_export_port=port,
        _system_config=system,
    )
    yield port
    ray.shutdown()


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
def test_l2_a_scrape_of_rays_metrics_port_has_every_number_of_a_run(
    tmp_path: Path, local_cluster: int
) -> None:
    """L2: real HTTP, of a run that has lost a worker and waits at a gate.  The control is the name of a run
    that there is not.
    """
    found = dict[str, float]()

    def act(witness: object, view: object) -> bool:
        found.update(scraped(local_cluster, "scraped"))
        if (
            found.get("ray_elastic_step") != GATE - 1
            or not found.keys() >= EXPORTED
            or found["ray_elastic_saved_step"] < 30
        ):
            return False
        assert not scraped(local_cluster, "another")
        (tmp_path / "gate").touch()
        return True

    held_out = {
        "every": 6,
        "samples": 21,
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": 50, "seq_len": 16},
    }
    job = job_of(
        tmp_path, "scraped", faults=[{"point": "backward", "step": 20, "world_rank": 1}], validation=held_out
    )
    chaos = trial(job, act, hash_it=False)
    assert chaos.result.state == "Finished"
    assert {name for name in found if "elastic" in name} == EXPORTED
    assert found["ray_elastic_loss"] in [step.loss for step in chaos.ledger.values()], "bit for bit"
    assert (
        found["ray_elastic_target_step"],
        found["ray_elastic_saved_step"],
        found["ray_elastic_skipped_steps"],
    ) == (job.steps, 30, 0)
    assert (
        found["ray_elastic_lost_workers_total"] >= 1
        and found["ray_elastic_generation"] >= 2
        and found["ray_elastic_tokens_per_second"] > 0
    )
