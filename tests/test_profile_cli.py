"""run.py profile, and plan --profile: what a person gets, and is told of mistakes."""

import json
import pathlib
from typing import Any

import pytest

import run
from hetjax.profile import Profile

DATA = pathlib.Path(__file__).parent / "data"
MESH = """
[groups.left]
kind = "cpu"
num_devices = 1
memory_gib = 4
[groups.right]
kind = "cpu"
num_devices = 1
memory_gib = 4
[default_link]
bandwidth_gb_per_s = 5
"""
SMALL = [
    "model.num_layers=1",
    "model.embed_dim=16",
    "model.num_heads=2",
    "data.seq_len=16",
    "data.source=text",
]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Stand in an empty folder; the arguments of a very small job on two CPU groups."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mesh.toml").write_text(MESH)
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 400)
    every = [*SMALL, "data.paths=text.txt", "data.cache_dir=cache"]
    return ["gpt_tiny", "--mesh", "mesh.toml", *(word for setting in every for word in ("--set", setting))]


def call(capfd, *arguments):
    """Run the command line in this process; its exit status, stdout and stderr."""
    try:
        run.main([str(a) for a in arguments])
        status = 0
    except SystemExit as exit:
        status = exit.code or 0
    return status, *capfd.readouterr()


def test_a_profile_is_measured_printed_written_and_planned_with(job, capfd):
    status, out, err = call(capfd, "profile", *job, "--rows", "2", "--remat", "none", "--out", "p.json")
    assert status == 0 and "Profile written to p.json" in err
    assert "blocks/0" in out and "left - right" in out and "1: measured" in out
    found = Profile.load("p.json")
    assert found.kinds == ("cpu",) and found.origins[0].versions["jax"]

    status, out, err = call(capfd, "plan", *job, "--profile", "p.json", "--json")
    assert status == 0
    assert "times on left: 3 of 3 segments measured" in err
    seconds = json.loads(out)["predicted"]["step_time_s"]
    # ten times the seconds of every segment: the planner must have read them
    points = {"forward_s", "backward_s"}
    slower = json.loads(found.model_dump_json())
    for entry in slower["entries"]:
        entry["points"] = [{k: v * 10 if k in points else v for k, v in p.items()} for p in entry["points"]]
    pathlib.Path("slow.json").write_text(json.dumps(slower))
    status, out, _ = call(capfd, "plan", *job, "--set", "plan.profile=slow.json", "--json")
    assert status == 0 and json.loads(out)["predicted"]["step_time_s"] > 2 * seconds


def test_imports_are_written_and_added_to_what_is_there(job, capfd):
    status, out, _ = call(capfd, "profile", "--import", "sailor", DATA / "sailor", "--out", "p.json")
    assert status == 0
    assert "OPT-350/layer" in out and "1: imported from sailor" in out
    assert "GPT-Neo-2.7 on GH-96 left out" in out
    assert call(capfd, "profile", "--import", "zorse", DATA / "zorse", "--out", "p.json")[0] == 0
    both = Profile.load("p.json")
    assert {e.source.split()[2] for e in both.entries} == {"sailor", "zorse"}
    assert [o.what for o in both.origins] == ["imported from sailor", "imported from zorse"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile"], "profile needs a MODEL to measure, or --import FORMAT PATH"),
        (["profile", "--import", "megatron", "x"], "--import megatron: not known. Allowed: zorse, sailor"),
        (["profile", "--import", "zorse", "x.json"], "Zorse's profile x.json does not exist"),
        (["profile", "JOB", "--rows", "0"], "--rows 0: give row counts"),
        (["profile", "JOB", "--rows", "1000"], "none is within the global batch"),
        (["profile", "JOB", "--remat", "some"], "--remat some: give some of none, dots, full"),
        (["plan", "JOB", "--profile", "absent.json"], "Profile absent.json does not exist"),
        (["plan", "JOB", "--profile", "mesh.toml"], "mesh.toml is not valid JSON"),
        (
            ["plan", "JOB", "--profile", "gpus.json"],
            "has figures of t4, and cluster 'mesh' has groups of cpu",
        ),
    ],
)
def test_mistakes_are_told_in_a_sentence(job, capfd, arguments, message):
    entry: dict[str, Any] = {"segment_class": "c", "kind": "t4", "dtype": "float16", "source": "imported"}
    entry["points"] = [{"rows": 1, "forward_s": 1.0, "backward_s": 2.0}]
    pathlib.Path("gpus.json").write_text(json.dumps({"format": "hetjax-profile-1", "entries": [entry]}))
    words = [word for a in arguments for word in (job if a == "JOB" else [a])]
    status, _, err = call(capfd, *words)
    assert status == 2 and message in " ".join(err.split())
    assert "Traceback" not in err
