"""run.py: what a person at the command line gets, above all when they made a mistake."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

import models
import run
from hetjax import outdir
from hetjax.checkpoint import finished_steps
from hetjax.cluster import Cluster
from hetjax.config import load_config
from hetjax.errors import UserError
from hetjax.metrics import read_metrics
from hetjax.plan import Member, Plan, Stage

ROOT = pathlib.Path(run.__file__).parent
TINY = [
    "model.num_layers=1",
    "model.embed_dim=16",
    "model.num_heads=2",
    "data.seq_len=16",
    "data.source=text",
]
MESH = """
[groups.left]
kind = "cpu"
num_devices = 1
[groups.right]
kind = "cpu"
num_devices = 1
[default_link]
bandwidth_gb_per_s = 5
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Stand in an empty folder with a mesh file, a text and settings for a very small job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mesh.toml").write_text(MESH)
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 400)
    return tmp_path


def settings(here, *more):
    every = [
        *TINY,
        f"data.paths={here}/text.txt",
        f"data.cache_dir={here}/cache",
        "train.tensorboard=false",
        *more,
    ]
    return [argument for setting in every for argument in ("--set", setting)]


def call(capfd, *arguments):
    """Run the command line in this process; return its exit status, stdout and stderr."""
    try:
        run.main([str(a) for a in arguments])
        status = 0
    except SystemExit as exit:
        status = exit.code or 0
    out, err = capfd.readouterr()
    return status, out, err


def two_stage_plan(here, num_microbatches=2):
    """Write a plan of two stages by hand, as a person may."""
    path = models.path("gpt_tiny")
    config = load_config(path, settings(here, "data.global_batch=4")[1::2])
    program = run.trace(config, models.parse(config.model, str(path)))
    half, rows = program.num_segments // 2, config.data.global_batch // num_microbatches
    spans = [(0, half, "left"), (half, program.num_segments, "right")]
    stages = tuple(
        Stage((a, b), (Member(group, (0,), {"dp": 1}, (0, rows), ("full",) * (b - a)),))
        for a, b, group in spans
    )
    cluster = Cluster.load(here / "mesh.toml")
    plan = Plan(
        cluster,
        program.fingerprint,
        program.num_segments,
        config.data.global_batch,
        num_microbatches,
        "gpipe",
        stages,
    )
    plan.save(here / f"plan{num_microbatches}.json")
    return here / f"plan{num_microbatches}.json"


MISTAKES = {
    "unknown model": (
        ["train", "gpt_smal"],
        "No model file 'gpt_smal'. Give the path of a TOML file, or one of: gpt_1.3b",
    ),
    "missing mesh": (
        ["train", "gpt_tiny", "--mesh", "mesh2.toml"],
        "mesh2.toml does not exist. There are: big.toml, mesh.toml.",
    ),
    "missing plan": (["train", "gpt_tiny", "--plan", "plan.json"], "Plan file plan.json does not exist."),
    "wrong key": (
        ["train", "gpt_tiny", "--set", "train.num_stepz=3"],
        "--set: [train] has no key 'num_stepz'. Did you mean 'num_steps'?",
    ),
    "wrong model key": (
        ["train", "gpt_tiny", "--set", "model.num_layerz=3"],
        "does not describe a gpt: unknown key 'num_layerz'.",
    ),
    "wrong plan key": (
        ["plan", "gpt_tiny", "--mesh", "mesh.toml", "--set", "plan.schedule=zebra"],
        "[plan] schedule = 'zebra' is not known. Allowed: gpipe, 1f1b, interleaved, ministage.",
    ),
    "nothing to resume": (
        ["train", "gpt_tiny", "--mesh", "mesh.toml", "--resume"],
        "runs/gpt_tiny holds no finished checkpoint to resume.",
    ),
    "no such files": (
        [
            "train",
            "gpt_tiny",
            "--mesh",
            "mesh.toml",
            "--set",
            "data.source=text",
            "--set",
            "data.paths=none.txt",
        ],
        "none.txt",
    ),
    "too few devices": (
        ["train", "gpt_tiny", "--mesh", "big.toml"],
        "'huge' of cluster 'big' needs 99 devices",
    ),
    "out is a file": (
        ["train", "gpt_tiny", "--mesh", "mesh.toml", "--out", "text.txt"],
        "--out text.txt is a file.",
    ),
    "no steps": (["train", "gpt_tiny", "--steps", "0"], "--steps"),
    "unknown option": (["train", "gpt_tiny", "--mash", "x"], "--mash"),
    "decay too long": (
        [
            *("train", "gpt_tiny", "--mesh", "mesh.toml", "--steps", "3"),
            *("--set", "optimizer.schedule=warmup_stable_decay", "--set", "optimizer.decay_steps=9"),
        ],
        "decay_steps = 9, and 2 steps are left after the warm-up",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_exit_2_and_nothing_written(here, capfd, name):
    arguments, message = MISTAKES[name]
    (here / "big.toml").write_text('[groups.huge]\nkind = "cpu"\nnum_devices = 99\n')
    before = sorted(here.rglob("*"))
    status, out, err = call(capfd, *arguments)
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err and out == ""
    assert sorted(here.rglob("*")) == before


def test_a_plan_of_another_cluster_or_model_is_refused(here, capfd):
    plan = two_stage_plan(here)
    (here / "other.toml").write_text(MESH.replace("right", "far"))
    status, _, err = call(capfd, "train", "gpt_tiny", "--plan", plan, "--mesh", "other.toml", *settings(here))
    assert status == 2
    assert "groups left (1 x cpu), right (1 x cpu), and other.toml has left (1 x cpu), far (1 x cpu)" in err
    changed = settings(here, "model.num_layers=3")
    status, _, err = call(capfd, "plan", "gpt_tiny", "--plan", plan, *changed)
    assert status == 2 and "Traceback" not in err and err.count("\n") == 1


def test_doctor_names_groups_speeds_and_what_is_off(here, capfd):
    status, out, _ = call(capfd, "doctor", "--mesh", "mesh.toml")
    assert status == 0
    assert "Group left: 1 device of kind cpu" in out and "TFLOP/s each in float32 (measured matmul)" in out
    assert "left[0] -> right[0]" in out and "GB/s" in out
    (here / "big.toml").write_text('[groups.huge]\nkind = "cpu"\nnum_devices = 99\n')
    status, out, _ = call(capfd, "doctor", "--mesh", "big.toml", "--json")
    found = json.loads(out)
    assert status == 0 and found["groups"] == []
    assert found["advice"][0].startswith("Group 'huge' of cluster 'big' needs 99 devices")
    assert set(found["versions"]) >= {"python", "jax", "flax"}


def test_help_shows_examples(capfd):
    for command in ("train", "plan", "doctor"):
        status, out, _ = call(capfd, command, "--help")
        assert status == 0 and f"python run.py {command}" in out


def test_runs_without_out_get_names_of_their_own(here):
    assert str(outdir.choose_out_dir(None, "gpt", resume=False)) == "runs/gpt"
    for name in ("gpt", "gpt-2", "gpt-10", "gpt_other"):
        (here / "runs" / name / "checkpoints" / "5").mkdir(parents=True)
    assert str(outdir.choose_out_dir(None, "gpt", resume=False)) == "runs/gpt-11"
    assert str(outdir.choose_out_dir(None, "gpt", resume=True)) == "runs/gpt-10"
    with pytest.raises(UserError, match="runs/gpt holds a run already. Add --resume"):
        outdir.choose_out_dir(outdir.RUNS / "gpt", "gpt", resume=False)


def test_a_run_ended_by_sigterm_resumes_under_another_plan_with_the_same_losses(here, capfd):
    """The real command in a process of its own, a real signal, and the real trainer under two plans."""
    plan, other = two_stage_plan(here), two_stage_plan(here, num_microbatches=1)
    quick = [
        "optimizer.name=sgd",
        "optimizer.momentum=0.9",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=1",  # of any number of steps, since that differs between the runs
        "data.global_batch=4",
    ]
    common = settings(
        here, *quick, "train.log_every=1", "train.checkpoint_every=none", "train.eval_every=none"
    )
    command = [sys.executable, str(ROOT / "run.py"), "train", "gpt_tiny", *common, "--plan", str(plan)]
    command += ["--steps", "100000", "--out", "stopped"]
    cache = {
        "COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    environment = os.environ | {f"JAX_{name}": value for name, value in cache.items()}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step 4/"):
                process.send_signal(signal.SIGTERM)
                break
        text, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by" in text and "SIGTERM" in text and errors == ""
    stopped_at = read_metrics(here / "stopped" / "metrics.jsonl")[-1]["step"]
    assert finished_steps(here / "stopped" / "checkpoints") == [stopped_at]
    shutil.copytree("stopped", "moved")

    common += ["--steps", str(stopped_at + 3)]
    assert call(capfd, "train", "gpt_tiny", *common, "--plan", plan, "--out", "straight")[0] == 0
    status, text, _ = call(
        capfd, "train", "gpt_tiny", *common, "--plan", plan, "--out", "stopped", "--resume"
    )
    assert status == 0 and f"Going on at step {stopped_at}" in text
    assert f"changed since this run began: train.num_steps = 100000 then, {stopped_at + 3} now" in text
    assert call(capfd, "train", "gpt_tiny", *common, "--plan", other, "--out", "moved", "--resume")[0] == 0
    runs = {n: read_metrics(here / n / "metrics.jsonl") for n in ("straight", "stopped", "moved")}
    straight, resumed, moved = ([r["loss"] for r in records] for records in runs.values())
    assert resumed == straight
    assert moved == pytest.approx(straight, rel=1e-5)
    assert [r["step"] for r in runs["moved"]] == list(range(1, stopped_at + 4))

    status, text, _ = call(
        capfd, "train", "gpt_tiny", *common, "--plan", plan, "--out", "stopped", "--resume"
    )
    assert status == 0 and f"stopped has all {stopped_at + 3} steps already" in text
    status, _, err = call(
        capfd, "train", "gpt_tiny", *common, "--set", "model.num_heads=4", "--out", "stopped", "--resume"
    )
    assert status == 2 and "is of another model: model.num_heads = 2 then, 4 now." in err
    status, _, err = call(capfd, "train", "gpt_tiny", *common, "--plan", plan, "--out", "stopped")
    assert status == 2 and "stopped holds a run already. Add --resume" in err


def test_a_second_process_in_the_same_directory_is_refused(here, capfd):
    with run.claimed(here / "out", resume=False):
        status, _, err = call(
            capfd, "train", "gpt_tiny", "--mesh", "mesh.toml", "--out", "out", "--steps", 8, *settings(here)
        )
    assert status == 2
    noted, message = err.splitlines()  # the memory taken for the mesh's CPU devices is said in between
    assert noted.startswith("No memory_gib for the CPU devices of")
    assert message == "Another process is training in out. Wait until it ends, or give another --out."
    assert list((here / "out").iterdir()) == []


def test_a_run_that_ended_before_its_first_checkpoint_is_not_offered_for_resuming(here, capfd):
    (here / "out" / "checkpoints").mkdir(parents=True)
    (here / "out" / "job.json").write_text("[]")
    common = ["train", "gpt_tiny", "--mesh", "mesh.toml", "--out", "out", *settings(here)]
    status, _, err = call(capfd, *common)
    assert status == 2 and "out holds a run that ended before its first checkpoint. Remove it, or give" in err
    status, _, err = call(capfd, *common, "--resume")
    assert status == 2 and "Leave out --resume to begin a new run, and give another --out." in err


@pytest.mark.parametrize("text", ["[]", '{"model": 3}', "{", '{"model": {"family": "gpt"}, "train": 3}'])
def test_a_job_file_of_a_run_that_cannot_be_read_is_passed_over(here, text):
    config = load_config(models.path("gpt_tiny"))
    (here / "job.json").write_text(text)
    assert run.changes_since(here, config) == []
    (here / "job.json").write_bytes(b"\xff")
    assert run.changes_since(here, config) == []


def test_a_key_of_the_model_that_was_left_to_its_default_may_be_written_out_when_resuming(here):
    path = models.path("gpt_tiny")
    (here / "job.json").write_text(load_config(path).model_dump_json())
    assert run.changes_since(here, load_config(path, ["model.tied=true", "train.num_steps=7"])) == [
        "train.num_steps = 30 then, 7 now"
    ]
    with pytest.raises(
        run.UserError, match="another model: model.tied = True then, False now. Set these back"
    ):
        run.changes_since(here, load_config(path, ["model.tied=false"]))


def test_a_plan_for_other_figures_than_the_mesh_has_is_refused(here, capfd):
    plan = two_stage_plan(here)
    (here / "half.toml").write_text(MESH.replace('"cpu"', '"cpu"\ncompute_dtype = "bfloat16"', 1))
    status, _, err = call(capfd, "plan", "gpt_tiny", "--plan", plan, "--mesh", "half.toml", *settings(here))
    assert status == 2
    assert "is for compute_dtype = None of group 'left', and half.toml has bfloat16. Leave out --mesh" in err


def test_a_plan_that_was_edited_is_predicted_anew(here, capfd):
    plan = two_stage_plan(here)
    data = json.loads(plan.read_text())
    data["predicted"] = {"step_time_s": 1e6, "binds": "nonsense"}
    plan.write_text(json.dumps(data))
    common = ["plan", "gpt_tiny", "--plan", plan, *settings(here, "data.global_batch=4")]
    status, out, _ = call(capfd, *common, "--json")
    predicted = json.loads(out)["predicted"]
    assert status == 0 and predicted["step_time_s"] < 1 and predicted["binds"] != "nonsense"
    assert set(predicted["groups"]) == {"left", "right"}
