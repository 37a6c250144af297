"""Compares the golden data of an earlier commit with the code of today: bits, journals, a checkpoint, the
simulator.

The data were computed by the commit that they name, never by the code under test.  ``README.md`` beside this
file says what is golden, and how to add to it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from elastic.control.machine import advance
from elastic.control.rules import Rules
from elastic.errors import JobError
from elastic.job import NUMERICS
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from storage import journal
from storage.objects import ObjectStore
from tests.golden.jobs import LOCAL, PINNED, Request, answered, ask, final_hash, golden, kernels, pinned
from tests.golden.make import NEWEST, facts, read, unpack
from tests.golden.runs import JOBS
from tests.golden.simulator import SEEDS, seen
from tests.support.job_file import to_toml
from tests.support.ranks import Ranks

A_BIT_MORE = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 0.01))[0] + 1))[0]
"""The float32 after 0.01."""
REQUESTS: Sequence[Request] = (
    *(
        ("base", "1x2", {}),
        ("untied", "1x2", {}),
        ("bf16", "1x2", {}),
        ("bf16", LOCAL, {}),
        ("own model", LOCAL, {}),
        ("two in a block", "1x2", {}),
        ("muon", "1x2", {}),
    ),
    ("base", "1x2", {"numerics": 4}),
    ("base", "1x2", {"numerics": 5}),
)
"""Jobs with the newest ``numerics``, and one with each older number; the run of
:func:`test_a_kept_run_goes_on_to_the_golden_bits` has 5.
"""
OTHERS: Mapping[str, Request] = {
    "the seed": ("own model", LOCAL, {"seed": 1}),
    "a bit of the learning rate": ("own model", LOCAL, {"optim": {"lr": A_BIT_MORE}}),
    "the samples": (
        "own model",
        LOCAL,
        {"data": {"dataset": "tests.support.toys:Sums", "args": {"vocab": 28}}},
    ),
}
JOURNALS = sorted(read("journals.json"))


def entry_of(name: str, kinds: dict[str, str], numerics: int = NEWEST) -> Any:
    """Returns the golden entry of a job for this machine; skips where there is none."""
    known = golden(numerics)["kinds"]
    if name not in known.get(kinds[name], {}):
        pytest.skip(
            f"not proven here: no golden data of {name!r} for this kind ({kinds[name]}); there are "
            f"{'; '.join(known)}"
        )
    return known[kinds[name]][name]


def turn_a_bit(path: Path) -> None:
    """Turns one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- bits


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with kernels(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def answer(pool: Ranks) -> Any:
    """The kind of this machine for each job, and the hashes of all requests."""
    asked = (*REQUESTS, *OTHERS.values())
    found = answered(pool, asked)
    return {
        "kinds": found["kinds"],
        "hashes": {json.dumps(each): value for each, value in zip(asked, found["hashes"], strict=True)},
    }


@pytest.mark.parametrize(
    "request_", REQUESTS, ids=lambda each: ", ".join(map(str, (*each[:2], *each[2].values())))
)
def test_the_bits_are_the_golden_ones(answer: Any, request_: Request) -> None:
    expected = entry_of(request_[0], answer["kinds"], request_[2].get("numerics", NEWEST))
    assert request_[1] in expected["seen"]
    assert answer["hashes"][json.dumps(request_)] == expected["hash"]


@pytest.mark.fast
def test_each_numerics_has_golden_bits_of_its_own() -> None:
    assert NEWEST == NUMERICS
    of_four, of_five, of_six = (
        {name: entry["hash"] for jobs in golden(numerics)["kinds"].values() for name, entry in jobs.items()}
        for numerics in (4, 5, 6)
    )
    assert of_four.keys() < of_five.keys() and not set(of_four.values()) & set(of_five.values())
    # without a tied weight and without dropout 6 has nothing to change
    same = {"untied", "bf16 untied", "own model"}
    assert of_six.keys() == of_five.keys()
    assert {name for name in of_six if of_six[name] == of_five[name]} == same


@pytest.mark.parametrize("what", OTHERS)
def test_another_input_has_other_bits(answer: Any, what: str) -> None:
    """Negative controls: another seed, a learning rate of one bit more, other samples."""
    assert answer["hashes"][json.dumps(OTHERS[what])] != entry_of("own model", answer["kinds"])["hash"]


@pytest.mark.fast
def test_no_two_jobs_have_the_same_bits() -> None:
    """Different bits show that each job's speciality (tied or not, clipped or not, …) counts."""
    for jobs in golden()["kinds"].values():
        hashes = [entry["hash"] for entry in jobs.values()]
        assert len(set(hashes)) == len(hashes)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_job_in_every_layout_has_the_golden_bits() -> None:
    jobs = [(name, entry) for jobs in golden()["kinds"].values() for name, entry in jobs.items()]
    runs = sorted(
        {(name, layout) for name, entry in jobs for layout in entry["seen"] if not layout.startswith("run ")}
    )
    requests: list[Request] = [(name, layout, {}) for name, layout in runs]
    found = ask(requests)
    known, unknown = golden()["kinds"], set[str]()
    for (name, layout, _), value in zip(requests, found["hashes"], strict=True):
        entry = known.get(found["kinds"][name], {}).get(name)
        unknown |= {name} if entry is None else set()
        assert entry is None or entry["hash"] == value, (
            f"{name} in layout {layout} does not end with the golden hash"
        )
    if unknown:
        pytest.skip(
            f"not proven here: no golden data of {', '.join(sorted(unknown))} for this kind; the others are "
            "as they were"
        )


@pytest.mark.full
@pytest.mark.parametrize("run", ["killed", "shards", "coordinator", "stopped", "undisturbed"])
def test_runs_on_a_cluster_have_the_golden_bits(tmp_path: Path, run: str) -> None:
    """Runs through points of the kill matrix, a coordinator's death and a stop end with the bits of the
    golden commit.
    """
    done = pinned("-m", "tests.golden.runs", str(tmp_path), run)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = ask([(JOBS[run], LOCAL, {})])["kinds"]
    assert json.loads(done.stdout.splitlines()[-1]) == {run: entry_of(JOBS[run], kinds)["hash"]}


@pytest.mark.full
@pytest.mark.parametrize("variable", [name for name in PINNED if name != "OMP_NUM_THREADS"])
def test_other_kernels_are_another_kind(variable: str) -> None:
    """Negative control of the skip: where a kernel that is not pinned gives other bits, the kind of the
    machine says so.
    """
    known, others = (
        golden()["kinds"],
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    )
    names = ("base", "own model", "bf16", "text")
    found = ask([(name, LOCAL, {}) for name in names], **{variable: others[variable]})
    jobs = [known.get(found["kinds"][name], {}).get(name) for name in names]
    assert None in jobs, "this variable makes no difference here: is it still needed?"
    assert not [
        name
        for name, entry, value in zip(names, jobs, found["hashes"], strict=True)
        if entry and entry["hash"] != value
    ]


# ---- journals


@pytest.mark.fast
@pytest.mark.parametrize("name", JOURNALS)
def test_a_journal_says_what_it_said(tmp_path: Path, name: str) -> None:
    unpack(f"journals/{name}.tar.gz", tmp_path)
    assert facts(tmp_path, name) == read("journals.json")[name]


@pytest.mark.fast
@pytest.mark.parametrize("name", JOURNALS)
def test_a_journal_is_decided_again_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    job = unpack(f"journals/{name}.tar.gz", tmp_path)
    (tmp_path / "job.toml").write_text(to_toml(job), encoding="utf-8")
    assert main(["replay", str(tmp_path / "job.toml"), "--check"]) == 0
    told = f"{read('journals.json')[name]['decisions']} decisions: this version decides 0 otherwise"
    assert told in capsys.readouterr().out


@pytest.mark.fast
@pytest.mark.parametrize("name", JOURNALS)
def test_a_journal_with_one_record_bent_is_found_out(tmp_path: Path, name: str) -> None:
    """Negative controls: in a file the decision that differs is found; in the bucket the object's digest is
    found wrong before that.
    """
    job = unpack(f"journals/{name}.tar.gz", tmp_path / "bucket")
    segments = journal.read(ObjectStore.open(job.bucket), name)
    (tmp_path / "job.toml").write_text(to_toml(job), encoding="utf-8")
    written = tmp_path / "journal.jsonl"
    written.write_text(
        "\n".join(json.dumps(line) for snapshot, records in segments for line in (snapshot, *records)),
        encoding="utf-8",
    )
    assert main(["replay", str(written), "--check"]) == 0
    bent = next(record for _, records in segments for record in records if record["actions"])
    whole = written.read_text(encoding="utf-8")
    written.write_text(whole.replace(json.dumps(bent), json.dumps({**bent, "actions": []})), encoding="utf-8")
    assert main(["replay", str(written), "--check"]) == 1
    segment = next((Path(job.bucket) / name / "journal").rglob("*.gz"))
    turn_a_bit(segment)
    assert main(["replay", str(tmp_path / "job.toml"), "--check"]) == 1


# ---- a checkpoint


TWO = "--workers.min 2 --workers.max 2 --parallel.dp_replicate 1 --parallel.dp_shard 2"


def commanded(world: Any, words: list[str]) -> int:
    world.close()  # a local run forms its own
    return main(words)


@pytest.mark.parametrize(
    "options", ["--local", pytest.param(TWO, marks=pytest.mark.full)], ids=["alone", "two shards"]
)
def test_a_kept_run_goes_on_to_the_golden_bits(
    tmp_path: Path, pool: Ranks, answer: Any, options: str
) -> None:
    """Four workers saved the run, as two replicas of two shards; the command line goes on with it."""
    job, step = kept_run(tmp_path)
    kinds = {"stopped": answer["kinds"]["base"]}  # both are in float32
    expected = entry_of("stopped", kinds, job.numerics)
    # the run noted the code of its day, and files of tests have changed since
    command = ["train", str(tmp_path / "job.toml"), "--accept-code", *options.split()]
    if options == "--local":
        assert pool.run(Layout(1, 1), commanded, command) == [0]
    else:
        done = pinned("-m", "elastic", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    run = Run.open(job)
    assert run.checkpoints.manifest(run.version_at(job.steps)).lineage[0] == (1, step), (
        "it did not begin where the kept run ended"
    )
    assert final_hash(job) == expected["hash"]


def test_a_kept_run_with_one_bit_turned_is_found_out(tmp_path: Path) -> None:
    """Negative controls: a bit of a shard, and another job."""
    job, _ = kept_run(tmp_path)
    assert main(["checkpoint", "verify", str(tmp_path / "job.toml")]) == 0
    turn_a_bit(next(Path(job.bucket).rglob("*.safetensors")))
    assert main(["checkpoint", "verify", str(tmp_path / "job.toml")]) == 1
    with pytest.raises(JobError, match="seed = 0 in the run and 1 now"):
        Run.open(job.replace(seed=1))


def kept_run(folder: Path) -> tuple[Any, int]:
    """Unpacks the kept run and writes its job file; returns the job, and the step of its checkpoint."""
    job = unpack("checkpoint.tar.gz", folder / "bucket")
    (folder / "job.toml").write_text(to_toml(job), encoding="utf-8")
    newest = Run.look(job).newest()
    assert newest is not None and 0 < newest.step < job.steps
    return job, newest.step


# ---- the simulator


@pytest.mark.fast
@pytest.mark.parametrize(
    "seeds",
    [SEEDS[:24], pytest.param(SEEDS[24:], marks=pytest.mark.full)],
    ids=lambda each: f"{each[0]}-{each[-1]}",
)
def test_the_simulator_sees_what_it_saw(seeds: Sequence[int]) -> None:
    kept = read("simulator.json")
    if not kept["current"]:
        pytest.skip(
            f"not proven here: what the simulator sees was changed on purpose since {kept['commit']}; make "
            "it anew"
        )
    assert {str(seed): seen(seed) for seed in seeds} == {
        str(seed): kept["seeds"][str(seed)] for seed in seeds
    }


@pytest.mark.fast
def test_another_rule_is_seen() -> None:
    """Negative controls: each seed has a digest of its own, and some seeds have another one where a fence has
    a second more.
    """
    kept = read("simulator.json")["seeds"]
    assert len(kept) == len(SEEDS) == len({line.rsplit(", ", 1)[1] for line in kept.values()})

    def patient(run: Any, event: Any, now: float, rules: Rules) -> Any:
        return advance(run, event, now, replace(rules, fence_s=rules.fence_s + 1.0))

    assert any(seen(seed, patient) != seen(seed) for seed in range(20)), "no fence of these seeds ran out"
