"""The preflight checks a job's data before any worker starts, and a run remembers which data it was begun on."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.data.prepare import prepare
from elastic.data.tokens import TokenDataset
from elastic.engine.loss import next_token
from elastic.engine.peak import peak_bytes
from elastic.errors import DataError, JobError, ModelError
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.report.story import StepLine
from elastic.runs import data
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import NO_ATTENTION, preflight
from elastic.train.model import build_model, builder_of
from tests.data.texts import write_texts
from tests.support.chaos import exported_hash
from tests.support.toys import toy_job

TEXT = "It was the best of times, it was the worst of times. " * 40


def job_on(root: Path, path: str | Path, **changes: Any) -> Job:
    model = {"vocab": 257, "dim": 16, "layers": 1, "heads": 2}
    args = {"path": str(path), "seq_len": 8}
    values = {"name": "run", "bucket": str(root / "bucket"), "model_args": model, "data": {"args": args}}
    return Job(**(values | changes))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text", {"a.txt": TEXT})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that no test changes."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(write_texts(folder / "text", {"a.txt": TEXT}), str(folder / "data"))
    return folder / "data"


def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path: Path, text: Path) -> None:
    prepare(text, str(tmp_path / "data"), bpe=270)
    sentence = (
        r"^the vocabulary of the model \(257\) is smaller than the vocabulary of the dataset \(270\); "
        r"set it to 270 or more in model_args$"
    )
    with pytest.raises(ModelError, match=sentence):
        preflight(job_on(tmp_path, tmp_path / "data"))
    assert not (tmp_path / "bucket").exists(), "refused before the run begins"
    preflight(
        job_on(tmp_path, tmp_path / "data", model_args={"vocab": 270, "dim": 16, "layers": 1, "heads": 2})
    )
    assert not (tmp_path / "bucket").exists(), "nor does a job that can work begin a run by being looked at"


def test_the_code_of_a_users_optimizer_is_part_of_the_build(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other code imports that module; nodes that have different code in it are told apart."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, rate in (("first_rule", 0.1), ("second_rule", 0.2)):
        (tmp_path / f"{name}.py").write_text(
            f"from elastic.engine.optim.base import Rule\nRULE = Rule((), lambda *_: {rate})\n"
        )
    builds = {
        name: preflight(job_on(tmp_path, prepared, optim={"kind": f"{name}:RULE"})).build.code
        for name in ("first_rule", "second_rule")
    }
    assert all(code.split()[0] == name for name, code in builds.items()), builds
    assert len({code.split()[1] for code in builds.values()}) == 2
    with pytest.raises(JobError, match=r"^optim\.kind = 'first_rule:Rule' names a type; name a Rule"):
        preflight(job_on(tmp_path, prepared, optim={"kind": "first_rule:Rule"}))


def test_the_memory_of_copies_is_told_unless_it_is_trivial(tmp_path: Path, prepared: Path) -> None:
    """A state of less than a megabyte needs no sentence, a larger one has one; so has every run without
    copies, which is another matter.
    """

    def told(dim: int, **settings: Any) -> list[str]:
        model = {"vocab": 257, "dim": dim, "layers": 1, "heads": 2}
        job = job_on(tmp_path, prepared, name=f"of-{dim}-{len(settings)}", model_args=model, **settings)
        return [note for note in preflight(job).notes if "host memory" in note]

    assert told(16) == []
    (sentence,) = told(128)
    assert re.match(
        r"copies in host memory and saves take \S+ MB of its node for each worker, in 7 slots of \S+ "
        r"MB: 1 for a save, 4 for copies of its own state, 2 for copies of a worker on another node$",
        sentence.partition("; ")[0],
    ), sentence
    (without,) = told(16, copies={"copy_every": 0})
    assert without.startswith("no copies in host memory (copies.copy_every = 0)")


def test_a_state_too_large_for_an_update_in_files_within_a_fence_is_told_of(
    tmp_path: Path, prepared: Path
) -> None:
    """A disk may need minutes for the state of 8 B parameters.  The value that the sentence recommends
    silences it; memory is no disk.

    A single worker has all of it where one is allowed, and half of it where two are the fewest.
    """
    large = {"vocab": 257, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336}

    def told(model: dict[str, Any], fence_s: float, folder: str = "/disk", least: int = 1) -> list[str]:
        settings: dict[str, Any] = {
            "offload": "optimizer",
            "parallel": {"zero": 2},
            "deadlines": {"fence_s": fence_s, "stall_s": fence_s},
        }
        settings |= {"offload_folder": folder, "offload_buffer_gb": 10} if folder else {}
        settings["workers"] = {"min": least, "max": 2}
        job = job_on(tmp_path, prepared, name=f"of-{model['dim']}-{least}", model_args=model, **settings)
        return [note for note in preflight(job).notes if "fence_s" in note]

    assert told({"vocab": 257, "dim": 16, "layers": 1, "heads": 2}, 10) == [] == told(large, 10, "")
    for least, part, takes_s in ((1, "83.8", 84), (2, "41.9", 42)):
        (sentence,) = told(large, 10, least=least)
        assert sentence.startswith(
            f"deadlines.fence_s = 10 may be too short for an update of {part} GB of state in files, "
        ), sentence
        assert (
            f"it takes {takes_s} s if the disk serves one worker, and the same time again for each "
            "other worker of the node"
        ) in sentence
        enough = float(sentence.partition("set deadlines.fence_s to ")[2].split()[0])
        assert told(large, enough, least=least) == [] != told(large, enough - 2, least=least)


def test_the_cost_of_an_initialisation_on_the_cpu_is_told(tmp_path: Path, prepared: Path) -> None:
    """It took 94 s for 8 B parameters; nothing is said of a small model, of one on GPUs, or of a run that has
    begun.
    """
    large = {"vocab": 257, "dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336}

    def told(**settings: Any) -> list[str]:
        job = job_on(
            tmp_path, prepared, **{"name": f"of-{len(str(settings))}", "model_args": large} | settings
        )
        return [note for note in preflight(job).notes if "initialises" in note]

    (sentence,) = told()
    seconds = int(
        re.findall(
            (
                r"about (\d+) s before the first step, and up to 738 MB of memory beside its "
                r"part"
            ),
            sentence,
        )[0]
    )
    assert 20 < seconds < 4000
    assert (
        told(workers={"gpus": 1}) == told(model_args={"vocab": 257, "dim": 16, "layers": 1, "heads": 2}) == []
    )


def test_slow_attention_within_documents_is_told(tmp_path: Path, prepared: Path) -> None:
    """Nothing is said where FlexAttention is used, or where it is not asked for."""
    small = {"vocab": 257, "dim": 16, "layers": 1, "heads": 2}

    def told(documents: bool = True, dropout: float = 0.0, **settings: Any) -> bool:
        data = {"args": {"path": str(prepared), "seq_len": 8, "documents": documents}}
        job = job_on(
            tmp_path,
            "",
            **{"data": data, "model_args": small | {"dropout": dropout}, "workers": {"gpus": 1}} | settings,
        )
        return any(
            note.startswith("data.args.documents = true: without FlexAttention")
            for note in preflight(job).notes
        )

    assert told() and told(compile=True, dropout=0.1)
    assert not told(documents=False) and not told(compile=True) and not told(workers={"gpus": 0})
    assert not told(compile=True, reproducible=False)


def test_the_kernel_of_attention_is_told_and_must_fit_the_model(tmp_path: Path, prepared: Path) -> None:
    small = {"vocab": 257, "dim": 16, "layers": 1, "heads": 2}

    def job(documents: bool = False, **settings: Any) -> Job:
        data = {"args": {"path": str(prepared), "seq_len": 8, "documents": documents}}
        return job_on(
            tmp_path,
            "",
            **{"data": data, "model_args": small, "precision": "bf16", "workers": {"gpus": 1}} | settings,
        )

    def told(**settings: Any) -> list[str]:
        return [note for note in preflight(job(**settings)).notes if note.startswith("attention is by")]

    def idle(**settings: Any) -> bool:
        notes = preflight(job(recompute="attention", **settings)).notes
        return any(
            note.startswith("recompute = 'attention' has no effect with FlexAttention") for note in notes
        )

    assert (
        idle(compile=True)
        and not idle()
        and not idle(compile=True, reproducible=False)
        and not idle(compile=True, workers={"gpus": 0})
    )

    flash = {"attention": "flash-4"}
    assert told() == ["attention is by torch's default"] and told(compile=True) == [
        "attention is by FlexAttention"
    ]
    assert told(**flash) == told(**flash, compile=True) == ["attention is by flash-attention 4"]
    assert told(workers={"gpus": 0}) == []
    for wrong, said in [
        (
            {"documents": True},
            "it cannot keep documents apart, but data.args.documents = true; or set attention to 'auto'",
        ),
        (
            {"model_args": small | {"dropout": 0.1}},
            "it supports no dropout, but the model has dropout; or set attention to 'auto'",
        ),
        (
            {"workers": {"gpus": 0}},
            "it needs GPUs, but workers.gpus = 0; set workers.gpus to 1; or set attention to 'auto'",
        ),
        ({"precision": "fp32"}, "precision = 'fp32'; set precision to 'bf16', or attention to 'auto'"),
        (
            {"documents": True, "model_args": small | {"dropout": 0.1}, "workers": {"gpus": 0}},
            (
                "workers.gpus = 0; set workers.gpus to 1; it supports no dropout, but the model has "
                "dropout; it cannot keep documents apart, but data.args"
            ),
        ),
    ]:
        with pytest.raises(JobError, match=re.escape(said)):
            told(**flash, **wrong)
    with pytest.raises(
        JobError,
        match=(r"(?s)numerics = 3 belongs to a run of a version of Elastic before 2026-11-27"),
    ):
        job(numerics=3)


# ---- a run is bound to its samples, not to their place


def test_data_that_was_moved_is_the_same_run_with_the_same_bits(tmp_path: Path, text: Path) -> None:
    """The run is stopped half way and the folder renamed: it goes on, and ends with the bits of an
    undisturbed run.
    """
    data, moved = tmp_path / "data", tmp_path / "moved"
    prepare(text, str(data))
    undisturbed = job_on(tmp_path, data, name="undisturbed", steps=6)
    assert run_local(undisturbed, lambda line: None)[0] == "Finished"

    def ctrl_c(line: object) -> None:
        if isinstance(line, StepLine) and line.step == 3:
            raise KeyboardInterrupt

    assert run_local(job_on(tmp_path, data, steps=6), ctrl_c)[0] == "Stopped"
    data.rename(moved)
    again = job_on(tmp_path, moved, steps=6)
    preflight(again)
    assert run_local(again, lambda line: None)[::2] == ("Finished", 6)
    assert exported_hash(again) == exported_hash(undisturbed)


def test_other_samples_are_refused_with_both_fingerprints(tmp_path: Path, text: Path) -> None:
    """The command and a worker both refuse other text at the same path, the same text cut otherwise, and its
    documents kept apart.
    """
    prepare(text, str(tmp_path / "data"))
    begun = job_on(tmp_path, tmp_path / "data")
    data.bind(Run.open(begun), (build := preflight(begun).build).data, int(build.samples))
    (tmp_path / "data").rename(tmp_path / "old")
    write_texts(text, {"a.txt": TEXT.replace("worst", "wurst")})
    prepare(text, str(tmp_path / "data"))
    old, new = (TokenDataset(str(tmp_path / name), 8).fingerprint() for name in ("old", "data"))
    cut = {"args": {"path": str(tmp_path / "old"), "seq_len": 9}}
    apart = {"args": {"path": str(tmp_path / "old"), "seq_len": 8, "documents": True}}
    others = (
        (begun, new),
        (begun.replace(data=cut), old.replace("/8", "/9")),
        (begun.replace(data=apart), old + "/documents"),
    )
    for job, found in others:
        for start in (preflight, lambda job: run_local(job, print)):
            with pytest.raises(
                JobError,
                match=(
                    rf"the dataset has the fingerprint {found}, but the run 'run' in .* was begun on "
                    rf"data with the fingerprint {old}; choose another name, or use (its data.args|that data) again"
                ),
            ):
                start(job)
    preflight(begun.replace(data={"args": {"path": str(tmp_path / "old"), "seq_len": 8}}))


class Nameless:
    """A dataset without a fingerprint."""

    def __len__(self) -> int:
        return 99

    def read(self, ids: tuple[int, ...]) -> dict[str, Any]:
        return {}


def test_a_dataset_must_have_a_fingerprint(tmp_path: Path) -> None:
    job = job_on(tmp_path, "", data={"dataset": "tests.train.test_preflight:Nameless"})
    with pytest.raises(
        DataError,
        match=(
            r"^data\.dataset = 'tests\.train\.test_preflight:Nameless' has no "
            r"fingerprint\(\); a dataset has"
        ),
    ):
        preflight(job)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": {"min": 2}}, ["--local trains with one worker: workers.min = 2 has no effect"]),
        (
            {"workers": {"min": 2}, "parallel": {"dp_shard": 2}},
            ["--local trains with one worker: workers.min = 2, parallel.dp_shard = 2 have no effect"],
        ),
        (
            {"workers": {"spares": 1}, "validation": {"by": "spares", "every": 50, "samples": 2}},
            [
                "--local has no spares for validation.by = 'spares': this process validates by itself, "
                "between steps"
            ],
        ),
        ({"workers": {"spares": 1}, "validation": {"by": "spares"}}, []),
        ({}, []),
    ],
)
def test_settings_that_one_worker_makes_no_use_of_are_told(
    tmp_path: Path, prepared: Path, changes: dict[str, Any], said: list[str]
) -> None:
    if "every" in changes.get("validation", {}):
        changes = changes | {
            "validation": changes["validation"] | {"args": {"path": str(prepared), "seq_len": 8}}
        }
    job = job_on(tmp_path, prepared, **changes)
    assert [note for note in preflight(job, local=True).notes if "--local" in note] == said
    assert not any("--local" in note for note in preflight(job).notes)


class Pair(nn.Module):
    """A block with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Nosy(nn.Module):
    """A model of one block with two layers, of which it multiplies by one itself."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.calls, self.embedding, self.output = calls, nn.Embedding(32, 32), nn.Linear(32, 32)
        self.blocks = nn.ModuleList([Pair()])

    def sharding(self) -> ShardingTable:
        return ShardingTable(("blocks.0",))

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        pair = self.blocks[0]
        assert isinstance(pair, Pair)
        x = self.embedding(tokens)
        return self.output(pair(x) if self.calls else F.linear(pair.one(x), pair.two.weight))


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_a_weight_in_fp8_is_read_by_its_layer_alone(tmp_path: Path, precision: str) -> None:
    """The controls: a model that calls the layer, and one that computes in bf16."""

    def job(precision: str, *, calls: bool) -> Job:
        return toy_job(tmp_path, model=f"{__name__}:Nosy", model_args={"calls": calls}, precision=precision)

    with pytest.raises(
        ModelError,
        match=(
            rf"^precision = '{precision}': .* calls linear\(\) with the weight 'blocks.0.two.weight' "
            r"directly"
        ),
    ):
        preflight(job(precision, calls=False), local=True)
    assert preflight(job(precision, calls=True), local=True)
    assert preflight(job("bf16", calls=False), local=True)


class Attends(nn.Module):
    """A block that attends with torch's function, with a product and a softmax of its own, or by torch's
    module.
    """

    def __init__(self, *, by: str) -> None:
        super().__init__()
        self.by, self.qkv = by, nn.Linear(32, 96)
        self.module = nn.MultiheadAttention(32, 2, batch_first=True) if by == "module" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.module is not None:
            found: Tensor = self.module(q, k, v, need_weights=False)[0]
            return x + found
        return x + (
            F.scaled_dot_product_attention(q, k, v) if self.by == "function" else (q @ k.mT).softmax(-1) @ v
        )


class Attending(Nosy):
    """A model with such a block."""

    def __init__(self, *, by: str) -> None:
        super().__init__(calls=True)
        self.blocks = nn.ModuleList([Attends(by=by)])

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.blocks[0](self.embedding(tokens)))
        return logits


@pytest.mark.parametrize(
    ("settings", "by", "idle"),
    [
        ({"recompute": "attention"}, "itself", True),
        ({"recompute": "attention"}, "module", True),
        ({"recompute": "attention"}, "function", False),
        ({"recompute": "attention", "precision": "fp8"}, "itself", True),
        ({"recompute": "attention", "precision": "fp8"}, "function", False),
        ({"recompute": "block"}, "itself", False),
    ],
)
def test_recomputed_attention_is_idle_where_the_model_has_its_own(
    tmp_path: Path, settings: dict[str, Any], by: str, idle: bool
) -> None:
    job = toy_job(tmp_path, **{"model": f"{__name__}:Attending", "model_args": {"by": by}} | settings)
    assert (NO_ATTENTION in preflight(job, local=True).notes) == idle


@pytest.mark.parametrize("by", ["itself", "module", "function"])
def test_what_is_idle_keeps_as_much_as_without_it(tmp_path: Path, by: str) -> None:
    job = toy_job(tmp_path, model=f"{__name__}:Attending", model_args={"by": by})
    batch = {"tokens": torch.zeros(2, 17, dtype=torch.int64)}
    none, attention = (
        peak_bytes(
            partial(build_model, job, builder_of(job)),
            job.replace(recompute=policy),
            next_token,
            batch,
            torch.device("cpu"),
        )
        for policy in ("none", "attention")
    )
    assert (none == attention) == (by != "function")


class Mixed(Pair):
    """A block with experts in one tensor, a layer of an odd size, and a table, beside two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router, self.places = (
            nn.Parameter(torch.zeros(4, 32, 32)),
            nn.Linear(32, 4),
            nn.Embedding(9, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return (
            super().forward(x)
            + torch.einsum("bsi,eij,bse->bsj", x, self.experts, weights)
            + self.places(weights.argmax(-1))
        )


class Experts(Nosy):
    """A model whose block is such a one."""

    def __init__(self) -> None:
        super().__init__(calls=True)
        self.blocks = nn.ModuleList([Mixed()])


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_weights_of_blocks_that_do_not_multiply_in_fp8_are_told(tmp_path: Path, precision: str) -> None:
    """The controls: a model whose blocks have none, and one that computes in bf16."""

    def told(precision: str, **model: Any) -> list[str]:
        job = toy_job(
            tmp_path, **{"model": f"{__name__}:Experts", "model_args": {}, "precision": precision} | model
        )
        return [note for note in preflight(job, local=True).notes if "in bf16" in note]

    (said,) = told(precision)
    assert said.startswith(
        f"precision = '{precision}': 2,048 of 6,272 elements of weights in blocks multiply in fp8 (torch"
    )
    assert said.endswith("all others, such as 'blocks.0.experts', multiply in bf16")
    assert told(precision, model=f"{__name__}:Nosy", model_args={"calls": True}) == told("bf16") == []


class Holding(nn.Module):
    """A model with its two layers in a container of this kind."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.embedding, layers = nn.Embedding(32, 32), [nn.Linear(32, 32), nn.Linear(32, 32)]
        self.blocks = nn.ModuleDict({"a": layers[0], "b": layers[1]}) if named else nn.ModuleList(layers)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recompute": "block", "activations": "int8"}, "recompute = 'block', activations = 'int8' have"),
        ({"recompute": 0.5}, "recompute = 0.5 has"),
        ({"compile": True}, "compile = True has"),
        (
            {"offload": "weights", "parallel": {"zero": 2}},
            "offload = 'weights' (but for what 'optimizer' does) has",
        ),
        ({}, ""),
    ],
)
def test_settings_that_act_on_blocks_are_idle_without_any(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """The control is the same model with its layers in a ModuleList."""

    def told(*, named: bool) -> list[str]:
        job = toy_job(tmp_path, model=f"{__name__}:Holding", model_args={"named": named}, **settings)
        return [note for note in preflight(job, local=True).notes if "no effect" in note]

    wanted = (
        f"the model has no blocks: {said} no effect; put its layers into a ModuleList, or name them in "
        "sharding()"
    )
    assert told(named=True) == ([wanted] if said else [])
    assert told(named=False) == []
