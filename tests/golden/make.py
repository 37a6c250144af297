"""Makes the golden data of the commit that is checked out; ``README.md`` beside this file says when.

    python -m tests.golden.make hashes        # the golden jobs that have none, in one process and in worlds
    python -m tests.golden.make runs          # runs on real clusters: their hashes, journals, and one checkpoint
    python -m tests.golden.make simulator     # what the simulator saw

It refuses to name a commit whose product is changed in the working tree.  Hashes of other kinds of machines
are kept.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elastic.plan.layout import Layout
from tests.golden.jobs import HERE, LOCAL, PINNED, ROOT, Request, ask, kernels, kinds_of, pinned

PRODUCT = ("elastic", "actors", "storage")
SMALL, LARGE = (LOCAL, "2x1", "1x2", "2x2", "1x3"), (LOCAL, "2x1", "1x2")
LAYOUTS = {"quickstart": LARGE, "text": LARGE, "kills": LARGE}
RUNS = ("undisturbed", "killed", "shards", "coordinator", "stopped")
NEWEST = 6
"""The ``numerics`` of the golden jobs and runs, of which ``hashes`` writes an entry; the entry of an earlier
number stays as it is.
"""


def commit() -> str:
    """Returns the commit that is checked out."""
    changed = _git("status", "--porcelain", "--", *PRODUCT)
    if changed:
        raise SystemExit(f"golden data names a commit, but the product differs from it here:\n{changed}")
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def write(name: str, value: Any) -> None:
    (HERE / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8")) if (HERE / name).exists() else {}


# ---- hashes


def hashes() -> None:
    """Runs the golden jobs that have no hash for this kind of machine in their layouts.  Raises
    AssertionError where two layouts of one job end with two hashes.
    """
    made_at, names = commit(), [*read("jobs.json")]
    with kernels(1) as pool:
        (kinds,) = pool.run(Layout(1, 1), kinds_of, names)
    known = read("hashes.json").get(str(NEWEST), {"kinds": {}})["kinds"]
    missing = [name for name in names if name not in known.get(kinds[name], {})]
    layouts = {name: LAYOUTS.get(name, SMALL) for name in missing}
    requests: list[Request] = [
        (name, layout, {"numerics": NEWEST}) for name in layouts for layout in layouts[name]
    ]
    answer = ask(requests)
    for (name, layout, _), value in zip(requests, answer["hashes"], strict=True):
        keep(made_at, answer["kinds"][name], name, value, (layout,))


def keep(made_at: str, kind: str, job: str, value: str, seen: tuple[str, ...]) -> None:
    """Writes a hash and where it was seen.  Raises AssertionError if another hash is known already."""
    known = read("hashes.json")
    numbered = known.setdefault(str(NEWEST), {"commit": made_at, "environment": PINNED, "kinds": {}})
    made = {
        "hash": value,
        "seen": list[str](),
        **({"commit": made_at} if made_at != numbered["commit"] else {}),
    }
    entry = numbered["kinds"].setdefault(kind, {}).setdefault(job, made)
    assert entry["hash"] == value, f"{job}: {numbered['commit']} has {entry}, {made_at} has {value}"
    entry["seen"] = sorted({*entry["seen"], *seen})
    write("hashes.json", known)


# ---- runs on clusters


def runs() -> None:
    """Performs the runs; each must end with the hash of its golden job."""
    from tests.golden.runs import CHECKPOINT, JOBS

    made_at, told = commit(), {}
    with TemporaryDirectory(prefix="golden-") as temporary:
        folder = Path(temporary)
        found = json.loads(_checked("-m", "tests.golden.runs", str(folder), *RUNS).splitlines()[-1])
        kinds = ask([(job, LOCAL, {}) for job in sorted(set(JOBS.values()))])["kinds"]
        for name in RUNS:
            keep(made_at, kinds[JOBS[name]], JOBS[name], found[name], (f"run {name}",))
            pack(
                folder / name / "bucket" / name,
                f"journals/{name}.tar.gz",
                without=(".safetensors", ".parquet", ".log"),
            )
            told[name] = facts(folder / name / "bucket", name)
        pack(folder / "stopped" / CHECKPOINT / "stopped", "checkpoint.tar.gz", without=(".log",))
    write("journals.json", told)


def _checked(*arguments: str) -> str:
    done = pinned(*arguments, timeout_s=1800)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}")
    return done.stdout


def pack(run: Path, name: str, without: tuple[str, ...]) -> None:
    """Writes the folder of a run as an archive, the same for the same files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path in sorted(run.rglob("*")):
            if path.is_file() and path.suffix not in without:
                entry = tarfile.TarInfo(str(path.relative_to(run.parent)))
                entry.size = path.stat().st_size
                archive.addfile(entry, io.BytesIO(path.read_bytes()))
    (HERE / name).parent.mkdir(exist_ok=True)
    (HERE / name).write_bytes(gzip.compress(raw.getvalue(), mtime=0))


def unpack(name: str, bucket: Path) -> Any:
    """Unpacks a kept run into ``bucket``; returns its job, which names that bucket, and whose samples wait
    for no gate any more.
    """
    from elastic.job import Job

    with tarfile.open(HERE / name) as archive:
        archive.extractall(bucket, filter="data")
    (about,) = bucket.glob("*/job.json")
    settings = json.loads(about.read_text(encoding="utf-8"))["job"]
    settings["data"]["args"].pop("gates", None)
    settings["copies"].pop("price_per_gb", None)  # a retired setting, used only in sentences of the launch
    return Job(**{**settings, "bucket": str(bucket)})


def facts(bucket: Path, name: str) -> dict[str, Any]:
    """Returns what the journal of a run says: how much was decided, which steps count and with which losses,
    how it ended.
    """
    from elastic.journal import codec
    from elastic.report.ledger import ledger
    from storage import journal
    from storage.objects import ObjectStore

    segments = journal.read(ObjectStore.open(str(bucket)), name)
    last = codec.fold(*segments[-1])
    steps = ledger(segments)
    losses = json.dumps([[step, steps[step].loss.hex(), steps[step].samples] for step in sorted(steps)])
    return {
        "format": segments[0][0]["format"],
        "decisions": sum(len(records) for _, records in segments),
        "worlds": last.generation,
        "coordinators": last.incarnation,
        "end": type(last.state).__name__,
        "steps": len(steps),
        "losses and samples": hashlib.sha256(losses.encode()).hexdigest(),
    }


# ---- the simulator


def simulator() -> None:
    from tests.golden.simulator import seen_by_all

    write("simulator.json", {"commit": commit(), "current": True, "seeds": seen_by_all()})


PARTS: dict[str, Callable[[], None]] = {"hashes": hashes, "runs": runs, "simulator": simulator}

if __name__ == "__main__":
    if not sys.argv[1:] or set(sys.argv[1:]) - set(PARTS):
        raise SystemExit(f"usage: python -m tests.golden.make {' '.join(PARTS)}: at least one of them")
    for part in sys.argv[1:]:
        PARTS[part]()
