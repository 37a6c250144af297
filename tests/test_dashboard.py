"""L2: the Grafana dashboard draws what a run exports to Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from actors.prometheus import COUNTED, OF_A_STEP, OF_THE_RUN, OF_TIME

DASHBOARD = Path(__file__).parents[1] / "examples/grafana/elastic.json"
EXPORTED = {f"ray_{name}" for name in {**OF_A_STEP, **OF_THE_RUN, **OF_TIME}} | {
    f"ray_{name}_total" for name in COUNTED
}


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
