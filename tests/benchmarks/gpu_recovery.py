"""On real GPUs: compiled, in bf16, losing ranks again and again, and ending with the same bits.

    python -m tests.benchmarks.gpu_recovery [--size large] [--sockets] [scenario ...]     # default: all that its GPUs allow
    python -m tests.benchmarks.gpu_recovery --size tiny --world 2                         # a rehearsal on CPUs, over gloo

Each scenario is a whole run under Ray, on all GPUs of this machine; its bits are compared with the first run's of the same call.
Times are the journal's, the killer's and the survivors' clocks on one machine; medians are over the kills of one run.  ``--sockets``: NCCL
without peer access and shared memory, as between hosts.  What was found goes to ``--out`` after every scenario.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
import torch
from blake3 import blake3

from actors import cluster
from elastic.data.prepare import prepare
from elastic.job import Job
from elastic.report.recoveries import Recovery, recoveries
from elastic.report.story import StepLine
from elastic.runs import Run
from tests.support.chaos import Trial, Witness, trial
from tests.support.mischief import STEP

SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "model": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256},
        "seq_len": 4096,
        "steps": 24,
    },
    "large": {"model": {"dim": 2048, "layers": 20, "heads": 16}, "seq_len": 2048, "steps": 120},  # 1.07 B parameters
    "medium": {"model": {"dim": 768, "layers": 12, "heads": 12}, "seq_len": 1024, "steps": 120},  # 0.09 B
    "tiny": {"model": {"dim": 64, "layers": 3, "heads": 2}, "seq_len": 64, "steps": 60},
}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
PHASES = ("detect_s", "decide_s", "abort_s", "form_s", "heal_s", "go_s", "first_microbatch_s", "next_commit_s", "fence_answer_s")


@dataclass
class Kill:
    """One, and what the survivors' counters said of it."""

    generation: int
    at: float
    step: int
    microbatch: int
    stepped_at: float = 0.0
    asked: bool = False
    """Where the survivors stand, since they were long in coming."""


class Killer:
    """Strikes the newest worker each time all ``workers`` have stepped together, in the middle of a step's microbatches."""

    def __init__(self, workers: int, kills: int, after: int, until: int, kind: signal.Signals = signal.SIGKILL) -> None:
        self.workers, self.wanted, self.after, self.until, self.kind = workers, kills, after, until, kind
        self.kills: list[Kill] = []
        self.whole = (0, 0)
        """(generation, step) at which the world was first seen whole."""

    def __call__(self, witness: Witness, view: Any) -> bool:
        if self.kills and not self.kills[-1].stepped_at:
            self._await(witness, view)
            return False
        if len(self.kills) == self.wanted or view.step >= self.until:
            return True
        if view.state != "Running" or len(view.workers) != self.workers or not all(name in witness.seen for name in view.workers):
            return False
        if self.whole[0] != view.generation:
            self.whole = (view.generation, view.step)
        victim = witness.seen[max(view.workers, key=lambda name: int(name[1:]))]
        counters = victim.counters
        middle = counters["microbatch"] >= 1 and counters["collective"] == 0 and counters["generation"] == view.generation
        if middle and view.step >= max(self.whole[1] + 3, self.after):
            self.kills.append(Kill(view.generation, time.time(), counters["step"] + 1, counters["microbatch"]))
            victim.process.kill(self.kind)
        return False

    def _await(self, witness: Witness, view: Any) -> None:
        """Until every member of the next world steps.  Whoever has not left after 3 s writes its threads' stacks into its log."""
        if not self.kills[-1].asked and time.time() > self.kills[-1].at + 3:
            self.kills[-1].asked = True
            for each in witness.seen.values():
                if each.process.running and each.counters["generation"] <= self.kills[-1].generation:
                    each.process.kill(signal.SIGUSR1)
        if view.generation > self.kills[-1].generation and view.state == "Running" and all(name in witness.seen for name in view.workers):
            counters = [witness.seen[name].counters for name in view.workers]
            since = [each["stepping_since_ns"] / 1e9 for each in counters if each["generation"] == view.generation]
            if len(since) == len(counters) and min(since) > self.kills[-1].at:
                self.kills[-1].stepped_at = max(since)


@dataclass
class Scenario:
    """What is changed in the job, what strikes from outside, and what must hold afterwards beyond the bits."""

    about: str
    changes: dict[str, Any] = field(default_factory=dict)
    act: Killer | None = None
    check: Callable[[Trial], dict[str, Any]] = lambda _: {}


def scenarios(world: int, steps: int, kills: int) -> dict[str, Scenario]:
    """For so many GPUs.  Live healing needs replicas: 2 × world/2."""
    last, half = world - 1, max(world // 2, 1)
    replicas = {"parallel": {"dp_replicate": "auto", "min_shard": half}}
    shards = {"parallel": {"dp_replicate": 1}}
    none = {"copies": {"copy_every": 0}}
    saves = none | {"checkpoint": {"save_every": max(steps // 4, 1)}}
    spare = {"workers": {"min": 1, "max": max(last, 1), "spares": 1}}
    seldom = {"deadlines": DEADLINES | {"stall_s": 5, "fence_s": 3}}
    early, late = steps // 4 + 4, steps - 5

    def fault(point: str, step: int, generation: int, rank: int, kind: str = "SIGKILL") -> dict[str, Any]:
        return {"point": point, "step": step, "generation": generation, "world_rank": rank, "kind": kind}

    chain = [
        fault("forward", 6, 1, 0, "exception"),
        fault("before_commit", 8, 2, last),
        *(fault("forming", step, 3, 0) for step in (5, 8)),  # from live replicas, or from the save of step 4
        *(fault("healing", step, 4, 0) for step in (5, 8)),
        fault("save", 12, 5, 0),
        fault("backward", 16, 6, 0, "SIGSEGV"),
        fault("before_update", 18, 7, 0, "exit"),
        fault("in_update", 22, 8, 0),
    ]
    frozen = [fault("before_commit", STEP, 1, last, "SIGSTOP")]
    killed = [fault("forward", STEP, 1, last)]  # while rank 0 sleeps: its replica needs nothing of rank 0 yet
    return {
        "undisturbed": Scenario(f"2×{half}, nothing happens", replicas),
        "fewer": Scenario(f"{max(last, 1)} of {world} workers, nothing happens", {"workers": {"min": max(last, 1), "max": max(last, 1)}}),
        "replicas": Scenario(f"2×{half}, SIGKILL, healed live, and back", replicas, Killer(world, kills, 5, late)),
        "shards": Scenario(f"1×{world}, SIGKILL, healed from the bucket, and back", shards | saves, Killer(world, kills, early, late)),
        "copied": Scenario(f"1×{world}, nothing happens, copies to host memory after every step", shards),
        "uncopied": Scenario(f"1×{world}, nothing happens, no copies", shards | none),
        "host": Scenario(f"1×{world}, SIGKILL, healed from copies in host memory, and back", shards, Killer(world, kills, 5, late)),
        "spare": Scenario(
            f"1×{max(last, 1)} and a spare, SIGKILL, healed from host memory", shards | spare, Killer(max(last, 1), kills, 5, late)
        ),
        "freeze": Scenario(f"2×{half}, SIGSTOP", replicas | seldom, Killer(world, min(kills, 2), 5, late, signal.SIGSTOP)),
        "points": Scenario(
            "one fault in each of eight generations",
            replicas | {"faults": chain, "checkpoint": {"save_every": 4}},
            check=deaths,
        ),
        "staggered": Scenario(
            "a frozen rank; rank 0 aborts 0.3 s before the others hear of it",
            replicas | seldom | {"faults": frozen, "loss": "tests.support.mischief:early_abort"},
            check=nobody_applied,
        ),
        "gil": Scenario(
            "a rank is killed while rank 0 keeps the GIL for 3 s",
            replicas | {"faults": killed, "loss": "tests.support.mischief:holding_the_gil"},
        ),
    }


DEADLINES = {"grow_debounce_s": 1, "form_s": 240, "fence_s": 10}


def deaths(done: Trial) -> dict[str, Any]:
    """How many processes ended in which way that was not the end of the run; an exception that was survived is none."""
    ended = [each.ended for each in done.witness.seen.values() if each.ended is not None]
    ways = [each.signal.name if each.signal else f"exit {each.exit_code}" for each in ended]
    return {"deaths": {way: ways.count(way) for way in sorted(set(ways) - {"exit 0"})}}


def nobody_applied(done: Trial) -> dict[str, Any]:
    """Each survivor of the first world applied each step once, by its counter; the journal: a later generation committed that step."""
    frozen = done.witness.killed()
    first = [each for each in done.witness.seen.values() if int(each.worker[1:]) <= done.job.workers.max and each not in frozen]
    applied = {each.worker: each.final["updates_applied"] for each in (*first, *frozen)}
    before = [each.final["updates_applied"] == STEP - 1 for each in frozen]
    once = [each.final["updates_applied"] == done.job.steps for each in first]
    later = done.ledger[STEP].generation > 1
    return {
        "updates_applied": applied,
        "committed_by": done.ledger[STEP].generation,
        "nobody_applied": later and all(once) and before == [True],
    }


def job_of(folder: Path, name: str, options: argparse.Namespace, changes: Mapping[str, Any]) -> Job:
    size, gpus = SIZES[options.size], int(options.device == "cuda")
    workers = {"min": 1, "max": options.world} | dict(changes.get("workers", {}))
    values: dict[str, Any] = {
        "name": name,
        "bucket": str(folder / "bucket"),
        "model_args": size["model"],
        "data": {"args": {"path": str(folder / f"tokens-{size['seq_len']}"), "seq_len": size["seq_len"]}},
        "loss": "tests.support.mischief:watched",
        "steps": options.steps,
        "global_batch": 16,
        "microbatch": 1,
        "precision": "bf16",
        "compile": bool(gpus),
        "optim": {"lr": 3e-4},
        "schedule": {"warmup_steps": 5},
        "checkpoint": {"save_every": 1000},
        "deadlines": DEADLINES,
    }
    return Job(**(values | dict(changes) | {"workers": workers | {"gpus": gpus, "cpus": 1}}))


def content_hash(job: Job) -> str:
    """blake3 over every tensor of the newest checkpoint, in order of name, whatever shards it lies in."""
    run, digest = Run.open(job), blake3()
    reader = run.checkpoints.open(run.version_at(job.steps))
    for tensor in sorted(reader.tensors()):
        for _, data in reader.read([tensor.whole()]):
            digest.update(f"{tensor.kind}/{tensor.name}".encode() + data)
    return str(digest.hexdigest())[:16]


def fence_answers(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """From each fence to each answer; None for whoever never answered."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for record in records:
        event = record["event"]
        if event["$"] == "Fenced" and (event["generation"], event["worker"]) in found:
            answer = found[event["generation"], event["worker"]]
            answer["seconds"] = answer["seconds"] or round(record["at"] - answer["asked_at"], 4)
        for action in record["actions"]:
            if action["$"] == "Fence":
                for worker in action["members"]:
                    new = {"generation": action["generation"], "worker": worker, "asked_at": record["at"], "seconds": None}
                    found.setdefault((action["generation"], worker), new)
    return list(found.values())


def kills_of(killer: Killer, changes: Sequence[Recovery], answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kill."""
    rows = []
    for kill in killer.kills:
        loss = next((each for each in changes if not each.planned and each.known_at >= kill.at), None)
        if loss is None or not kill.stepped_at:
            continue
        mine = [answer["seconds"] for answer in answers if answer["generation"] == kill.generation]
        rows.append(
            {
                "generation": kill.generation,
                "step": kill.step,
                "microbatch": kill.microbatch,
                "detect_s": loss.known_at - kill.at,
                **{key: value for key, value in asdict(loss).items() if key.endswith("_s") and key != "step_s"},
                "first_microbatch_s": kill.stepped_at - kill.at,
                "next_commit_s": loss.committed_at - kill.at,
                "fence_answer_s": max((each for each in mine if each is not None), default=0.0),
                "fences_unanswered": mine.count(None),
                "reason": loss.reason,
            }
        )
    return rows


def memory_of(job: Job) -> dict[str, list[int]]:
    """MiB allocated by each process, oldest first, as it said every tenth step."""
    found: dict[str, list[int]] = {}
    for log in sorted(Path(job.bucket).glob(f"{job.name}/logs/*/*.log")):
        said = re.findall(r"^memory: (\S+) generation \d+ step \d+ allocated (\d+)", log.read_text(errors="replace"), re.MULTILINE)
        for worker, used in said:
            found.setdefault(worker, []).append(int(used) >> 20)
    return found


def measure(name: str, scenario: Scenario, job: Job) -> dict[str, Any]:
    began = time.monotonic()
    done = trial(job, scenario.act, hash_it=False)
    for line in done.lines:
        if not isinstance(line, StepLine):
            print(f"    {line.at:.2f} {line.text[:300]}", flush=True)
    found: dict[str, Any] = {
        "scenario": name,
        "about": scenario.about,
        "state": done.result.state,
        "took_s": round(time.monotonic() - began, 1),
    }
    if done.result.state != "Finished":
        return found | {"result": str(done.result)[:500]}
    records = Run.open(job).records()
    changes, answers = recoveries(records), fence_answers(records)
    lines = [line for line in done.lines if isinstance(line, StepLine)]
    steady = [b.at - a.at for a, b in pairwise(lines[4:]) if a.generation == b.generation]
    work = done.witness.total("microbatches_run")
    found |= {
        "hash": content_hash(job),
        "losses": [done.losses[0], done.losses[-1]],
        "step_s": statistics.median(steady) if steady else None,
        "generations": done.witness.generation,
        "microbatches_done_again": work - job.steps * job.microbatches,
        "healed_live_gb": done.witness.total("healed_live_bytes") / 1e9,
        "healed_host_gb": done.witness.total("healed_host_bytes") / 1e9,
        "healed_bucket_gb": done.witness.total("healed_bucket_bytes") / 1e9,
        "growth_s": [each.committed_at - each.known_at for each in changes[1:] if each.planned],
        "fence_answers": [(each["generation"], each["worker"], each["seconds"]) for each in answers],
        "kills": kills_of(scenario.act, changes, answers) if scenario.act is not None else [],
        "memory_mib": memory_of(job),
        **scenario.check(done),
    }
    return found


def show(found: Mapping[str, Any], reference: str | None) -> None:
    """A paragraph for people."""
    same = {None: "nothing to compare with", found.get("hash"): "the same bits"}.get(reference, "OTHER BITS")
    print(
        f"\n== {found['scenario']}: {found['about']}: {found['state']} in {found['took_s']} s; {found.get('hash', '')} {same}", flush=True
    )
    skip = {"scenario", "about", "state", "took_s", "hash", "kills", "fence_answers"}
    print("   " + "; ".join(f"{key} {_short(value)}" for key, value in found.items() if key not in skip))
    answers = [seconds for *_, seconds in found.get("fence_answers", ())]
    if answers:
        print(f"   fences answered: {_short([each for each in answers if each is not None])}; not answered: {answers.count(None)}")
    kills = found.get("kills", [])
    for phase in PHASES if kills else ():
        values = [kill[phase] for kill in kills]
        print(f"   {phase:20} median {statistics.median(values):7.3f}   worst {max(values):7.3f}   of {len(values)}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"[{', '.join(_short(each) for each in value)}]" if isinstance(value, list) else str(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", nargs="*")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count())
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--reference", help="hash of an undisturbed run with the same --size and --steps; default: the first run's")
    parser.add_argument("--seconds", type=float, default=480, help="no scenario begins later")
    parser.add_argument("--work", type=Path, help="folder for buckets; default: a temporary one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.steps = options.steps or SIZES[options.size]["steps"]
    if options.world < 2:
        parser.error(f"--world {options.world}: somebody must be left; this machine has {torch.cuda.device_count()} GPUs")
    return options


def main() -> None:
    options, began = arguments(), time.monotonic()
    if options.sockets:
        os.environ |= SOCKETS  # before Ray starts: its processes inherit it
    folder = Path(mkdtemp(dir=options.work))
    prepare(Path(sysconfig.get_path("stdlib")) / "asyncio", str(folder / f"tokens-{SIZES[options.size]['seq_len']}"), (".py",))
    known = scenarios(options.world, options.steps, options.kills)
    device = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    about = f"{options.world} x {device}, torch {torch.__version__}, ray {ray.__version__}, {options.size}, sockets {options.sockets}"
    print(about, flush=True)
    cluster.connect("local")
    table: list[dict[str, Any]] = []
    target = options.out / f"gpu_recovery-{options.size}-{options.world}{'-sockets' if options.sockets else ''}.json"
    for number, name in enumerate(options.scenario or known):
        if time.monotonic() - began > options.seconds:
            print(f"no time is left for {name}", flush=True)
            continue
        job = job_of(folder, f"run{number}", options, known[name].changes)
        table.append(measure(name, known[name], job))
        reference = options.reference or table[0].get("hash")
        table[-1]["same_bits"] = table[-1].get("hash") == reference
        show(table[-1], reference)
        with target.with_suffix(".log").open("a") as kept:
            for log in sorted((folder / "bucket").glob("*/logs/*/*.log")):
                kept.write(f"==== {name} {log.name}\n{log.read_text(errors='replace')}\n")
        target.write_text(json.dumps({"about": about, "scenarios": table}, indent=1) + "\n")
        shutil.rmtree(folder / "bucket", ignore_errors=True)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
