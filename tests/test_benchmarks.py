"""Every benchmark runs and ends with its figures as JSON. The sizes are tiny and the values are not tested.

The slowest tests of the suite, together about a minute. `benchmarks.setup_times` is left out: it installs.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import common

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {
    # compiling is nearly all that these runs do
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}

FIGURES = {
    "compile_time": ["ratio"],
    "curve": ["max_relative_difference", "hetjax_bits_per_byte", "plain_bits_per_byte"],
    "dispatch": ["single_device_us", "four_devices_us"],
    "memory": ["remat_full_to_none", "1f1b_to_gpipe", "within_bounds", "1f1b_stage1_in_flight"],
    "overhead": ["throughput_ratio", "naive_ratio", "hetjax_flat_tokens_per_s", "plain_gpt_tokens_per_s"],
}


def run(*command: str) -> subprocess.CompletedProcess:
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.parametrize("name", FIGURES)
def test_a_benchmark_ends_with_one_line_of_figures(name: str, tmp_path: Path):
    options = ["--losses", str(tmp_path / "losses.jsonl")] if name == "curve" else []
    done = run("-m", f"benchmarks.{name}", "--quick", *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 2, "a person reads what is measured"
    assert not any(line.startswith("{") for line in lines[:-1])
    figures = json.loads(lines[-1])
    assert set(FIGURES[name]) <= set(figures)
    numbers = [figures[figure] for figure in FIGURES[name] if not isinstance(figures[figure], bool)]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    if name == "curve":
        losses = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
        assert [record["step"] for record in losses] == list(range(1, figures["steps"] + 1))
        worst = max(abs(record["hetjax"] / record["plain"] - 1) for record in losses)
        assert figures["max_relative_difference"] == pytest.approx(worst, rel=1e-3)
        assert worst < 1e-4


def test_a_benchmark_runs_as_a_file_too():
    done = run("benchmarks/setup_times.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "Time the way from a clone" in done.stdout


def test_interleaved_forms_take_turns_and_each_round_begins_with_another(capsys: pytest.CaptureFixture):
    calls = []

    def form(name: str):
        def step():
            calls.append(name)
            return common.Result(jnp.zeros(()), jnp.zeros(()))

        return step

    times = common.interleave({"a": form("a"), "b": form("b")}, num_rounds=2, num_steps=2)
    assert calls == list("aabbbbaa")
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
    assert "round 2" in capsys.readouterr().out


def test_a_ratio_is_the_median_of_the_rounds_own():
    assert common.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0


def test_figures_are_printed_short_and_never_as_something_that_is_not_json(capsys: pytest.CaptureFixture):
    common.finish({"ratio": 1 / 3, "count": 7, "form": "x"})
    assert json.loads(capsys.readouterr().out) == {"ratio": 0.33333, "count": 7, "form": "x"}
    with pytest.raises(ValueError, match="JSON"):
        common.finish({"ratio": float("nan")})


def test_a_plan_by_hand_gives_each_group_an_equal_run_of_segments():
    program = common.trace(common.gpt(8, 4, num_layers=2, embed_dim=4, num_heads=1), 8)
    plan = common.plan_by_hand(program, common.cpu_groups(1, 2), num_microbatches=2, remat="full")
    plan.check(program)
    middle = round(program.num_segments / 2)
    assert [stage.segments for stage in plan.stages] == [(0, middle), (middle, program.num_segments)]
    assert [stage.members[0].axes for stage in plan.stages] == [{"dp": 1}, {"dp": 2}]
    assert np.unique([m.rows for stage in plan.stages for m in stage.members]).tolist() == [0, 4]


def test_a_failed_process_is_told_with_what_it_wrote():
    with pytest.raises(RuntimeError, match="Invalid value for '--steps'"):
        common.in_fresh_process("benchmarks.dispatch", ["--steps=none"])
