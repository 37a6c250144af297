"""Searches for hyperparameters with Ray Tune.  Each trial is a run of Elastic, with a name, workers and checkpoints of its own.

    pip install 'ray[tune]'
    python examples/search.py job.toml --grid model_args.layers=2,4 --draw optim.lr=1e-4..1e-2 --trials 3

The job needs ``[validation]``: the best trial is the one with the smallest loss there.  Every point of the grids is tried with so many
random draws (log-uniform), and ASHA (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning") stops those that fall behind.

The process of a trial only follows its run.  If it is lost, Tune starts the trial again, and it attaches to its run; if a worker is lost,
the run goes on by itself.  Neither costs another trial anything.
"""

from __future__ import annotations

import argparse
import math
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from actors import cluster
from elastic import Job, launch
from elastic.report.story import Line, Scored

FOLLOWING = {"CPU": 0.01}
"""Resources of a trial: it only follows its run, whose workers take their own."""


def trial(settings: dict[str, Any], file: Path, folder: Path, bucket: str) -> None:
    """Trains one run, and reports each validation to Tune.  A driver that Tune ends is missed soon, and then its run saves and stops."""
    os.chdir(folder)  # from which the code and the data of the job are found; Tune has gone elsewhere

    def report(line: Line) -> None:
        if isinstance(line, Scored):
            tune.report({"loss": line.loss, "step": line.step, "run": job.name})

    fixed = {
        "name": f"trial-{tune.get_context().get_trial_id()}",
        "bucket": bucket,
        "deadlines.driver_s": 5.0,
    }
    job = Job.load(file, settings | fixed)
    result = launch(job, show=report)
    if result.state != "Finished":
        raise RuntimeError(f"{job.name}: {result.state}, {result.reason}")


def search(file: Path, space: dict[str, Any], trials: int, at_once: int) -> tune.ResultGrid:
    """Tries each point of the grids in ``space`` with ``trials`` draws, ``at_once`` of them at a time."""
    job = Job.load(file)
    bucket = job.bucket if "://" in job.bucket else str(Path(job.bucket).absolute())
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(trial, file=file.absolute(), folder=Path.cwd(), bucket=bucket), FOLLOWING
        ),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=trials,
            max_concurrent_trials=at_once,
            # Tune ends a trial that reaches max_t at once, before its run has made its last save
            scheduler=ASHAScheduler(
                time_attr="step", max_t=job.steps + 1, grace_period=max(job.validation.every, 1)
            ),
        ),
        run_config=tune.RunConfig(
            name="search", storage_path=f"{bucket}/tune", failure_config=tune.FailureConfig(max_failures=3)
        ),
    )
    return tuner.fit()


def space_of(grids: Sequence[str], draws: Sequence[str]) -> dict[str, Any]:
    """Returns what Tune draws from: ``setting=1,2,4`` is a grid, and ``setting=1e-4..1e-2`` is drawn log-uniformly."""
    space: dict[str, Any] = {}
    for each in grids:
        setting, _, values = each.partition("=")
        space[setting] = tune.grid_search(tomllib.loads(f"values = [{values}]")["values"])
    for each in draws:
        setting, _, ends = each.partition("=")
        first, _, last = ends.partition("..")
        space[setting] = tune.loguniform(float(first), float(last))
    return space


def main() -> int:
    parser = argparse.ArgumentParser(description="Search for the hyperparameters of a job with Ray Tune.")
    parser.add_argument("job", type=Path, help="the job file (TOML), with [validation]")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="SETTING=A,B", help="try each of these values"
    )
    parser.add_argument(
        "--draw",
        action="append",
        default=[],
        metavar="SETTING=A..B",
        help="draw values between A and B, log-uniformly",
    )
    parser.add_argument(
        "--trials", type=int, default=1, help="number of draws for each point of the grids (default: 1)"
    )
    parser.add_argument(
        "--at-once", type=int, default=2, help="largest number of runs at a time (default: 2)"
    )
    known = parser.parse_args()
    space = space_of(known.grid, known.draw)
    cluster.connect(None)
    results = search(known.job, space, known.trials, known.at_once)
    for found in sorted(results, key=lambda each: each.metrics.get("loss", math.inf)):
        drawn = ", ".join(f"{setting} = {found.config[setting]:.4g}" for setting in space)
        print(
            f"{found.metrics.get('run', 'no validation')}: {drawn}: loss {found.metrics.get('loss', math.nan):.6g}"
        )
    best = results.get_best_result()
    print(
        f"the best of {len(results)}: {best.metrics['run']}, loss {best.metrics['loss']:.6g} after step {best.metrics['step']}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
