"""L4: what another value of each setting does to a run that has begun: the table of the guide, setting by
setting.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from elastic.config.sections import Samples
from elastic.config.settings import leaves
from elastic.config.values import Change
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.runs import branches
from elastic.runs.branches import Branches
from elastic.runs.run import Run
from storage.objects import ObjectStore

pytestmark = pytest.mark.fast

BASE: dict[str, Any] = {
    "global_batch": 64,
    "microbatch": 4,
    "precision": "fp16",
    "optim": {"lr": 1e-3, "args": {"x": 1}, "kind": "a.b:opt", "groups": [{"names": ["a"]}]},
    "faults": [{"point": "save", "step": 1}],
    "validation": {"every": 5},
    "model_args": {"dim": 1},
}
OTHER: dict[str, Any] = {
    "model": "a.b:c",
    "model_args": {"dim": 2},
    "init": "other@best",
    "loss": "a.b:c",
    "loop": "a.b:c",
    "seed": 1,
    "steps": 120,
    "global_batch": 128,
    "microbatch": 2,
    "precision": "bf16",
    "loss_scale": 2.0,
    "compile": True,
    "recompute": "block",
    "activations": "int8",
    "attention": "flash-4",
    "offload": "optimizer",
    "offload_folder": "/other/disk",
    "offload_buffer_gb": 2.0,
    "reproducible": False,
    "numerics": 4,
    "on_driver_exit": "detach",
    "log_every": 9,
    "profile": "5-7",
    "trial": False,
    "data.dataset": "a.b:D",
    "data.args": {"path": "/moved"},
    "data.sampling": "with_replacement",
    "data.prefetch": 7,
    "data.readers": 2,
    "data.group_by_length": True,
    "data.weights": (1.0, 3.0),
    "validation.patience": 3,
    "validation.min_delta": 0.5,
    "validation.dataset": "a.b:V",
    "validation.args": {"path": "/moved"},
    "validation.every": 6,
    "validation.by": "spares",
    "validation.samples": 8,
    "export.every": 100,
    "samples.every": 100,
    "samples.prompts": ("b",),
    "samples.tokens": 8,
    "samples.temperature": 0.5,
    "samples.seed": 1,
    "metrics.sinks": {"a.b:C": {"path": "c"}},
    "optim.kind": "c.d:opt",
    "optim.args": {"x": 2},
    "optim.lr": 2e-3,
    "optim.betas": (0.8, 0.9),
    "optim.momentum": 0.5,
    "optim.eps": 1e-6,
    "optim.weight_decay": 0.2,
    "optim.decay": "l2",
    "optim.moments": "bf16",
    "optim.clip_norm": 2.0,
    "optim.average": 0.9,
    "optim.groups": [],
    "optim.groups[].names": ["b"],
    "optim.groups[].lr_scale": 2.0,
    "optim.groups[].weight_decay": 0.0,
    "schedule.kind": "constant",
    "schedule.args": {"x": 2},
    "schedule.warmup_steps": 7,
    "schedule.final": 0.2,
    "schedule.decay_steps": 9,
    "batch_ramp.start": 32,
    "batch_ramp.increment": 48,
    "batch_ramp.samples": 200,
    "reduction.block": 2,
    "reduction.wire": "bf16",
    "parallel.dp_replicate": 1,
    "parallel.dp_shard": 2,
    "parallel.min_shard": 2,
    "parallel.zero": 2,
    "parallel.bucket_elements": 5,
    "parallel.use": "fit",
    "parallel.tp": 2,
    "parallel.cp": 2,
    "parallel.pp": 2,
    "parallel.ep": 2,
    "workers.min": 2,
    "workers.max": 3,
    "workers.spares": 1,
    "workers.straggler": "evict",
    "workers.rerun_every": 9,
    "workers.lemon_after": 5,
    "workers.labels": {"ray.io/market-type": "spot"},
    "workers.cpus": 2,
    "workers.gpus": 1,
    "workers.device_gb": 80,
    "workers.threads": 4,
    "checkpoint.save_every": 1,
    "checkpoint.keep_last": 2,
    "checkpoint.keep_every": 4,
    "checkpoint.keep_best": True,
    "checkpoint.keep_younger": "24h",
    "checkpoint.compare": False,
    "copies.copy_every": 2,
    "copies.buddy_every": 9,
    "copies.cross_zone": True,
    "copies.link_share": 0.5,
    "copies.verify": True,
    "watch.every": 7,
    "watch.patience": 2,
    "watch.vanishing": 0.1,
    "watch.exploding": 9.0,
    "watch.stationary": 40,
    "watch.max_skipped": 3,
    "watch.max_restarts": 5,
    "spikes.action": "skip",
    "spikes.z": 5.0,
    "spikes.window": 64,
    "spikes.microbatch_z": 8.0,
    "network.interface": "eth1",
    "notices.sources": ("aws",),
    "notices.file": "/run/taken",
    "notices.command": "taken",
    "notices.grace_s": 120,
    "deadlines.form_s": 1,
    "deadlines.fence_s": 1,
    "deadlines.stall_s": 7,
    "deadlines.silence_s": 4,
    "deadlines.lease_s": 130,
    "deadlines.wait_s": 1,
    "deadlines.stop_s": 1,
    "deadlines.driver_s": 30,
    "deadlines.grow_debounce_s": 1,
    "faults": [],
    "faults[].point": "backward",
    "faults[].step": 2,
    "faults[].world_rank": 1,
    "faults[].generation": 2,
    "faults[].kind": "SIGSTOP",
}
"""Another value of each setting than that of :data:`BASE`, or the default."""
WITH: dict[str, dict[str, Any]] = {
    "attention": {"precision": "bf16", "workers.gpus": 1},
    "offload": {"parallel.zero": 1},
    "parallel.bucket_elements": {"parallel.zero": 1},
    "offload_folder": {"offload": "optimizer", "parallel.zero": 1},
    "offload_buffer_gb": {"offload": "optimizer", "offload_folder": "/disk", "parallel.zero": 1},
    "optim.betas": {"optim.kind": "adamw", "optim.args": {}},
    "optim.eps": {"optim.kind": "adamw", "optim.args": {}},
    "optim.momentum": {"optim.kind": "sgd", "optim.args": {}},
    "optim.decay": {"optim.kind": "adamw", "optim.args": {}},
    "optim.moments": {"optim.kind": "adamw", "optim.args": {}},
    "schedule.args": {"schedule.kind": "a.b:rate"},
    "schedule.decay_steps": {"schedule.kind": "wsd", "schedule.decay_steps": 5},
    "data.weights": {"data.weights": (1.0, 1.0)},
    "spikes.z": {"spikes.action": "skip"},
    "spikes.window": {"spikes.action": "skip"},
    "spikes.microbatch_z": {"spikes.action": "skip"},
    **{f"samples.{name}": {"samples.every": 50, "samples.prompts": ("a",)} for name in Samples.model_fields},
    "checkpoint.keep_every": {"checkpoint.keep_last": 3},
    "checkpoint.keep_younger": {"checkpoint.keep_last": 3},
    "validation.by": {"workers.spares": 1, "validation.every": 50},
    "validation.patience": {"validation.every": 50, "checkpoint.save_every": 50},
    "validation.min_delta": {"validation.every": 50, "checkpoint.save_every": 50, "validation.patience": 3},
    "checkpoint.keep_best": {"checkpoint.keep_last": 3, "validation.every": 50},
    **{
        f"batch_ramp.{name}": {"batch_ramp": {"start": 16, "increment": 16, "samples": 100}}
        for name in ("start", "increment", "samples")
    },
}
"""Settings that both jobs have besides, so that the two values of a setting are allowed."""


def job_of(bucket: Path, values: dict[str, Any]) -> Job:
    """Returns the job of settings with dotted names, later ones over earlier ones."""
    found: dict[str, Any] = {"name": "run", "bucket": str(bucket)}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if section == "faults[]":
            found["faults"] = [{**found["faults"][0], key: value}]
        elif section == "optim.groups[]":
            found["optim"] = {**found["optim"], "groups": [{**found["optim"]["groups"][0], key: value}]}
        elif section:
            found[section] = {**found.get(section, {}), key: value}
        else:
            found[name] = value
    return Job(**found)


def what_happens(folder: Path, setting: str) -> Change:
    """Begins a run, changes the setting, and returns what the checks of a command that trains it say."""
    begun = job_of(folder, BASE | WITH.get(setting, {}))
    changed = job_of(folder, BASE | WITH.get(setting, {}) | {setting: OTHER[setting]})
    assert begun != changed
    Run.open(begun)
    try:
        Run.look(changed)
    except JobError as error:
        assert setting.partition("[")[0] in str(error), "it is named"
    else:
        return Change.FREE
    try:
        Run.look(changed, branch=True)
    except JobError as error:
        assert re.search(rf"another value of .*{re.escape(setting)}", str(error)), "it is named"
        return Change.REFUSED
    store = ObjectStore.open(str(folder))
    branches.begin(run := Branches(store, "run"), changed, begun, Version(0, 0), 0.0)
    (differs,) = (each.changed for each in run.every())
    setting = setting.partition("[")[0]  # a list changes as a whole
    assert differs and all(name == setting or name.startswith(f"{setting}.") for name in differs)
    return Change.BRANCH


@pytest.mark.parametrize("setting", [name for name in leaves(Job) if name not in ("name", "bucket")])
def test_l4_what_another_value_does_is_what_the_table_says(tmp_path: Path, setting: str) -> None:
    """L4: free: nothing is asked; branch: a word is, and the branch says what it changed; refused: by name,
    also with the word.
    """
    assert what_happens(tmp_path, setting) is branches.change_of(setting)


@pytest.mark.parametrize("setting", [name for name in leaves(Job) if name not in ("name", "bucket")])
def test_a_run_with_any_setting_can_be_read_again(tmp_path: Path, setting: str) -> None:
    """It is read without the settings that are free, so none of the others may ask for one of these."""
    job = job_of(tmp_path, BASE | WITH.get(setting, {}) | {setting: OTHER[setting]})
    Run.open(job)
    assert Run.look(job).job.digest == job.digest


def test_l4_the_name_says_which_run_it_is_and_the_bucket_where(tmp_path: Path) -> None:
    """L4: with another name it is another run (refused), and a bucket may be moved (free)."""
    Run.open(job_of(tmp_path / "here", BASE))
    (tmp_path / "here").rename(tmp_path / "there")
    assert Run.look(job_of(tmp_path / "there", BASE)).there is not None
    assert Branches(ObjectStore.open(str(tmp_path / "there")), "other").last() is None
    assert [branches.change_of(name) for name in ("name", "bucket")] == [Change.REFUSED, Change.FREE]


def test_a_table_that_is_wrong_is_found(tmp_path: Path) -> None:
    """The control: a setting that is declared as free, and is part of the trajectory."""
    assert what_happens(tmp_path, "seed") is not Change.FREE is not branches.change_of("seed")
    assert what_happens(tmp_path / "other", "log_every") is not Change.BRANCH
