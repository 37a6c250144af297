"""``python goodput_by_hand.py PRESENT.csv PAID.csv TIMELINE.parquet`` prints goodput without any code of ours."""

import sys
from collections import defaultdict
from itertools import pairwise
from math import ceil
from pathlib import Path

import pyarrow.parquet as pq


def goodput(present: str | Path, paid: str | Path, timeline: str | Path) -> list[float]:
    """Returns the steps done divided by the steps that the nodes present, and those paid, could have done."""
    spans = pq.read_table(timeline).to_pylist()
    first = next(each["end"] for each in spans if each["steps"])
    spans = [each for each in spans if each["begin"] >= first]
    took, done = defaultdict[int, float](float), defaultdict[int, int](int)
    for each in spans:
        if each["bucket"] == "stepping":
            rounds = ceil(each["microbatches"] / each["data_ranks"])
            took[rounds] += each["end"] - each["begin"]
            done[rounds] += each["steps"]
    found = []
    for trace in (present, paid):
        rows = [line.split(",") for line in Path(trace).read_text().split("\n") if line[:1].isdigit()]
        events, could = [(float(at), 1 if what == "add" else -1) for at, what, _ in rows], 0.0
        for each in spans:
            inside = [at for at, _ in events if each["begin"] < at < each["end"]]
            for begin, end in pairwise([each["begin"], *inside, each["end"]]):
                nodes = sum(change for at, change in events if at <= begin)
                if ranks := nodes * each["data_ranks"] // each["world_nodes"]:
                    rounds = ceil(each["microbatches"] / ranks)
                    near = min((r for r in done if done[r]), key=lambda r, n=rounds: (abs(r - n), r))
                    could += (end - begin) * done[near] / took[near] * near / rounds
        found.append(sum(done.values()) / could)
    return found


if __name__ == "__main__":
    print(*goodput(*sys.argv[1:]))
