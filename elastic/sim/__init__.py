"""THE CLUSTER IN ONE PROCESS: virtual time, lossy messages, seeded faults, and the invariants that must survive them.

    simulate(seed)          one run, the same story for the same seed; raises Violation
    run_many(range(10_000)) many, summed up as Coverage; coverage_table(...) prints it

``advance`` is the one production runs.  Everything round it is a model: of workers (``worker.py``), of the collectives that bind
them (``world.py``), of nodes, stores and bucket (``cluster.py``), of the network (``network.py``).  ``oracle.py`` sees everything,
from outside, and says what must never happen.
"""

from elastic.sim.coverage import Coverage, run_many
from elastic.sim.oracle import Violation
from elastic.sim.scenario import Scenario
from elastic.sim.simulation import Report, simulate

__all__ = ["Coverage", "Report", "Scenario", "Violation", "run_many", "simulate"]
