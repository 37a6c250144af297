"""The job: all that the user asks for, as one immutable :class:`Job`, from TOML, from the command line or
from Python.

Every setting has its type, its default, its meaning and its change class here, or in
``elastic/config/sections.py`` if it is in a table of the job file, and nowhere else; ``--help`` and the
guide's page of settings are made from them.  The change class, ``Free``, ``Branch`` or ``Refused``, says what
another value does to a run that has begun (:class:`~elastic.config.values.Change`).  ``Job.load`` reads a
TOML file, and ``Job(...)`` checks: a value that cannot work is refused before any worker starts, in a
sentence that names the setting, its value and the fix.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from elastic.code.given import Given
from elastic.config.agreement import disagreements, idle
from elastic.config.command_line import read_options
from elastic.config.sections import (
    OLDEST,
    BatchRamp,
    Checkpoint,
    Copies,
    Data,
    Deadlines,
    Export,
    LayerWatch,
    Metrics,
    Network,
    Notices,
    Optim,
    Parallel,
    Reduction,
    Samples,
    Schedule,
    Section,
    Spikes,
    Validation,
    WorkerFault,
    Workers,
    known_numerics,
)
from elastic.config.settings import Where, merge, read_toml, sentences, source_of
from elastic.config.values import (
    Auto,
    Branch,
    Change,
    Code,
    Flag,
    Free,
    Number,
    Positive,
    Refused,
    Share,
    Whole,
    change_at,
    checkpoint_word,
    folder_name,
    free_settings,
    own_folder,
    place,
    same_checkpoint,
    seconds_of,
    stands_for_secret,
    step_range,
    steps_of,
    without_secrets,
)
from elastic.control.rules import Rules, WatchRule
from elastic.errors import JobError
from elastic.plan.copy_budget import CopyRule
from elastic.plan.layout import Layout, LayoutRule, layouts_by_size
from elastic.plan.ramp import Batches
from elastic.plan.retention import Keep
from elastic.plan.stretches import Stretch, Stretches, batches, followed
from elastic.protocol.copy_schedule import due

NUMERICS = 6
"""The newest number of the setting ``numerics``; a new run begins with it."""
ROUNDS = 4
"""Number of microbatches of each worker in a step from which on uneven division among the workers wastes
little: a fifth of the time at most.
"""


class Job(Section):
    """One training job.  Its trajectory is a function of this object and its samples, never of the cluster."""

    name: Refused[Annotated[str, AfterValidator(folder_name)]]
    """Name of the run, and of its folder in the bucket.  With another name it is another run."""
    bucket: Free[Annotated[str, AfterValidator(place)]]
    """Folder or fsspec URL of the bucket.  Every node must see the same place under it."""
    model: Refused[Code] = "elastic.models.llama:build"
    """The model, as ``pkg.module:build``, or in Python ``build`` itself.  ``build(**model_args)`` returns an
    ``nn.Module`` on the meta device, with ``init_weights()``.  ``elastic.models.llama:build`` has Llama 3 and
    Qwen 3 too, ``elastic.models.gpt2:build`` has GPT-2.
    """
    model_args: Refused[dict[str, JsonValue]] = {}  # noqa: RUF012 (pydantic copies it)
    """Arguments of ``model``.  Our own models take the name of a published one: ``{ preset = "qwen3-8b" }``.
    Here, and in all other arguments, ``${NAME}`` is the value of an environment variable where the code runs.
    A secret is refused in any other form."""
    init: Refused[Annotated[str, AfterValidator(checkpoint_word)]] = ""
    """A checkpoint of another run in the same bucket, as ``run@400``, ``run@best`` or ``run@latest``, whose
    weights the run begins with, at step 0 and with fresh moments.  The choice is made when the run begins,
    and stays.  Empty: the model initialises itself.
    """
    loss: Branch[Code] = "elastic.engine.loss:next_token"
    """The loss, as ``pkg.module:loss``, or in Python ``loss`` itself.  ``loss(model, batch)`` returns
    ``(loss_sum, count)``: a sum, and the number of its terms.
    """
    loop: Branch[Code | Literal[""]] = ""
    """A loop of your own, as ``pkg.module:train``: ``train(ctx)`` goes through ``ctx.steps()``, and runs and
    commits each.  Empty: each step runs ``loss`` on its microbatches.
    """
    seed: Branch[Whole] = 0
    """Seed of the initial weights, of the order of the samples, of dropout, and of the rounding of moments.
    """
    steps: Branch[Positive] = 100
    """Number of steps of the run."""
    global_batch: Branch[Positive | Literal["all"]] = 16
    """Samples of one step, whatever the number of workers.  ``all``: as many as the dataset has when the run
    begins.
    """
    microbatch: Branch[Positive | Auto] = 2
    """Samples of one forward and backward.  ``global_batch`` must be a multiple of it.  ``auto``: the largest
    number with which each of ``workers.max`` workers has 4 microbatches a step, and ``workers.min`` (or, if
    that is 1, half of ``workers.max``) can train in the memory of the smallest device, without recomputation
    unless ``recompute`` names some; 1 if there is none.  It is reckoned as by ``elastic estimate`` when the
    run begins, and stays.
    """
    precision: Branch[Literal["fp32", "bf16", "fp16", "fp8", "fp8-rowwise"]] = "fp32"
    """Number format of forward and backward.  Gradients are summed in float32.  ``fp8``: the linear layers of
    blocks multiply in fp8 with a scale for each tensor, all else is as with ``bf16``; it needs GPUs of
    compute capability 8.9, or CPUs for a test.  ``fp8-rowwise`` has a scale for each row, and gradients of
    weights are products in bf16: it is slower and bears outliers.

    Weights and moments keep the format of the model, which is float32 unless it or ``optim.moments`` says
    otherwise.
    """
    loss_scale: Branch[Literal["dynamic"] | Annotated[Number, Field(gt=0)]] = "dynamic"
    """Number by which the loss is multiplied with ``precision = "fp16"``, so that small gradients do not
    become zero.  ``dynamic``: as large as works.
    """
    compile: Branch[Flag] = False
    """``true`` compiles each block of the model.  New worlds, and workers on new nodes, reuse the compiled
    code.
    """
    attention: Branch[Literal["auto", "flash-4"]] = "auto"
    """The kernel by which models attend that let the engine choose, as all of ``elastic.models`` do.
    ``auto``: torch's fastest, or FlexAttention where ``reproducible`` asks for a fixed order and blocks are
    compiled.  ``flash-4``: the package flash-attn-4, which is faster, also in a fixed order; every node needs
    it, and GPUs of compute capability 9.0 or 10.0.  The bits are others with each.
    """
    recompute: Branch[Literal["none", "block", "sqrt", "attention", "selective", "auto"] | Share] = "auto"
    """The part of each block that the backward pass computes again, so that it need not be kept: ``block`` is
    all but its input, a third more computing; ``sqrt`` keeps the inputs of only √L of L blocks, two thirds
    more; ``attention`` is attention alone; ``selective`` is all but matrix products and attention: norms,
    casts, rotary positions, activation functions, dropout.  A number between 0 and 1 is a budget: so large a
    part of the blocks, evenly spread, is as with ``block``, and the others keep everything. ``auto``: the
    first of ``none``, ``selective`` and ``block`` with which ``workers.min`` (or, if that is 1, half of
    ``workers.max``) can train in the memory of their devices, or else all; each worker tries it before it
    joins.  It is ``none`` with ``--local``, and where blocks are compiled in a reproducible job, since they
    have other bits with each. A run that is gone on with keeps its own in place of ``auto``.
    """
    activations: Branch[Literal["keep", "offload", "int8", "fp8"]] = "keep"
    """The place or format of what blocks keep for the backward pass: ``offload`` is memory of the host, with
    the same bits; ``int8`` and ``fp8`` take a quarter of float32, and gradients change a little.
    """
    offload: Free[Literal["none", "optimizer", "weights"]] = "none"
    """``optimizer`` (with ``parallel.zero`` 0, 1 or 2; ``auto`` is 2 then) keeps weights and moments in the
    node's memory, that of ``[copies]``, and brings them to the device only to be updated.  The device has the
    weights in the format of forward and backward. No copies have to be made then, and a worker that lives
    through a failure and keeps its part reads nothing.  The bits are the same. ``weights`` does so, too, and
    keeps the weights in the format of forward and backward in the memory of each worker: a block gets its own
    while it runs, and those of the next one come meanwhile."""
    offload_folder: Free[Annotated[str, AfterValidator(own_folder)]] = ""
    """Folder of a local disk of every node, such as ``/mnt/nvme``, in whose files offloaded state and its
    copies are.  Empty: in memory. The files have no names, and are gone once no worker and no keeper of the
    run is left on the node."""
    offload_buffer_gb: Free[Annotated[Number, Field(gt=0)]] = 1.0
    """Memory, in GB, through which state in files passes, a few tensors at a time.  Where a worker has a GPU,
    most of it is the GPU's.
    """
    reproducible: Branch[Flag] = True
    """``true`` gives the same weights to the bit, whatever dies or joins.  This needs an ordered reduction
    and deterministic kernels.
    """
    numerics: Refused[Annotated[Whole, Field(ge=OLDEST, le=NUMERICS), BeforeValidator(known_numerics)]] = (
        NUMERICS
    )
    """Number of the rules by which the bits are computed.  Leave it out: a new run begins with the newest,
    and each run goes on with its own.  5 differs from 4 in what no microbatch of a step gave a gradient: its
    update leaves that alone, as those of ``torch.optim`` do, so that it does not decay, and its moments stay.
    6 differs from 5 in random numbers, for which each block of the model has a seed of its own, and in a
    weight that the model's table has both in ``first`` and in ``last``, as a head that is the embedding, whose
    gradients have a sum for each of the two.
    """
    trial: Free[Flag] = True
    """``true`` lets a new run compare the engine with plain torch before its first step: on the model, the
    loss and the first two microbatches, on the worker's device.  What plain torch does otherwise ends the run
    with a sentence; the bits are the same without."""
    on_driver_exit: Free[Literal["stop", "detach"]] = "stop"
    """The reaction of the run when its driver ends or vanishes: ``stop`` saves and stops, ``detach`` trains
    on until ``elastic stop``.
    """
    log_every: Free[Positive | Auto] = "auto"
    """Number of steps between the lines of steps that a command prints into a file, a pipe or a notebook.
    ``auto``: a hundredth of ``steps``, and a line a minute.  A terminal shows every step, in one line;
    sentences are always printed."""
    profile: Free[Annotated[str, AfterValidator(step_range)]] = ""
    """Steps that world rank 0 profiles, as ``7`` or ``5-7``.  A trace (for Perfetto), and on a GPU a snapshot
    of its memory (for pytorch.org/memory_viz), go to the folder ``profiles/`` of the run.  Empty: none."""
    data: Data = Data()
    validation: Validation = Validation()
    export: Export = Export()
    samples: Samples = Samples()
    metrics: Metrics = Metrics()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    batch_ramp: BatchRamp = BatchRamp()
    parallel: Parallel = Parallel()
    reduction: Reduction = Reduction()
    spikes: Spikes = Spikes()
    workers: Workers = Workers()
    checkpoint: Checkpoint = Checkpoint()
    copies: Copies = Copies()
    watch: LayerWatch = LayerWatch()
    network: Network = Network()
    notices: Notices = Notices()
    deadlines: Deadlines = Deadlines()
    faults: Free[tuple[WorkerFault, ...]] = ()
    """Faults of a chaos test."""
    _earlier: Stretches = PrivateAttr(())
    """The stretches before the newest branch of the run.  They are no setting; ``after`` sets them."""

    if not TYPE_CHECKING:  # type checkers keep the typed constructor

        def __init__(self, where: Where = lambda setting, line: "Job", /, **settings: Any) -> None:
            """Checks the settings.  Raises :class:`JobError` with one sentence for each problem; ``where``
            returns the source of a setting.
            """
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise JobError("\n".join(sentences(error, Job, where))) from None

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        problems = list(disagreements(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Job:
        """Returns the job of a TOML file.  Raises :class:`JobError`.

        ``overrides`` are put over the file: words of a command line, ``["--workers.max", "3"]``, or values,
        ``{"workers.max": 3}``.
        """
        path = Path(path)
        options = overrides if isinstance(overrides, Mapping) else read_options(overrides, cls)
        values = merge(read_toml(path), options, path.name)
        checked: Callable[..., Job] = cls
        return checked(source_of(path.name, options), **values)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Returns the job that :meth:`to_json` wrote.  Raises :class:`JobError` if its settings are no longer
        valid.
        """
        return cls(**BEFORE | json.loads(text))

    def replace(self, **settings: Any) -> Job:
        """Returns the job with other values for some of its settings, checked again.  A setting that the job
        leaves out stays left out.
        """
        return Job(**{name: getattr(self, name) for name in self.model_fields_set} | settings).after(
            self._earlier
        )

    def after(self, earlier: Stretches) -> Job:
        """Returns the job of a branch; ``earlier`` holds the stretches of the run before the first step of
        the branch.
        """
        made = self.model_copy()
        made._earlier = earlier
        return made

    def in_stage(self, zero: int | None) -> Job:
        """Returns the job with stage ``zero`` of ZeRO, or the job itself if ``zero`` is None."""
        return (
            self if zero is None else self.replace(parallel=self.parallel.model_copy(update={"zero": zero}))
        )

    def going_on(self, stored: dict[str, Any]) -> Job:
        """Returns the job as it goes on with the run whose ``job.json`` is ``stored``.

        The run gives ``numerics``, unless the job names a number, and ``recompute`` and ``microbatch`` where
        they are ``auto``.  The microbatch of the run is left out if the steps of this job cannot be cut into
        it.  ``init`` becomes that of the run if both name the same checkpoint.
        """
        left = {"numerics"} - self.model_fields_set | {
            name for name in ("recompute", "microbatch") if getattr(self, name) == "auto"
        }
        if (
            "microbatch" in left
            and self.global_batch != "all"
            and stored["microbatch"] not in self.microbatch_sizes(least=1)
        ):
            left -= {"microbatch"}
        if self.init and same_checkpoint(self.init, (BEFORE | stored)["init"]):
            left |= {"init"}
        return self.replace(**{name: (BEFORE | stored)[name] for name in sorted(left)}) if left else self

    def begun_as(self, stored: dict[str, Any]) -> Job:
        """Returns the job of a run's ``job.json`` as this code reads it.

        Free settings of the top level, and sections that have only free settings, are left out: their stored
        values may be invalid by now.
        """
        theirs = {
            name: value
            for name, value in (BEFORE | stored).items()
            if _NOT_THE_TRAJECTORY.get(name) is not True
        }
        return Job(**theirs, name=self.name, bucket=self.bucket)

    def with_free_of(self, other: Job) -> Job:
        """Returns the job with the free settings that ``other`` names; of a section that ``other`` names, it
        takes all free settings.
        """
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        for name, free in free_settings(Job).items():
            if name not in other.model_fields_set:
                continue
            theirs = getattr(other, name)
            kept = (
                {}
                if free is True
                else {
                    each: getattr(getattr(self, name), each)
                    for each in type(theirs).model_fields
                    if each not in free
                }
            )
            settings[name] = theirs.model_copy(update=kept) if kept else theirs
        return Job(**settings).after(self._earlier)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2)

    @property
    def digest(self) -> str:
        """The sha256 of the settings that define the trajectory; the samples are not part of it.  All other
        settings may change at a resume.

        A setting that an older release did not have counts with its default.  So compare it with the digest
        of a stored ``job.json`` that this code has read, not with a stored digest.
        """
        return hashlib.sha256(
            json.dumps(self.trajectory(), sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()

    def trajectory(self) -> dict[str, Any]:
        """Returns the settings that define the trajectory."""
        settings = self.model_dump(mode="json", exclude=_NOT_THE_TRAJECTORY)
        settings = {name: without_secrets(name, value, stands_for_secret) for name, value in settings.items()}
        for section, later in _LATER.items():
            settings[section] = {
                name: value
                for name, value in settings[section].items()
                if name not in later or value != later[name]
            }
        without = {name: {} for name in _LATER} | BEFORE
        return {
            name: value for name, value in settings.items() if name not in without or value != without[name]
        }

    @classmethod
    def refuses(cls, setting: str) -> bool:
        """Returns whether a run's state fits no other value of ``setting``, such as ``model_args.dim``."""
        return change_at(cls, setting) is Change.REFUSED

    def code(self) -> tuple[str, ...]:
        """Returns the code that the job names, as ``pkg.module:name``."""
        validated = (self.validation.dataset,) if self.validation.every and self.validation.dataset else ()
        return (*self.trajectory_code(), *validated)

    def trajectory_code(self) -> tuple[str, ...]:
        """Returns the code on which the weights depend: all code that the job names, except the dataset for
        validation, which may change.
        """
        own = [kind for kind in (self.optim.kind, self.schedule.kind) if ":" in kind]
        loop = (self.loop,) if self.loop else ()
        parts = self.data.args.get("parts")  # of a mixture
        mixed = (
            (each.get("dataset") for each in parts if isinstance(each, dict))
            if isinstance(parts, list)
            else ()
        )
        return (
            self.model,
            self.loss,
            self.data.dataset,
            *loop,
            *own,
            *(each for each in mixed if isinstance(each, str)),
        )

    def named_code(self) -> dict[str, str]:
        """Returns, by setting, the code that the job names or that was given as objects."""
        code = {"model": self.model, "loss": self.loss, "loop": self.loop, "data.dataset": self.data.dataset}
        code |= {
            "optim.kind": self.optim.kind,
            "schedule.kind": self.schedule.kind,
            "validation.dataset": self.validation.dataset,
        }
        return {setting: path for setting, path in code.items() if ":" in path}

    def objects(self) -> dict[str, Given]:
        """Returns the code that was given as objects and cannot be imported, by setting."""
        return {setting: path for setting, path in self.named_code().items() if isinstance(path, Given)}

    def with_objects(self, given: Mapping[str, Given]) -> Job:
        """Returns the job with the objects that :meth:`objects` returned, in a process that knows only their
        names.
        """
        job = self
        for setting, each in given.items():
            section, _, name = setting.rpartition(".")
            job = job.replace(
                **(
                    {section: getattr(job, section).model_copy(update={name: each})}
                    if section
                    else {name: each}
                )
            )
        return job

    @property
    def microbatches(self) -> int:
        """The number of microbatches of one step, once the batch has its final size."""
        return self._batch() // self.microbatch_size

    @property
    def microbatch_size(self) -> int:
        """The samples of a microbatch, once the run has begun."""
        assert self.microbatch != "auto", "launch() puts a number in its place"
        return self.microbatch

    def microbatch_sizes(self, least: int | None = None) -> list[int]:
        """Returns the sizes of microbatches into which every step can be cut, with ``least`` or more
        microbatches in the largest step.

        Without ``least``, the largest step has :data:`ROUNDS` microbatches or more for each of
        ``workers.max`` workers, or as many as possible.
        """
        batch, ramp = self._batch(), self.batch_ramp
        common, most = (
            math.gcd(batch, ramp.start, ramp.increment),
            batch // (ROUNDS * self.workers.max if least is None else least),
        )
        return [size for size in range(1, common + 1) if not common % size and size <= max(most, 1)]

    def validates(self, step: int) -> bool:
        """Returns whether the members validate the state after ``step``."""
        if self.validation.by == "spares":
            return self.validation.every > 0 and step == self.steps
        return self.validation.every > 0 and due(step, self.validation.every, self.steps)

    @property
    def offloads(self) -> bool:
        """True if the state lives in the memory of the node."""
        return self.offload != "none"

    @property
    def zero(self) -> int | Literal["auto"]:
        """The stage of ZeRO.  ``auto`` becomes 2 for workers that share state in the memory of the node,
        where stage 3 is not possible.
        """
        chosen = self.parallel.zero
        return 2 if chosen == "auto" and self.offloads and self.parallel.shards != 1 else chosen

    def stretches(self) -> Stretches:
        """Returns the rules by which all steps of the run draw their samples, also the steps before its
        newest branch.
        """
        ramp, data = self.batch_ramp, self.data
        own = Stretch(
            0, self._batch(), ramp.start, ramp.increment, ramp.samples, self.seed, data.sampling, data.weights
        )
        return followed(self._earlier, own)

    def batches(self) -> Batches:
        """Returns the number of samples of each step."""
        return batches(self.stretches())

    def _batch(self) -> int:
        assert self.global_batch != "all", "launch() puts a number in its place"
        return self.global_batch

    def profiled(self) -> range:
        """Returns the steps that are profiled."""
        return steps_of(self.profile)

    def layout_rule(self) -> LayoutRule:
        parallel = self.parallel
        return LayoutRule(*parallel.degrees(self.zero), parallel.min_shard, parallel.use, parallel.model)

    def layouts(self, least_shard: int = 1) -> list[Layout]:
        """Returns the layouts that the permitted numbers of workers form, from the fewest workers to
        ``workers.max``.

        Each layout has at least ``least_shard`` shards; if none has, all layouts are returned.
        """
        least, rule = self.workers.min, self.layout_rule().at_least(least_shard)
        found = [
            layout
            for n, layout in layouts_by_size(rule, self.workers.max, least)
            if layout is not None and n >= least
        ]
        return found if found or least_shard == 1 else self.layouts()

    def copy_rule(self) -> CopyRule:
        return CopyRule(
            self.copies.copy_every == "auto" and not self.offloads,
            self.copies.buddy_every == "auto",
            self.copies.link_share,
        )

    def _buddies(self) -> int:
        """Returns the number of steps between copies to buddies: 0 if nothing is copied, and 1, the smallest,
        with ``auto``.
        """
        if self.copies.copy_every == 0:
            return 0
        return 1 if self.copies.buddy_every == "auto" else self.copies.buddy_every

    def keep(self) -> Keep:
        """Returns the rules that say which checkpoints are kept."""
        kept = self.checkpoint
        return Keep(kept.keep_last, kept.keep_every, kept.keep_best, seconds_of(kept.keep_younger))

    def rules(self) -> Rules:
        """Returns the rules by which ``advance`` decides for this job."""
        return Rules(
            min_workers=self.workers.min,
            max_workers=self.workers.max,
            layout=self.layout_rule(),
            target_step=self.steps,
            save_every=self.checkpoint.save_every,
            copy_every=1 if self.copies.copy_every == "auto" else self.copies.copy_every,
            buddy_every=self._buddies(),
            cross_zone=self.copies.cross_zone,
            reproducible=self.reproducible,
            compare=self.reproducible and self.checkpoint.compare,
            validates_last=self.validates(self.steps),
            validates_every=self.validation.every if self.validation.by == "members" else 0,
            patience=self.validation.patience,
            min_delta=self.validation.min_delta,
            spares=self.workers.spares,
            evicts=self.workers.straggler == "evict",
            lemon_after=self.workers.lemon_after,
            may_wait=True,
            microbatches=0 if self.global_batch == "all" or self.microbatch == "auto" else self.microbatches,
            watch=WatchRule(**self.watch.model_dump(exclude={"every", "max_restarts"})),
            keep=self.keep(),
            **self.deadlines.model_dump(exclude={"driver_s"}),
        )

    def warnings(self) -> list[str]:
        """Returns a sentence for each setting that works but is probably not meant."""
        found, needed = list(idle(self)), ROUNDS * self.workers.max
        if self.global_batch == "all" or self.microbatch == "auto":
            return found
        if self.microbatches < needed and any(
            self.microbatches % number for number in range(self.workers.min, self.workers.max + 1)
        ):
            found.append(
                f"global_batch = {self.global_batch} is only {self.microbatches} microbatches of "
                f"{self.microbatch} for up to {self.workers.max} workers: if the number of workers "
                "does not divide the number of microbatches, some workers idle in the last round of a "
                f"step; with {needed} or more microbatches this costs little"
            )
        if self.reduction.block > self.microbatches:
            found.append(
                f"reduction.block = {self.reduction.block} is more than the {self.microbatches} "
                f"microbatches of a step, and has the effect of {self.microbatches}; best is the "
                "number of workers on a node"
            )
        return found


_NOT_THE_TRAJECTORY: Any = {"name": True, **free_settings(Job)}
"""The settings that are not in the digest, in the form that pydantic's ``exclude`` takes.

The name only says which run it is.  ``data.args`` are free, because the fingerprint of the samples is
compared instead (``runs/data.py``).
"""
_LATER: dict[str, dict[str, Any]] = {
    "data": {"weights": [], "group_by_length": False},
    "optim": {
        "kind": "adamw",
        "args": {},
        "momentum": 0.9,
        "decay": "decoupled",
        "moments": "model",
        "average": 0.0,
        "groups": [],
    },
    "schedule": {"decay_steps": 0, "args": {}},
    "batch_ramp": {"start": 0, "increment": 0, "samples": 0},
    "reduction": {"block": 1, "wire": "fp32"},
    "spikes": {"action": "none", "z": 6.0, "window": 128, "microbatch_z": 0.0},
}
"""The settings that came after the first release, by section, each with the value that means the behaviour
before the setting existed.

A setting with that value is left out of the digest, and so is a section without other settings, so that the
digest of an older run stays the same.
"""

BEFORE: dict[str, Any] = {
    "numerics": 1,
    "init": "",
    "loop": "",
    "recompute": "none",
    "attention": "auto",
    "activations": "keep",
    "loss_scale": "dynamic",
}
"""The top-level settings, with their values, of a run whose ``job.json`` does not name them.  The digest
leaves these values out, as it does with ``_LATER``.
"""
