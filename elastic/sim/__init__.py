"""SIMULATES a cluster in one process: virtual time, lossy messages, seeded faults, and the promises that must
hold.

    simulate(seed)             runs one seed, with the same story every time; raises Violation
    simulate(seed, replace(Scenario.drawn(seed), faults=...))    runs the same cluster with other faults
    run_many(range(10_000))    runs many seeds in this process and sums them up as Coverage

Three things are the product's own: ``advance`` (``elastic/control``), the rules of a member
(``elastic/protocol/member.py``) and those of the coordinator's authority (``elastic/protocol/authority.py``).
Everything else is a model: of coordinators and their journal (``coordinators.py``, ``journals.py``), of
workers (``worker.py``, ``process.py``) and their host memory (``memory.py``), of the collectives that bind
them (``world.py``), of nodes, stores and bucket (``cluster.py``, ``uploads.py``), and of the network
(``network.py``).  ``strikes.py`` performs a schedule of faults (``elastic/protocol/faults.py``).
``oracle.py`` and ``copies.py`` see everything from outside, and raise :class:`Violation` if a promise is
broken.
"""

from elastic.sim.coverage import Coverage, run_many
from elastic.sim.scenario import Scenario
from elastic.sim.simulation import Report, simulate
from elastic.sim.violation import Violation

__all__ = ["Coverage", "Report", "Scenario", "Violation", "run_many", "simulate"]
