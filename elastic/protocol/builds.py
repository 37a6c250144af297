"""Builds: each worker's software and data are compared with those that the job was checked with.

The reference is the build of the driver, which loaded the model, the loss and the data before anything was
started.  A part that is "" in either build is not compared.  Workers of another *kind* (device, torch,
threads) are a different matter: see ``seating.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Build:
    """The software and data of one process.  ``host`` only says where it runs; the rest must be the same
    wherever a member runs.
    """

    host: str = ""
    elastic: str = ""
    """The version of Elastic, and the digest of its sources."""
    python: str = ""
    """The major and minor version of Python."""
    torch: str = ""
    """The version of torch without its local part (+cpu, +cu130), which belongs to the kind."""
    ray: str = ""
    code: str = ""
    """The top-level packages that the job names, each with the digest of its sources."""
    data: str = ""
    """The dataset's fingerprint."""
    held_out: str = ""
    """The fingerprint of the samples of the validation, and their number; "" without a validation."""
    samples: str = ""
    """The number of samples."""
    model: str = ""
    """The digest of the model's tensors in their order: names, shapes, formats, which are trained, and their
    blocks.
    """


_PARTS = {
    "elastic": ("Elastic is", "install the same Elastic on every node, or send it along with the job"),
    "python": ("Python is", "use one Python on every node"),
    "torch": ("torch is", "install the same torch on every node"),
    "ray": ("Ray is", "install the same Ray on every node"),
    "code": (
        "the code that the job names is",
        "give every node the same files: submit them with the job (--working-dir)",
    ),
    "data": ("the data's fingerprint is", "let data.args name what every node sees as the same data"),
    "samples": (
        "the dataset's length is",
        (
            "let every node see all samples, and let fingerprint() change with the samples: a folder "
            "that is still being filled has fewer"
        ),
    ),
    "model": (
        "the digest of the model's tensors, in their order, is",
        (
            "let build() make the same modules in the same order in every process: sort what comes from a "
            "set or os.listdir()"
        ),
    ),
    "held_out": (
        "the fingerprint of the held-out data is",
        "let validation.args name what every node sees as the same data",
    ),
}


@dataclass(frozen=True)
class Difference:
    """A difference between two builds.

    ``part`` is the field of :class:`Build`; ``sentence`` says what differs, with both values and the fix.
    """

    part: str
    sentence: str


def difference(build: Build, reference: Build, reproducible: bool) -> Difference | None:
    """Returns the first part in which ``build`` differs from ``reference``; None if there is none.

    Without ``reproducible``, a different torch is no difference: it only makes the worker one of another
    kind.
    """
    for part, (subject, fix) in _PARTS.items():
        here, there = getattr(reference, part), getattr(build, part)
        if here and there and here != there and (reproducible or part != "torch"):
            where = f" on {reference.host}" if reference.host else ""
            return Difference(
                part, f"{subject} {there} on this node and {here}{where}, where the job was checked; {fix}"
            )
    return None
