"""Jobs are written, read again, and told apart by what defines the trajectory."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic.config.sections import (
    BatchRamp,
    Checkpoint,
    Copies,
    Data,
    Deadlines,
    LayerWatch,
    Metrics,
    Network,
    Optim,
    Parallel,
    Reduction,
    Schedule,
    Spikes,
    Validation,
    WorkerFault,
    Workers,
)
from elastic.control.rules import Rules, WatchRule
from elastic.errors import JobError
from elastic.job import Job
from tests.support.job_file import to_toml

pytestmark = pytest.mark.fast


def job(**settings: Any) -> Job:
    return Job(**{"name": "run", "bucket": "/bucket", "global_batch": 32, **settings})


def test_a_job_is_immutable() -> None:
    with pytest.raises(ValidationError):
        job().steps = 3  # type: ignore[misc]


# ---- writing and reading again

plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
jobs = st.builds(
    job,
    seed=st.integers(0, 2**40),
    model_args=st.dictionaries(st.text(), plain, max_size=3),
    data=st.builds(Data, args=st.dictionaries(st.text(), plain, max_size=2), prefetch=st.integers(1, 9)),
    optim=st.builds(Optim, lr=st.floats(0, 1), betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)),
    deadlines=st.builds(Deadlines, form_s=st.floats(0, 1e9, exclude_min=True)),
    parallel=st.builds(Parallel, use=st.sampled_from(["all", "fit"])),
    faults=st.lists(
        st.builds(WorkerFault, point=st.sampled_from(["save", "forward"]), step=st.integers(0, 99)),
        max_size=2,
    ),
)


@given(jobs)
def test_toml_and_json_say_the_same_job(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_bytes(to_toml(job).encode())
    for again in (Job.load(path), Job.from_json(job.to_json()), pickle.loads(pickle.dumps(job))):
        assert again == job
        assert again.digest == job.digest
        assert again.to_json() == job.to_json()


def test_json_has_none() -> None:
    nothing = job(model_args={"a": {"b": None}})
    assert Job.from_json(nothing.to_json()) == nothing


def test_replace_checks_again() -> None:
    assert job().replace(steps=7).steps == 7
    assert job(seed=3).replace(steps=7).seed == 3
    with pytest.raises(JobError, match="steps = 0"):
        job().replace(steps=0)
    with pytest.raises(JobError, match="unknown setting 'stepz'"):
        job().replace(stepz=1)


# ---- what follows from a job

CLUSTER = {
    "name": "other",
    "bucket": "/other",
    "on_driver_exit": "detach",
    "log_every": 9,
    "profile": "5-7",
    "trial": False,
    "offload": "optimizer",
    "offload_folder": "/other/disk",
    "offload_buffer_gb": 2,
    "workers": Workers(min=2, max=16, cpus=2, gpus=1, threads=4),
    "parallel": Parallel(
        dp_shard=2, min_shard=2, use="fit", zero=2, bucket_elements=5, tp=2, cp=2, pp=2, ep=2
    ),
    "checkpoint": Checkpoint(save_every=1, keep_last=2, keep_every=4, keep_younger="7d"),
    "copies": Copies(copy_every=1, buddy_every=9),
    "network": Network(interface="eth1"),
    "notices": {"sources": ["aws"], "grace_s": 120},
    "watch": LayerWatch(every=7, patience=2, vanishing=0.1, exploding=9, stationary=40, max_skipped=3),
    "deadlines": Deadlines(form_s=1, fence_s=1, stall_s=1, lease_s=1, wait_s=1, stop_s=1),
    "faults": (WorkerFault(point="save", step=1),),
    "data": Data(prefetch=7, args={"path": "/moved"}),
    "validation": Validation(every=5),
    **{"export": {"every": 5}, "samples": {"every": 5, "prompts": ["a"]}},
    "metrics": Metrics(sinks={"a.b:C": {"path": "c"}}),
}
TRAJECTORY = {
    "model": "a.b:c",
    "model_args": {"dim": 1},
    "init": "other@best",
    "loss": "a.b:c",
    "loop": "a.b:c",
    "seed": 1,
    "steps": 99,
    "global_batch": 64,
    "microbatch": 4,
    "reproducible": False,
    "precision": "bf16",
    "compile": True,
    "recompute": "block",
    **{"activations": "int8", "attention": "flash-4", "loss_scale": 2.0},
    "data": Data(weights=(1.0,), group_by_length=True),
    "optim": Optim(lr=1),
    "schedule": Schedule(warmup_steps=1),
    "batch_ramp": BatchRamp(start=4, increment=4, samples=100),
    "numerics": 4,
    "reduction": Reduction(block=2),
    "spikes": Spikes(action="skip"),
}


def test_the_digest_is_of_the_trajectory_and_of_nothing_else() -> None:
    """Promise 1: the cluster never enters, everything else does."""
    assert job(**CLUSTER).digest == job().digest
    needed = {"loss_scale": {"precision": "fp16"}, "attention": {"precision": "bf16", "workers": {"gpus": 1}}}
    digests = {
        job(**needed.get(setting, {}), **{setting: value}).digest for setting, value in TRAJECTORY.items()
    }
    assert len(digests | {job().digest}) == len(TRAJECTORY) + 1
    assert set(CLUSTER) | set(TRAJECTORY) == set(Job.model_fields)


def test_the_digest_stays_as_it_was() -> None:
    """A run begun by an earlier release can be resumed: change this only together with the meaning of a
    setting.
    """
    assert (
        job(numerics=4, recompute="none").digest
        == "0a67061131832569db76f4e4a942a932a7d1cb88d4b639747bf42236f22ac18b"
    )


def test_rules_are_the_jobs() -> None:
    rules = job(
        steps=9,
        reproducible=False,
        workers=Workers(min=2, max=3),
        deadlines=Deadlines(stall_s=7),
        parallel=Parallel(min_shard=2),
    ).rules()
    assert isinstance(rules, Rules)
    assert (rules.min_workers, rules.max_workers, rules.target_step, rules.save_every) == (2, 3, 9, 50)
    assert (rules.stall_s, rules.lease_s, rules.reproducible) == (7, 120, False)
    assert job(
        watch={"patience": 2, "vanishing": 0.1, "exploding": 9, "stationary": 40, "max_skipped": 3}
    ).rules().watch == WatchRule(2, 0.1, 9, 40, 3)
    assert rules.watch == WatchRule()
    assert (rules.layout.dp_shard, rules.layout.min_shard, rules.layout.use) == (None, 2, "all")


def test_microbatches_and_the_warning_about_too_few() -> None:
    few = job(global_batch=30, microbatch=2, workers=Workers(max=4))
    assert few.microbatches == 15
    (warning,) = few.warnings()
    assert "only 15 microbatches of 2 for up to 4 workers" in warning
    assert job(global_batch=32, microbatch=2, workers=Workers(max=4)).warnings() == []
    assert [
        job(global_batch=2 * many, microbatch=2, workers=Workers(max=2)).warnings() == [] for many in (3, 4)
    ] == [False, True]
    (warning,) = job(global_batch=32, microbatch=2, reduction={"block": 17}).warnings()
    assert "reduction.block = 17 is more than the 16 microbatches" in warning
    assert job(global_batch=32, microbatch=2, reduction={"block": 16}).warnings() == []
