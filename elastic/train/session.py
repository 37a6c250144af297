"""Prepares a worker for a job before its first plan: fixes threads and kernels, finds the user's code, opens
the data.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn

import elastic
from elastic.code.imports import arguments, code_digest, load, own_digest, unknown_argument, version_of
from elastic.config.values import without_secrets
from elastic.data.cursor import Cursor, Lengths
from elastic.data.loader import Dataset, Loader
from elastic.data.readers import Readers
from elastic.data.rows import dataset_of
from elastic.engine.optim.base import rule_of
from elastic.engine.optim.schedule import check_schedule
from elastic.engine.precision import PRECISIONS
from elastic.errors import CodeError, DataError, ElasticError, JobError, NoRoomYet
from elastic.job import Job
from elastic.plan.copy_budget import amount, no_room, slots_a_worker, slots_for
from elastic.plan.layout import Layout, after_a_loss
from elastic.plan.placement import largest_cells, number_of_cells
from elastic.protocol.builds import Build
from elastic.protocol.copy_schedule import SaveRule
from elastic.protocol.plan import Plan
from elastic.state.node_memory import alone, copies_here, filesystem, free_disk, free_memory
from elastic.state.region import Region, slot_sizes
from elastic.state.snapshot import Snapshots
from elastic.train.context import Context, standard
from elastic.train.gauges.counters import Counters
from elastic.train.machine.device import need_of
from elastic.train.machine.gpus import LAUNCHES
from elastic.train.machine.interface import choose
from elastic.train.machine.limits import little_lockable, little_shared, lockable_memory, shared_memory
from elastic.train.model import build_model, builder_of, digest_of
from elastic.train.own_faults import Faults, Seat
from elastic.train.step import Loss, Session
from storage.errors import Unavailable
from storage.slices import Tensor

MICROBATCH = 1024
"""Largest microbatch that an error message proposes."""
SAVE_S = 5.0
"""Seconds that a due save waits, once, for the previous save.  If it does not wait, checkpoints are further
apart, and a failure costs more steps; if the bucket is down, waiting costs time.
"""
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's watchdog must not end the process: recovery is ours
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # else torch's watchdog sleeps 4 × 15 s when a peer's socket breaks, and the end of the group waits for it
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # NCCL's RAS thread crashes processes whose peers come and go (NCCL issues 1996 and 2346)
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",  # an abort crashes on memory that is registered for multicast
}
DETERMINISTIC = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
"""The variable that has the effect of ``torch.use_deterministic_algorithms`` on torch's compiler, which reads
it when it is imported.
"""
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Settings of torch's allocator.  The sizes of tensors change with the layout: with segments of fixed size,
unused pieces from every world would add up until NCCL finds no memory.
"""


COMES_S = 5.0
"""Seconds without more free memory on the node after which no more is expected.  The system needs half a
minute to give back the memory of a large process that was killed.
"""
IN_MEMORY = ("tmpfs", "ramfs")
"""Filesystems whose files are in memory."""
OVER_A_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "beegfs",
    "gpfs",
    "wekafs",
    "afs",
    "9p",
    "fuse.sshfs",
    "fuse.ceph",
    "fuse.glusterfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.juicefs",
)
"""Filesystems whose files are on other machines."""


def prepare_process(job: Job, address: str = "", *, alone: bool = False) -> torch.device:
    """Fixes what would vary between processes; returns this worker's device.  Other nodes reach this one at
    ``address``.

    The import of torch's compiler takes a second.  A process that stays ``alone`` imports it only if the job
    or the user's code compiles.  Any other process needs it for FSDP2, and imports it here, so that the
    members of a world do not wait for each other's import.

    Raises :class:`JobError` if this machine lacks something that the job asks for.
    """
    torch.set_num_threads(job.workers.threads)
    os.environ |= NCCL | LAUNCHES
    for variable, value in ALLOCATOR.items():
        os.environ.setdefault(variable, value)
    choose(job.network.interface, address, gpu=bool(job.workers.gpus))
    if not alone:
        import_module("torch._dynamo")  # after the variables above, which it reads
    if job.reproducible:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # demanded by deterministic cuBLAS
        if alone and not job.compile and "torch._inductor.config" not in sys.modules:
            os.environ |= DETERMINISTIC
            torch.set_deterministic_debug_mode("error")
        else:
            torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # no memory is read before it is written
    if job.workers.gpus and not torch.cuda.is_available():
        raise JobError(
            f"workers.gpus = {job.workers.gpus}, and torch {torch.__version__} finds no GPU for this "
            "process; install a torch for CUDA and its driver, or set workers.gpus = 0"
        )
    device = torch.device("cuda", 0) if job.workers.gpus else torch.device("cpu")
    if (
        PRECISIONS[job.precision].fp8 is not None
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        raise JobError(
            f"precision = {job.precision!r}: {torch.cuda.get_device_name(device)} cannot multiply in "
            "fp8; set precision to 'bf16'"
        )
    if job.offload_folder and (slow := check_folder(job.offload_folder)):
        print(slow, flush=True)
    if device.type == "cuda" and getattr(
        sys.modules.get("torch._inductor.config"), "use_static_cuda_launcher", False
    ):
        name = next(iter(LAUNCHES))
        print(
            f"torch's compiler was imported without {name}=0: set this variable before `ray start` on "
            "every node, or a hanging kernel will hang the worker"
        )
    if device.type == "cuda" and (little := little_shared(shared_memory())):
        print(little, flush=True)
    torch.zeros((), device=device)  # opens the accelerator's context now, not while a world forms
    return device


def check_folder(folder: str, kind_of_disk: Callable[[str], str] = filesystem) -> str:
    """Returns a warning if ``folder`` is not on a disk of this node, or "".

    Raises :class:`JobError` if this process cannot make files there, or if the files would be in memory.
    """
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise JobError(
            f"offload_folder = {folder!r} is not a folder in which a worker on {platform.node()} can make "
            f"files ({error.strerror}); make it on every node, on a local disk, or name another one"
        ) from error
    kind = kind_of_disk(folder)
    if kind in IN_MEMORY:
        raise JobError(
            f"offload_folder = {folder!r} is a {kind} on {platform.node()}: files in it take memory, "
            "which offload should save; name a folder of a local disk, or leave offload_folder out to "
            "keep the state in memory"
        )
    if kind in OVER_A_NETWORK:
        return (
            f"offload_folder = {folder!r} is a {kind} on {platform.node()}: every update reads and writes "
            "all of the state over the network, and all nodes may share what it can carry; a folder of a "
            "local disk is faster"
        )
    return ""


def kind_of(device: torch.device, attention: str = "auto") -> str:
    """Returns the kind of a worker on ``device``: workers of one kind compute the same bits.  ``attention``
    is that of the job.
    """
    # kernels of another capability add in another order
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    flash = ""
    if attention == "flash-4":
        with suppress(PackageNotFoundError):  # what follows says that it is missing
            flash = f", flash-attn-4 {version_of('flash-attn-4')}"
    return f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads{flash}"


def settled(job: Job) -> Job:
    """Returns the job with a number in place of ``global_batch = "all"``.

    Raises like :func:`opened`, and :class:`JobError` if microbatches do not divide the number.
    """
    if job.global_batch != "all":
        return job
    if not (samples := len(opened(job))):
        raise DataError("global_batch = 'all': the dataset has no samples; add samples")
    if job.microbatch != "auto" and samples % job.microbatch:
        fits = [str(size) for size in range(1, min(samples, MICROBATCH) + 1) if not samples % size]
        raise JobError(
            f"global_batch = 'all': the dataset has {samples} samples, which is not a multiple of "
            f"microbatch = {job.microbatch}; set microbatch to {', '.join(fits[-4:])}, or set "
            "global_batch to a number"
        )
    return job.replace(global_batch=samples)


def make_session(job: Job, counters: Counters, *, prefetch: int | None = None) -> Session:
    """Opens the user's parts and returns the session.

    Raises an :class:`~elastic.errors.ElasticError` that names the setting if a part does not fit.
    """
    dataset = opened(job)
    if len(dataset) < job.batches().final:
        raise DataError(
            f"global_batch = {job.global_batch}: data.dataset = {job.data.dataset!r} has {len(dataset)} "
            "samples, fewer than one step takes; give it more samples (data.args), or lower global_batch"
        )
    rule = rule_of(job)
    check_schedule(job)
    lengths = lengths_of(job, dataset) if job.data.group_by_length else None
    cursor = Cursor.of(job.stretches(), len(dataset), lengths, _sizes_of(job, dataset))
    ahead = job.data.prefetch * max(job.data.readers, 1) if prefetch is None else prefetch
    loader, loop = _loader(job, dataset, cursor, ahead, counters, "data"), loop_of(job)
    faults, held_out = Faults(job.faults), _held_out(job, loader, counters)
    return Session(
        job,
        builder_of(job),
        rule,
        loss_function(job),
        cursor,
        loader,
        counters,
        faults,
        held_out=held_out,
        loop=loop,
    )


def _loader(
    job: Job, dataset: Dataset, cursor: Cursor, ahead: int, counters: Counters, section: str
) -> Loader:
    """Returns the loader of the dataset of ``section``, which ``job`` has as that of ``[data]``."""
    return Loader(
        dataset,
        cursor,
        job.microbatch_size,
        ahead,
        named=_named(job, section),
        reads=partial(counters.reads, section),
        readers=_readers_of(job, section),
    )


def _sizes_of(job: Job, dataset: Dataset) -> tuple[int, ...]:
    """Returns the lengths of the parts of a mixture, if the job weights them; else ().  Raises
    :class:`DataError`.
    """
    if not job.data.weights:
        return ()
    sizes = tuple(getattr(dataset, "sizes", ()))
    if len(sizes) != len(job.data.weights):
        parts = "1 part" if len(sizes) == 1 else f"{len(sizes) or 'no'} parts"
        raise DataError(
            f"data.weights has {len(job.data.weights)} numbers, and data.dataset = "
            f"{job.data.dataset!r} has {parts}; give each part one weight, or leave data.weights out "
            "(elastic.data.mixture:Mixture makes one dataset of several parts)"
        )
    return sizes


def _readers_of(job: Job, section: str) -> Readers | None:
    """Returns the processes that read the dataset, or None if the job asks for none.  Raises
    :class:`JobError` for a dataset that they cannot open.
    """
    if not job.data.readers:
        return None
    if job.data.dataset in job.objects().values():
        raise JobError(
            f"data.readers = {job.data.readers}: each reader is a process that opens "
            f"{_named(job, section)} by its name, but this is code of a script or a notebook; put it "
            "into a module and import it from there, or set data.readers = 0"
        )
    return Readers(job.data.readers, job.data.dataset, job.data.args, section)


def _held_out(job: Job, loader: Loader, counters: Counters) -> Loader | None:
    """Returns the loader of the held-out samples, or None if the job has no validation.  Raises
    :class:`DataError`.
    """
    validation = job.validation
    if not validation.every:
        return None
    named = {"dataset": validation.dataset or job.data.dataset, "args": validation.args}
    held = job.replace(data=job.data.model_copy(update=named))
    dataset = opened(held, "validation")
    if not len(dataset) or validation.samples > len(dataset):
        given = without_secrets("validation.args", validation.args)
        raise DataError(
            f"validation.samples = {validation.samples}: the dataset of validation.args = {given} has "
            f"{len(dataset)} samples; give it more samples, or leave validation.samples out to take all"
        )
    return _loader(held, dataset, loader.cursor, loader.prefetch, counters, "validation")


def loss_function(job: Job) -> Loss:
    """Returns the loss that the job names.  Raises :class:`CodeError`."""
    found: Loss = _function(job.loss, "loss", "loss(model, batch) returns (sum, count), two scalars")
    return found


def loop_of(job: Job) -> Callable[[Context], object]:
    """Returns the loop that the job names, or our own.  Raises :class:`CodeError`."""
    return _function(job.loop, "loop", "loop(ctx) goes through ctx.steps()") if job.loop else standard


def _function(path: str, setting: str, does: str) -> Any:
    """Returns the function that ``setting`` names by ``path``.  ``does`` says how it is called and what it
    does.  Raises :class:`CodeError`.
    """
    found = load(path, setting)
    if isinstance(found, type) or not callable(found):
        what = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise CodeError(f"{setting} = {path!r} names {what}; name a function: {does}")
    return found


def make_snapshots(
    job: Job,
    tensors: tuple[Tensor, ...],
    device: torch.device,
    counters: Counters,
    faults: Faults,
    least: int = 1,
    shared: int = 1,
) -> Snapshots:
    """Returns this worker's slots.  If the node has the memory, they may grow to the size of its shard in the
    smallest permitted world of ``least`` or more shards.  They begin at the size of its shard in the largest
    permitted world, of ``shared`` or more shards.

    Waits as long as the node's free memory grows.  Then it raises :class:`JobError` if this node, beside the
    copies of its other workers, has no room for this worker's shard in a world of ``workers.max``, and
    :class:`NoRoomYet` if it may have room once the memory of dead workers is given back.
    """
    layouts = job.layouts(least)
    rule = job.rules()
    slot_bytes, slot_blocks = slot_sizes(tensors, largest_cells(min(layouts, key=number_of_cells)))
    smallest = _shard_bytes(tensors, job.layouts(min(max(least, shared), job.workers.max))[-1])
    own, slots = (
        count(rule.copy_every, rule.buddy_every, offload=job.offloads)
        for count in (slots_for, slots_a_worker)
    )
    folder, hosted, most, since = job.offload_folder, need_of(job, tensors).hosted, 0, time.monotonic()
    while True:
        with alone():
            (free, where), (coming, kept) = (
                (free_disk(folder), copies_here(folder)) if folder else (free_memory(), copies_here())
            )
            if not folder and hosted:
                free, where = (
                    free - hosted,
                    f"{where}, less {amount(hosted)} for weights with which the model computes,",
                )
            needed, left = slots * smallest, max(free - coming, 0)
            why = no_room(
                job.copies.copy_every, needed, left, where, slots, offload=job.offloads, folder=folder
            )
            if not why:
                region = Region.create(own, slot_bytes, slot_blocks, tensors, folder)
                region["wanted"] = own * smallest
                counters["copies"] = region.descriptor
                break
        if left > most + needed // 100:
            most, since = left, time.monotonic()
        if time.monotonic() - since >= COMES_S:
            raise (NoRoomYet if needed <= left + kept else JobError)(why)
        time.sleep(COMES_S / 10)
    if (
        device.type == "cuda"
        and not folder
        and (little := little_lockable(own * slot_bytes, lockable_memory()))
    ):
        print(little, flush=True)

    def strike(plan: Plan, rank: int, step: int) -> None:
        faults.strike("save", step, Seat(plan.generation, rank))

    def foresee(plan: Plan) -> int:
        layout = after_a_loss(plan.layout, plan.nodes, rule.layout.at_least(least), job.workers.min)
        return _shard_bytes(tensors, layout) if layout is not None else 0

    saves = SaveRule(job.checkpoint.save_every, job.steps)
    return Snapshots(
        region,
        tensors,
        device,
        job.copy_rule(),
        saves,
        min(SAVE_S, job.deadlines.stall_s / 2),
        strike,
        foresee,
        lives=job.offloads,
    )


def _shard_bytes(tensors: Sequence[Tensor], layout: Layout) -> int:
    """Returns the bytes of a copy of the largest part, as an estimate for every member."""
    return slot_sizes(tensors, largest_cells(layout))[0]


def _named(job: Job, section: str = "data") -> str:
    return f"{section}.dataset = {job.data.dataset!r}"


def opened(job: Job, section: str = "data") -> Dataset:
    """Opens the data; ``section`` names the settings in errors.

    Raises :class:`DataError`, or :class:`Unavailable` if a store does not answer.
    """
    named = _named(job, section)
    kind = load(job.data.dataset, f"{section}.dataset")
    try:
        return dataset_of(kind, arguments(f"{section}.args", job.data.args), named)
    except DataError as error:  # our own datasets name their arguments as those of ``[data]``
        raise DataError(str(error).replace("data.args", f"{section}.args")) from error
    # ``Unavailable`` passes: a store that does not answer is not the dataset's error
    except (ElasticError, Unavailable):
        raise
    # the user's class may raise anything, say for a folder that this machine has not
    except Exception as error:
        if unknown := unknown_argument(f"{section}.args", named, kind, job.data.args, error):
            raise DataError(unknown) from error
        given = without_secrets("data.args", job.data.args)
        raise DataError(
            f"{_failed(job, error, section)}; correct the dataset, or {section}.args = {given}"
        ) from error


def lengths_of(job: Job, dataset: Dataset) -> Lengths:
    """Returns a function from ids of samples to their lengths.  It raises :class:`DataError` if the dataset's
    ``lengths()`` fails.

    Raises :class:`DataError` at once if the dataset has no ``lengths()``, or if it fails for the first
    sample.
    """
    told = getattr(dataset, "lengths", None)
    if not callable(told):
        raise DataError(
            f"data.group_by_length = true, and data.dataset = {job.data.dataset!r} has no lengths(); give "
            "it lengths(ids), which returns a whole number for each id without reading the samples, or "
            "leave data.group_by_length out"
        )

    def lengths(ids: tuple[int, ...]) -> list[int]:
        try:
            found = [int(length) for length in told(ids)]
        except Unavailable:
            raise
        except Exception as error:  # the user's code, which may raise anything
            raise DataError(
                f"{_failed(job, error)}; correct its lengths(), or leave data.group_by_length out"
            ) from error
        if len(found) != len(ids):
            raise DataError(
                f"data.dataset: lengths() returned {len(found)} numbers for {len(ids)} ids; it must "
                "return one number for each id"
            )
        return found

    lengths((0,))
    return lengths


def fingerprint_of(job: Job, dataset: Dataset, section: str = "data") -> str:
    try:
        return str(dataset.fingerprint())
    except (DataError, Unavailable):
        raise
    except Exception as error:  # the user's code, which may raise anything
        raise DataError(
            f"{_failed(job, error, section)}; give it a fingerprint() that is equal if and only if the "
            "samples are equal"
        ) from error


def _failed(job: Job, error: Exception, section: str = "data") -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{section}.dataset = {job.data.dataset!r} failed with {type(error).__name__}: {error} (in "
        f"{frame.filename}, line {frame.lineno})"
    )


def held_out_of(session: Session) -> str:
    """Returns a text that identifies the held-out samples; "" without a validation."""
    if session.held_out is None:
        return ""
    dataset = session.held_out.dataset
    return (
        f"{fingerprint_of(session.job, dataset, 'validation')}, "
        f"{session.job.validation.samples or len(dataset)} samples"
    )


def expect_same_samples(session: Session, build: Build) -> None:
    """Raises :class:`JobError` if a fingerprint differs from that in ``build``, which the checks of the same
    job made a moment before.
    """
    for section, now, then in (
        ("data", fingerprint_of(session.job, session.loader.dataset), build.data),
        ("validation", held_out_of(session), build.held_out),
    ):
        if now != then:
            raise JobError(
                f"{section}.dataset = {session.job.data.dataset!r}: fingerprint() returned {then} "
                f"first, and {now} now; it must depend on the samples alone, not on the time, random "
                "numbers, id() or hash() of a text"
            )


def unlike_held_out(session: Session) -> list[str]:
    """Returns a warning if the held-out samples are those on which the run trains; else an empty list."""
    if not held_out_of(session).startswith(f"{fingerprint_of(session.job, session.loader.dataset)}, "):
        return []
    return [
        (
            "validation.args: these samples are the training samples, so their loss says little; hold out "
            "other samples"
        )
    ]


def build_of(session: Session, model: nn.Module | None = None) -> Build:
    """Returns the build of this process: everything that must be the same for all members.  ``model`` is the
    job's model, if the caller has built it.
    """
    job, (major, minor, _) = session.job, platform.python_version_tuple()
    return Build(
        elastic=f"{elastic.__version__} (sources {own_digest()})",
        python=f"{major}.{minor}",
        torch=torch.__version__.partition("+")[0],
        ray=version_of("ray"),
        code=code_digest(job.code()),
        data=fingerprint_of(job, session.loader.dataset),
        held_out=held_out_of(session),
        samples=str(len(session.loader.dataset)),
        model=digest_of(model if model is not None else build_model(job, session.builder)),
    )
