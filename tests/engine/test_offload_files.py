"""State in files of a disk that passes through a bounded buffer (``offload_folder``): the same bits, and
little of it in memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine.optim.base import rule_of
from elastic.engine.world import World
from elastic.errors import JobError, StateDamaged, StateMissing
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.copy_budget import CopyRule
from elastic.plan.layout import Layout
from elastic.protocol.copy_schedule import Copy
from elastic.state import node_memory
from elastic.state.region import Region, frame
from elastic.state.shard import Key, Shard, ShardHome
from elastic.state.snapshot import Snapshots
from elastic.state.streaming import SHARES, Values, _Threads, buffer_gb, group_bytes, groups_of, put, through
from elastic.state.uploader import check
from elastic.train import heal, session
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from elastic.train.model import State, build_model, builder_of, bytes_of, tensors_of
from storage.slices import Tensor
from tests.engine.test_offload import in_files
from tests.support.cells import cell
from tests.support.patience import PATIENCE_S
from tests.support.ranks import Ranks
from tests.support.segments import Member, compute, here, member
from tests.support.toys import small_job

LARGE: dict[str, Any] = {"vocab": 29, "dim": 256, "layers": 8, "heads": 4}


def test_groups_are_as_large_as_the_buffer_allows() -> None:
    """The fifth part of a buffer of 100 bytes has two tensors of ten, and a tensor of thirty is a group
    alone.
    """
    job = in_files(Path("/nowhere"), offload_buffer_gb=1e-7)
    units = [
        {("parameter", str(number)): torch.empty(size, dtype=torch.uint8)}
        for number, size in enumerate([10, 10, 1, 30, 10, 10])
    ]
    assert [[name for _, name in group] for group in groups_of(units, group_bytes(job))] == [
        ["0", "1"],
        ["2"],
        ["3"],
        ["4", "5"],
    ]


@pytest.mark.parametrize(("later", "together"), [(1, True), (2, False)], ids=["the next group", "control"])
def test_a_group_is_updated_while_the_one_before_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int, together: bool
) -> None:
    """The first group goes only once the next one is updated and the one after comes.

    The control: the update of that one has to wait, since no more than three groups are in memory at once.
    """
    tensors = tuple(Tensor(f"w{number}", "parameter", "F32", (8, 8)) for number in range(5))
    whole, version = frame(tensors, cell(1, 0)), Version(1, 1)
    snapshots = Snapshots(
        Region.create(4, whole.bytes, whole.blocks, tensors, str(tmp_path)),
        tensors,
        torch.device("cpu"),
        CopyRule(),
    )
    one = snapshots.home(Copy(version, cell(1, 0)), [], adopt=False)
    for key, value in one.values.items():
        put(one, key, torch.full_like(value, 3))
    other = snapshots.next_home(Shard(version, cell(1, 0), {}, one))
    came, updated, seen = defaultdict[str, Event](Event), defaultdict[str, Event](Event), list[bool]()
    write, read = _Threads._write, _Threads._read

    def reads(self: _Threads, home: ShardHome, keys: list[Key]) -> Values:
        for _, name in keys:
            came[name].set()
        return read(self, home, keys)

    def writes(self: _Threads, home: ShardHome, values: Values, computed: None) -> None:
        if ("parameter", "w0") in values:
            patience_s = PATIENCE_S if together else 0.5
            seen.append(updated[f"w{later}"].wait(patience_s) and came[f"w{later + 1}"].wait(patience_s))
        write(self, home, values, computed)

    monkeypatch.setattr(_Threads, "_read", reads)
    monkeypatch.setattr(_Threads, "_write", writes)
    for values in through(
        torch.device("cpu"), one, other, groups_of([{key: value} for key, value in one.values.items()], 1)
    ):
        for (_, name), value in values.items():
            value.mul_(2)
            updated[name].set()
    assert seen == [together] and all((value == 6).all() for value in other.values.values())


# ---- memory


def resident(field: str) -> int:
    return 1024 * int(
        next(
            line.split()[1]
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(field)
        )
    )


def peaks(world: World, folder: Path, buffer_gb: float, hows: Sequence[str]) -> list[int]:
    """Returns, for each run, the bytes by which the memory of this process grew at most, in initialisation,
    steps and a save.
    """
    # M_MMAP_THRESHOLD: freed memory is given back at once, as tensors of real size are
    ctypes.CDLL(None).mallopt(-3, 65536)
    world.close()  # a local run forms its own

    def run(name: str, how: str, **more: Any) -> None:
        settings = {} if how == "resident" else {"offload": "optimizer"}
        if how in ("files", "mapped"):
            settings |= {"offload_folder": str(folder), "offload_buffer_gb": buffer_gb}
        job = small_job(
            folder / name,
            parallel={"zero": 2},
            steps=2,
            checkpoint={"save_every": 2},
            global_batch=2,
            trial=False,
            **settings,
            **more,
        )
        assert run_local(job, lambda line: None)[0] == "Finished"

    run("small", "files")  # loads what any run loads
    found = []
    for how in hows:
        if how == "mapped":
            Region.let_go = lambda self, first, last: None  # type: ignore[method-assign]
        gc.collect()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
        run(how, how, model_args=LARGE)
        found.append(resident("VmHWM") - before)
    return found


@pytest.mark.parametrize(
    "controls", [("mapped", "resident"), pytest.param(("memory",), marks=pytest.mark.full)], ids=" ".join
)
def test_f4_memory_is_bounded_by_the_buffer(
    fresh_ranks: Ranks, tmp_path: Path, controls: tuple[str, ...]
) -> None:
    """The state is four times the buffer.  A worker without it has the weights to compute with, the sums of
    gradients, and as much once more while gradients are gathered.

    Controls: state on the device, in memory, and in files that a process never lets go of.
    """
    job = small_job(tmp_path, model_args=LARGE)
    model = build_model(job, builder_of(job))
    state, weights = (
        bytes_of(tensors_of(model, rule_of(job))),
        sum(parameter.nbytes for parameter in model.parameters()),
    )
    buffer = state // 4
    (found,) = fresh_ranks.run(Layout(1, 1), peaks, tmp_path, buffer / 1e9, ("files", *controls))
    in_files, *others = (grown < 3 * weights + buffer for grown in found)
    assert in_files and not any(others)


def nameless(world: World, job: Job) -> tuple[bool, str, list[str], int]:
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        assert me.session.snapshots is not None
        region = me.session.snapshots.region
        link = os.readlink(f"/proc/self/fd/{region.descriptor}")
        return (
            region.on_disk,
            link,
            os.listdir(job.offload_folder),
            512 * os.fstat(region.descriptor).st_blocks,
        )


def test_the_files_have_no_names_and_end_with_their_processes(tmp_path: Path) -> None:
    """A killed worker or keeper leaves nothing behind: the system frees a file without a name with the last
    process that has it open.
    """
    job = in_files(tmp_path / "run", offload_folder=str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    state = bytes_of(tensors_of(build_model(job, builder_of(job)), rule_of(job)))
    on_disk, link, names, size = here(nameless, job)
    assert (
        on_disk and link.startswith(f"{tmp_path / 'disk'}/") and link.endswith(" (deleted)") and names == []
    )
    assert size >= 2 * state, "two versions are in it"
    assert not Region.create(1, 10, 1).on_disk, "the control"


# ---- an update that fails


def test_a_write_that_fails_ends_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of the last group, for which nothing else waits."""

    def refuse(self: _Threads, home: Any, values: Any, computed: Any) -> None:
        raise OSError("the disk is broken")

    world = World.alone(torch.device("cpu"), generation=1)
    try:
        with member(world, in_files(tmp_path, offload_buffer_gb=1), Version(0, 0), prefetch=0) as me:
            me.step()
            monkeypatch.setattr(_Threads, "_write", refuse)
            with pytest.raises(OSError, match="the disk is broken"):
                me.step()
            with me.fence as rules:
                assert not rules.held, "the member answers as for any update that failed"
    finally:
        world.close()


def lies_at(me: Member, step: int, kind: str) -> tuple[Region, int, int]:
    """Returns the region of the member's slots, the place in it of the first tensor of ``kind`` at version
    ``step``, and its size.
    """
    assert me.session.snapshots is not None
    region, lies = me.session.snapshots.region, frame(me.state.tensors, me.state.shard.cell)
    slot = region.find(Copy(Version(step, 1), me.state.shard.cell))
    assert slot is not None
    check(region, slot, lies)
    place = next(place for tensor, place in lies.places.items() if tensor.kind == kind)
    return region, region.data_at(slot) + place.offset, place.bytes


def bend(me: Member, step: int, kind: str) -> None:
    """Writes other bytes into the file in which the member's state at version ``step`` is."""
    region, at, size = lies_at(me, step, kind)
    old = os.pread(region.descriptor, size, at)
    assert os.pwrite(region.descriptor, bytes(255 - byte for byte in old), at) == size


@contextmanager
def alone_in_files(folder: Path, **changes: Any) -> Iterator[Member]:
    """Makes this process the only member of a world whose state is in files."""
    world = World.alone(torch.device("cpu"), generation=1)
    try:
        with member(world, in_files(folder, **changes), Version(0, 0), prefetch=0) as me:
            yield me
    finally:
        world.close()


def says(folder: Path, kind: str) -> str:
    return (
        rf"state in files of {folder} on .*: the bytes that were read differ from those that were "
        rf"written \(first in {kind} '"
    )


@pytest.mark.parametrize("kind", ["parameter", "moment.exp_avg_sq"])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
def test_old_bytes_that_come_back_are_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, checked: bool
) -> None:
    """A write is lost: the file has a tensor's bytes of step 1 in the slot of step 2.

    The update of step 3 raises; neither the slot that it has read nor the one that it has written is taken
    for state.  The control: an update that does not look brings the old bytes into step 3, with digests that
    match them.
    """
    if not checked:
        monkeypatch.setattr(_Threads, "wrong", lambda self: [])
    with alone_in_files(tmp_path) as me:
        me.step()
        region, at, size = lies_at(me, 1, kind)
        old = os.pread(region.descriptor, size, at)
        me.step()
        _, at, _ = lies_at(me, 2, kind)
        assert os.pread(region.descriptor, size, at) != old
        assert os.pwrite(region.descriptor, old, at) == size
        if not checked:
            me.step()
            assert lies_at(me, 3, kind), "the digests of what became of old bytes match"
            return
        with pytest.raises(StateDamaged, match=says(tmp_path, kind)):
            me.step()
        with me.fence as rules:
            assert not rules.held, "the member answers as for any update that failed"
        assert region.find(Copy(Version(3, 1), me.state.shard.cell)) is None
        with pytest.raises(StateMissing, match=f"the copy of {kind} .* is damaged"):
            lies_at(me, 2, kind)


@pytest.mark.parametrize("kind", ["parameter", "scalar", "none"])
def test_a_file_that_changed_is_not_adopted(tmp_path: Path, kind: str) -> None:
    """A member of another world takes the slot that has its state already: nothing is copied, so nobody else
    looks at it.

    The weights to compute with are made from it in the first step, and scalars come from it at once.  The
    control: a file that did not change gives the loss that the member of the world before gets.
    """
    with alone_in_files(tmp_path) as me:
        me.step()
        if kind != "none":
            bend(me, 1, kind)
        session, cell = me.session, me.state.shard.cell
        assert session.snapshots is not None
        home = session.snapshots.home(Copy(Version(1, 1), cell), [], adopt=True)
        assert home.whole
        state = State(session.job, session.builder, session.rule, me.state.world, Version(1, 1), home)
        with pytest.raises(StateDamaged, match=says(tmp_path, kind)) if kind != "none" else nullcontext():
            state.read_the_rest()
            losses = compute(session, state, 2).losses
        if kind == "none":
            assert torch.equal(torch.stack(losses), torch.stack(compute(session, me.state, 2).losses))


@pytest.mark.parametrize("bent", [True, False], ids=["bent", "control"])
def test_a_direction_is_not_made_from_bytes_that_changed(tmp_path: Path, bent: bool) -> None:
    """Muon reads momenta before the commit, and sends others what it makes of them: so nothing may be
    committed.
    """
    with alone_in_files(tmp_path, optim={"lr": 1e-2, "kind": "muon"}) as me:
        me.step()
        if bent:
            bend(me, 1, "moment.momentum_buffer")
        with (
            pytest.raises(StateDamaged, match=says(tmp_path, "moment.momentum_buffer"))
            if bent
            else nullcontext()
        ):
            me.step()
        assert me.session.counters["collective"] == 0 and me.session.counters["step"] == (1 if bent else 2), (
            "no step is prepared"
        )


@pytest.mark.parametrize("bent", [True, False], ids=["bent", "control"])
def test_what_is_sent_to_others_or_saved_is_looked_at(tmp_path: Path, bent: bool) -> None:
    """A save in one process, and a survivor's part that another member is to have."""
    with alone_in_files(tmp_path) as me:
        me.step()
        if bent:
            bend(me, 1, "moment.exp_avg")
        with pytest.raises(StateDamaged, match=says(tmp_path, "moment.exp_avg")) if bent else nullcontext():
            me.save()
        tensor = next(tensor for tensor in me.state.tensors if tensor.kind == "moment.exp_avg")
        with pytest.raises(StateDamaged, match=says(tmp_path, "moment.exp_avg")) if bent else nullcontext():
            heal._find([me.state.shard], tensor, tensor.whole(), set())


# ---- what cannot work


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"offload": "none"},
            (
                r"offload_folder = '/disk' has no effect with offload = 'none'; set offload to "
                r"'optimizer' or 'weights', or"
            ),
        ),
        (
            {"offload_folder": "", "offload_buffer_gb": 2},
            (r"offload_buffer_gb = 2 has no effect without offload_folder; set"),
        ),
        (
            {"offload_folder": "s3://b/x"},
            (
                r"offload_folder = 's3://b/x' must be a folder of a local disk, "
                r"not a URL"
            ),
        ),
        ({"offload_buffer_gb": 0}, r"offload_buffer_gb = 0 must be more than 0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], why: str) -> None:
    settings = {"parallel": {"zero": 2}, "offload": "optimizer", "offload_folder": "/disk"}
    with pytest.raises(JobError, match=why):
        small_job("/nowhere", **settings | changes)
    small_job("/nowhere", **settings)


def test_a_buffer_that_is_too_small_is_refused_with_the_size_that_works(tmp_path: Path) -> None:
    """The largest parameter of the toy model with its moments must fit the fifth part."""
    with pytest.raises(
        JobError,
        match=(
            r"offload_buffer_gb = 1e-06 is too small: .* in 5 groups, and '.*' of .* with its "
            r"moments has"
        ),
    ) as said:
        preflight(in_files(tmp_path, offload_buffer_gb=1e-6))
    enough = float(str(said.value).partition("set offload_buffer_gb to ")[2].split()[0])
    assert "files of" in " ".join(preflight(in_files(tmp_path, offload_buffer_gb=enough)).notes)
    with pytest.raises(JobError, match="is too small"):  # less does not do
        preflight(in_files(tmp_path, offload_buffer_gb=enough - 1e-9))


@given(st.integers(1, 2**42))
def test_the_size_that_works_has_room_for_a_group_to_the_byte(size: int) -> None:
    """The control: a byte less does not do."""
    assert group_bytes(in_files(Path("/nowhere"), offload_buffer_gb=float(buffer_gb(size)))) == size
    assert group_bytes(in_files(Path("/nowhere"), offload_buffer_gb=(SHARES * size - 1) / 1e9)) < size


def test_a_folder_that_is_missing_is_refused_before_the_first_step(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with pytest.raises(
        JobError,
        match=(
            rf"offload_folder = '{gone}' is not a folder in which .* \(No such "
            r"file or directory\); make it on"
        ),
    ):
        run_local(in_files(tmp_path, offload_folder=str(gone)), lambda line: None)


def test_a_folder_in_memory_is_refused(tmp_path: Path) -> None:
    """Every Linux has one, /dev/shm.  The control: the folder of this test, which is on a disk."""
    why = (
        r"offload_folder = '/dev/shm/.*' is a tmpfs on .*: files in it take memory, which offload "
        r"should save; name a folder of"
    )
    with TemporaryDirectory(dir="/dev/shm") as folder, pytest.raises(JobError, match=why):
        run_local(in_files(tmp_path, offload_folder=folder), lambda line: None)
    assert session.check_folder(str(tmp_path)) == ""


MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / {0} rw,relatime - ext4 /dev/vdb rw
24 23 0:22 / {0} rw,relatime shared:7 master:3 - nfs4 server:/export rw,addr=10.0.0.1
25 24 0:23 / {0}/with\040blank rw - ramfs none rw
26 24 0:24 / {0}/with rw - xfs /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("below", "kind"),
    [
        ("", "nfs4"),
        ("deep/er", "nfs4"),
        ("with blank/x", "ramfs"),
        ("with", "xfs"),
        ("without", "nfs4"),
        ("..", "ext4"),
    ],
)
def test_a_folder_over_a_network_is_warned_of(tmp_path: Path, below: str, kind: str) -> None:
    """The innermost mount counts, and of two at the same place the later one.  A link leads to where it
    points.
    """
    there, link, mounts = tmp_path / "mount" / below, tmp_path / "link", tmp_path / "mountinfo"
    there.mkdir(parents=True, exist_ok=True)
    link.symlink_to(there)
    mounts.write_text(MOUNTS.replace("{0}", str(tmp_path / "mount")))
    kind_of = partial(node_memory.filesystem, mounts=mounts)
    assert kind_of(str(there)) == kind_of(str(link)) == kind
    assert node_memory.filesystem(str(there), tmp_path / "none") == ""
    if kind == "ramfs":
        with pytest.raises(JobError, match="is a ramfs on"):
            session.check_folder(str(link), kind_of)
    else:
        assert ("is a nfs4 on" in session.check_folder(str(link), kind_of)) == (kind == "nfs4")


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: it is accepted by a disk that has just enough."""
    job, told = in_files(tmp_path, steps=2, global_batch=2), "the disk of offload_folder"
    state = bytes_of(tensors_of(build_model(job, builder_of(job)), rule_of(job)))
    for room, refused in ((4 * state, True), (10 * state, False)):
        monkeypatch.setattr(session, "free_disk", lambda folder, room=room: (room, told))
        if refused:
            with pytest.raises(
                JobError,
                match=(
                    rf"offload_folder = '.*': .* of disk \(8 slots\), and {told} leaves only .* "
                    r"a larger disk, or"
                ),
            ):
                run_local(job, lambda line: None)
        else:
            run_local(job, lambda line: None)


def test_what_other_workers_will_take_of_the_disk_is_not_free(tmp_path: Path) -> None:
    """The control: a disk that has none of the files."""
    size, other, folder = 2**22, tmp_path / "other", tmp_path / "disk"
    for each in (other, folder):
        each.mkdir()
    region = Region.create(2, size, 16, folder=str(folder))
    coming, kept = node_memory.copies_here(str(folder))
    assert 2 * size - 2**16 <= coming <= 2 * size and kept <= 2**16
    for slot in (0, 1):
        region.reserve(slot, size)
    coming, kept = node_memory.copies_here(str(folder))
    assert coming == 0 and kept >= 2 * size, "written, and nobody else has it open"
    assert node_memory.copies_here(str(other)) == (0, 0)


def test_a_disk_that_is_full_later_is_told_of_like_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses the room for a slot, which is taken before a step is prepared; no write can find the
    disk full.
    """
    region = Region.create(2, 2**20, 4, folder=str(tmp_path))
    assert (
        node_memory.reserve(region, 0, 2**20) == "" and 512 * os.fstat(region.descriptor).st_blocks >= 2**20
    )
    monkeypatch.setattr(node_memory, "free_disk", lambda folder: (2**20, "the disk of offload_folder"))
    assert (
        "the disk of offload_folder has 1.05 MB left, of which 134 MB must stay free"
        in node_memory.reserve(region, 1, 2**20)
    )
    monkeypatch.undo()

    def full(*arguments: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "the disk of offload_folder gives no memory: No space left on device" in node_memory.reserve(
        region, 1, 2**20
    )
