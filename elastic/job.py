"""What the user asks for: one immutable :class:`Job`, from TOML, from the command line or from Python.

Every setting has its default and its meaning here and nowhere else.  ``Job.load`` reads a TOML file, ``Job(...)`` checks; a
value that cannot work is refused here, before any worker starts, in a sentence that names the setting, its value and the fix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from elastic.config.settings import COMMAND_LINE, Where, merge, read_options, read_toml, sentences
from elastic.config.values import (
    Auto,
    Code,
    Flag,
    Fraction,
    Number,
    Positive,
    Seconds,
    Whole,
    fault_word,
    folder_name,
    interface_name,
    place,
)
from elastic.control.rules import Rules
from elastic.errors import JobError
from elastic.plan.copy_budget import CopyRule
from elastic.plan.layout import LayoutRule


class Part(BaseModel):
    """A group of settings: frozen, and no key that is not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Data(Part):
    """The samples.  ``dataset``: ``pkg.module:Class`` with ``len()``, ``read(ids)``, ``fingerprint()``, made with ``args``.

    Of ``args`` a run remembers only the fingerprint of the dataset that they make: data may be moved.
    """

    dataset: Code = "elastic.data.tokens:TokenDataset"
    args: dict[str, JsonValue] = {}
    sampling: Literal["permutation", "with_replacement"] = "permutation"
    prefetch: Positive = 2
    """Microbatches read ahead of the one that is computed."""


class Optim(Part):
    """The optimizer.  Weight decay is decoupled and spares biases, norms and every other tensor of fewer than two dimensions."""

    kind: Literal["adamw"] | Code = "adamw"
    """The optimizer: one of ours, or ``pkg.module:RULE`` with a ``Rule`` of ``elastic.engine.optim.base``."""
    args: dict[str, JsonValue] = {}
    """Settings of an optimizer of your own."""
    lr: Annotated[Number, Field(ge=0)] = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[Number, Field(gt=0)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0)] = 0.1
    clip_norm: Annotated[Number, Field(gt=0)] = 1.0
    """Norm above which the mean gradient is rescaled to it."""


class Schedule(Part):
    """Learning rate by step: linear warmup from 0, then a cosine down to ``final`` × lr at the last step; or constant."""

    kind: Literal["cosine", "constant"] = "cosine"
    warmup_steps: Annotated[Whole, Field(ge=0)] = 0
    final: Annotated[Number, Field(ge=0, le=1)] = 0.1


class Parallel(Part):
    """Degrees of the data axes.  ``auto``: ``dp_shard`` is the smallest allowed one, ``dp_replicate`` what fits beside it."""

    dp_replicate: Positive | Auto = "auto"
    dp_shard: Positive | Auto = "auto"
    min_shard: Positive = 1
    """Smallest shard degree at which one worker's part of the state fits its memory."""
    use: Literal["all", "fit"] = "all"
    """all: a larger shard degree when it uses workers that would be left over; fit: they become spares."""


class Workers(Part):
    """How many processes, and what each takes of its node."""

    min: Positive = 1
    max: Positive = 2
    spares: Annotated[Whole, Field(ge=0)] = 0
    """Beyond ``max``: started and kept warm, so that one takes a dead worker's seat at once."""
    cpus: Annotated[Number, Field(ge=0)] = 1
    gpus: Annotated[Whole, Field(ge=0, le=1)] = 0
    threads: Positive = 1
    """Threads of one CPU worker's kernels; part of what makes two workers of one kind."""


class Checkpoint(Part):
    """Saves to the bucket.  When no worker holds the state, 2 × ``save_every`` steps may be lost: a save can be in flight."""

    save_every: Positive = 50


class Copies(Part):
    """Copies of the state in the hosts' memory: what a dead worker held is read there again.  0: never.

    Every ``copy_every`` steps each worker's part goes to memory that its node's keeper holds too, every ``buddy_every`` steps on to a
    keeper in another failure domain.
    """

    copy_every: Annotated[Whole, Field(ge=0)] | Auto = "auto"
    """auto: every step, unless a copy takes longer."""
    buddy_every: Annotated[Whole, Field(ge=0)] | Auto = "auto"
    """auto: as often as ``link_share`` allows, once a second at most."""
    cross_zone: Flag = False
    """Buddies are in other zones (the label of Ray's nodes), not in the same one."""
    link_share: Annotated[Number, Field(gt=0, le=1)] = 0.2
    """Of a node's link, on average, for copies to buddies."""
    price_per_gb: Annotated[Number, Field(ge=0)] = 0.0
    """Of traffic between nodes: only for what is said before the launch.  0: nothing is said."""


class Network(Part):
    """Between the workers.  Sockets of NCCL and gloo use one interface of each node."""

    interface: Annotated[str, AfterValidator(interface_name)] = "auto"
    """auto: the one that has the address by which Ray's other nodes reach this one."""


class Deadlines(Part):
    """Seconds.  Deadlines are the last resort: what somebody knows is acted on at once."""

    form_s: Seconds = 120
    """From sending a plan until every member is ready."""
    fence_s: Seconds = 10
    """From a fence until a member that has not answered is expelled."""
    stall_s: Seconds = 60
    """Without progress of any member of a world, before the one that is furthest behind is expelled; grows with the step time."""
    silence_s: Seconds = 5
    """A world that stands still while nothing is heard of a member's node, but of others, is stopped after so long; after half as long
    again who has not answered there is expelled.  A node beats every half second."""
    lease_s: Seconds = 120
    """A member that hears no coordinator for so long stops stepping."""
    wait_s: Seconds = 600
    """Waiting for enough workers before the run gives up (and can be resumed)."""
    stop_s: Seconds = 60
    """For the final save of a stop, without any part of it arriving."""
    driver_s: Seconds = 20
    """A run whose driver has not been heard for so long stops, unless ``on_driver_exit = "detach"``."""
    grow_debounce_s: Seconds = 2
    """How long to wait for other newcomers after one joined, and before starting again after a start failed."""


class Fault(Part):
    """One fault of a chaos run, performed by the worker on itself.  Points: see ``elastic/sim/faults.py``."""

    point: Annotated[str, AfterValidator(fault_word("Point"))]
    step: Annotated[Whole, Field(ge=0)] = 0
    """0: the first that the generation comes to."""
    world_rank: Annotated[Whole, Field(ge=0)] = 0
    generation: Positive = 1
    """Only there, so that the step done again by a later generation is spared."""
    kind: Annotated[str, AfterValidator(fault_word("OWN_KINDS"))] = "SIGKILL"


class Job(Part):
    """One training job.  Its trajectory is a function of this object and its samples, never of the cluster."""

    name: Annotated[str, AfterValidator(folder_name)]
    """The run: its folder in the bucket."""
    bucket: Annotated[str, AfterValidator(place)]
    """fsspec URL or folder that every node sees as the same place."""
    model: Code = "elastic.models.llama:build"
    """``pkg.module:build``; ``build(**model_args) -> nn.Module`` on the meta device, with ``init_weights()``."""
    model_args: dict[str, JsonValue] = {}
    loss: Code = "elastic.engine.loss:next_token"
    """``pkg.module:loss``; ``loss(model, batch) -> (loss_sum, count)``: a sum, and what it was summed over."""
    seed: Whole = 0
    steps: Positive = 100
    global_batch: Positive = 16
    """Samples of one step, whatever the number of workers."""
    microbatch: Positive = 2
    """Samples of one forward and backward."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of forward and backward.  Masters, moments and the gradient sum are float32 in either."""
    compile: Flag = False
    """Compile each block of the model; new worlds of the same process reuse the code."""
    reproducible: Flag = True
    """Bit-identical weights whatever died or joined on the way: ordered fold, deterministic kernels."""
    on_driver_exit: Literal["stop", "detach"] = "stop"
    """When the driver that started the run is stopped or vanishes: the run saves and stops, or trains on until ``elastic stop``."""
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    workers: Workers = Workers()
    checkpoint: Checkpoint = Checkpoint()
    copies: Copies = Copies()
    network: Network = Network()
    deadlines: Deadlines = Deadlines()
    faults: tuple[Fault, ...] = ()
    """For chaos tests."""

    if not TYPE_CHECKING:  # type checkers keep the typed constructor

        def __init__(self, where: Where = lambda _: "Job", /, **settings: Any) -> None:
            """Raises :class:`JobError`: one sentence a problem; ``where`` says who set a setting."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise JobError("\n".join(sentences(error, Job, where))) from None

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        problems = list(_disagreements(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Job:
        """The job of a TOML file, with ``--section.option value`` overrides over it.  Raises :class:`JobError`."""
        path = Path(path)
        options = read_options(overrides, cls)
        values = merge(read_toml(path), options, path.name)
        checked: Callable[..., Job] = cls
        return checked(lambda setting: COMMAND_LINE if setting in options else path.name, **values)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of :meth:`to_json`; :class:`JobError` if the settings are no longer valid."""
        return cls(**json.loads(text))

    def replace(self, **settings: Any) -> Job:
        """The job with other values for some of its settings, checked again."""
        return Job(**{name: getattr(self, name) for name in Job.model_fields} | settings)

    def begun_as(self, stored: dict[str, Any]) -> Job:
        """The job of a run's ``job.json`` as this code reads it, but for what defines no trajectory, which may no longer be valid."""
        theirs = {name: value for name, value in stored.items() if _NOT_THE_TRAJECTORY.get(name) is not True}
        return Job(**theirs, name=self.name, bucket=self.bucket)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2)

    @property
    def digest(self) -> str:
        """sha256 over what defines the trajectory, but for the samples: a run may be resumed with other values of everything else.

        New settings enter with their defaults, so compare it with the digest of a stored ``job.json`` *as this code reads it*.
        """
        return hashlib.sha256(json.dumps(self.trajectory(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def trajectory(self) -> dict[str, Any]:
        """Return the settings that define the trajectory."""
        settings = self.model_dump(mode="json", exclude=_NOT_THE_TRAJECTORY)
        for section, later in _LATER.items():
            settings[section] = {name: value for name, value in settings[section].items() if name not in later or value != later[name]}
        return settings

    def code(self) -> tuple[str, ...]:
        """Return the code that the job names, as ``pkg.module:name``."""
        optimizer = () if self.optim.kind == "adamw" else (self.optim.kind,)
        return (self.model, self.loss, self.data.dataset, *optimizer)

    @property
    def microbatches(self) -> int:
        """Of one step."""
        return self.global_batch // self.microbatch

    def layout_rule(self) -> LayoutRule:
        degrees = (self.parallel.dp_replicate, self.parallel.dp_shard)
        dp_replicate, dp_shard = (None if degree == "auto" else degree for degree in degrees)
        return LayoutRule(dp_replicate, dp_shard, self.parallel.min_shard, self.parallel.use)

    def copy_rule(self) -> CopyRule:
        return CopyRule(self.copies.copy_every == "auto", self.copies.buddy_every == "auto", self.copies.link_share)

    def _buddies(self) -> int:
        """0 where nothing is copied that could go to them; auto: 1, or so many steps as members agree on."""
        if self.copies.copy_every == 0:
            return 0
        return 1 if self.copies.buddy_every == "auto" else self.copies.buddy_every

    def rules(self) -> Rules:
        """What ``advance`` must know of the job."""
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
            spares=self.workers.spares,
            **self.deadlines.model_dump(exclude={"driver_s"}),
        )

    def warnings(self) -> list[str]:
        """What works but is probably not meant, one sentence each."""
        needed = 4 * self.workers.max
        if self.workers.max > 1 and self.microbatches < needed:
            return [
                f"global_batch = {self.global_batch} is only {self.microbatches} microbatches of {self.microbatch} for up to "
                f"{self.workers.max} workers: when their number does not divide it, some idle in a step's last round; "
                f"{needed} or more microbatches keep that small"
            ]
        return []


_NOT_THE_TRAJECTORY: Any = {
    **dict.fromkeys(("name", "bucket", "workers", "parallel", "deadlines", "checkpoint", "copies", "network"), True),
    **dict.fromkeys(("faults", "on_driver_exit"), True),
    "data": {"prefetch", "args"},  # what args select is known by its fingerprint: Run.trains_on
}
_LATER: dict[str, dict[str, Any]] = {"optim": {"kind": "adamw", "args": {}}}
"""Settings that came after the first release, by section, with the value that means what was done before.  With that value a setting
does not enter the digest, so that the digests of runs that were begun before stay as they are."""


FENCED_LEASES = 4
"""Leases that a fence may last at most: twice as long as a worker lives that hears nobody."""


def _disagreements(job: Job) -> Iterator[str]:
    """Checks over several settings: a sentence for each that fails."""
    rest = job.global_batch % job.microbatch
    if rest:
        near = [n for n in (job.global_batch - rest, job.global_batch - rest + job.microbatch) if n]
        yield (
            f"global_batch = {job.global_batch} is not a multiple of microbatch = {job.microbatch}; "
            f"the nearest {'are' if len(near) > 1 else 'is'} {' and '.join(map(str, near))}"
        )
    if job.schedule.warmup_steps > job.steps:
        yield f"schedule.warmup_steps = {job.schedule.warmup_steps} is more than steps = {job.steps}; lower it or train longer"
    if not job.workers.gpus and any(fault.kind == "device_assert" for fault in job.faults):
        yield "faults: kind = 'device_assert' strikes an accelerator, and workers.gpus = 0; set it to 1, or take another kind"
    yield from _deadlines(job.deadlines)
    if job.copies.copy_every == 0 and job.copies.buddy_every not in (0, "auto"):
        yield (
            f"copies.buddy_every = {job.copies.buddy_every} with copies.copy_every = 0: there is no copy that could go to a buddy; "
            f"set copies.copy_every to 1 or more, or copies.buddy_every to 0"
        )
    if job.workers.min > job.workers.max:
        yield f"workers.min = {job.workers.min} is more than workers.max = {job.workers.max}; raise the one or lower the other"
        return
    try:
        job.layout_rule().check(job.workers.min, job.workers.max)
    except ValueError as error:
        yield str(error)


def _deadlines(deadlines: Deadlines) -> Iterator[str]:
    """What is shorter than the rhythm in which those that are well are heard would strike them."""
    rhythm = {
        "lease_s": (1, "a member renews its lease four times in it, and would leave"),
        "stall_s": (1, "keepers say each 0.5 s how far their workers are, and one that is well would be blamed"),
        "silence_s": (2, "a node beats each 0.5 s, and one that is well would be taken for silent"),
        "driver_s": (1, "a driver asks ten times a second, and would be taken for gone"),
        "wait_s": (1, "no worker can start in less, and the run would give up"),
    }
    for name, (least_s, why) in rhythm.items():
        if (value := getattr(deadlines, name)) < least_s:
            yield f"deadlines.{name} = {value:g} is less than {least_s:g}: {why}; raise it"
    lease_s, fence_s = deadlines.lease_s, deadlines.fence_s
    if lease_s >= 1 and fence_s > FENCED_LEASES * lease_s:
        yield (
            f"deadlines.fence_s = {fence_s:g} is more than {FENCED_LEASES} × deadlines.lease_s = {lease_s:g}: who hears nobody ends itself "
            f"after two leases, and its answer would be waited for in vain; lower the one or raise the other"
        )
