"""Runs jobs on real GPUs, compiled and in bf16, that lose ranks again and again and must end with the same
bits.

    python -m tests.benchmarks.gpu_recovery [--size large] [--sockets] [scenario ...]     # default: all that its GPUs allow
    python -m tests.benchmarks.gpu_recovery --size tiny --world 2                         # a rehearsal on CPUs, over gloo

Each scenario is a whole run under Ray, on all GPUs of this machine; its bits are compared with the first
run's of the same call. Times come from the journal, the killer and the survivors, all on one machine; medians
are over the kills of one run.  ``--sockets``: NCCL without peer access and shared memory, as between hosts.
``--nodes 2``: two Ray nodes, each with its share of the GPUs, and a keeper. ``--per-gpu 2`` beside it: each
GPU is on both nodes and has two ranks, and NCCL takes the nodes for two hosts.  This shows what must hold,
not how fast it is.  Results go to ``--out`` after every scenario.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
import torch
from blake3 import blake3
from ray.cluster_utils import Cluster

from actors import cluster
from actors.processes import log_file
from elastic.data.prepare import prepare
from elastic.job import Job
from elastic.report.recoveries import Recovery, recoveries
from elastic.report.story import Line, StepLine
from elastic.runs.run import Run
from elastic.train.gauges.counters import FOLDER as SEGMENTS
from elastic.train.gauges.counters import Counters
from storage.checkpoints import MANIFEST
from tests.benchmarks.gpu_scenarios import (
    DEADLINES,
    Killer,
    Scenario,
    compiled_of,
    deaths,
    memory_of,
    scenarios,
    transports_of,
)
from tests.benchmarks.peers.nodes import VARIABLES
from tests.support.chaos import assert_nothing_left, trial
from tests.support.processes import children

SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "model": {
            "dim": 4096,
            "layers": 32,
            "heads": 32,
            "kv_heads": 8,
            "hidden": 14336,
            "vocab": 128256,
            "tied": False,
        },
        "seq_len": 4096,
        "steps": 24,
    },
    "3b": {  # 3.2 B parameters; on each of two GPUs as much as 8b on each of four
        "model": {"dim": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "hidden": 8192, "vocab": 128256},
        "seq_len": 4096,
        "steps": 24,
    },
    # 1.01 B parameters
    "large": {"model": {"dim": 2048, "layers": 20, "heads": 16}, "seq_len": 2048, "steps": 120},
    "medium": {"model": {"dim": 768, "layers": 12, "heads": 12}, "seq_len": 1024, "steps": 120},  # 0.09 B
    "tiny": {"model": {"dim": 64, "layers": 3, "heads": 2}, "seq_len": 64, "steps": 60},
}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
TOLD = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
"""Environment variables that make NCCL write the transports of its channels."""
TAIL = 120
"""Number of lines that are shown of each log of a run that was given up."""
PHASES = (
    "detect_s",
    "decide_s",
    "abort_s",
    "form_s",
    "heal_s",
    "go_s",
    "first_microbatch_s",
    "next_commit_s",
    "fence_answer_s",
)


def job_of(folder: Path, name: str, options: argparse.Namespace, changes: Mapping[str, Any]) -> Job:
    size, gpus = SIZES[options.size], int(options.device == "cuda")
    workers = {"min": 1, "max": options.world} | dict(changes.get("workers", {}))
    # else each takes four more slots
    copies = ({"buddy_every": 0} if options.nodes == 1 else {}) | dict(changes.get("copies", {}))
    values: dict[str, Any] = {
        "name": name,
        "bucket": str(folder / "bucket"),
        "model_args": size["model"],
        "data": {"args": {"path": str(folder / f"tokens-{size['seq_len']}"), "seq_len": size["seq_len"]}},
        "loss": "tests.support.mischief:watched",
        "steps": options.steps,
        "global_batch": options.global_batch,
        "microbatch": 1,
        "precision": "bf16",
        "compile": bool(gpus),
        "optim": {"lr": 3e-4},
        "schedule": {"warmup_steps": 5},
        "checkpoint": {"save_every": 1000},
        "deadlines": DEADLINES,
    }
    return Job(
        **(values | dict(changes) | {"workers": workers | {"gpus": gpus, "cpus": 1}, "copies": copies})
    )


def content_hash(job: Job) -> str:
    """Returns the blake3 over every tensor of the newest checkpoint, in order of name, whatever shards it
    lies in.
    """
    run, digest = Run.open(job), blake3(max_threads=blake3.AUTO)
    reader = run.checkpoints.open(run.version_at(job.steps))
    for tensor in sorted(reader.tensors()):
        for _, data in reader.read([tensor.whole()]):
            digest.update(f"{tensor.kind}/{tensor.name}".encode())
            digest.update(data)
    return str(digest.hexdigest())[:16]


def fence_answers(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the time from each fence to each answer, None for a member that never answered."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for record in records:
        event = record["event"]
        if event["$"] == "Fenced" and (event["generation"], event["worker"]) in found:
            answer = found[event["generation"], event["worker"]]
            answer["seconds"] = answer["seconds"] or round(record["at"] - answer["asked_at"], 4)
        for action in record["actions"]:
            if action["$"] == "Fence":
                for worker in action["members"]:
                    new = {
                        "generation": action["generation"],
                        "worker": worker,
                        "asked_at": record["at"],
                        "seconds": None,
                    }
                    found.setdefault((action["generation"], worker), new)
    return list(found.values())


def kills_of(
    killer: Killer, changes: Sequence[Recovery], answers: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a row for each kill after which a world stepped again."""
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
                **{
                    key: value
                    for key, value in asdict(loss).items()
                    if key.endswith("_s") and key != "step_s"
                },
                "first_microbatch_s": kill.stepped_at - kill.at,
                "next_commit_s": loss.committed_at - kill.at,
                "fence_answer_s": max((each for each in mine if each is not None), default=0.0),
                "fences_unanswered": mine.count(None),
                "reason": loss.reason,
            }
        )
    return rows


def tell(line: Line) -> None:
    """Prints the story while it happens, so that a run that has to be given up tells how far it came."""
    if not isinstance(line, StepLine):
        print(f"    {line.at:.2f} {line.text[:300]}", flush=True)
    elif line.step % 10 == 0:
        print(f"    {line.at:.2f} step {line.step} of generation {line.generation}", flush=True)


def give_up(folder: Path, name: str) -> None:
    """Prints the place of every process and the end of every log, and kills every process, this one last.
    Nothing is left on the GPUs.
    """
    print(f"== {name}: not over in time", flush=True)
    ours, living = set(children(os.getpid())), sorted(SEGMENTS.glob("elastic-*-w*"))
    for each in living:
        with contextlib.suppress(OSError):
            if (pid := Counters(each, create=False)["pid"]) in ours:
                os.kill(pid, signal.SIGUSR1)
    time.sleep(2)
    logs = [log_file(*each.name.removeprefix("elastic-").rsplit("-", 1)) for each in living]
    for log in sorted({*logs, *(folder / "bucket").glob("*/logs/*/*.log")}):
        with contextlib.suppress(OSError):
            print(
                f"==== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:]),
                flush=True,
            )
    for pid in reversed(children(os.getpid())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(3)


def measure(name: str, scenario: Scenario, job: Job) -> dict[str, Any]:
    began = time.monotonic()
    if scenario.act is not None and scenario.from_bucket:
        scenario.act.ready = lambda: any(Path(job.bucket).glob(f"{job.name}/steps/*/g*/{MANIFEST}"))
    done = trial(job, scenario.act, hash_it=False, tell=tell)
    found: dict[str, Any] = {
        "scenario": name,
        "about": scenario.about,
        "state": done.result.state,
        "took_s": round(time.monotonic() - began, 1),
    }
    if done.result.state != "Finished":
        return found | {"result": str(done.result)[:500]}
    try:
        assert_nothing_left(done)
    except AssertionError as error:
        found["left"] = str(error)
    records = Run.open(job).records()
    changes, answers = recoveries(records), fence_answers(records)
    lines = [line for line in done.lines if isinstance(line, StepLine)]
    steady = [b.at - a.at for a, b in pairwise(lines[4:]) if a.generation == b.generation]
    work = done.witness.total("microbatches_run")
    found |= {
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
        "struck": len(scenario.act.kills) if scenario.act is not None else 0,
        "memory_mib": memory_of(job),
        "compiled": compiled_of(job),
        "transports": transports_of(job),
        **deaths(done),
        "killed_by_us": len(scenario.act.kills)
        if scenario.act is not None and scenario.act.kind is signal.SIGKILL
        else None,
        **scenario.check(done),
    }
    return found


def wrong(found: Mapping[str, Any], scenario: Scenario, *, sockets: bool) -> list[str]:
    """Returns a short text for everything that must not be.  Of a control it returns only that the control
    shows nothing.
    """
    if scenario.harmful:
        return (
            []
            if found.get("believed")
            else ["the control shows nothing: no member took garbage for a commit"]
        )
    recompiled = {
        worker: graphs for worker, graphs in found.get("compiled", {}).items() if graphs[0] != graphs[1]
    }
    others = {
        way: number for way, number in found.get("transports", {}).items() if not way.startswith("NET/")
    }
    survived = (
        found.get("killed_by_us") is None or sum(found.get("deaths", {}).values()) == found["killed_by_us"]
    )
    checks = {
        f"the run ended as {found['state']}": found["state"] == "Finished",
        "the weights differ from those of the reference run": found["same_bits"] is not False,
        "it is not shown that no member applied the step in which the rank froze": found.get(
            "nobody_applied", True
        ),
        "after some faults no world stepped again": len(found.get("kills", ())) == found.get("struck", 0),
        f"the run left things behind: {found.get('left')}": "left" not in found,
        f"workers compiled graphs after their first step: {recompiled}": not recompiled,
        f"not exactly the victims died: {found.get('deaths')}": survived,
        f"not all connections are sockets: {found.get('transports')}": not sockets
        or (bool(found.get("transports")) and not others),
    }
    return [sentence for sentence, holds in checks.items() if not holds]


def show(found: Mapping[str, Any]) -> None:
    """Prints a paragraph for people."""
    same = {None: "nothing to compare with", True: "the same bits", False: "OTHER BITS"}[found["same_bits"]]
    print(
        (
            f"\n== {found['scenario']}: {found['about']}: {found['state']} in {found['took_s']} s; "
            f"{found.get('hash', '')} {same}"
        ),
        flush=True,
    )
    skip = {"scenario", "about", "state", "took_s", "hash", "kills", "fence_answers"}
    print("   " + "; ".join(f"{key} {_short(value)}" for key, value in found.items() if key not in skip))
    answers = [seconds for *_, seconds in found.get("fence_answers", ())]
    if answers:
        print(
            f"   fences answered: {_short([each for each in answers if each is not None])}; not answered: "
            f"{answers.count(None)}"
        )
    if found["wrong"]:
        print(f"   WRONG: {'; '.join(found['wrong'])}", flush=True)
    kills = found.get("kills", [])
    for phase in PHASES if kills else ():
        values = [kill[phase] for kill in kills]
        print(
            f"   {phase:20} median {statistics.median(values):7.3f}   worst {max(values):7.3f}   of "
            f"{len(values)}"
        )


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
    parser.add_argument("--world", type=int, help="default: all GPUs")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--per-gpu", type=int, default=1, help="ranks on each GPU, on different nodes")
    parser.add_argument("--global-batch", type=int, default=16, help="sequences a step, each a microbatch")
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument(
        "--reference",
        help="hash of an undisturbed run with the same --size and --steps; default: the first run's",
    )
    parser.add_argument("--seconds", type=float, default=480, help="no scenario begins later than this")
    parser.add_argument(
        "--limit",
        type=float,
        default=600,
        help="after so many seconds in one scenario the whole benchmark ends",
    )
    parser.add_argument(
        "--bits",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the final weights; reading large ones takes minutes",
    )
    parser.add_argument("--commit", default="not said", help="the commit of this code, for the results")
    parser.add_argument("--work", type=Path, help="folder for buckets; default: a temporary one")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tests/benchmarks/results")))
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.steps = options.steps or SIZES[options.size]["steps"]
    options.gpus = list(range(torch.cuda.device_count())) * options.per_gpu
    options.world = options.world or len(options.gpus)
    if options.world < 2:
        parser.error(
            f"--world {options.world}: at least 2 workers are needed, so that one is left; there are "
            f"{torch.cuda.device_count()} GPUs"
        )
    if options.nodes % options.per_gpu or len(options.gpus) % options.nodes:
        parser.error(
            f"--nodes {options.nodes} --per-gpu {options.per_gpu}: {torch.cuda.device_count()} GPUs cannot "
            "be divided evenly among the nodes like this"
        )
    return options


def start(nodes: int, gpus: Sequence[int]) -> None:
    """Starts Ray on one node, or on several among which ``gpus`` are dealt out.  Nodes that have the same
    GPUs are made hosts for NCCL.
    """
    if nodes == 1:
        return cluster.connect("local")
    os.environ |= VARIABLES
    there, share = Cluster(), len(gpus) // nodes
    for number in range(nodes):
        mine = gpus[number * share : (number + 1) * share]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in mine)} if mine else {}
        if len(gpus) > len(set(gpus)):
            variables |= {"NCCL_HOSTID": f"host{number}", "NCCL_SOCKET_IFNAME": "lo"}
        there.add_node(
            num_cpus=8,
            num_gpus=len(mine),
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            env_vars=variables,
        )
    ray.init(there.address, namespace=cluster.NAMESPACE, log_to_driver=False, logging_level="warning")


def main() -> int:
    """Runs the scenarios.  Returns 1 if anything is wrong, else 0."""
    options, began = arguments(), time.monotonic()
    if options.sockets:
        os.environ |= SOCKETS | TOLD  # before Ray starts: its processes inherit it
    folder = Path(mkdtemp(dir=options.work))
    prepare(
        Path(sysconfig.get_path("stdlib")) / "asyncio",
        str(folder / f"tokens-{SIZES[options.size]['seq_len']}"),
        (".py",),
    )
    known = scenarios(options.world, options.steps, options.kills)
    devices = (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        if options.device == "cuda"
        else "CPU"
    )
    versions = f"torch {torch.__version__}, ray {ray.__version__}"
    ranks = f"{options.world} ranks, {options.nodes} nodes, {devices}, {versions}"
    about = (
        f"{date.today()}, commit {options.commit}: {ranks}, {options.size}, batch {options.global_batch}, "
        f"sockets {options.sockets}"
    )
    print(about, flush=True)
    start(options.nodes, options.gpus)
    table: list[dict[str, Any]] = []
    kind = ("-sockets" if options.sockets else "") + (f"-{options.nodes}-nodes" if options.nodes > 1 else "")
    kind += f"-{options.per_gpu}-a-gpu" if options.per_gpu > 1 else ""
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"gpu_recovery-{options.size}-{options.world}{kind}.json"
    for number, name in enumerate(options.scenario or known):
        if time.monotonic() - began > options.seconds:
            print(f"no time is left for {name}", flush=True)
            continue
        job = job_of(folder, f"run{number}", options, known[name].changes)
        late = threading.Timer(options.limit, give_up, (folder, name))
        late.daemon = True
        late.start()
        try:
            table.append(measure(name, known[name], job))
        finally:
            late.cancel()
        # kept even if the bits cannot be read
        target.write_text(json.dumps({"about": about, "scenarios": table}, indent=1) + "\n")
        if options.bits and table[-1]["state"] == "Finished":
            table[-1]["hash"] = content_hash(job)
        reference = options.reference or table[0].get("hash")
        compared = reference is not None and (number > 0 or options.reference is not None)
        table[-1]["same_bits"] = table[-1].get("hash") == reference if compared else None
        table[-1]["wrong"] = wrong(
            table[-1], known[name], sockets=options.sockets and options.device == "cuda"
        )
        show(table[-1])
        with target.with_suffix(".log").open("a") as kept:
            for log in sorted((folder / "bucket").glob("*/logs/*/*.log")):
                kept.write(f"==== {name} {log.name}\n{log.read_text(errors='replace')}\n")
        target.write_text(json.dumps({"about": about, "scenarios": table}, indent=1) + "\n")
        shutil.rmtree(folder / "bucket", ignore_errors=True)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(found["wrong"] for found in table) else 0


if __name__ == "__main__":
    sys.exit(main())
