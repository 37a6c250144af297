"""The architecture as data: which module may import what, and a few more rules that hold everywhere.

The rows follow the README's tree: ``examples → actors → elastic → storage``; Ray only in ``actors``; torch
and numpy not where decisions are made.  A module takes the row of the longest name that it begins with;
``pkg.*`` means the whole package.
"""

from __future__ import annotations

from dataclasses import dataclass

PACKAGES = ("storage", "elastic", "actors", "examples")


@dataclass(frozen=True)
class Row:
    """``ours``: modules of this repository; ``others``: top-level names of installed packages.  The standard
    library is always allowed.
    """

    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


DOCUMENTS = ("storage.background", "storage.documents", "storage.errors")
NAMES = ("elastic.ids", "elastic.errors", "elastic.code.imports", "elastic.threads", "storage.slices")

IMPORTS = {
    "storage": Row(("storage.errors",), ("blake3",)),
    "storage.documents": Row(("storage.errors", "storage.objects.port"), ("blake3",)),
    "storage.numbered": Row(("storage.documents", "storage.errors", "storage.objects")),
    "storage.slices": Row(),
    "storage.objects": Row(("storage.objects.*", "storage.background", "storage.errors")),
    "storage.objects.fsspec": Row(("storage.objects.*", "storage.background", "storage.errors"), ("fsspec",)),
    "storage.objects.s3": Row(("storage.objects.*", "storage.errors"), ("aiobotocore", "fsspec", "s3fs")),
    "storage.objects.s3_errors": Row(("storage.objects.remote",), ("aiohttp", "botocore")),
    "storage.objects.urls": Row((), ("fsspec",)),
    "storage.checkpoints": Row(
        ("storage.checkpoints.*", "storage.objects.*", "storage.slices", *DOCUMENTS),
        ("blake3", "numpy", "pyarrow"),
    ),
    "storage.journal": Row(("storage.journal.*", "storage.objects.*", "storage.numbered", *DOCUMENTS)),
    "storage.datasets": Row(
        ("storage.datasets.*", "storage.objects.*", *DOCUMENTS), ("blake3", "numpy", "pyarrow")
    ),
    "elastic.ids": Row(("storage.slices",)),
    "elastic.errors": Row(),
    "elastic.code.given": Row(),
    "elastic.code.imports": Row(("elastic.errors", "elastic.code.given")),
    "elastic.threads": Row(),
    "elastic.plan": Row(("elastic.plan.*", "elastic.ids", "storage.slices")),
    "elastic.protocol": Row(
        ("elastic.protocol.*", "elastic.plan.*", "elastic.ids", "elastic.errors", "storage.slices")
    ),
    "elastic.control": Row(
        ("elastic.control.*", "elastic.protocol.*", "elastic.plan.*", "elastic.ids", "storage.slices")
    ),
    "elastic.journal": Row(
        (
            "elastic.journal.*",
            "elastic.control.*",
            "elastic.protocol.*",
            "elastic.plan.*",
            "elastic.ids",
            "storage.slices",
        )
    ),
    "elastic.code": Row(),
    "elastic.sim": Row(
        (
            *(
                "elastic.sim.*",
                "elastic.control.*",
                "elastic.journal.*",
                "elastic.protocol.*",
                "elastic.plan.*",
            ),
            *("elastic.ids", "elastic.errors", "storage.slices"),
        )
    ),
    "elastic.report": Row(
        (
            "elastic.report.*",
            "elastic.journal.*",
            "elastic.control.*",
            "elastic.protocol.*",
            "elastic.plan.*",
            "elastic.ids",
        )
    ),
    "elastic.report.page": Row(("elastic.report.*", "elastic.ids", "elastic.plan.copy_budget"), ("numpy",)),
    "elastic.report.page.draw": Row(("elastic.report.*",), ("matplotlib", "numpy")),
    "elastic.report.page.parquet": Row(("elastic.report.*",), ("pyarrow",)),
    "elastic.report.page.html": Row(("elastic.report.*", "elastic.plan.copy_budget"), ("jinja2",)),
    "elastic.config": Row(
        (
            "elastic.config.*",
            "elastic.errors",
            "elastic.code.imports",
            "elastic.code.given",
            "elastic.protocol.faults",
            "storage.objects.urls",
        ),
        ("pydantic",),
    ),
    "elastic.config.agreement": Row(
        (
            "elastic.config.optimizers",
            "elastic.config.sections",
            "elastic.job",
            "elastic.plan.layout",
            "elastic.plan.mixture",
        )
    ),
    "elastic.job": Row(
        (
            "elastic.config.*",
            "elastic.control.rules",
            "elastic.errors",
            "elastic.code.given",
            "elastic.plan.*",
            "elastic.protocol.copy_schedule",
        ),
        ("pydantic",),
    ),
    "elastic.runs": Row(),
    "elastic.runs.notes": Row(("storage.*", *NAMES)),
    "elastic.runs.branches": Row(
        (
            "elastic.job",
            "elastic.config.settings",
            "elastic.config.values",
            "elastic.plan.stretches",
            "elastic.runs.notes",
            "storage.*",
            *NAMES,
        )
    ),
    "elastic.runs.forks": Row(
        ("elastic.job", "elastic.runs.branches", "elastic.runs.notes", "storage.*", *NAMES)
    ),
    "elastic.code.sources": Row(("elastic.code.given", *NAMES)),
    "elastic.runs.alone": Row(("elastic.control.run", "storage.*", *NAMES)),
    "elastic.runs.receipts": Row(("elastic.plan.layout", *NAMES)),
    "elastic.runs.run": Row(
        (
            *(
                "elastic",
                "elastic.runs.alone",
                "elastic.runs.branches",
                "elastic.runs.forks",
                "elastic.runs.notes",
                "elastic.journal.*",
                "elastic.control.*",
                "elastic.protocol.*",
                "elastic.plan.*",
                "elastic.job",
            ),
            *("storage.*", *NAMES),
        )
    ),
    "elastic.runs.code": Row(
        (
            "elastic.job",
            "elastic.runs.branches",
            "elastic.runs.notes",
            "elastic.runs.run",
            "elastic.code.sources",
            "storage.*",
            *NAMES,
        )
    ),
    "elastic.runs.deleted": Row(("elastic.runs.branches", "elastic.runs.run", "storage.errors")),
    "elastic.runs.harmed": Row(("elastic.runs.metrics", "elastic.runs.run", "storage.*")),
    "elastic.runs.data": Row(
        ("elastic.config.values", "elastic.runs.branches", "elastic.runs.run", "storage.*", *NAMES)
    ),
    "elastic.runs.asked": Row(
        (
            *("elastic.config.sections", "elastic.job", "elastic.runs.notes"),
            *("elastic.runs.run", "storage.*", *NAMES),
        )
    ),
    "elastic.runs.owed": Row(
        (
            *(
                "elastic.protocol.*",
                "elastic.runs.asked",
                "elastic.runs.validations",
            ),
            *("elastic.runs.run", "storage.*", *NAMES),
        )
    ),
    "elastic.runs.validations": Row(("elastic.report.*", "storage.*", *NAMES)),
    "elastic.runs.retention": Row(
        (
            *(
                "elastic.runs.forks",
                "elastic.report.best",
                "elastic.runs.metrics",
                "elastic.runs.owed",
                "elastic.runs.resume",
                "elastic.control.saves",
                "elastic.protocol.*",
                "elastic.plan.*",
            ),
            *("elastic.runs.run", "storage.*", *NAMES),
        )
    ),
    "elastic.runs.descent": Row(
        (
            *(
                "elastic.runs.branches",
                "elastic.config.values",
                "elastic.runs.notes",
                "elastic.job",
                "elastic.report.best",
                "elastic.runs.metrics",
                "elastic.runs.resume",
            ),
            *("elastic.runs.run", "storage.*", *NAMES),
        )
    ),
    "elastic.runs.resume": Row(
        (
            *(
                "elastic.runs.branches",
                "elastic.config.values",
                "elastic.runs.forks",
                "elastic.job",
                "elastic.report.best",
                "elastic.runs.metrics",
                "elastic.plan.stretches",
            ),
            *("elastic.protocol.lineage", "elastic.runs.notes", "elastic.runs.run", "storage.*", *NAMES),
        )
    ),
    "elastic.runs.named": Row(
        ("elastic.config.settings", "elastic.job", "elastic.runs.branches", "storage.objects", *NAMES)
    ),
    "elastic.runs.quarantine": Row(("elastic.protocol.spikes", "storage.checkpoints")),
    "elastic.runs.skipped": Row(
        (
            *(
                "elastic.control.skips",
                "elastic.report.metrics",
                "elastic.runs.metrics",
                "elastic.runs.quarantine",
            ),
            *("elastic.runs.run", *NAMES),
        )
    ),
    "elastic.runs.standing": Row(
        (
            *("elastic.control.run", "elastic.job", "elastic.runs.branches", "elastic.runs.run"),
            *("storage.journal", "storage.objects"),
        )
    ),
    "elastic.runs.begin": Row(
        (
            *("elastic.control.run", "elastic.engine.optim.schedule", "elastic.job"),
            *("elastic.protocol.commit_record", "elastic.report.story", "elastic.code.sources"),
            *("elastic.runs.alone", "elastic.runs.code", "elastic.runs.owed", "elastic.runs.resume"),
            *("elastic.runs.run", "storage.*", *NAMES),
        )
    ),
    "elastic.runs.restarts": Row(("elastic.control.*", "elastic.runs.run", *NAMES)),
    "elastic.runs.metrics": Row(
        (
            *(
                "elastic.runs.branches",
                "elastic.journal.codec",
                "elastic.engine.optim.schedule",
                "elastic.runs.notes",
                "elastic.job",
            ),
            *(
                "elastic.config.values",
                "elastic.protocol.lineage",
                "elastic.report.best",
                "elastic.report.metrics",
                "elastic.runs.run",
                "elastic.runs.validations",
            ),
            *("elastic.sinks.port", "storage.*", *NAMES),
        )
    ),
    "elastic.sinks": Row(("elastic.sinks", "elastic.report.metrics", "storage.*", *NAMES)),
    "elastic.sinks.tensorboard": Row(
        ("elastic.sinks.port", "elastic.report.metrics", "storage.*"), ("tensorboard",)
    ),
    "elastic.sinks.wandb": Row(("elastic.sinks.port", "elastic.report.metrics"), ("wandb",)),
    "elastic.sinks.mlflow": Row(("elastic.sinks.port", "elastic.report.metrics"), ("mlflow",)),
    "elastic.kernels": Row(("elastic.kernels.*",), ("torch",)),
    "elastic.kernels.triton_kernels": Row((), ("torch", "triton")),
    "elastic.models": Row(("elastic.models.*", "elastic.kernels.*"), ("torch",)),
    "elastic.models.spec": Row(),
    "elastic.models.pretrained": Row((), ("safetensors", "torch")),
    "elastic.models.causal": Row(("elastic.kernels.attention",), ("torch", "transformers")),
    "elastic.models.transformers_lm": Row(
        (
            "elastic.models.causal",
            "elastic.models.flops",
            "elastic.models.plans",
            "elastic.models.pretrained",
            "elastic.models.spec",
            "elastic.kernels.*",
        ),
        ("torch", "transformers"),
    ),
    "elastic.engine": Row(
        (
            *(
                "elastic.engine.*",
                "elastic.kernels.*",
                "elastic.models.spec",
                "elastic.protocol.commit_record",
            ),
            # placement says which part a member holds, so no other module has the rules of the axes
            *("elastic.plan.batch", "elastic.plan.layout", "elastic.plan.placement", "elastic.plan.routes"),
            *("elastic.protocol.spikes", "elastic.job", "elastic.config.sections", *NAMES),
            "elastic.config.optimizers",
        ),
        ("torch",),
    ),
    "elastic.engine.seeds": Row(
        ("elastic.engine.blocks", "elastic.config.sections", "elastic.job"), ("numpy", "torch")
    ),
    "elastic.state": Row(
        (
            *(
                "elastic.state.*",
                "elastic.engine.*",
                "elastic.protocol.*",
                "elastic.plan.*",
                "elastic.job",
                "storage.*",
            ),
            *NAMES,
        ),
        ("torch",),
    ),
    "elastic.state.region": Row(("elastic.protocol.copy_schedule", "elastic.plan.placement", *NAMES)),
    "elastic.state.node_memory": Row(("elastic.state.region", "elastic.plan.copy_budget", *NAMES)),
    "elastic.state.wire": Row(("elastic.errors", "elastic.threads")),
    "elastic.state.compiled": Row(("elastic.errors", "elastic.state.wire")),
    "elastic.state.keeper_store": Row(
        (
            "elastic.state.*",
            "elastic.protocol.copy_schedule",
            "elastic.plan.*",
            *NAMES,
        )
    ),
    "elastic.state.uploads": Row(
        ("elastic.state.*", "elastic.protocol.*", "elastic.plan.*", "storage.checkpoints", *NAMES)
    ),
    "elastic.state.uploader": Row(
        ("elastic.state.region", "elastic.protocol.copy_schedule", "elastic.plan.*", "storage.*", *NAMES),
        ("numpy",),
    ),
    "elastic.data": Row(("elastic.data.*", "storage.*", *NAMES), ("numpy", "pyarrow")),
    "elastic.data.apart": Row((), ("numpy", "torch")),
    "elastic.data.reader_process": Row(("elastic.data.*", "storage.errors", *NAMES), ("torch",)),
    "elastic.data.readers": Row(NAMES, ("torch",)),
    "elastic.data.cursor": Row(
        ("elastic.errors", "elastic.plan.mixture", "elastic.plan.ramp", "elastic.plan.stretches")
    ),
    "elastic.data.tokenizer": Row(("elastic.data.*", "storage.*", *NAMES), ("numpy", "tokenizers")),
    "elastic.data.tokens": Row(("elastic.data.*", "storage.*", *NAMES), ("numpy", "torch")),
    "elastic.data.mixture": Row(("elastic.data.loader", "elastic.data.rows", *NAMES), ("torch",)),
    "elastic.data.rows": Row(("elastic.data.apart", "elastic.data.loader", *NAMES), ("torch",)),
    "elastic.data.loader": Row(
        ("elastic.data.*", "elastic.plan.batch", "storage.errors", *NAMES), ("numpy", "torch")
    ),
    "elastic.probe": Row(("storage.*",)),
    "elastic.train": Row(
        (
            "elastic",
            *("elastic.train.*", "elastic.state.*", "elastic.engine.*", "elastic.models.*", "elastic.data.*"),
            *(
                "elastic.control.*",
                "elastic.protocol.*",
                "elastic.plan.*",
                "elastic.report.*",
                "elastic.job",
                "elastic.runs.run",
                "storage.*",
            ),
            *(
                "elastic.runs.alone",
                "elastic.runs.branches",
                "elastic.config.optimizers",
                "elastic.config.sections",
                "elastic.config.values",
                "elastic.runs.asked",
                "elastic.runs.code",
                "elastic.runs.data",
                "elastic.runs.harmed",
                "elastic.runs.metrics",
                "elastic.runs.owed",
                "elastic.runs.quarantine",
                "elastic.runs.resume",
                "elastic.runs.validations",
            ),
            *(
                "elastic.runs.retention",
                "elastic.sinks.port",
                "elastic.code.sources",
                "elastic.kernels.attention",
                *NAMES,
            ),
        ),
        ("numpy", "torch"),
    ),
    "elastic": Row(("actors.launch", "elastic.errors", "elastic.job")),
    "elastic.__main__": Row(("actors.cli", "elastic.errors", "elastic.code.imports")),
    "actors": Row(("actors.*", "elastic.*", "storage.*"), ("ray", "rich", "torch")),
    "actors.heads": Row(("elastic.errors",), ("grpc", "ray")),
    "examples": Row(
        ("actors.*", "elastic.*", "examples.*", "storage.*"),
        ("numpy", "peft", "ray", "rich", "safetensors", "torch", "transformers"),
    ),
}

NO_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
"""Modules that can run code while they read data; they are never imported, and torch's own forms of them are
never called.
"""
PICKLES = {
    "actors/users_code.py": "it brings functions of a script to workers, and reads nothing from storage"
}
"""The only file that may import one of these, in any form, and why."""
NO_CALLS = ("torch.save", "torch.load")

GROUPS = frozenset(
    {
        *(
            "init_process_group",
            "new_group",
            "new_subgroups",
            "split_group",
            "shrink_group",
            "destroy_process_group",
        ),
        *(
            "abort_process_group",
            "_abort_process_group",
            "reconfigure",
            "_world",
            "_update_default_pg",
            "distributed_c10d",
        ),
        *("init_device_mesh", "DeviceMesh", "device_mesh", "ProcessGroupNCCL", "ProcessGroupGloo"),
    }
)
"""Names that make or leave process groups and meshes; only ``World`` uses them (``elastic/engine/world.py``).
"""
AXES = frozenset({"dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"})
KNOW_AXES = {
    "elastic/plan/axes.py": "its row",
    "elastic/engine/parallelize.py": "its entry in REWRITES",
    "elastic/config/sections.py": "its degree, a setting of the job",
    "elastic/plan/layout.py": "nothing, unless layouts are chosen by the links that it needs",
}
"""The names of axes, and the files whose code may have them, each with all that a new axis adds to it."""
AXIS_FILES = "elastic/engine/axes"
"""The folder of the axes that compute, each a file."""
SAY_AXES = frozenset({"elastic/config/agreement.py", "elastic/sim/scenario.py", "elastic/sim/truth.py"})
"""Files that name a setting of axes to the user by a word of its own, or layouts that the simulator tries."""
SEAM = "elastic/engine/world.py"

ENVIRONMENT = {
    "elastic/code/imports.py": (
        "an argument of the user's code may be the value of one, so that a secret is written nowhere"
    ),
    "actors/cluster.py": "Ray's own variables, before it is joined",
    "actors/own_cluster.py": "Ray's own variables, before it starts",
    "actors/notices/metadata.py": "the clouds' own tools find an emulated metadata service by one each",
    "actors/submitted.py": "Ray's own variable, by which a command knows that it was submitted",
    "elastic/train/session.py": "cuBLAS demands one for deterministic kernels",
    "elastic/train/machine/compilers.py": (
        "torch's compiler and Triton are told by one each where to keep what they make"
    ),
    "elastic/train/machine/interface.py": "NCCL and gloo are told by one which interface to use",
}
"""The only files that touch environment variables, and why."""

BOUNDARIES = {
    "actors/": "processes begin and end here",
    "elastic/train/loop.py": "whatever the user's code raises goes to the coordinator",
    "elastic/train/next_world.py": "whatever keeps a world from being connected ahead, it connects in its pause",
    "elastic/train/alone/local.py": "whatever the user's code raises, the steps before it are saved",
    "elastic/train/context.py": (
        "whatever the user's loop has made of the error of a step, that error goes on"
    ),
    "elastic/train/gauges/profiler.py": (
        "whatever keeps a profile from being made is told, and training goes on without it"
    ),
    "elastic/state/snapshot.py": "a copy that fails ends the thread that makes it, never the step",
    "elastic/state/uploader.py": (
        "whatever ends the thread that uploads goes to the keeper, which waits for its part"
    ),
    "elastic/engine/paged.py": (
        "whatever the user's initialisation makes of values that were lost is done again with the true ones"
    ),
    "elastic/train/checks/contract.py": (
        "the user's code need not work with other numbers of samples than that of a microbatch"
    ),
    "elastic/train/checks/plain.py": (
        "what cannot be watched, or evaluated, in plain torch is computed without that"
    ),
    "elastic/train/checks/trial.py": (
        "whatever the user's code raises in plain torch it raises again in a step, or it becomes a sentence"
    ),
    "elastic/train/errands.py": (
        "whatever the user's code raises while it writes text, or a spare validates, is noted, and tried "
        "again"
    ),
    "elastic/train/published.py": (
        "whatever the user's model or dataset raises while an export is made, the weights are written"
    ),
    "elastic/train/warmup.py": "whatever the user's code raises before the first step it raises again in it",
    "elastic/train/checks/microbatch.py": (
        "whatever the user's model or loss raises with tensors that have no values becomes a sentence"
    ),
    "elastic/data/loader.py": (
        "whatever the user's dataset raises in the reading thread is raised where its samples are used"
    ),
    "elastic/data/reader_process.py": (
        "whatever the user's dataset raises while a reader opens it becomes a sentence"
    ),
    "elastic/train/model.py": "whatever the user's model raises while it is built becomes a sentence",
    "elastic/engine/optim/trial.py": "whatever the user's optimizer raises becomes a sentence",
    "elastic/engine/optim/schedule.py": "whatever the user's schedule raises becomes a sentence",
    "elastic/train/session.py": "whatever the user's dataset raises while it is opened becomes a sentence",
    "storage/background.py": "whatever ends a thread is raised where its result is waited for",
    "elastic/threads.py": (
        "whatever ends a thread's work is told, and the work begins anew or the process ends"
    ),
    "elastic/runs/metrics.py": "whatever a sink of the user's raises is told, and the run goes on",
    "elastic/code/given.py": (
        "whatever an object of the user's raises while it is looked at, its type must do"
    ),
    "elastic/code/imports.py": "whatever the user's module raises while it is imported becomes a sentence",
}
"""Places that may catch every exception, and why."""

LONG_FILE, LONG_FUNCTION = 500, 60
"""Numbers of lines from which on a file or a function is listed, as a reminder: it should hold one idea."""

DOUBLES = {
    "Attention": "a layer of each model",
    "Block": "a layer of each model",
    "Cluster": "the simulator's stand-in has the name of what it stands for",
    "Coordinator": "the simulator's stand-in has the name of what it stands for",
    "Journal": "the simulator's stand-in has the name of what it stands for",
    "Memory": "slots of the simulator's worker, and the store of `memory://`",
    "Network": "the simulator's stand-in, and the section of a job about the real one",
    "Process": "the simulator's stand-in has the name of what it stands for",
    "Tracker": "each tracker is one",
    "Uploads": "the simulator's stand-in has the name of what it stands for",
    "Worker": "the actor, its stand-in in the simulator, and what the coordinator knows of it",
    "World": "the simulator's stand-in has the name of what it stands for",
}
"""Names that classes of several modules share, and why they may."""

FILE_DOUBLES = {
    "base": "what all optimizers, all ways to hold parameters, and all schemes of synchronisation share",
    "cluster": "the simulator's stand-in has the name of what it stands for",
    "coordinator": "the simulator's stand-in has the name of what it stands for",
    "errands": "a run's debts: what makes an export or a sample, and the thread that has it made",
    "errors": "storage has its own, since it imports nothing of elastic",
    "memory": "slots of the simulator's worker, and the store of `memory://`",
    "metrics": "the rows, and the bucket that has them",
    "mixture": "the dataset, and the plan of its positions",
    "port": "each port has one: object stores and sinks",
    "retention": "the rules, and the deletions that follow from them",
    "replay": "a journal that is told and decided again, and a spot trace that is replayed",
    "run": "what the coordinator knows of a run, and the run in its bucket",
    "spikes": "the rules, and the simulator's stand-in for the memory of spikes",
    "trial": "what is tried before a run: the user's optimizer, and the engine beside plain torch",
    "uploads": "the rules, the keeper that follows them, and the simulator's stand-in",
    "worker": "the simulator's stand-in has the name of what it stands for",
    "world": "the simulator's stand-in has the name of what it stands for",
}
"""Names that files of several folders share, and why they may."""
