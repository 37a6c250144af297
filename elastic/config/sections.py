"""The sections of a job: one class for each table of a job file.

A setting has its type, its default, its meaning and its change class here, or in ``elastic/job.py`` if it is
in no table.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from elastic.config.optimizers import OptimizerName
from elastic.config.values import (
    Auto,
    Branch,
    Code,
    CodeOrName,
    Flag,
    Fraction,
    Free,
    Number,
    Positive,
    Refused,
    Seconds,
    Whole,
    duration,
    fault_word,
    interface_name,
    own_file,
)

OLDEST = 4
"""The oldest value of ``numerics`` whose rules this version still has."""
UNUSED_SINCE = 5
"""The first ``numerics`` in which an update leaves a parameter alone that no microbatch of the step gave a
gradient.
"""
STAGES_SINCE = 6
"""The first ``numerics`` whose bits do not depend on how blocks are divided into stages: each block draws
random numbers from a seed of its own, and a weight of both ends of the model has a sum for each end.
"""
TOKENS = "elastic.data.tokens:TokenDataset"
"""The dataset of most jobs: tokens that `elastic data prepare` wrote."""


def known_numerics(value: object) -> object:
    """Refuses the number of a run that is older than the rules of this version, or that has none, which
    stands for 1.
    """
    if type(value) is int and 1 <= value < OLDEST:
        raise ValueError(
            "belongs to a run of a version of Elastic before 2026-11-27; go on with that version, or "
            "leave numerics out for a new run"
        )
    return value


class Section(BaseModel):
    """A group of settings.  It is immutable, and refuses a key that is not declared."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


class Data(Section):
    """The samples."""

    dataset: Branch[Code] = TOKENS
    """The class of the dataset, or a function that returns it, or the dataset, as ``pkg.module:name``; in
    Python also the thing itself. It has ``len()``, ``read(ids)`` and ``fingerprint()``, or rows by index as
    datasets of torch and Hugging Face.
    """
    args: Free[dict[str, JsonValue]] = {}
    """Arguments of that class or function.  Data may be moved: a run remembers only the fingerprint of its
    samples, and refuses other samples.
    """
    sampling: Branch[Literal["permutation", "with_replacement"]] = "permutation"
    """Order of the samples: ``permutation`` draws each once in an epoch, ``with_replacement`` draws each time
    from all.
    """
    weights: Branch[tuple[Annotated[Number, Field(ge=0)], ...]] = ()
    """Samples that each part of a mixture gives in proportion to the others
    (``elastic.data.mixture:Mixture``), exact to one sample at any time.  Each part then has its own epochs.
    Empty: the samples of all parts are one dataset, each once an epoch.
    """
    group_by_length: Branch[Flag] = False
    """``true`` cuts a step into microbatches by the lengths of its samples, the longest first, so that there
    is less padding and workers wait less for each other.  The dataset then also has ``lengths(ids)``.
    """
    prefetch: Free[Positive] = 2
    """Number of microbatches that are read ahead of the one that is computed; with ``readers``, by each of
    them.
    """
    readers: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Number of processes of each worker that read the samples, as ``num_workers`` of torch's DataLoader.
    The bits are the same.  0: a thread of the worker reads them.
    """


class Validation(Section):
    """Samples that are held out: the loss on them is measured between steps, and no bit of the training
    depends on it.
    """

    every: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Number of steps between validations; the last step is always validated.  0: none."""
    by: Free[Literal["members", "spares"]] = "members"
    """Workers that measure it.  ``members`` train on after it.  ``spares`` measure a checkpoint while the
    members train, so it is told later: the first one at or after each multiple of ``every``.  The members
    measure the state after the last step in any case. The device of a spare must hold the whole state.
    """
    patience: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Number of validations in a row without a smaller loss than the best one after which the run ends, with
    the checkpoint of that step.  With a larger number, or 0, it goes on from there.  0: never.
    """
    min_delta: Free[Annotated[Number, Field(ge=0)]] = 0.0
    """A loss counts for ``patience`` only if it is smaller than the best one that counted by more than this.
    """
    samples: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Number of samples, the first ones of the dataset.  0: all."""
    dataset: Free[Code | Literal[""]] = ""
    """The class of the dataset, as ``pkg.module:Class``.  Empty: that of ``data.dataset``."""
    args: Free[dict[str, JsonValue]] = {}
    """Arguments of that class."""


class Export(Section):
    """Weights as plain safetensors, in the folder ``exports/`` of the run, made from checkpoints while the
    run goes on.
    """

    every: Free[Annotated[Whole, Field(ge=0)]] = 0
    """The first checkpoint at or after each multiple of this number of steps is exported, and that of the
    last step.  0: none.
    """


class Samples(Section):
    """Text that the model writes, made from checkpoints while the run goes on.  The model must turn tokens
    into logits.
    """

    every: Free[Annotated[Whole, Field(ge=0)]] = 0
    """The first checkpoint at or after each multiple of this number of steps continues the prompts, and that
    of the last step.  0: none.
    """
    prompts: Free[tuple[str, ...]] = ()
    """Texts that are continued.  They become tokens as the text of the dataset did, or else byte by byte."""
    tokens: Free[Positive] = 64
    """Largest number of tokens that follow a prompt: fewer, where a document ends."""
    temperature: Free[Annotated[Number, Field(ge=0)]] = 0.0
    """Number by which the logits are divided before a token is drawn.  0: each token is the most likely one.
    """
    seed: Free[Whole] = 0
    """Seed of what is drawn."""


class Metrics(Section):
    """The numbers of each step.  They are always in the bucket, whatever is set here."""

    sinks: Free[dict[CodeOrName, dict[str, JsonValue]]] = {}
    """Trackers that get them too: ``tensorboard``, ``wandb``, ``mlflow`` or your own ``pkg.module:Class``,
    each with its arguments.
    """


class ParameterGroup(Section):
    """Parameters with a learning rate and a weight decay of their own.  A parameter is in the first group
    that names it.
    """

    names: Branch[Annotated[tuple[str, ...], Field(min_length=1)]]
    """Patterns of names of parameters, as ``named_parameters()`` has them: ``*`` stands for any letters.
    Each must match a parameter that is trained, and that no earlier group has.
    """
    lr_scale: Branch[Annotated[Number, Field(ge=0)]] = 1.0
    """Number by which the learning rate of each step is multiplied."""
    weight_decay: Branch[Annotated[Number, Field(ge=0)] | Auto] = "auto"
    """Weight decay of all parameters of the group.  ``auto``: as without the group."""


class Optim(Section):
    """The optimizer.  Weight decay leaves out biases, norms and every other tensor with fewer than two
    dimensions, unless its group says otherwise.
    """

    kind: Refused[OptimizerName | Code] = "adamw"
    """The optimizer: ``adamw`` (with ``decay = "l2"`` it is Adam), ``sgd``, ``adagrad``, ``rmsprop``,
    ``muon`` for the matrices of the blocks with ``adamw`` for the rest, or ``pkg.module:RULE`` with a
    ``Rule`` of ``elastic.engine.optim.base``.
    """
    args: Branch[dict[str, JsonValue]] = {}
    """Settings of your own optimizer.  The others have none but those of this section."""
    lr: Branch[Annotated[Number, Field(ge=0)]] = 3e-4
    """Learning rate after the warmup.  ``[schedule]`` says how it falls."""
    betas: Branch[tuple[Fraction, Fraction]] = (0.9, 0.95)
    """Decay rates of the averages of the gradient and of its square.  ``rmsprop`` uses the second one only.
    """
    momentum: Branch[Fraction] = 0.9
    """Part of the velocity that ``sgd`` keeps in each step, and part of the average that ``muon`` keeps; 0.95
    is usual for ``muon``.
    """
    eps: Branch[Annotated[Number, Field(gt=0)]] = 1e-8
    """Number that is added to the divisor of an update, so that it is never zero."""
    weight_decay: Branch[Annotated[Number, Field(ge=0)]] = 0.1
    """Fraction of a weight, times the learning rate, that is subtracted in each step."""
    decay: Branch[Literal["decoupled", "l2"]] = "decoupled"
    """Form of the weight decay: ``decoupled`` changes the weight itself, ``l2`` adds ``weight_decay`` ×
    weight to the gradient, after clipping.
    """
    moments: Refused[Literal["model", "bf16"]] = "model"
    """Number format of the moments of ``adamw``, and of your own optimizer if it rounds them.  ``model`` is
    that of the weights.  ``bf16`` takes half the bytes of float32: an update of float32 weights is rounded
    stochastically, with the same bits in every layout.
    """
    clip_norm: Branch[Annotated[Number, Field(gt=0)]] = 1.0
    """Largest norm of the mean gradient.  A gradient with a larger norm is scaled down to it."""
    average: Branch[Fraction] = 0.0
    """Part that an average of the weights keeps in each step, such as 0.999; the rest comes from the weights
    after the update, and the first update makes it those.  It is in float32 or the format of the weights, cut
    and copied as a moment is, and in every checkpoint. Training and validation do not use it: ``--average``
    of ``elastic checkpoint export`` and ``elastic evaluate`` do.  0: none.
    """
    groups: Branch[tuple[ParameterGroup, ...]] = ()
    """Groups of parameters with a learning rate and a weight decay of their own.  A parameter is in the first
    one that names it.
    """


class Schedule(Section):
    """The learning rate by step.  It rises linearly from 0 in the warmup, and then follows ``kind``."""

    kind: Branch[Literal["cosine", "linear", "constant", "wsd", "rsqrt"] | Code] = "cosine"
    """``cosine`` and ``linear`` fall to ``final`` × ``optim.lr`` at the last step.  ``constant`` stays at
    ``optim.lr``.  ``wsd`` stays there, too, and falls linearly in the last ``decay_steps``.  ``rsqrt`` falls
    with the inverse square root of the step. ``pkg.module:function`` is your own: ``function(step, steps,
    **args)`` returns the part of ``optim.lr``, of the warmup as well.
    """
    args: Branch[dict[str, JsonValue]] = {}
    """Arguments of your own schedule."""
    warmup_steps: Branch[Annotated[Whole, Field(ge=0)]] = 0
    """Number of steps in which the learning rate rises."""
    final: Branch[Annotated[Number, Field(ge=0, le=1)]] = 0.1
    """Fraction of ``optim.lr`` that is left at the last step, with ``cosine``, ``linear`` and ``wsd``."""
    decay_steps: Branch[Annotated[Whole, Field(ge=0)]] = 0
    """Number of steps at the end in which the learning rate of ``wsd`` falls."""


class BatchRamp(Section):
    """A batch that grows at the beginning of the run, from ``start`` by ``increment`` up to ``global_batch``."""

    start: Branch[Annotated[Whole, Field(ge=0)]] = 0
    """Samples of the first step.  0: every step has ``global_batch``."""
    increment: Branch[Annotated[Whole, Field(ge=0)]] = 0
    """Samples by which a step becomes larger, each time."""
    samples: Branch[Annotated[Whole, Field(ge=0)]] = 0
    """Samples after which the batch has its final size; each size before lasts for an equal share of them."""


COMING = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
    "ep": "expert parallelism",
}
"""The degrees of ``parallel`` that may only be 1 yet, with the names of what they are for."""


class Parallel(Section):
    """The degrees of the axes."""

    dp_replicate: Free[Positive | Auto] = "auto"
    """Number of replicas of the state.  ``auto``: as many as the workers allow with the given ``dp_shard``.
    """
    dp_shard: Free[Positive | Auto] = "auto"
    """Number of workers over which one replica is cut.  ``auto``: the smallest number that is allowed and at
    which the state fits the devices, and its copies the nodes."""
    min_shard: Free[Positive] = 1
    """Smallest shard degree that is allowed.  ``auto`` takes a larger one by itself where memory asks for it.
    """
    zero: Free[Literal[0, 1, 2, 3] | Auto] = "auto"
    """Stage of ZeRO: what workers share.  ``0``: nothing.  From ``1`` on the weights and moments that are
    updated; each worker also has all weights, in the format of forward and backward.  ``2``: also the sums of
    gradients, which with ``reproducible`` are shared anyway. ``3``: all weights, too; those of a block are
    gathered when it runs, so all workers must run the same blocks in the same order in each microbatch,
    whatever its samples are.  ``auto``, where ``dp_shard`` is more than 1: 2 if that degree is ``auto``, too,
    and all devices have room for it, or if blocks share a weight, or with ``offload``, else 3.  A number from
    1 on, and ``auto`` with ``offload``, makes all workers one replica, unless a degree is set.
    """
    bucket_elements: Free[Positive | Literal["block"]] = "block"
    """Largest number of elements of a bucket, with ``zero`` 0, 1 or 2: consecutive blocks are joined up to
    it, and gathered and summed by one collective.  ``block``: each block by itself; a worker without others
    joins small ones.  With small blocks, 5e8 saves collectives and takes memory for a bucket.
    """
    use: Free[Literal["all", "fit"]] = "all"
    """``all`` takes a larger shard degree if that uses workers that would be left over, unless they are fewer
    than one in eight and replicas then fit into nodes.  ``fit`` keeps such workers as spares."""
    tp: Free[Positive] = 1
    """Tensor parallelism: number of workers that compute each layer together, each with a part of its heads
    and features.  Only 1 is possible yet."""
    cp: Free[Positive] = 1
    """Context parallelism: number of workers over which each sequence is cut.  Only 1 is possible yet."""
    pp: Free[Positive] = 1
    """Pipeline parallelism: number of stages, each with some of the blocks of the model.  Only 1 is possible
    yet."""
    ep: Free[Positive] = 1
    """Expert parallelism: number of workers over which the experts of a layer are spread.  Only 1 is possible
    yet."""

    @property
    def shards(self) -> int | None:
        """The number of workers over which one replica is cut, if the job fixes it."""
        return None if self.dp_shard == "auto" else self.dp_shard

    def degrees(self, zero: int | Literal["auto"]) -> tuple[int | None, int | None]:
        """Returns the number of replicas and of their shards with this stage of ZeRO; None is chosen later."""
        replicas = None if self.dp_replicate == "auto" else self.dp_replicate
        shards = 1 if zero == 0 else self.shards
        if zero not in (0, "auto") and replicas is None and shards is None:
            replicas = 1
        return replicas, shards

    @property
    def model(self) -> tuple[tuple[str, int], ...]:
        """The axes that divide the model, the outermost first, with their degrees; those of 1 are left out."""
        degrees = {"pp": self.pp, "cp": self.cp, "tp": self.tp}
        return tuple((name, degree) for name, degree in degrees.items() if degree > 1)

    @property
    def coming(self) -> dict[str, int]:
        """The degrees above 1 of axes that do not compute yet, by name."""
        return {name: degree for name in COMING if (degree := getattr(self, name)) != 1}

    @property
    def experts(self) -> tuple[int, int]:
        """The degree over which experts are spread, and the number that it must divide; the degree again if the
        job does not fix that number.
        """
        return self.ep, self.shards * self.cp if self.shards is not None else self.ep

    @property
    def elements(self) -> int:
        """The largest number of elements of joined blocks: 0 if none are joined."""
        return 0 if self.bucket_elements == "block" else self.bucket_elements


class Reduction(Section):
    """The order in which the gradients of the microbatches are added.  It is part of the job, so the sum has
    the same bits in every world.

    ``block`` consecutive microbatches are added first, and then the sums of the blocks.  A node that runs a
    whole block adds it before it sends anything to other nodes.
    """

    block: Branch[Positive] = 1
    """Number of microbatches of a block.  1 adds all one after the other.  The number of workers on a node is
    best for the network between nodes, and also works where some nodes have fewer.
    """
    wire: Branch[Literal["fp32", "bf16"]] = "fp32"
    """Number format of gradients on their way between workers.  They are added in float32.  ``bf16`` halves
    their bytes: it rounds the gradient of each microbatch once, so the bits are still the same in every
    world, and with ``precision = "bf16"`` no bit changes.  Sums, as of a block, travel in float32.  Without
    ``reproducible`` the sum of each worker is rounded, and the library adds in bf16.
    """


class Workers(Section):
    """The number of worker processes, and the resources that each takes from its node."""

    min: Free[Positive] = 1
    """Smallest number of workers that train.  With fewer the run waits."""
    max: Free[Positive] = 2
    """Largest number of workers that train."""
    spares: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Number of workers beyond ``max`` that are started and kept warm.  One of them takes a dead worker's
    seat at once.
    """
    lemon_after: Free[Annotated[Whole, Field(ge=0)]] = 3
    """Number of incidents within an hour after which a node gets no worker for ten minutes, the next time for
    twenty, and so on: its workers die, do not start, or hang, and those of other nodes hardly do.  If the run
    has no other node, it is used nevertheless.  0: no node is closed.
    """
    labels: Free[dict[str, str]] = {}
    """Labels of the nodes on which workers start, as in a label selector of Ray:
    ``{ "ray.io/market-type" = "spot" }``, ``"!spot"``, ``"in(a, b)"``.  Nothing: any node.
    """
    cpus: Free[Annotated[Number, Field(ge=0)]] = 1
    """CPUs that a worker takes from its node."""
    gpus: Free[Annotated[Whole, Field(ge=0, le=1)]] = 0
    """GPUs that a worker takes from its node.  With 0 it trains on the CPU.  A run resumed with another value
    may end with other bits.
    """
    straggler: Free[Literal["report", "evict"]] = "report"
    """Treatment of a slow worker: in 12 of 16 steps its forward passes took 1.5 times the median time of its
    peers, or longer.  ``report``: it is named.  ``evict``: it also leaves at the next step boundary, and a spare
    or a new worker takes its seat.  Nobody is evicted if too few workers would be left, or within 100 steps of
    another one.  Each counts as an incident of its node, and if it is at least the second one within an hour, the
    node gets no new worker for a time (``workers.lemon_after``).
    """
    rerun_every: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Number of steps from one in which each worker also runs a microbatch of another one, and both must get the
    same gradients, to the next.  If two differ, nobody applies the step, it is done again, and the worker that
    was wrong is replaced, as soon as it is known.  The run ends if they differ three times in a row and nobody
    is found.  It needs ``reproducible``, and costs one more microbatch each time.  0: no microbatch is run again.
    """
    device_gb: Free[Annotated[Number, Field(gt=0)] | Auto] = "auto"
    """Memory of its device that a worker may use, in GB.  ``auto``: all that a GPU has; on the CPU it is not
    limited.  With ``dp_shard = "auto"`` the state is cut among so many workers that each part fits.
    """
    threads: Free[Positive] = 1
    """Number of threads for the kernels of a worker on the CPU.  Workers with different numbers are of
    different kinds.  A run resumed with another value may end with other bits.
    """


class Checkpoint(Section):
    """Saves to the bucket."""

    save_every: Free[Positive] = 50
    """Number of steps between saves.  If no worker holds the state any more, 2 × ``save_every`` steps may be
    lost, as a save takes time.
    """
    keep_last: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Number of the newest good checkpoints that are kept; older ones are deleted, unless another of these
    settings keeps them.  At least 2, since the newest one may turn out to be damaged.  0: all are kept.  What
    a branch goes on from is always kept.
    """
    keep_every: Free[Annotated[Whole, Field(ge=0)]] = 0
    """The first checkpoint at or after each multiple of this number of steps is kept, too.  0: none for its
    step.
    """
    keep_best: Free[Flag] = False
    """``true`` keeps the checkpoint with the smallest validation loss, too.  If the held-out samples have
    changed, only losses on the newest count.  Nothing is deleted before the first validation.
    """
    keep_younger: Free[Annotated[str, AfterValidator(duration)]] = ""
    """Checkpoints that were written less than this time ago are kept, too: ``"90m"``, ``"24h"`` or ``"7d"``,
    for example.  The clock of the coordinator's machine counts.  One that is slow keeps more, and one that is
    fast less, but never less than the other settings keep. Nothing: none for its age.
    """
    compare: Free[Flag] = True
    """``true`` writes a checkpoint only if all replicas of the state have the same bits, by the digests of
    their copies, which cost nothing more.  If not, the run goes back to the checkpoint before, and the worker
    that was wrong is replaced, as soon as it is known.  Three such saves in a row end the run.  With one
    replica, or without ``reproducible``, nothing is compared.
    """


class Copies(Section):
    """Copies of the state in the memory of the nodes.  The state of a dead worker is read from them.

    A copy goes to memory of the worker's own node, which the node's keeper holds too.  Less often it also
    goes to a keeper in another failure domain, the buddy.
    """

    copy_every: Free[Annotated[Whole, Field(ge=0)] | Auto] = "auto"
    """Number of steps between copies on the own node.  0: none.  ``auto``: every step, unless a copy takes
    longer.
    """
    buddy_every: Free[Annotated[Whole, Field(ge=0)] | Auto] = "auto"
    """Number of steps between copies to the buddy.  0: none.  ``auto``: as often as ``link_share`` allows, at
    most once a second.
    """
    cross_zone: Free[Flag] = False
    """``true`` puts buddies in another zone (a label of Ray's nodes), ``false`` in the same one."""
    link_share: Free[Annotated[Number, Field(gt=0, le=1)]] = 0.2
    """Largest fraction of a node's link that copies to buddies may take on average."""
    verify: Free[Flag] = False
    """``true`` compares the state in a worker's device with the digests of its copy before the next update reads
    it.  If a bit has flipped meanwhile, the step is not committed, and the worker is replaced.  Only versions
    that are copied are compared, so ``copy_every = 1`` looks at each.  It reads the state once a copy: 7 ms for
    16 GB on an H200.
    """


class LayerWatch(Section):
    """The norms of the gradients of single layers, which are recorded now and then, and warnings that follow
    from them.

    A layer is a block of the model, or a module outside of the blocks.  A record takes about 15 bytes of the
    journal for each layer.
    """

    every: Free[Annotated[Whole, Field(ge=0)]] = 100
    """Number of steps between records.  0: none, and no warnings.  A step whose gradient is not finite is
    always recorded.
    """
    patience: Free[Positive] = 5
    """Number of records in a row in which the gradient of a layer must be zero, or vanish, until a warning
    says so.
    """
    vanishing: Free[Annotated[Number, Field(ge=0, lt=1)]] = 1e-6
    """Part of the largest layer's norm below which the gradient of a layer vanishes.  0: never."""
    exploding: Free[Annotated[Number, Field(ge=0)]] = 100.0
    """Multiple of its usual norm above which the gradient of a layer explodes.  0: never."""
    stationary: Free[Annotated[Whole, Field(ge=0)]] = 200
    """Number of records, in twenties, over which the loss must fall, or else a warning says so: by the line
    of least squares through the means of twenty.  0: never.
    """
    max_skipped: Free[Annotated[Whole, Field(ge=0)]] = 20
    """Number of steps in a row that may be skipped, because a loss or the gradient is not finite, until the
    run fails.  0: any number. Steps with which ``fp16`` finds the scale of its loss do not count.
    """
    max_restarts: Free[Annotated[Whole, Field(ge=0)]] = 3
    """Number of restarts in a row that may save no later step.  `elastic train` refuses the next one with
    exit code 4, so that no supervisor restarts the run forever.  0: any number.  What was stopped, failed by
    a fault of the job, or only waited for machines does not count.
    """


class Spikes(Section):
    """Steps whose loss or gradient norm is far above those of the steps before, as a corrupt document causes
    them, and what is done then.

    The score is the distance from the median, in robust standard deviations: 1.4826 × the median absolute
    deviation, at least 1% of the median.  That of a norm is of its logarithm.  A step is judged as a whole,
    so one noisy sample among many good ones may raise neither far enough, and is not found; ``microbatch_z``
    is for that.  Before there are ``window`` steps none is a spike.
    """

    action: Branch[Literal["none", "warn", "skip", "quarantine", "forget"]] = "none"
    """``warn`` only says which steps are spikes.  ``skip`` also leaves their update out, on all workers.
    ``quarantine`` also reads the samples of the microbatches that cause one never again, nor those of a
    microbatch whose loss is not finite; other samples take their places, of the same part of a mixture with
    ``data.weights``.  At most 10,000 samples, and half of the data and of each such part, may be in
    quarantine.  ``warn`` and ``skip`` keep out what is there, and a run that has some refuses ``none``.
    ``forget`` is ``none``, and reads them again.  With ``none`` and ``forget`` ``microbatch_z`` is 0.
    """
    z: Branch[Annotated[Number, Field(gt=0)]] = 6.0
    """Score above which a step is a spike."""
    window: Branch[Annotated[Whole, Field(ge=8)]] = 128
    """Number of steps with which a step is compared, those before it that were not skipped.  Until there are
    as many, none is a spike.
    """
    microbatch_z: Branch[Annotated[Number, Field(ge=0)]] = 0.0
    """Score above which a microbatch is left out of its own step; 0: none is.  How far its mean loss lies
    above those of the newest 8 steps is compared with how far those of the newest 1,024 microbatches did,
    once there are ``window`` steps.  The step counts all others as if this one had not been there.  With
    ``quarantine`` none of its samples is read again, good ones included: what is known is the loss of the
    microbatch, not of each sample, so a smaller ``microbatch`` loses fewer.  In the first ``window`` steps
    nothing is left out.  If more than half of a step would be left out, the step is skipped.  Use it where
    all samples are alike: a seldom kind of sample whose loss is always high, such as a rare language, would
    be left out, too.  ``warn`` only says which would be.
    """

    @property
    def leaves_out(self) -> bool:
        """True if microbatches are left out of their steps."""
        return self.microbatch_z > 0 and self.action in ("skip", "quarantine")

    @property
    def off(self) -> bool:
        """True if the state has no memory of spikes, and so no quarantine."""
        return self.action in ("none", "forget")


class Network(Section):
    """The network between the workers."""

    interface: Free[Annotated[str, AfterValidator(interface_name)]] = "auto"
    """Network interface for the sockets of NCCL and gloo on each node.  ``auto``: the one whose address Ray's
    other nodes use to reach it.
    """


class Notices(Section):
    """Notices that the machine of a node will be taken away."""

    sources: Free[tuple[CodeOrName, ...]] = ("auto",)
    """Sources of notices: ``aws``, ``gcp``, ``azure``, ``drain`` (Ray), ``sigterm``, ``file``, ``command`` or
    your own ``pkg.module:Class``.  ``auto``: the cloud whose machine a node is, ``drain``, and ``file`` and
    ``command`` if they are set.  Empty: nobody.
    """
    file: Free[Annotated[str, AfterValidator(own_file)]] = ""
    """File that your own script writes on a node whose machine is taken, with the seconds that are left in its
    first line, or a Unix time.
    """
    command: Free[str] = ""
    """Command for the shell of every node that prints the same as ``file`` has in it, or nothing.  It is run
    every 5 s.
    """
    grace_s: Free[Seconds] = 30
    """Time from a notice without a deadline until the machine is taken."""


class Deadlines(Section):
    """Deadlines in seconds.  They are the last resort: a loss that is known for certain is acted on at once."""

    form_s: Free[Seconds] = 120
    """Time from sending a plan until every member must be ready, and from asking for a worker until it must
    have joined.  It begins anew while members that initialise or heal get further, and while a worker that
    starts gets further: takes memory, compiles.  From when a member is ready the others get ten times as
    long.
    """
    fence_s: Free[Seconds] = 10
    """Time from a fence until a member that has not answered is expelled."""
    stall_s: Free[Seconds] = 60
    """Time without progress of any member until the member that is furthest behind is expelled.  It grows
    with the step time.
    """
    silence_s: Free[Seconds] = 5
    """Time without a beat of a member's node until a world that stands still is stopped.  If others answered,
    silent nodes get another 0.5 × ``silence_s``.  A node beats every half second.
    """
    lease_s: Free[Seconds] = 120
    """Time without an answer of the coordinator until a member stops stepping."""
    wait_s: Free[Seconds] = 600
    """Time to wait for enough workers until the run gives up.  It can be resumed.  A world waits as long at
    the last step, or for the save of a stop, if the bucket refuses what it is given.
    """
    stop_s: Free[Seconds] = 60
    """Longest time without progress of the save at the last step, or at a stop.  Then a stop goes on without
    that save, and at the last step a new world makes it again; after a few that fail, the run has failed.
    """
    driver_s: Free[Seconds] = 20
    """Time after the driver's last question until the run stops.  With ``on_driver_exit = "detach"`` the run
    does not stop.
    """
    grow_debounce_s: Free[Seconds] = 2
    """Time to wait for more newcomers after one has joined, and before starting again after a start failed.
    """


class WorkerFault(Section):
    """A fault of a chaos test, which a worker performs on itself."""

    point: Free[Annotated[str, AfterValidator(fault_word("Point"))]]
    """Point of a step at which the fault happens: see ``Point`` in ``elastic/protocol/faults.py``."""
    step: Free[Annotated[Whole, Field(ge=0)]] = 0
    """Step in which the fault happens.  0: the first step of the generation."""
    world_rank: Free[Annotated[Whole, Field(ge=0)]] = 0
    """World rank of the worker that performs the fault."""
    generation: Free[Positive] = 1
    """Generation in which the fault happens.  It does not happen again when a later generation repeats the
    step.
    """
    kind: Free[Annotated[str, AfterValidator(fault_word("OWN_KINDS"))]] = "SIGKILL"
    """Kind of fault: see ``OWN_KINDS`` in ``elastic/protocol/faults.py``."""
