"""Two regions joined by a thin link, from DT-FM's data: what the plan sends over it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planner import regions
from hetjax.plan import Member, Plan, Stage

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def figures():
    # In a process of its own: without the type checks of the test run it takes a tenth of the time.
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner.regions", "--quick", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_program_too_large_for_a_region_sends_its_boundary_once_over_the_thin_link_and_no_gradients(
    figures,
):
    rows = [row for row in figures["rows"] if row["model"] == "5 layers"]
    assert len(rows) == 2
    # 8 rows of 1,024 tokens of 5,120 values in float16, in MB
    boundary_mb = 8 * 1024 * 5120 * 2 / 1e6
    for row in rows:
        assert row["first_region"] is None and row["second_region"] is None
        assert row["ours"]["gradient_mb"] == 0
        assert row["ours"]["num_crossings"] == 1
        assert (row["ours"]["mb_there"], row["ours"]["mb_back"]) == pytest.approx((boundary_mb, boundary_mb))


def test_a_program_that_fits_in_a_region_sends_nothing_over_a_far_link(figures):
    (row,) = [row for row in figures["rows"] if row["model"] == "2 layers"]
    assert row["pair"] == "Sydney-London"
    assert (row["ours"]["mb_there"], row["ours"]["mb_back"], row["ours"]["num_crossings"]) == (0, 0, 0)
    assert sum((row["ignoring"]["mb_there"], row["ignoring"]["mb_back"])) > 0


def test_a_plan_that_knows_the_links_is_not_slower_than_one_that_ignores_them_or_a_region_alone(figures):
    # The planner is within 1% of the best.
    assert figures["worst_time_ratio"] > 0.99
    assert figures["worst_region_ratio"] > 0.99


def test_the_figures_are_those_of_the_rows(figures):
    times = sorted(r["ignoring"]["step_time_s"] / r["ours"]["step_time_s"] for r in figures["rows"])
    assert figures["time_ratio"] == pytest.approx(times[1])
    assert figures["worst_time_ratio"] == pytest.approx(times[0])
    there = sorted(max(r["ours"]["mb_there"], r["ours"]["mb_back"]) for r in figures["rows"])
    assert figures["thin_link_mb"] == pytest.approx(there[1])


def test_like_groups_of_a_plan_take_each_others_places_and_others_do_not():
    cluster = regions.cluster_of("a100-40 t4 | v100-16 t4", "Oregon-Tokyo", num_devices=1)
    names = ["t4-2", "a100-40", "t4-1"]
    stages = tuple(
        Stage((i, i + 1), (Member(name, (0,), {}, (0, 8), ("none",)),)) for i, name in enumerate(names)
    )
    plan = Plan(cluster, "", 3, 8, 1, "1f1b", stages)
    found = {tuple(stage.members[0].group for stage in other.stages) for other in regions.renamed(plan)}
    assert found == {("t4-2", "a100-40", "t4-1"), ("t4-1", "a100-40", "t4-2")}


def test_links_are_as_measured_in_a_region_and_between_two():
    cluster = regions.cluster_of("a100-40 t4 | v100-16 t4", "Oregon-Tokyo")
    assert [g.name for g in cluster.groups] == ["a100-40", "t4-1", "v100-16", "t4-2"]
    inside, across = cluster.link("t4-2", "v100-16"), cluster.link("t4-1", "t4-2")
    assert (inside.bandwidth_gb_per_s, inside.latency_us) == (0.25, 5e3)
    assert (across.bandwidth_gb_per_s, across.latency_us) == (0.523 / 8, 96e3)
    fast = regions.without_links(cluster).link("t4-1", "t4-2")
    assert fast.transfer_s(1e9) == pytest.approx(1e-6)
