"""THE CLUSTER IN ONE PROCESS: virtual time, lossy messages, seeded faults, and the invariants that must survive them.

    simulate(seed)          one run, the same story for the same seed; raises Violation
    simulate(seed, replace(Scenario.drawn(seed), faults=...))    the same cluster, with other faults
    run_many(range(10_000)) many, summed up as Coverage; elastic simulate does it in several processes

``advance`` is the one production runs.  Everything round it is a model: of coordinators and their journal (``coordinators.py``), of
workers (``worker.py``, ``process.py``) and their host memory (``memory.py``), of the collectives that bind them (``world.py``), of nodes,
stores and bucket (``cluster.py``), of the network (``network.py``).  What befalls it is a schedule of faults (``faults.py``,
``strikes.py``).  ``oracle.py`` and ``copies.py`` see everything, from outside, and say what must never happen.
"""

from elastic.sim.coverage import Coverage, run_many
from elastic.sim.scenario import Scenario
from elastic.sim.simulation import Report, simulate
from elastic.sim.violation import Violation

__all__ = ["Coverage", "Report", "Scenario", "Violation", "run_many", "simulate"]
