"""A corrupt document changes no weight, on no member, and is read only once; what decides that is part of the
state.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actors.launch import launch
from elastic.data.cursor import Cursor
from elastic.engine.loss import next_token
from elastic.engine.spike_memory import DTYPES, HEIGHTS, HISTORY, SpikeMemory, tensors_of
from elastic.engine.world import World
from elastic.errors import DataError, JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.batch import deal_of
from elastic.plan.layout import Layout
from elastic.protocol import spikes as rules
from elastic.protocol.commit_record import Outcome
from elastic.protocol.spikes import QUARANTINE
from elastic.report.story import Sentence
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from tests.support.ranks import Ranks
from tests.support.segments import finish, member, raw
from tests.support.toys import Sums, toy_job
from tests.train.test_skips import local

HERE = "tests.train.test_spikes"
WINDOW, EPOCH, STEPS = 8, 4, 16
"""The window of the rule; the steps of an epoch; those of most runs, so that each document comes four times.
"""
MICROBATCHES = 6
"""Number of microbatches of a step of the jobs below."""
JUDGED = WINDOW + 2
"""The first step of which microbatches are judged: those of the first step are compared with none, and 48
must be known.
"""


class Corrupt(Sums):
    """Samples of which some are corrupt: ``gains`` has, by sample, how many times the loss of a good one they
    have.
    """

    def __init__(self, gains: Mapping[str, str] | None = None, **args: Any) -> None:
        super().__init__(**args)
        self.gains = {int(sample): float(gain) for sample, gain in (gains or {}).items()}

    def read(self, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {**super().read(ids), "gain": torch.tensor([self.gains.get(each, 1.0) for each in ids])}


def gained(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the microbatch, times the largest gain of its samples, of which NaN is the greatest."""
    loss, count = next_token(model, {"tokens": batch["tokens"]})
    return loss * batch["gain"].max(), count


def spiky(bucket: Path, gains: Mapping[int, float], microbatches: int = 8, **changes: Any) -> Job:
    """Returns a job with these corrupt documents, four steps an epoch, each of so many microbatches of two
    samples.
    """
    corrupt = {
        "samples": 2 * microbatches * EPOCH,
        "gains": {str(sample): str(gain) for sample, gain in gains.items()},
    }
    data = {"dataset": f"{HERE}:Corrupt", "args": corrupt}
    spikes = {"action": "quarantine", "window": WINDOW, **changes.pop("spikes", {})}
    model = {"vocab": 29, "dim": 16, "layers": 1, "heads": 2, "dropout": 0.1}
    sizes = {"steps": STEPS, "global_batch": 2 * microbatches}
    return toy_job(
        bucket, data=data, model_args=model, loss=f"{HERE}:gained", spikes=spikes, **(sizes | changes)
    )


def drawn_by(bucket: Path, step: int, layout: Layout, rank: int, microbatches: int = 8) -> tuple[int, int]:
    """Returns a microbatch of ``step`` that only this data rank of ``layout`` runs, and its first sample."""
    job = spiky(bucket, {}, microbatches)
    index = deal_of(job.microbatches, 1, layout, ()).microbatch_of(0, rank)
    assert index is not None
    return index, Cursor(job.global_batch * EPOCH, job.global_batch, job.seed).microbatch_ids(
        step, index, job.microbatch_size
    )[0]


small, drawn = partial(spiky, microbatches=MICROBATCHES), partial(drawn_by, microbatches=MICROBATCHES)


@dataclass
class Trained:
    """A segment: what each member committed, the hash of its weights and moments after each step, and the
    state in the bucket.
    """

    outcomes: list[Outcome]
    members: list[list[Outcome]]
    weights: list[list[str]]
    version: Version
    hash: str


def watched(world: World, job: Job, version: Version, last: int) -> tuple[list[Outcome], list[str], Any]:
    """Trains to step ``last`` and saves.  The memory of spikes is not in the hashes, since it may change when
    weights do not.
    """
    with member(world, job, version) as me:
        outcomes, hashes = [], []
        while me.state.shard.version.step < last:
            outcomes.append(me.step())
            shard = me.state.shard
            mine = [shard.values[key] for key in sorted(shard.values) if not key[1].startswith("spikes.")]
            hashes.append(hashlib.sha256(b"".join(raw(each) for each in mine)).hexdigest())
        return outcomes, hashes, me.save()


def train(
    ranks: Ranks,
    job: Job,
    layout: Layout,
    last: int = STEPS,
    version: Version = Version(0, 0),  # noqa: B008 (frozen)
) -> Trained:
    """Trains a segment in one world of ``layout``."""
    members, weights, receipts = zip(*ranks.run(layout, watched, job, version, last), strict=True)
    end = Version(last, members[0][-1].generation)
    before = ((version.generation, version.step),) if version.step else ()
    return Trained(members[0], [*members], [*weights], end, finish(job, layout, receipts, end, before))


def kept(job: Job, version: Version, name: str) -> torch.Tensor:
    """Returns a tensor of the memory of spikes, as the checkpoint holds it."""
    reader = Run.open(job).checkpoints.open(version)
    (tensor,) = [each for each in reader.tensors() if each.name == name]
    data = bytearray(next(reader.read([tensor.whole()]))[1])
    return torch.frombuffer(data, dtype=DTYPES[tensor.dtype]).view(tensor.shape)


def read(outcomes: list[Outcome], sample: int) -> list[int]:
    """Returns the steps that have read the sample."""
    return [each.step for each in outcomes if sample in {one for ids in each.samples for one in ids}]


@pytest.mark.parametrize(
    ("layout", "other"),
    [(Layout(3, 1), Layout(1, 2)), pytest.param(Layout(1, 3), Layout(2, 1), marks=pytest.mark.full)],
    ids=str,
)
def test_g1_a_corrupt_document_on_rank_2_is_skipped_by_all_and_read_no_more(
    ranks: Ranks, tmp_path: Path, layout: Layout, other: Layout
) -> None:
    """G1: a document with 1,000 times the loss is in a microbatch of rank 2 alone, in each epoch.  As soon as
    the window is full, all ranks skip its step: the bytes of every member's weights stay.  Both samples of
    the microbatch are in the list that the checkpoint holds, and no later step reads them.  A run that is
    saved before the spike, with a window that is half full, and again after it, and resumed in other worlds,
    of which one has a single member, agrees to the bit.  The controls: with "warn" the same steps are spikes
    and change weights in each epoch, a clean run has no spike, and a run that begins to look at the first of
    these saves has no full window, and skips nothing at that step.
    """
    first = WINDOW + 1
    index, sample = drawn(tmp_path, first, layout, 2)
    job = small(tmp_path / "many", {sample: 1e3})
    told = train(ranks, job, layout)
    mates = told.outcomes[first - 1].samples[index]
    for outcomes, weights in zip(told.members, told.weights, strict=True):
        assert outcomes == told.outcomes
        assert [each.step for each in outcomes if not each.applies] == [first]
        assert weights[first - 2] == weights[first - 1] != weights[first]
    assert told.outcomes[first - 1].quarantined == mates and sample in mates
    assert len(read(told.outcomes, sample)) == 3 and read(told.outcomes, sample)[-1] == first
    assert not any(read(told.outcomes[first:], each) for each in mates)
    assert kept(job, told.version, QUARANTINE)[:3].tolist() == [
        *([each, first + 1] for each in mates),
        [0, 0],
    ]

    job = small(tmp_path / "cut", {sample: 1e3})
    begun = train(ranks, job, Layout(1, 1), WINDOW - 2)
    half = train(ranks, job, other, first, begun.version)
    rest = train(ranks, job, Layout(1, 1), STEPS, half.version)
    assert [each.step for each in half.outcomes if not each.applies] == [first]
    assert rest.hash == told.hash and [each.samples for each in rest.outcomes] == [
        each.samples for each in told.outcomes[first:]
    ]

    job = small(tmp_path / "warned", {sample: 1e3}, spikes={"action": "warn"})
    warned = train(ranks, job, Layout(1, 1))
    assert [each.step for each in warned.outcomes if each.spike] == [
        each for each in read(warned.outcomes, sample) if each > WINDOW
    ]
    assert all(each.applies for each in warned.outcomes) and warned.hash != told.hash
    clean = train(ranks, small(tmp_path / "clean", {}), Layout(1, 1), first)
    assert all(each.applies and each.spike is None and not each.quarantined for each in clean.outcomes)
    late = train(
        ranks, small(tmp_path / "late", {sample: 1e3}, spikes={"action": "none"}), Layout(1, 1), WINDOW - 2
    )
    again = ranks.run(Layout(1, 1), watched, small(tmp_path / "late", {sample: 1e3}), late.version, first + 2)
    assert all(outcome.applies for outcome in again[0][0]), "a checkpoint without a memory begins one"


def without(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the microbatch, which counts for nothing if a sample of it has no gain."""
    loss, count = next_token(model, {"tokens": batch["tokens"]})
    counts = batch["gain"].min() > 0
    return loss * counts, count * counts


@pytest.mark.parametrize(("layout", "kind"), [(Layout(2, 1), "muon"), (Layout(1, 2), "adamw")], ids=str)
def test_g1_a_noisy_microbatch_is_left_out_of_its_own_step(
    ranks: Ranks, tmp_path: Path, layout: Layout, kind: str
) -> None:
    """G1: a document with 1.3 times the loss is no spike of its step, and its microbatch is left out of it.
    The judge is a user's loss that counts nothing of it, from the same checkpoint: the weights and moments
    have the same bits.  Its samples come no more.  From the same checkpoint, a run that only warns says what
    would be left out, and has the bits of one without ``microbatch_z``.  The controls:
    those have other weights, and where that document is good nothing would be left out.
    """
    first, each = JUDGED, {"microbatch_z": 6.0}
    index, sample = drawn(tmp_path, first, layout, layout.world - 1)
    optim = {"lr": 0.002, "kind": kind}
    job = small(tmp_path, {sample: 1.3}, spikes=each, optim=optim)
    begun = train(ranks, job, layout, first - 1)
    told = train(ranks, job, layout, STEPS, begun.version)
    outcomes = begun.outcomes + told.outcomes
    (bad,) = [each for each in outcomes if each.left_out]
    assert (bad.step, bad.left_out, bad.applies) == (
        first,
        (index,),
        True,
    ) and bad.quarantined == bad.samples[index]
    assert all(each == told.outcomes for each in told.members) and all(
        each.spike is None for each in outcomes
    )
    assert len(read(outcomes, sample)) == 3 and read(outcomes, sample)[-1] == first
    assert kept(job, told.version, QUARANTINE)[:3].tolist() == [
        *([-1 - each, first + 1] for each in bad.quarantined),
        [0, 0],
    ]
    heights = kept(job, told.version, HEIGHTS)
    counted = MICROBATCHES * (STEPS - 1) - 1
    assert (
        int(heights[:, 0].sum()) == counted
        and heights[:, 1].max() < bad.losses[index] / bad.counts[index] - bad.loss
    )

    def step(job: Job) -> tuple[list[Outcome], list[str]]:
        """Returns what the members commit in that step, and their weights after it."""
        found, weights, _ = zip(*ranks.run(layout, watched, job, begun.version, first), strict=True)
        return [one for (one,) in found], [one for (one,) in weights]

    after = [weights[0] for weights in told.weights]
    judge = small(tmp_path, {sample: 0.0}, optim=optim, spikes={"action": "none"}).replace(
        loss=f"{HERE}:without"
    )
    judged, weights = step(judge)
    assert weights == after and (judged[0].loss, judged[0].norm, judged[0].tokens) == (
        bad.loss,
        bad.norm,
        bad.tokens,
    )

    (whole, *_), weights = step(small(tmp_path, {sample: 1.3}, optim=optim))
    assert weights != after and whole.spike is None and not whole.left_out and not whole.warned
    warned, same = step(small(tmp_path, {sample: 1.3}, optim=optim, spikes=each | {"action": "warn"}))
    assert same == weights and warned == [warned[0]] * layout.world
    assert warned[0].warned == (index,) and sample in warned[0].samples[index]
    assert warned[0].applies and not warned[0].left_out and not warned[0].quarantined
    (good, *_), others = step(small(tmp_path, {}, optim=optim, spikes=each | {"action": "warn"}))
    assert not good.warned and good.applies and others != weights


def test_g1_what_is_left_out_depends_on_no_world(ranks: Ranks, tmp_path: Path) -> None:
    """G1: interrupted before and after the step, and resumed in other layouts, a run leaves out the same
    microbatch, with the same bits. The control: without the losses of the microbatches before, nothing is
    left out.
    """
    first = JUDGED
    _, sample = drawn(tmp_path, first, Layout(1, 1), 0)
    each = {"spikes": {"microbatch_z": 6.0}, "optim": {"lr": 0.002}}
    whole = train(ranks, small(tmp_path / "whole", {sample: 1.3}, **each), Layout(1, 1))
    job = small(tmp_path / "cut", {sample: 1.3}, **each)
    begun = train(ranks, job, Layout(3, 1), WINDOW - 2)
    half = train(ranks, job, Layout(1, 2), first, begun.version)
    rest = train(ranks, job, Layout(2, 1), STEPS, half.version)
    assert [each.step for each in half.outcomes if each.left_out] == [first] and rest.hash == whole.hash

    late = train(ranks, small(tmp_path / "late", {sample: 1.3}, optim=each["optim"]), Layout(1, 1), first - 1)
    again = ranks.run(
        Layout(1, 1), watched, small(tmp_path / "late", {sample: 1.3}, **each), late.version, first
    )
    assert not any(outcome.left_out for outcome in again[0][0])


def test_g1_the_run_says_what_it_leaves_out(tmp_path: Path) -> None:
    """G1: the sentence names the microbatch, its samples and the limit; the metrics count it.  Nothing counts
    as skipped, also for a run that goes on.  The control: with "skip" nothing is in quarantine, and it is
    left out in each epoch.
    """
    _, sample = drawn(tmp_path, JUDGED, Layout(1, 1), 0)
    for action, times in (("quarantine", 1), ("skip", 2)):
        job = small(
            tmp_path / action,
            {sample: 1.3},
            spikes={"action": action, "microbatch_z": 6.0},
            optim={"lr": 0.002},
        )
        said, error = local(job)
        found = [text for text in said if "leaves out" in text]
        assert len(found) == times and not error and not any("skipped" in text for text in said)
        pattern = (
            rf"step {JUDGED} leaves out microbatch \d \(loss [\d.]+, samples .*\b{sample}\b.*\) of 6: "
            r"above [\d.]+ no loss counts "
        )
        assert re.match(pattern + r"\(spikes.microbatch_z\)", found[0])
        assert found[0].endswith("in quarantine from now on") == (action == "quarantine")
        assert said[-1] == (
            f"all {STEPS} steps are done{'; 2 samples are in quarantine' if action == 'quarantine' else ''}"
        )
        rows = [row for row in rows_of(Run.open(job)) if row.get("left_out")]
        assert [row["step"] for row in rows][:1] == [JUDGED] and len(rows) == times
        ended = launch(job.replace(steps=STEPS + 1), local=True, branch=True, show=lambda line: None)
        assert ended.reason == said[-1].replace(str(STEPS), str(STEPS + 1))


def test_a_run_without_ray_says_what_would_be_left_out(tmp_path: Path) -> None:
    """It comes in each epoch, since nothing is in quarantine.  No row counts anything as left out."""
    _, sample = drawn(tmp_path, JUDGED, Layout(1, 1), 0)
    job = small(tmp_path, {sample: 1.3}, spikes={"action": "warn", "microbatch_z": 6.0}, optim={"lr": 0.002})
    said, error = local(job)
    found = [text for text in said if "would leave out" in text]
    words = (
        rf"would leave out microbatch \d \(loss [\d.]+, samples .*\b{sample}\b.*\) of 6: above [\d.]+ "
        r"no loss would count "
    )
    assert re.match(f"step {JUDGED} {words}", found[0]) and not error
    steps = [int(text.split()[1]) for text in found]
    told = re.fullmatch(
        (
            rf"all {STEPS} steps are done; (\d+) steps? had microbatches that would be left out "
            r"\(warned\): (.*)"
        ),
        said[-1],
    )
    assert (
        told is not None
        and int(told[1]) == len(steps)
        and told[2].replace("–", ", ").split(", ")[0] == str(steps[0])
    )
    rows = list(rows_of(Run.open(job)))
    assert not any("left_out" in row or row["skipped"] for row in rows)
    assert [row["step"] for row in rows if row.get("would_leave_out")] == steps


@pytest.mark.parametrize("microbatch_z", [6.0, 0.0], ids=("judged", "the control"))
def test_the_largest_loss_that_counts_is_computed_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, microbatch_z: float
) -> None:
    """It is what the gradient was made by, so the commit judges by the same number."""
    asked, found = list[int](), rules.most_loss
    monkeypatch.setattr(
        rules, "most_loss", lambda past, *others: (asked.append(len(past)), found(past, *others))[1]
    )
    local(small(tmp_path, {}, steps=WINDOW + 2, spikes={"microbatch_z": microbatch_z}))
    assert asked == ([min(step, WINDOW) for step in range(WINDOW + 2)] if microbatch_z else [])


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)], ids=str)
def test_g3_a_document_without_a_number_is_met_once(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """G3: the loss of one document is NaN whenever it is read.  The step changes no byte, and the next epoch
    does not read the document. The control: with "skip" it comes back.
    """
    steps = 2 * EPOCH
    _, sample = drawn(tmp_path, 3, layout, layout.world - 1)
    told = train(ranks, small(tmp_path / "quarantine", {sample: math.nan}), layout, steps)
    for outcomes, weights in zip(told.members, told.weights, strict=True):
        assert [each.step for each in outcomes if not each.finite] == [3] == read(outcomes, sample)
        assert weights[1] == weights[2] != weights[3]
    if layout == Layout(2, 1):
        met = train(
            ranks, small(tmp_path / "skip", {sample: math.nan}, spikes={"action": "skip"}), layout, steps
        )
        assert len([each for each in met.outcomes if not each.finite]) == 2 == len(read(met.outcomes, sample))


def test_g3_the_run_says_what_is_in_quarantine(tmp_path: Path) -> None:
    """G3: the sentences name the step and the samples, at the end their number.  The control: with "skip"
    nothing is in quarantine.
    """
    _, sample = drawn(tmp_path, 3, Layout(1, 1), 0)
    said, error = local(small(tmp_path / "one", {sample: math.nan}, steps=4))
    (skipped,) = [text for text in said if "is skipped" in text]
    assert (
        skipped.startswith("step 3 is skipped")
        and (" are in quarantine from now on; look at these samples") in skipped
    )
    assert str(sample) in skipped
    ended = "1 step was skipped, because no finite gradient came: 3; 2 samples are in quarantine"
    assert said[-1] == f"all 4 steps are done; {ended}" and not error
    said, _ = local(small(tmp_path / "two", {sample: math.nan}, steps=4, spikes={"action": "skip"}))
    assert not any("quarantine" in text for text in said) and said[-1].endswith("came: 3")


def test_g1_no_branch_and_no_fork_forgets_the_quarantine_unasked(tmp_path: Path) -> None:
    """G1: "none" is refused before anything begins, from wherever the samples are in quarantine.  A branch
    with another window begins to fill that one, and keeps the quarantine, as one that only warns does.  The
    controls: a state before the quarantine, a fork that takes the weights alone, and a branch with "forget",
    which reads the sample again, and from which "none" may go on.
    """
    _, sample = drawn(tmp_path, 3, Layout(1, 1), 0)
    job = small(tmp_path, {sample: math.nan}, steps=4, checkpoint={"save_every": 2})
    local(job)
    off = job.replace(steps=5, spikes={"action": "none", "window": WINDOW})
    said = list[str]()
    begin = partial(
        launch, local=True, show=lambda line: said.append(line.text) if isinstance(line, Sentence) else None
    )
    refused = (
        r"^spikes.action = 'none' would read samples again that are in quarantine in step 4 of "
        r"generation 1 \(2 samples\); .* 'warn' .* 'forget'"
    )
    for words in ({"branch": True}, {"resume": 4}):
        with pytest.raises(JobError, match=refused):
            begin(off, **words)
    with pytest.raises(JobError, match=refused):
        begin(off.replace(name="fork"), resume="toy@4")
    assert not (tmp_path / "fork").exists() and not (tmp_path / "toy" / "branches").exists()
    assert begin(off.replace(name="early", steps=3), resume="toy@2").step == 3
    assert begin(off.replace(name="warm", steps=2, init="toy@4")).step == 2

    for action, window, steps in (("quarantine", 20, 8), ("warn", 20, 9), ("forget", WINDOW, 12)):
        said.clear()
        branch = job.replace(steps=steps, spikes={"action": action, "window": window})
        ended = begin(branch, branch=True)
        newest = Run.open(branch).newest()
        assert newest is not None and newest.step == steps
        assert len([text for text in said if "is skipped" in text]) == (action == "forget")
        assert ("2 samples are in quarantine" in ended.reason) == (action != "forget"), (
            "it counts what the state has"
        )
        if action != "forget":
            assert kept(branch, newest, HISTORY)[:, 0].tolist() == [0] * (24 - steps) + [1] * (steps - 4)
            assert kept(branch, newest, QUARANTINE)[:3, 1].tolist() == [4, 4, 0]
    assert begin(off.replace(steps=13), branch=True).step == 13


def shared(bucket: Path, gains: Mapping[int, float], **changes: Any) -> Job:
    """Returns a job like :func:`small` of two parts with 16 and 64 documents, of which the first has a
    quarter of the samples of a step.
    """
    job = small(bucket, {}, steps=12, **changes)
    parts = [
        {
            "dataset": f"{HERE}:Corrupt",
            "args": {"samples": 16, "gains": {str(key): str(gain) for key, gain in gains.items()}},
        }
    ]
    parts += [{"dataset": f"{HERE}:Corrupt", "args": {"samples": 64}}]
    return job.replace(
        data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}, "weights": [1, 3]}
    )


def test_g1_a_quarantine_leaves_the_shares_of_a_mixture_alone(ranks: Ranks, tmp_path: Path) -> None:
    """G1: a document of the small part is NaN.  Each step has its quarter of that part, also once the
    document, and its mates, are in quarantine, with the bits of a run that is interrupted in another layout,
    and goes on with one worker.  The control: replaced from all documents, as by earlier versions, some steps
    would have less of that part.
    """
    sample = Cursor.of(shared(tmp_path, {}).stretches(), 80, sizes=(16, 64)).ids(3)
    (bad,) = [each for each in sample if each < 16][:1]
    job = shared(tmp_path / "one", {bad: math.nan})
    told = train(ranks, job, Layout(2, 1), 12)
    (skipped,) = [each for each in told.outcomes if not each.applies]
    mates = set(skipped.quarantined)
    assert bad in mates and skipped.step == read(told.outcomes, bad)[-1] <= 6
    for outcome in told.outcomes:
        ids = [each for microbatch in outcome.samples for each in microbatch]
        assert sum(each < 16 for each in ids) == len(ids) // 4
        assert outcome.step <= skipped.step or not mates & {*ids}
    before = Cursor.of(job.stretches(), 80, sizes=(16, 64))
    before.avoid(dict.fromkeys(mates, skipped.step + 1), mates)
    assert min(sum(each < 16 for each in before.ids(step)) for step in range(1, 13)) < job.global_batch // 4
    rows = kept(job, told.version, QUARANTINE)
    assert dict(rows[rows[:, 1] != 0].tolist()) == dict.fromkeys(mates, -1 - skipped.step)

    cut = shared(tmp_path / "cut", {bad: math.nan})
    half = train(ranks, cut, Layout(1, 2), 6)
    assert train(ranks, cut, Layout(1, 1), 12, half.version).hash == told.hash


def test_g1_a_quarantine_of_an_earlier_version_is_replaced_as_then(tmp_path: Path) -> None:
    """G1: a row without the mark means any source, beside new rows with it.  A run without weights has the
    rows that it always had.
    """
    job = shared(tmp_path, {})
    tensors = {
        each.name: torch.zeros(each.shape, dtype=DTYPES[each.dtype]) for each in tensors_of(job.spikes)
    }
    tensors[QUARANTINE][0] = torch.tensor([5, 3])
    spikes = SpikeMemory(job, tensors)
    spikes.after(
        Outcome(4, 1, math.nan, (math.nan, 1.0), (1, 1), ((0, 7), (9, 11)), False, quarantined=(0, 7))
    )
    for each in (spikes, SpikeMemory(job, tensors)):
        assert (each.quarantined, set(each.anywhere)) == ({5: 3, 0: 5, 7: 5}, {5})
    assert tensors[QUARANTINE][:4].tolist() == [[5, 3], [0, -5], [7, -5], [0, 0]]
    plain = small(tmp_path, {})
    tensors = {
        each.name: torch.zeros(each.shape, dtype=DTYPES[each.dtype]) for each in tensors_of(plain.spikes)
    }
    SpikeMemory(plain, tensors).after(
        Outcome(4, 1, math.nan, (math.nan,), (1,), ((0, 7),), False, quarantined=(0, 7))
    )
    assert tensors[QUARANTINE][:3].tolist() == [[0, 5], [7, 5], [0, 0]]


def test_more_than_half_of_a_part_may_not_be_in_quarantine(tmp_path: Path) -> None:
    """Eight of its 16 documents may be.  The control: as many of the other part."""
    job = shared(tmp_path, {})
    spikes = SpikeMemory(
        job, {each.name: torch.zeros(each.shape, dtype=DTYPES[each.dtype]) for each in tensors_of(job.spikes)}
    )

    def commit(step: int, *bad: int) -> Outcome:
        return Outcome(step, 1, math.nan, (math.nan, 1.0), (1, 1), (bad, (79,)), False)

    spikes.after(spikes.judged(commit(1, *range(8)), (16, 64)))
    with pytest.raises(
        DataError,
        match=(
            r"step 2 9 samples would be in quarantine, but at most 8 of the 16 of data.args.parts\[0\] "
            r"may be"
        ),
    ):
        spikes.judged(commit(2, 8), (16, 64))
    assert spikes.judged(commit(2, 16), (16, 64)).quarantined == (16,)


def test_more_than_half_of_the_data_may_not_be_in_quarantine(tmp_path: Path) -> None:
    """Five of ten samples may be; the sixth ends the run, in a sentence.  A sample is listed once."""
    job = small(tmp_path, {})
    spikes = SpikeMemory(
        job, {each.name: torch.zeros(each.shape, dtype=DTYPES[each.dtype]) for each in tensors_of(job.spikes)}
    )

    def commit(step: int, *bad: int) -> Outcome:
        return Outcome(step, 1, math.nan, (math.nan, 1.0), (1, 1), (bad, (9,)), False)

    for step, bad in ((1, (0, 1)), (2, (2, 2, 3, 4))):
        outcome = spikes.judged(commit(step, *bad), [10])
        spikes.after(outcome)
    assert spikes.quarantined == {0: 2, 1: 2, 2: 3, 3: 3, 4: 3}
    with pytest.raises(
        DataError,
        match=(
            r"after step 3 6 samples would be in quarantine, but at most 5 of the 10 may be; clean the data"
        ),
    ):
        spikes.judged(commit(3, 5), [10])
    assert spikes.judged(commit(3, 5), [12]).quarantined == (5,), "the control"
