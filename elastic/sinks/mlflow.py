"""MLflow: a tracking server, or any other store that a tracking URI names.

All rows belong to one MLflow run.  It has a tag with the id of the run in the bucket, by which a process that
goes on finds it again.

MLflow adds the numbers of a call one by one, and would add a step twice.  So the first call of a process
reads back which step each metric has last, and every call leaves out the steps that are there.  So each step
is there once, whichever process dies at whatever moment.  One case remains: a coordinator that is cut off,
but reaches MLflow until its lease ends, may add a step that its successor adds, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from elastic.report.metrics import Row
from elastic.sinks.port import EVENT, TrackedRun, shown

MARK = "elastic.run"
"""The tag with the id of the run."""
STEP = "step_done"
"""The metric that is added after all others of its step.  Its value is the step."""
AT_ONCE = 1000
"""Largest number of metrics that MLflow takes in one request."""
PARAMS, PARAM_LENGTH = 100, 6000
"""Largest number of parameters in one request, and of letters in one of them."""


class Tracker:
    """Logs rows to a run of ``experiment`` in the store that ``uri`` names, such as
    ``http://mlflow:5000``.
    """

    def __init__(self, run: TrackedRun, uri: str, experiment: str = "elastic") -> None:
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        where = self._client.create_experiment(experiment) if found is None else found.experiment_id
        known = self._client.search_runs(
            [where], f"tags.`{MARK}` = '{run.id}'", order_by=["attributes.start_time ASC"]
        )
        self._id = known[0].info.run_id if known else self._begin(where, run)
        self._there: dict[str, int] = {}
        """The last step of each metric, as far as it was read back or added."""

    def last(self) -> int:
        return self._last(STEP)

    def write(self, rows: Sequence[Row]) -> None:
        added = list[Metric]()
        for row in rows:
            step, at = int(row["step"]), int(row["time"] * 1000)
            if EVENT in row:
                self._client.set_tag(self._id, f"{EVENT}.{step:012d}", row[EVENT][:PARAM_LENGTH])
            numbers = [*shown(row).items(), (STEP, float(step))]
            added += [Metric(name, value, at, step) for name, value in numbers if self._last(name) < step]
        for first in range(0, len(added), AT_ONCE):
            self._client.log_batch(self._id, metrics=added[first : first + AT_ONCE])
        self._there |= {each.key: each.step for each in added}

    def _last(self, name: str) -> int:
        if name not in self._there:
            self._there[name] = max(
                (each.step for each in self._client.get_metric_history(self._id, name)), default=0
            )
        return self._there[name]

    def _begin(self, experiment: str, run: TrackedRun) -> str:
        made: str = self._client.create_run(experiment, tags={MARK: run.id}, run_name=run.title).info.run_id
        settings = [Param(name, str(value)[:PARAM_LENGTH]) for name, value in run.settings.items()]
        for first in range(0, len(settings), PARAMS):
            self._client.log_batch(
                made, params=settings[first : first + PARAMS], tags=[RunTag("mlflow.source.name", "elastic")]
            )
        return made
