"""``python goodput_by_hand.py PRESENT.csv PAID.csv TIMELINE.parquet`` prints goodput without any code of ours.

In a second, so many ranks could do 1 / ceil(microbatches / ranks) of a step, in rounds of a second.
"""

import sys
from itertools import pairwise
from math import ceil
from pathlib import Path

import pyarrow.parquet as pq


def goodput(present: str | Path, paid: str | Path, timeline: str | Path) -> list[float]:
    """Returns the work done divided by the work that the nodes present, and those paid, could have done."""
    spans = pq.read_table(timeline).to_pylist()
    first = next(each["end"] for each in spans if each["steps"])
    spans = [each for each in spans if each["begin"] >= first]
    done = sum(
        (each["end"] - each["begin"]) / ceil(each["microbatches"] / each["data_ranks"])
        for each in spans
        if each["bucket"] == "stepping"
    )
    found = []
    for trace in (present, paid):
        rows = [line.split(",") for line in Path(trace).read_text().split("\n") if line[:1].isdigit()]
        events, could = [(float(at), 1 if what == "add" else -1) for at, what, _ in rows], 0.0
        for each in spans:
            inside = [at for at, _ in events if each["begin"] < at < each["end"]]
            for begin, end in pairwise([each["begin"], *inside, each["end"]]):
                nodes = sum(change for at, change in events if at <= begin)
                if ranks := nodes * each["data_ranks"] // each["world_nodes"]:
                    could += (end - begin) / ceil(each["microbatches"] / ranks)
        found.append(done / could)
    return found


if __name__ == "__main__":
    print(*goodput(*sys.argv[1:]))
