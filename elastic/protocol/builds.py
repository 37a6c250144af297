"""What a worker is made of, and whether that is what the job was checked with.

The driver's own build is the reference: it has loaded the model, the loss and the data before anything was started.  A part that
nobody has named ("") is not compared.  Workers of another *kind* (device, torch, threads) are another matter: see ``seating.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Build:
    """``host`` only says where; the rest must be the same wherever a member runs."""

    host: str = ""
    elastic: str = ""
    """Version, and digest of the sources."""
    python: str = ""
    """Major and minor."""
    torch: str = ""
    """Without the local part (+cpu, +cu130), which belongs to the kind."""
    ray: str = ""
    code: str = ""
    """Each top-level package that the job names, with the digest of its sources."""
    data: str = ""
    """The dataset's fingerprint."""


_PARTS = {
    "elastic": ("Elastic is", "install the same Elastic on every node, or send it along with the job"),
    "python": ("Python is", "use one Python on every node"),
    "torch": ("torch is", "install the same torch on every node"),
    "ray": ("Ray is", "install the same Ray on every node"),
    "code": ("the code that the job names is", "give every node the same files: submit them with the job (--working-dir)"),
    "data": ("the data's fingerprint is", "let data.args name what every node sees as the same data"),
}


@dataclass(frozen=True)
class Difference:
    """``part``: the field of :class:`Build`; ``sentence``: what differs, both values and the fix."""

    part: str
    sentence: str


def difference(build: Build, reference: Build, reproducible: bool) -> Difference | None:
    """The first part in which ``build`` is not ``reference``.  Without ``reproducible`` another torch only makes another kind."""
    for part, (subject, fix) in _PARTS.items():
        here, there = getattr(reference, part), getattr(build, part)
        if here and there and here != there and (reproducible or part != "torch"):
            where = f" on {reference.host}" if reference.host else ""
            return Difference(part, f"{subject} {there} there and {here}{where}, where the job was checked; {fix}")
    return None
