"""The memory that a process may still take is read from the files in which the kernel says so."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.engine.optim.base import rule_of
from elastic.errors import JobError, NoRoomYet
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.plan import Plan
from elastic.state import node_memory
from elastic.state.node_memory import alone, copies_here, free_memory
from elastic.state.region import PAGE
from elastic.state.snapshot import Snapshots
from elastic.train import session
from elastic.train.gauges.counters import Counters
from elastic.train.machine import device as machine_device
from elastic.train.machine.device import fitting_shard, fitting_whole, need_of, states_fitting
from elastic.train.machine.limits import (
    SEGMENT,
    SHARED,
    little_lockable,
    little_shared,
    lockable_memory,
    no_segment,
    shared_memory,
)
from elastic.train.model import build_model, builder_of, bytes_of, tensors_of
from elastic.train.own_faults import Faults
from elastic.train.session import make_snapshots
from storage.slices import Tensor
from tests.support.patience import PATIENCE_S
from tests.support.toys import toy_job

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def copies_of_this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of the suite have copies on this node, too, and they come and go."""
    here, found = str(os.getpid()), node_memory._open_files
    monkeypatch.setattr(node_memory, "_open_files", lambda: (each for each in found() if each[0] == here))


def test_the_limit_that_is_met_first_counts(tmp_path: Path) -> None:
    """A container's limit counts, without the file cache, which the kernel gives back; without a container or
    a limit, the node's free memory counts."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000 kB\nMemAvailable:  1000 kB\n")
    assert free_memory(meminfo, tmp_path / "none") == (1_024_000, "the node (MemAvailable)")
    for name, text in (
        ("memory.max", "max"),
        ("memory.current", "700000"),
        ("memory.stat", "anon 5\ninactive_file 100000\n"),
    ):
        (tmp_path / name).write_text(text + "\n")
    assert free_memory(meminfo, tmp_path)[0] == 1_024_000, "no limit"
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_memory(meminfo, tmp_path) == (400_000, "the container (memory.max = 1000000)")


def test_a_group_within_a_group_counts(tmp_path: Path) -> None:
    """The limit may be that of the process's own control group or of a group above it, in both versions of
    control groups.
    """
    meminfo, own = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemAvailable:  1000 kB\n")
    for line, inner, names in (
        ("0::/pods/mine", "pods/mine", ("memory.max", "memory.current")),
        ("4:memory:/pods/mine", "memory/pods/mine", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        own.write_text(f"1:name=systemd:/\n{line}\n")
        folder = tmp_path / names[0]
        for group, limit, used in (
            (folder / inner, 900_000, 500_000),
            ((folder / inner).parent, 800_000, 700_000),
        ):
            group.mkdir(parents=True, exist_ok=True)
            for name, text in (
                (names[0], f"{limit}\n"),
                (names[1], f"{used}\n"),
                ("memory.stat", "inactive_file 0\n"),
            ):
                (group / name).write_text(text)
        assert free_memory(meminfo, folder, own) == (100_000, f"the container ({names[0]} = 800000)")


def test_what_other_workers_will_take_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of one node that each find room for one: the second is refused, or told to come again where
    memory is only held.
    """
    job = toy_job(tmp_path, copies={"copy_every": 3})
    tensors, cpu = tensors_of(build_model(job, builder_of(job)), rule_of(job)), torch.device("cpu")
    counters = [Counters(tmp_path / name, create=True) for name in ("w1", "w2")]
    before, kept = copies_here()
    first = make_snapshots(job, tensors, cpu, counters[0], Faults(()))
    assert counters[0]["copies"] == first.region.descriptor
    size = first.region["wanted"]
    assert size - 5 * PAGE <= copies_here()[0] - before <= size

    def free(regions: int, taken: int = 0) -> None:
        monkeypatch.setattr(session, "free_memory", lambda: (regions * size, "the node (MemAvailable)"))
        monkeypatch.setattr(session, "copies_here", lambda: (copies_here()[0] - before, taken))

    free(2)
    monkeypatch.setattr(session, "COMES_S", 0.05)
    with pytest.raises(
        JobError,
        match=(
            r"^copies\.copy_every = 3: this worker's copies and saves take .* raise the limit "
            r"by .* \(on Kubernetes resources"
        ),
    ):
        make_snapshots(job, tensors, cpu, counters[1], Faults(()))
    free(2, taken=size)
    with pytest.raises(NoRoomYet):
        make_snapshots(job, tensors, cpu, counters[1], Faults(()))
    assert counters[1]["copies"] == 0
    for slot in range(first.region.slots):
        first.region.data(slot)[:] = bytes(first.region.slot_bytes)
        first.region.digests(slot)[:] = memoryview(bytes(8 * first.region.slot_blocks)).cast("q")
    assert copies_here()[0] - before <= 5 * PAGE and copies_here()[1] - kept >= size - 5 * PAGE, (
        "written, and nobody else has it open"
    )
    free(2)
    assert make_snapshots(job, tensors, cpu, counters[1], Faults(())).region.slots == first.region.slots


def test_a_start_waits_while_memory_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes long to give back what a killed process had, and nobody else holds it then: the node
    is not refused for that. The control: memory that is not there and does not come."""
    job = toy_job(tmp_path, copies={"copy_every": 3, "buddy_every": 0})
    tensors, counters = (
        tensors_of(build_model(job, builder_of(job)), rule_of(job)),
        Counters(tmp_path / "w1", create=True),
    )
    needed = 3 * bytes_of(tensors)
    monkeypatch.setattr(session, "COMES_S", 2.0)
    monkeypatch.setattr(session, "copies_here", lambda: (0, 0))
    for shares, fits in (((0.2, 0.2, 0.5, 0.5, 0.9, 1.5), True), ((0.2, 0.5, 0.5), False)):
        left = list(shares)
        monkeypatch.setattr(
            session,
            "free_memory",
            lambda left=left: (
                int(needed * (left.pop(0) if len(left) > 1 else left[0])),
                "the node (MemAvailable)",
            ),
        )
        with contextlib.nullcontext() if fits else pytest.raises(JobError, match="leaves only"):
            assert make_snapshots(job, tensors, torch.device("cpu"), counters, Faults(())).region.slots == 3
        assert len(left) == 1


def test_slots_are_not_sized_for_the_smallest_permitted_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N11: eight workers of one node share the state, and one worker alone may go on.  The node needs at most
    four times the state, and refuses nobody; where each worker has all of the state, it refuses the second
    one."""
    monkeypatch.setattr(session, "COMES_S", 0.05)

    def start(replicas: int | str) -> tuple[int, list[Snapshots]]:
        job = toy_job(
            tmp_path,
            copies={"buddy_every": 0},
            workers={"min": 1, "max": 8},
            parallel={"dp_replicate": replicas},
        )
        tensors, made = tensors_of(build_model(job, builder_of(job)), rule_of(job)), list[Snapshots]()
        state, (before, _) = bytes_of(tensors), copies_here()
        monkeypatch.setattr(session, "free_memory", lambda: (4 * state, "the node (MemAvailable)"))
        monkeypatch.setattr(session, "copies_here", lambda: (copies_here()[0] - before, 0))
        for number in range(8):
            counters = Counters(tmp_path / f"{replicas} {number}", create=True)
            made.append(make_snapshots(job, tensors, torch.device("cpu"), counters, Faults(())))
        return state, made

    state, made = start(1)
    assert 3 * state <= sum(each.region["wanted"] for each in made) <= 4 * state
    assert all(each.region.slot_bytes >= state for each in made), "they may grow until one has all"
    members = tuple(WorkerId(f"w{rank}") for rank in range(8))
    plan = Plan(
        1, 1, Layout(1, 8), members, Version(0, 0), "init", (), NodeId("n"), (NodeId("n"),) * 8, copy_every=1
    )
    assert state / 7 <= made[0].foresee(plan) < state / 6, "one worker of the only node may be lost"
    assert state / 4 <= made[0].foresee(replace(plan, nodes=(NodeId("n"), NodeId("m")) * 4)) < state / 3, (
        "or a node of two"
    )
    with pytest.raises(JobError, match="raise the limit"):
        start("auto")


def test_one_worker_of_a_node_at_a_time() -> None:
    entered = threading.Event()

    def enter() -> None:
        with alone():
            entered.set()

    with alone():
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.2)
    assert entered.wait(PATIENCE_S)
    other.join()


def test_this_machine_says_so_too() -> None:
    free, where = free_memory()
    assert free > 0 and where
    assert shared_memory() >= SEGMENT and lockable_memory() >= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def test_a_worker_whose_counters_do_not_fit_is_refused_by_name() -> None:
    assert no_segment(SEGMENT) == ""
    assert no_segment(100) == (
        "/dev/shm has 100 B left, and the counters of one worker take 4.1 kB of it; make /dev/shm "
        "larger (on Kubernetes an emptyDir with medium: Memory and a sizeLimit, mounted at /dev/shm; "
        "with docker --shm-size), or remove files from it"
    )


def test_shared_memory_that_may_not_do_for_nccl_is_named() -> None:
    assert little_shared(SHARED) == ""
    said = little_shared(64 * 2**20)
    assert said.startswith("/dev/shm has 67.1 MB left, less than the 1.07 GB that NCCL is usually given")
    assert "emptyDir with medium: Memory and a sizeLimit" in said and "docker --shm-size" in said


def test_a_limit_on_locked_memory_below_what_is_pinned_is_named() -> None:
    assert little_lockable(8 * 2**20, 8 * 2**20) == little_lockable(2**50, sys.maxsize) == ""
    said = little_lockable(96 * 10**9, 8 * 2**20)
    assert said.startswith(
        "this worker pins 96 GB of host memory for copies, and RLIMIT_MEMLOCK is 8.39 MB: "
    )
    assert "was not verified" in said and "`ulimit -l unlimited`" in said and "LimitMEMLOCK=infinity" in said


FULL = """
import os, sys
from pathlib import Path
from elastic.train.gauges.counters import FOLDER, Counters, segment
from elastic.train.machine.limits import no_segment, shared_memory
print(no_segment(shared_memory()))
Counters(segment("fits", "w1"), create=True)["pid"] = 1
print(no_segment(shared_memory()))
try:
    Counters(segment("full", "w2"), create=True)
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a /dev/shm of its own")
def test_a_full_one_is_an_error_and_no_signal() -> None:
    """The mount has room for the counters of one worker."""
    mount = f'mount -t tmpfs -o size={SEGMENT} none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    fits, full, why = done.stdout.splitlines()
    assert fits == "" and full == no_segment(0) and why == "No space left on device"


@pytest.mark.parametrize(
    ("changes", "bytes_a_parameter", "least"),
    [
        ({}, 1000, 1),
        ({}, 18, 1),  # 16, and 92 % of the device are planned with
        ({}, 14.5, 2),
        ({}, 10, 3),
        ({"parallel": {"dp_shard": 2}}, 14.5, 1),  # the job has chosen, and it fits
        ({"reduction": {"block": 2}}, 18, 2),  # two sums of gradients
        ({"precision": "bf16"}, 18, 2),  # the copy with which one shard computes
        ({"parallel": {"zero": 3}}, 11.5, 3),
        # the weights with which each member computes, also while a world forms
        ({"parallel": {"zero": 2}}, 11.5, 4),
    ],
)
def test_the_least_shard_degree_that_fits_a_device(
    changes: dict[str, Any], bytes_a_parameter: float, least: int
) -> None:
    job, tensors, device = of_device(changes, bytes_a_parameter)
    assert fitting_shard(job, tensors, device) == least


@pytest.mark.parametrize(
    ("changes", "bytes_a_parameter", "least"),
    [
        # bytes a parameter in bf16, of two: 6 of state beside 6 of an older world's, and 2 of weights to
        # compute with
        ({}, 18, 2),
        ({}, 14.5, 3),
        ({}, 8.8, 4),  # four take 8.0 bytes while a world forms, and 8.1 can be used
        ({}, 8.5, 0),  # 7.8 can be used; the whole device would do, but this is no reason to be refused for
        ({"workers": {"min": 1, "max": 4}}, 18, 0),  # memory that is not limited
        ({"parallel": {"zero": 3}}, 18, 0),
        ({"parallel": {"dp_shard": 2}}, 18, 0),
    ],
    ids=str,
)
def test_the_least_shard_degree_at_which_whole_weights_fit_too(
    changes: dict[str, Any], bytes_a_parameter: float, least: int
) -> None:
    job, tensors, device = of_device({"precision": "bf16"} | changes, bytes_a_parameter)
    job = job.replace(**{name: changes[name] for name in changes.keys() & {"workers"}})
    assert fitting_whole(job, tensors, device, took=0) == least


@pytest.mark.parametrize(
    ("changes", "bytes_a_parameter"),
    [({}, 5), ({"parallel": {"dp_replicate": 2}}, 10), ({"parallel": {"dp_shard": 1}}, 10)],
)
def test_a_degree_that_the_job_does_not_allow_is_no_way_out(
    changes: dict[str, Any], bytes_a_parameter: float
) -> None:
    """The control is the test above: the same devices are large enough if the job allows more shards."""
    job, tensors, device = of_device(changes, bytes_a_parameter)
    with pytest.raises(JobError, match=r"^workers\.max = 4: even if \d workers share the state"):
        fitting_shard(job, tensors, device)


def test_what_a_step_takes_is_counted() -> None:
    """A microbatch that took as much again as a member holds needs twice the shards."""
    job, tensors, device = of_device({}, 18)
    held = need_of(job, tensors).held(4)
    assert fitting_shard(job, tensors, device, took=held) == 1
    assert fitting_shard(job, tensors, device, took=held + need_of(job, tensors).state // 2) == 2


@pytest.mark.parametrize(
    ("copies", "slots"), [({"copy_every": 1, "buddy_every": 0}, 3), ({"copy_every": 0}, 1), ({}, 7)], ids=str
)
def test_a_node_has_room_for_so_many_states(
    copies: dict[str, Any], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its slots: copies, saves, and those for a worker on another node; 80 % of the memory are
    planned with.
    """
    job, tensors, _ = of_device({"copies": copies}, 1000)
    monkeypatch.setattr(machine_device, "whole_memory", lambda: 30 * need_of(job, tensors).state)
    assert states_fitting(job, tensors) == pytest.approx(0.8 * 30 / slots)


def test_sums_that_are_late_are_not_taken_for_something_else() -> None:
    """The warm-up holds them whole.  If they seemed to come and go beside its part of them, a member would
    seem to need more.
    """
    job, tensors, device = of_device({"parallel": {"zero": 1}, "reproducible": False}, 30)
    need = need_of(job, tensors)
    assert need.deferred and need.held(4) - replace(need, deferred=False).held(4) == 3 * need.gradients // 4
    took = need.held(4) + 14 * need.gradients // 4  # 14 bytes a parameter come and go in a step
    assert fitting_shard(job, tensors, device, took=took) == 3
    assert fitting_shard(job, tensors, device, took=took + 3 * need.gradients // 4) > 3


def test_what_muon_prepares_is_counted() -> None:
    """Two bytes for each element of the matrices of blocks.  The control: AdamW prepares nothing."""
    needs = {}
    for kind in ("muon", "adamw"):
        job, tensors, _ = of_device({"optim": {"kind": kind}}, 1000)
        needs[kind] = need_of(job, tensors).gradients
        matrices = sum(prod(tensor.shape) for tensor in tensors if tensor.kind == "moment.momentum_buffer")
        assert (matrices > 0) == (kind == "muon")
        needs[kind] -= 2 * matrices
    assert needs["muon"] == needs["adamw"]


def test_slots_follow_the_shards_that_a_device_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a worker would ask for host memory for the whole state.  The control: with one shard it does."""
    job = toy_job(tmp_path, copies={"copy_every": 3}, workers={"min": 1, "max": 4})
    assert [layout.dp_shard for layout in job.layouts(3)] == [3, 4]
    assert job.layouts(9) == job.layouts(), "no layout has so many"
    tensors, counters = (
        tensors_of(build_model(job, builder_of(job)), rule_of(job)),
        Counters(tmp_path / "w1", create=True),
    )
    asked = list[int]()
    monkeypatch.setattr(session, "COMES_S", 0.0)
    monkeypatch.setattr(
        session,
        "no_room",
        lambda every, needed, left, where, slots, **_: asked.append(needed // slots) or "no room",
    )
    for least in (1, 3):
        with pytest.raises((JobError, NoRoomYet), match="no room"):
            make_snapshots(job, tensors, torch.device("cpu"), counters, Faults(()), least)
    assert asked[0] >= bytes_of(tensors) > 3 * asked[-1]


def of_device(
    changes: dict[str, Any], bytes_a_parameter: float
) -> tuple[Job, tuple[Tensor, ...], torch.device]:
    """Returns the toy job for devices with so many bytes for each parameter, and the tensors of its state."""
    job = toy_job("/nowhere", **changes)
    model = build_model(job, builder_of(job))
    limit = bytes_a_parameter * sum(parameter.numel() for parameter in model.parameters()) / 1e9
    return (
        job.replace(workers={"min": 1, "max": 4, "device_gb": limit}),
        tensors_of(model, rule_of(job)),
        torch.device("cpu"),
    )
