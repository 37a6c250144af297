"""Jobs are read, checked, refused in sentences, and told apart by what defines the trajectory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic.config.command_line import Parser
from elastic.config.sections import (
    BatchRamp,
    Checkpoint,
    Copies,
    Data,
    Deadlines,
    Fault,
    Metrics,
    Network,
    Optim,
    Parallel,
    Reduction,
    Schedule,
    Spikes,
    Validation,
    Watch,
    Workers,
)
from elastic.config.settings import leaves, nearest
from elastic.control.rules import Rules, WatchRule
from elastic.errors import JobError
from elastic.job import Job
from tests.support.job_file import to_toml

pytestmark = pytest.mark.fast

JOB = """
name = "run"
bucket = "/bucket"
steps = 20
model_args = { dim = 64 }

[workers]
min = 1
max = 4

[optim]
lr = 1e-3
"""


def job(**settings: Any) -> Job:
    return Job(**{"name": "run", "bucket": "/bucket", "global_batch": 32, **settings})


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def refusal(path: Path, *options: str, text: str | None = None) -> list[str]:
    """Returns the sentences with which a job is refused."""
    if text is not None:
        path.write_text(text)
    with pytest.raises(JobError) as caught:
        Job.load(path, options)
    return str(caught.value).splitlines()


# ---- reading


def test_a_file_and_options_over_it(job_file: Path) -> None:
    options = "--workers.max 3 --optim.lr=2e-4 --model_args.dim 128 --model-args.act relu --seed -1"
    loaded = Job.load(job_file, options.split())
    assert loaded.workers == Workers(min=1, max=3)
    assert loaded.optim.lr == 2e-4
    assert loaded.model_args == {"dim": 128, "act": "relu"}
    assert (loaded.seed, loaded.steps) == (-1, 20)


@pytest.mark.parametrize(
    ("options", "setting", "value"),
    [
        (["--reproducible"], "reproducible", True),
        (["--no-reproducible"], "reproducible", False),
        (["--reproducible", "false"], "reproducible", False),
        (["--optim.betas", "0.8", "0.9"], "optim", Optim(lr=1e-3, betas=(0.8, 0.9))),
        (["--optim.betas", "[0.8, 0.9]"], "optim", Optim(lr=1e-3, betas=(0.8, 0.9))),
        (["--parallel.dp-shard", "auto"], "parallel", Parallel()),
        (["--parallel.dp-shard", "2"], "parallel", Parallel(dp_shard=2)),
        (["--name", "2026"], "name", "2026"),
        (["--faults", '[{point = "save", step = 3}]'], "faults", (Fault(point="save", step=3),)),
        (["--steps", "5", "--steps", "6"], "steps", 6),
        (["--compile", "yes"], "compile", True),
        (["--reproducible", "0"], "reproducible", False),
        (["--steps", "007"], "steps", 7),
        (["--steps", "1e3"], "steps", 1000),
        (["--recompute", "0.4"], "recompute", 0.4),
        (["--optim.betas", ".8", "0.9"], "optim", Optim(lr=1e-3, betas=(0.8, 0.9))),
    ],
)
def test_an_option_reads_as_its_setting_wants(job_file: Path, options: list[str], setting: str, value: object) -> None:
    assert getattr(Job.load(job_file, options), setting) == value


def test_help_shows_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    Parser(settings=Job, listed=True).print_help()
    shown = capsys.readouterr().out
    tables = {"model_args", "data.args", "optim.args", "faults"}
    assert [name for name in leaves(Job) if "[" not in name and name not in tables and f"--{name.replace('_', '-')}" not in shown] == []
    assert "Samples of one step" in shown


# ---- refusing


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("stepz = 3", [], "job.toml: unknown setting 'stepz'; did you mean 'steps'?"),
        ("lr = 3", [], "job.toml: unknown setting 'lr'; did you mean 'optim.lr'?"),
        ("[workers]\nmni = 3", [], "job.toml: unknown setting 'workers.mni'; did you mean 'workers.min'?"),
        ("[wrokers]\nmin = 3", [], "job.toml: unknown setting 'wrokers'; did you mean 'workers'?"),
        ("xyzzy = 3", [], "job.toml: unknown setting 'xyzzy'; see 'elastic train --help' for all settings"),
        ("", ["--worker.max", "3"], "command line: unknown setting '--worker.max'; did you mean '--workers.max'?"),
        ("", ["--max=3"], "command line: unknown setting '--max'; did you mean '--workers.max'?"),
        (
            "",
            ["--checkpoint", "1"],
            "command line: '--checkpoint' is a section; its settings are --checkpoint.save-every, --checkpoint.keep-last, "
            "--checkpoint.keep-every, --checkpoint.keep-best, --checkpoint.keep-younger, --checkpoint.compare",
        ),
        (
            "[batch_ramp]\nstart = 4",
            [],
            "job.toml: batch_ramp.increment and batch_ramp.samples = 0: a batch ramp needs all of start, increment, samples; "
            "set them all, or none",
        ),
        (
            "global_batch = 16\n[batch_ramp]\nstart = 4\nincrement = 8\nsamples = 9",
            [],
            "job.toml: batch_ramp.start = 4 does not grow to global_batch = 16 by batch_ramp.increment = 8; "
            "let their difference be a multiple of the increment",
        ),
        (
            "global_batch = 16\n[batch_ramp]\nstart = 4\nincrement = 3\nsamples = 9",
            [],
            "job.toml: batch_ramp.increment = 3 is not a multiple of microbatch = 2; make it one",
        ),
        ("", ["--steps.x", "1"], "command line: unknown setting '--steps.x'; did you mean '--steps'?"),
        ("", ["--no-steps"], "command line: unknown setting '--no-steps'; did you mean '--steps'?"),
        ("", ["--no_steps"], "command line: unknown setting '--no_steps'; did you mean '--steps'?"),
        ("", ["--optim.learning-rate=1"], "command line: unknown setting '--optim.learning-rate'; did you mean '--optim.lr'?"),
        ("", ["--save_evry", "1"], "command line: unknown setting '--save_evry'; did you mean '--checkpoint.save-every'?"),
        ("[optim]\nlearning_rate = 1", [], "job.toml: unknown setting 'optim.learning_rate'; did you mean 'optim.lr'?"),
        ("lerning_rate = 1", [], "job.toml: unknown setting 'lerning_rate'; did you mean 'optim.lr'?"),
        ("batch_size = 1", [], "job.toml: unknown setting 'batch_size'; did you mean 'global_batch' or 'microbatch'?"),
        ("epochs = 1", [], "job.toml: unknown setting 'epochs'; did you mean 'steps'?"),
        ("num_workers = 1", [], "job.toml: unknown setting 'num_workers'; did you mean 'workers.max'?"),
        (
            "[optim]\nnesterov = 1",
            [],
            "job.toml: unknown setting 'optim.nesterov'; [optim] has kind, args, lr, betas, momentum, eps, weight_decay, decay, moments, "
            "clip_norm",
        ),
        (
            "recompute = 'sqrt'\nactivations = 'int8'",
            [],
            "job.toml: activations = 'int8' cannot reach what recompute = 'sqrt' keeps; set recompute to 'none', 'attention' or 'block', "
            "or leave activations out",
        ),
        (
            "recompute = 1.0",
            [],
            "job.toml: recompute = 1.0 must be 'none', 'block', 'sqrt', 'attention', 'selective' or 'auto', or less than 1",
        ),
        (
            "",
            ["--recompute", "0"],
            "command line: recompute = 0 must be 'none', 'block', 'sqrt', 'attention', 'selective' or 'auto', or more than 0",
        ),
        (
            "recompute = 'half'",
            [],
            "job.toml: recompute = 'half' must be 'none', 'block', 'sqrt', 'attention', 'selective' or 'auto', or a finite number",
        ),
        (
            "[optim]\nmomentum = 0.5",
            [],
            "job.toml: optim.momentum = 0.5 is a setting of sgd, muon, and optim.kind = 'adamw'; leave it out",
        ),
        (
            "[optim]\nkind = 'sgd'\neps = 1e-3",
            [],
            "job.toml: optim.eps = 0.001 is a setting of adamw, adagrad, rmsprop, muon, and optim.kind = 'sgd'; leave it out",
        ),
        (
            "[schedule]\nkind = 'wsd'",
            [],
            "job.toml: schedule.kind = 'wsd' falls in the last schedule.decay_steps = 0 steps; set decay_steps, say to a tenth of steps",
        ),
        (
            "[schedule]\ndecay_steps = 7",
            [],
            "job.toml: schedule.decay_steps = 7 belongs to schedule.kind = 'wsd', and it is 'cosine'; leave one of them out",
        ),
        (
            "steps = 10\n[schedule]\nkind = 'wsd'\ndecay_steps = 7\nwarmup_steps = 4",
            [],
            "job.toml: schedule.warmup_steps = 4 and schedule.decay_steps = 7 are together more than steps = 10; lower them or "
            "train longer",
        ),
        (
            "",
            ["--parallel.tensor", "2"],
            "command line: unknown setting '--parallel.tensor'; [parallel] has dp_replicate, dp_shard, min_shard, zero, "
            "bucket_elements, use",
        ),
        (
            '[[faults]]\npoint = "save"\nstep = 1\nstp = 2',
            [],
            "job.toml: unknown setting 'faults[0].stp'; did you mean 'faults[].step'?",
        ),
        ("steps = 0", [], "job.toml: steps = 0 must be 1 or more"),
        ("steps = 3", ["--steps", "0"], "command line: steps = 0 must be 1 or more"),
        ('steps = "many"', [], "job.toml: steps = 'many' must be a whole number"),
        ("steps = 1.5", [], "job.toml: steps = 1.5 must be a whole number"),
        ("reproducible = 3", [], "job.toml: reproducible = 3 must be true or false"),
        ("model = 3", [], "job.toml: model = 3 must be text"),
        ("workers = 3", [], "job.toml: workers = 3 must be a table of settings; did you mean 'workers.max'?"),
        ("workers = 3", ["--workers.min", "1"], "job.toml: workers = 3 must be a table of settings; did you mean 'workers.max'?"),
        ("model_args = 3", [], "job.toml: model_args = 3 must be a table of settings"),
        ("[parallel]\ndp_shard = 0", [], "job.toml: parallel.dp_shard = 0 must be 1 or more, or 'auto'"),
        ("[optim]\nlr = inf", [], "job.toml: optim.lr = inf must be a finite number"),
        ("[optim]\nlr = -1", [], "job.toml: optim.lr = -1 must be 0 or more"),
        ("[optim]\nbetas = [1, 2, 3]", [], "job.toml: optim.betas = [1, 2, 3] must have 2 values"),
        ("[optim]\nbetas = [0.9]", [], "job.toml: optim.betas = [0.9] must have 2 values"),
        ("[optim]\nbetas = []", [], "job.toml: optim.betas = [] must have 2 values"),
        ("[optim]\nlr = true", [], "job.toml: optim.lr = True must be a finite number"),
        ("[workers]\nmax = true", [], "job.toml: workers.max = True must be a whole number"),
        ('steps = "3"', [], "job.toml: steps = '3' must be a whole number; write 3 without quotes"),
        ('compile = "yes"', [], "job.toml: compile = 'yes' must be true or false"),
        ('[network]\ninterface = ""', [], "job.toml: network.interface = '' must be an interface's name, 1 to 15 characters"),
        (
            "",
            ["--network.interface", "a" * 16],
            f"command line: network.interface = '{'a' * 16}' must be an interface's name, 1 to 15 characters",
        ),
        (
            "[copies]\ncopy_every = 0\nbuddy_every = 3",
            [],
            "job.toml: copies.buddy_every = 3 with copies.copy_every = 0: there is no copy that could go to a buddy; "
            "set copies.copy_every to 1 or more, or copies.buddy_every to 0",
        ),
        ("[optim]\nbetas = [0.9, 1.0]", [], "job.toml: optim.betas[1] = 1.0 must be less than 1"),
        ("[optim]\nclip_norm = 0", [], "job.toml: optim.clip_norm = 0 must be more than 0"),
        ("[schedule]\nfinal = 2", [], "job.toml: schedule.final = 2 must be 1 or less"),
        ('[data]\nsampling = "x"', [], "job.toml: data.sampling = 'x' must be 'permutation' or 'with_replacement'"),
        ("faults = 3", [], "job.toml: faults = 3 must be a list"),
        ('model = "llama"', [], "job.toml: model = 'llama' must name code as 'package.module:name'"),
        (
            "global_batch = 10\nmicrobatch = 4",
            [],
            "job.toml: global_batch = 10 is not a multiple of microbatch = 4; the nearest are 8 and 12",
        ),
        (
            "global_batch = 3\nmicrobatch = 4",
            [],
            "job.toml: global_batch = 3 is not a multiple of microbatch = 4; the nearest is 4",
        ),
        (
            "[schedule]\nwarmup_steps = 200",
            [],
            "job.toml: schedule.warmup_steps = 200 is more than steps = 100; lower it or train longer",
        ),
        (
            "[workers]\nmin = 3",
            [],
            "job.toml: workers.min = 3 is more than workers.max = 2; raise the one or lower the other",
        ),
        ("", ["steps=3"], "command line: 'steps=3' is no option; write '--section.option value', say '--workers.max 3'"),
        ("", ["--steps"], "command line: --steps has no value; write '--steps value'"),
        ("", ["--steps", "--seed", "3"], "command line: --steps has no value; write '--steps value'"),
    ],
)
def test_a_bad_setting_is_one_clear_sentence(job_file: Path, text: str, options: list[str], said: str) -> None:
    assert refusal(job_file, *options, text=f'name = "run"\nbucket = "/bucket"\n{text}\n') == [said]


def test_every_problem_is_said_at_once(job_file: Path) -> None:
    assert refusal(job_file, "--seed", "x", text="steps = 0\n[workers]\nmni = 3") == [
        "job.toml: name is missing; set it in the file (name = ...) or by --name on the command line",
        "job.toml: bucket is missing; set it in the file (bucket = ...) or by --bucket on the command line",
        "command line: seed = 'x' must be a whole number",
        "job.toml: steps = 0 must be 1 or more",
        "job.toml: unknown setting 'workers.mni'; did you mean 'workers.min'?",
    ]


def test_several_settings_that_disagree_are_all_named(job_file: Path) -> None:
    lines = refusal(job_file, "--global_batch", "9", "--schedule.warmup_steps", "21", "--workers.min", "5")
    assert [line.split(" = ")[0] for line in lines] == [
        "job.toml with --global-batch: global_batch",
        "job.toml with --schedule.warmup-steps: schedule.warmup_steps",
        "job.toml with --workers.min: workers.min",
    ]


def test_an_impossible_layout_is_refused_with_its_setting(job_file: Path) -> None:
    (line,) = refusal(job_file, "--parallel.dp_shard", "7")
    assert "dp_shard" in line
    assert "7" in line
    assert Job.load(job_file, ["--parallel.dp_shard", "4"]).layout_rule().dp_shard == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"point": "lunch", "step": 1}, "point = 'lunch' must be one of forward, backward"),
        ({"point": "save", "step": 1, "kind": "SIGNAL"}, "kind = 'SIGNAL' must be one of SIGKILL"),
    ],
)
def test_a_fault_of_no_known_kind_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=r"Job: faults\[0\]." + said):
        job(faults=[settings])


def test_a_fault_of_an_accelerator_is_refused_where_there_is_none() -> None:
    """R1; the control: it is accepted where there is one."""
    fault = {"point": "forward", "step": 1, "kind": "device_assert"}
    with pytest.raises(JobError, match=r"kind = 'device_assert' strikes an accelerator, and workers.gpus = 0; set it to 1"):
        job(faults=[fault])
    assert job(faults=[fault], workers={"gpus": 1}).faults[0].kind == "device_assert"


def test_what_cannot_travel_to_a_worker_is_no_argument() -> None:
    with pytest.raises(JobError) as caught:
        job(model_args={"act": len, "sizes": {"hidden": [1, (2, 3)]}})
    act, hidden = str(caught.value).splitlines()
    assert act.startswith("Job: model_args.act = <built-in function len> must be text, a number")
    assert hidden.startswith("Job: model_args.sizes.hidden[1] = (2, 3) must be text, a number")


def test_a_file_that_is_none(tmp_path: Path, job_file: Path) -> None:
    assert "there is no job file" in refusal(tmp_path / "nowhere.toml")[0]
    assert refusal(job_file, text="name = run")[0].startswith("job.toml is not valid TOML: Invalid value (at line 1")
    assert "cannot be read" in refusal(tmp_path)[0]


def test_a_job_is_immutable() -> None:
    with pytest.raises(ValidationError):
        job().steps = 3  # type: ignore[misc]


def test_nearest_knows_places_and_spelling() -> None:
    known = ["steps", "workers.min", "workers.max", "optim.lr"]
    assert nearest("lr", known) == ("optim.lr",)
    assert nearest("worker.max", known) == ("workers.max",)
    assert nearest("maxx", known) == ("workers.max",)
    assert nearest("qqqq", known) == ()


# ---- writing and reading again

plain = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
jobs = st.builds(
    job,
    seed=st.integers(0, 2**40),
    model_args=st.dictionaries(st.text(), plain, max_size=3),
    data=st.builds(Data, args=st.dictionaries(st.text(), plain, max_size=2), prefetch=st.integers(1, 9)),
    optim=st.builds(Optim, lr=st.floats(0, 1), betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)),
    deadlines=st.builds(Deadlines, form_s=st.floats(0, 1e9, exclude_min=True)),
    parallel=st.builds(Parallel, use=st.sampled_from(["all", "fit"])),
    faults=st.lists(st.builds(Fault, point=st.sampled_from(["save", "forward"]), step=st.integers(0, 99)), max_size=2),
)


@given(jobs)
def test_toml_and_json_say_the_same_job(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_bytes(to_toml(job).encode())
    for again in (Job.load(path), Job.from_json(job.to_json()), pickle.loads(pickle.dumps(job))):
        assert again == job
        assert again.digest == job.digest
        assert again.to_json() == job.to_json()


def test_json_has_none() -> None:
    nothing = job(model_args={"a": {"b": None}})
    assert Job.from_json(nothing.to_json()) == nothing


def test_replace_checks_again() -> None:
    assert job().replace(steps=7).steps == 7
    assert job(seed=3).replace(steps=7).seed == 3
    with pytest.raises(JobError, match="steps = 0"):
        job().replace(steps=0)
    with pytest.raises(JobError, match="unknown setting 'stepz'"):
        job().replace(stepz=1)


# ---- what follows from a job

CLUSTER = {
    "name": "other",
    "bucket": "/other",
    "on_driver_exit": "detach",
    "log_every": 9,
    "profile": "5-7",
    "offload": "optimizer",
    "offload_folder": "/other/disk",
    "offload_buffer_gb": 2,
    "workers": Workers(min=2, max=3, cpus=2, gpus=1, threads=4),
    "parallel": Parallel(dp_shard=2, min_shard=2, use="fit", zero=2, bucket_elements=5),
    "checkpoint": Checkpoint(save_every=1, keep_last=2, keep_every=4, keep_younger="7d"),
    "copies": Copies(copy_every=1, buddy_every=9),
    "network": Network(interface="eth1"),
    "watch": Watch(every=7, patience=2, vanishing=0.1, exploding=9, stationary=40, max_skipped=3),
    "deadlines": Deadlines(form_s=1, fence_s=1, stall_s=1, lease_s=1, wait_s=1, stop_s=1),
    "faults": (Fault(point="save", step=1),),
    "data": Data(prefetch=7, args={"path": "/moved"}),
    "validation": Validation(every=5),
    **{"export": {"every": 5}, "samples": {"every": 5, "prompts": ["a"]}},
    "metrics": Metrics(sinks={"a.b:C": {"path": "c"}}),
}
TRAJECTORY = {
    "model": "a.b:c",
    "model_args": {"dim": 1},
    "init": "other@best",
    "loss": "a.b:c",
    "loop": "a.b:c",
    "seed": 1,
    "steps": 99,
    "global_batch": 64,
    "microbatch": 4,
    "reproducible": False,
    "precision": "bf16",
    "compile": True,
    "recompute": "block",
    **{"activations": "int8", "attention": "flash-4", "loss_scale": 2.0},
    "data": Data(weights=(1.0,), group_by_length=True),
    "optim": Optim(lr=1),
    "schedule": Schedule(warmup_steps=1),
    "batch_ramp": BatchRamp(start=4, increment=4, samples=100),
    "numerics": 1,
    "reduction": Reduction(block=2),
    "spikes": Spikes(action="skip"),
}


def test_the_digest_is_of_the_trajectory_and_of_nothing_else() -> None:
    """Promise 1: the cluster never enters, everything else does."""
    assert job(**CLUSTER).digest == job().digest
    needed = {"loss_scale": {"precision": "fp16"}, "attention": {"precision": "bf16", "workers": {"gpus": 1}}}
    digests = {job(**needed.get(setting, {}), **{setting: value}).digest for setting, value in TRAJECTORY.items()}
    assert len(digests | {job().digest}) == len(TRAJECTORY) + 1
    assert set(CLUSTER) | set(TRAJECTORY) == set(Job.model_fields)


def test_the_digest_stays_as_it_was() -> None:
    """A run begun by an earlier release can be resumed: change this only together with the meaning of a setting."""
    assert job(numerics=1, recompute="none").digest == "07ebc4a1a74d2f5f78cfc6eaa1fecc182ca94e26c11304b5b56bdb1ea95c130d"


def test_rules_are_the_jobs() -> None:
    rules = job(
        steps=9, reproducible=False, workers=Workers(min=2, max=3), deadlines=Deadlines(stall_s=7), parallel=Parallel(min_shard=2)
    ).rules()
    assert isinstance(rules, Rules)
    assert (rules.min_workers, rules.max_workers, rules.target_step, rules.save_every) == (2, 3, 9, 50)
    assert (rules.stall_s, rules.lease_s, rules.reproducible) == (7, 120, False)
    assert job(watch={"patience": 2, "vanishing": 0.1, "exploding": 9, "stationary": 40, "max_skipped": 3}).rules().watch == WatchRule(
        2, 0.1, 9, 40, 3
    )
    assert rules.watch == WatchRule()
    assert (rules.layout.dp_shard, rules.layout.min_shard, rules.layout.use) == (None, 2, "all")


def test_microbatches_and_the_warning_about_too_few() -> None:
    few = job(global_batch=30, microbatch=2, workers=Workers(max=4))
    assert few.microbatches == 15
    (warning,) = few.warnings()
    assert "only 15 microbatches of 2 for up to 4 workers" in warning
    assert job(global_batch=32, microbatch=2, workers=Workers(max=4)).warnings() == []
    assert [job(global_batch=2 * many, microbatch=2, workers=Workers(max=2)).warnings() == [] for many in (3, 4)] == [False, True]
    (warning,) = job(global_batch=32, microbatch=2, reduction={"block": 17}).warnings()
    assert "reduction.block = 17 is more than the 16 microbatches" in warning
    assert job(global_batch=32, microbatch=2, reduction={"block": 16}).warnings() == []
