"""A job file and options over it are read, checked, and refused in sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from elastic.config.sections import COMING, Optim, Parallel, WorkerFault, Workers
from elastic.config.settings import leaves, nearest
from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.checks.early import check_axes, check_early
from tests.support.toys import toy_job
from tests.test_job import job

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
        (["--faults", '[{point = "save", step = 3}]'], "faults", (WorkerFault(point="save", step=3),)),
        (["--steps", "5", "--steps", "6"], "steps", 6),
        (["--compile", "yes"], "compile", True),
        (["--reproducible", "0"], "reproducible", False),
        (["--steps", "007"], "steps", 7),
        (["--steps", "1e3"], "steps", 1000),
        (["--recompute", "0.4"], "recompute", 0.4),
        (["--optim.betas", ".8", "0.9"], "optim", Optim(lr=1e-3, betas=(0.8, 0.9))),
    ],
)
def test_an_option_reads_as_its_setting_wants(
    job_file: Path, options: list[str], setting: str, value: object
) -> None:
    assert getattr(Job.load(job_file, options), setting) == value


def test_help_shows_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    """The control: the help of other commands stays short."""
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    assert "--workers.min" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    tables = {"model_args", "data.args", "optim.args", "faults"}
    assert [
        name
        for name in leaves(Job)
        if "[" not in name and name not in tables and f"--{name.replace('_', '-')}" not in shown
    ] == []
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
        (
            "",
            ["--worker.max", "3"],
            "command line: unknown setting '--worker.max'; did you mean '--workers.max'?",
        ),
        (
            "",
            ["--data-args", "{}"],
            "command line: unknown setting '--data-args'; did you mean '--data.args'?",
        ),
        ("data_args = 3", [], "job.toml: unknown setting 'data_args'; did you mean 'data.args'?"),
        ("", ["--max=3"], "command line: unknown setting '--max'; did you mean '--workers.max'?"),
        (
            "",
            ["--checkpoint", "1"],
            "command line: '--checkpoint' is a section; its settings are --checkpoint.save-every, "
            "--checkpoint.keep-last, --checkpoint.keep-every, --checkpoint.keep-best, "
            "--checkpoint.keep-younger, --checkpoint.compare",
        ),
        (
            "[batch_ramp]\nstart = 4",
            [],
            (
                "job.toml: batch_ramp.increment and batch_ramp.samples = 0: a batch ramp needs all of "
                "start, increment, samples; set all of them, or none of them"
            ),
        ),
        (
            "global_batch = 16\n[batch_ramp]\nstart = 4\nincrement = 8\nsamples = 9",
            [],
            (
                "job.toml: batch_ramp.start = 4 does not grow to global_batch = 16 by "
                "batch_ramp.increment = 8; the difference of global_batch and batch_ramp.start must be a "
                "multiple of batch_ramp.increment"
            ),
        ),
        (
            "global_batch = 16\n[batch_ramp]\nstart = 4\nincrement = 3\nsamples = 9",
            [],
            "job.toml: batch_ramp.increment = 3 is not a multiple of microbatch = 2; use a multiple",
        ),
        ("", ["--steps.x", "1"], "command line: unknown setting '--steps.x'; did you mean '--steps'?"),
        ("", ["--no-steps"], "command line: unknown setting '--no-steps'; did you mean '--steps'?"),
        ("", ["--no_steps"], "command line: unknown setting '--no_steps'; did you mean '--steps'?"),
        (
            "",
            ["--optim.learning-rate=1"],
            "command line: unknown setting '--optim.learning-rate'; did you mean '--optim.lr'?",
        ),
        (
            "",
            ["--save_evry", "1"],
            "command line: unknown setting '--save_evry'; did you mean '--checkpoint.save-every'?",
        ),
        (
            "[optim]\nlearning_rate = 1",
            [],
            "job.toml: unknown setting 'optim.learning_rate'; did you mean 'optim.lr'?",
        ),
        ("lerning_rate = 1", [], "job.toml: unknown setting 'lerning_rate'; did you mean 'optim.lr'?"),
        (
            "batch_size = 1",
            [],
            "job.toml: unknown setting 'batch_size'; did you mean 'global_batch' or 'microbatch'?",
        ),
        ("epochs = 1", [], "job.toml: unknown setting 'epochs'; did you mean 'steps'?"),
        ("num_workers = 1", [], "job.toml: unknown setting 'num_workers'; did you mean 'workers.max'?"),
        (
            "gradient_accumulation_steps = 1",
            [],
            (
                "job.toml: unknown setting 'gradient_accumulation_steps'; did you mean 'global_batch' or "
                "'microbatch'?"
            ),
        ),
        (
            "",
            ["--gradient-accumulation", "4"],
            (
                "command line: unknown setting '--gradient-accumulation'; did you mean '--global-batch' or "
                "'--microbatch'?"
            ),
        ),
        (
            "per_device_train_batch_size = 1",
            [],
            "job.toml: unknown setting 'per_device_train_batch_size'; did you mean 'microbatch'?",
        ),
        (
            "micro_batch_size = 1",
            [],
            "job.toml: unknown setting 'micro_batch_size'; did you mean 'microbatch'?",
        ),
        (
            "local_batch_size = 1",
            [],
            "job.toml: unknown setting 'local_batch_size'; did you mean 'microbatch'?",
        ),
        ("max_steps = 1", [], "job.toml: unknown setting 'max_steps'; did you mean 'steps'?"),
        ("num_train_epochs = 1", [], "job.toml: unknown setting 'num_train_epochs'; did you mean 'steps'?"),
        (
            "max_grad_norm = 1",
            [],
            "job.toml: unknown setting 'max_grad_norm'; did you mean 'optim.clip_norm'?",
        ),
        (
            "[optim]\nnesterov = 1",
            [],
            "job.toml: unknown setting 'optim.nesterov'; [optim] has kind, args, lr, betas, momentum, eps, "
            "weight_decay, decay, moments, clip_norm, average, groups",
        ),
        (
            "recompute = 'sqrt'\nactivations = 'int8'",
            [],
            (
                "job.toml: activations = 'int8' has no effect with recompute = 'sqrt'; set recompute to "
                "'none', 'attention' or 'block', or leave activations out"
            ),
        ),
        (
            "reproducible = false\nworkers.rerun_every = 100",
            [],
            "job.toml: workers.rerun_every = 100 needs reproducible = true, because without it two workers may "
            "rightly get different gradients; set reproducible to true, or leave it out",
        ),
        (
            "recompute = 1.0",
            [],
            "job.toml: recompute = 1.0 must be 'none', 'block', 'sqrt', 'attention', 'selective' or 'auto', "
            "or a number more than 0 and less than 1",
        ),
        (
            "",
            ["--recompute", "0"],
            "command line: recompute = 0 must be 'none', 'block', 'sqrt', 'attention', 'selective' or "
            "'auto', or a number more than 0 and less than 1",
        ),
        (
            "recompute = 'half'",
            [],
            "job.toml: recompute = 'half' must be 'none', 'block', 'sqrt', 'attention', 'selective' or "
            "'auto', or a number more than 0 and less than 1",
        ),
        (
            "recompute = 'full'",
            [],
            "job.toml: recompute = 'full' must be 'none', 'block', 'sqrt', 'attention', 'selective' or "
            "'auto', or a number more than 0 and less than 1; did you mean 'block'?",
        ),
        (
            "recompute = '0.5'",
            [],
            "job.toml: recompute = '0.5' must be 'none', 'block', 'sqrt', 'attention', 'selective' or "
            "'auto', or a number more than 0 and less than 1; write 0.5 without quotes",
        ),
        (
            "[optim]\nkind = 'Adam'",
            [],
            "job.toml: optim.kind = 'Adam' must be 'adamw', 'sgd', 'adagrad', 'rmsprop' or 'muon', or name "
            "code as 'package.module:name'; Adam is optim.kind = 'adamw' with optim.decay = 'l2'",
        ),
        (
            "[optim]\nkind = 'adam2'",
            [],
            "job.toml: optim.kind = 'adam2' must be 'adamw', 'sgd', 'adagrad', 'rmsprop' or 'muon', or name "
            "code as 'package.module:name'; did you mean 'adamw'?",
        ),
        (
            "[optim]\nmomentum = 0.5",
            [],
            (
                "job.toml: optim.momentum = 0.5 has no effect with optim.kind = 'adamw', only with "
                "sgd, muon; leave optim.momentum out"
            ),
        ),
        (
            "[optim]\nkind = 'sgd'\neps = 1e-3",
            [],
            (
                "job.toml: optim.eps = 0.001 has no effect with optim.kind = 'sgd', only with adamw, "
                "adagrad, rmsprop, muon; leave optim.eps out"
            ),
        ),
        (
            "[schedule]\nkind = 'wsd'",
            [],
            (
                "job.toml: schedule.decay_steps = 0 with schedule.kind = 'wsd': the rate would never "
                "fall; set schedule.decay_steps, for example to a tenth of steps"
            ),
        ),
        (
            "[schedule]\ndecay_steps = 7",
            [],
            (
                "job.toml: schedule.decay_steps = 7 has no effect with schedule.kind = 'cosine', only "
                "with 'wsd'; leave schedule.decay_steps out, or set schedule.kind to 'wsd'"
            ),
        ),
        (
            "steps = 10\n[schedule]\nkind = 'wsd'\ndecay_steps = 7\nwarmup_steps = 4",
            [],
            (
                "job.toml: schedule.warmup_steps = 4 and schedule.decay_steps = 7 are together more than "
                "steps = 10; lower one of them, or raise steps"
            ),
        ),
        (
            "",
            ["--parallel.tensor", "2"],
            "command line: unknown setting '--parallel.tensor'; [parallel] has dp_replicate, dp_shard, "
            "min_shard, zero, bucket_elements, use, tp, cp, pp, ep",
        ),
        (
            '[[faults]]\npoint = "save"\nstep = 1\nstp = 2',
            [],
            "job.toml: unknown setting 'faults[0].stp'; did you mean 'faults[].step'?",
        ),
        (
            "[[optim.groups]]\nnames = ['*.bias']\nlr_scal = 2",
            [],
            "job.toml: unknown setting 'optim.groups[0].lr_scal'; did you mean 'optim.groups[].lr_scale'?",
        ),
        (
            "[[optim.groups]]\nlr_scale = 2",
            [],
            "job.toml: optim.groups[0].names is missing; set it in the file (names = ...)",
        ),
        (
            "[[optim.groups]]\nnames = ['a', 'b']\n[[optim.groups]]\nnames = ['b', 'a']",
            [],
            (
                "job.toml: optim.groups[1].names = ['b', 'a'] are the names of optim.groups[0], too, and "
                "only the first group that matches counts; leave one of the two groups out"
            ),
        ),
        ("steps = 0", [], "job.toml: steps = 0 must be 1 or more"),
        ("steps = 3", ["--steps", "0"], "command line: steps = 0 must be 1 or more"),
        ('steps = "many"', [], "job.toml: steps = 'many' must be a whole number"),
        ("steps = 1.5", [], "job.toml: steps = 1.5 must be a whole number"),
        ("reproducible = 3", [], "job.toml: reproducible = 3 must be true or false"),
        ("model = 3", [], "job.toml: model = 3 must be text"),
        ("workers = 3", [], "job.toml: workers = 3 must be a table of settings; did you mean 'workers.max'?"),
        (
            "workers = 3",
            ["--workers.min", "1"],
            "job.toml: workers = 3 must be a table of settings; did you mean 'workers.max'?",
        ),
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
        (
            '[network]\ninterface = ""',
            [],
            "job.toml: network.interface = '' must be an interface's name, 1 to 15 characters",
        ),
        (
            "",
            ["--network.interface", "a" * 16],
            f"command line: network.interface = '{'a' * 16}' must be an interface's name, 1 to 15 characters",
        ),
        (
            "[copies]\ncopy_every = 0\nbuddy_every = 3",
            [],
            "job.toml: copies.buddy_every = 3 with copies.copy_every = 0: there is no copy that could go to "
            "a buddy; set copies.copy_every to 1 or more, or copies.buddy_every to 0",
        ),
        ("[optim]\nbetas = [0.9, 1.0]", [], "job.toml: optim.betas[1] = 1.0 must be less than 1"),
        ("[optim]\nclip_norm = 0", [], "job.toml: optim.clip_norm = 0 must be more than 0"),
        ("[schedule]\nfinal = 2", [], "job.toml: schedule.final = 2 must be 1 or less"),
        (
            '[data]\nsampling = "x"',
            [],
            "job.toml: data.sampling = 'x' must be 'permutation' or 'with_replacement'",
        ),
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
            (
                "job.toml: schedule.warmup_steps = 200 is more than steps = 100; lower "
                "schedule.warmup_steps, or raise steps"
            ),
        ),
        (
            "[workers]\nmin = 3",
            [],
            "job.toml: workers.min = 3 is more than workers.max = 2; raise workers.max or lower workers.min",
        ),
        (
            "",
            ["steps=3"],
            (
                "command line: 'steps=3' is no option; write an option as '--section.option value', "
                "say '--workers.max 3'"
            ),
        ),
        ("", ["--steps"], "command line: --steps has no value; write '--steps value'"),
        ("", ["--steps", "--seed", "3"], "command line: --steps has no value; write '--steps value'"),
    ],
)
def test_a_bad_setting_is_one_clear_sentence(
    job_file: Path, text: str, options: list[str], said: str
) -> None:
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


def test_experts_that_shards_cannot_spread_evenly_are_refused(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control spreads them evenly; where the shard degree is chosen later, so is this.  While experts are
    not possible, this is said first, as of all degrees.
    """
    words = ["--parallel.dp-shard", "4", "--parallel.ep"]
    for waiting in ([*words, "3"], ["--parallel.tp", "64"]):
        with pytest.raises(
            JobError, match=r"= (3|64): (expert|tensor) parallelism is not possible yet; set "
        ):
            check_axes(Job.load(job_file, waiting))
    monkeypatch.delitem(COMING, "ep")
    (line,) = refusal(job_file, *words, "3")
    assert "parallel.ep = 3 does not divide parallel.dp_shard × parallel.cp = 4; set parallel.ep to" in line
    assert Job.load(job_file, [*words, "2"]).parallel.ep == 2
    assert Job.load(job_file, ["--parallel.ep", "3"]).parallel.ep == 3


def test_an_impossible_layout_is_refused_with_its_setting(job_file: Path) -> None:
    (line,) = refusal(job_file, "--parallel.dp_shard", "7")
    assert "dp_shard" in line
    assert "7" in line
    assert Job.load(job_file, ["--parallel.dp_shard", "4"]).layout_rule().dp_shard == 4


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep"])
def test_an_axis_that_does_not_compute_yet_is_refused_before_anything_starts(
    tmp_path: Path, axis: str
) -> None:
    """Each of them may be 1, which is its default, so a job that does not name them is the same job."""
    with pytest.raises(
        JobError, match=rf"^parallel\.{axis} = 2: .* is not possible yet; set parallel\.{axis} to 1"
    ):
        check_early(toy_job(tmp_path, parallel={axis: 2}))
    check_early(toy_job(tmp_path, parallel={axis: 1}))
    assert toy_job(tmp_path, parallel={axis: 1}) == toy_job(tmp_path)


def test_layouts_have_the_axes_that_divide_the_model(tmp_path: Path) -> None:
    """Their degrees are fixed, and workers form as many model groups as they can."""
    job = toy_job(tmp_path, parallel={"tp": 2, "pp": 2, "cp": 1}, workers={"min": 4, "max": 9})
    model = (("pp", 2), ("tp", 2))
    assert job.layouts() == [Layout(each, 1, model) for each in (1, 1, 1, 1, 2, 2)]
    assert toy_job(tmp_path).layout_rule().model == ()


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
    with pytest.raises(
        JobError,
        match=(r"kind = 'device_assert' needs an accelerator, but workers.gpus = 0; set workers.gpus to 1"),
    ):
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
    assert refusal(job_file, text="name = run")[0].startswith(
        "job.toml is not valid TOML: Invalid value (at line 1"
    )
    assert "cannot be read" in refusal(tmp_path)[0]


def test_nearest_knows_places_and_spelling() -> None:
    known = ["steps", "workers.min", "workers.max", "optim.lr"]
    assert nearest("lr", known) == ("optim.lr",)
    assert nearest("worker.max", known) == ("workers.max",)
    assert nearest("maxx", known) == ("workers.max",)
    assert nearest("qqqq", known) == ()
