"""Replicated pipelines of unlike shape: two devices that hold the model together, and one that does alone."""

import itertools

import pytest

from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts
from hetjax.planner import make_plan
from hetjax.planner.replicas import Part, combined, exchange_s, partitions, rows_of
from hetjax.planner.search import Search
from hetjax.program import Edge
from hetjax.schedule import plan_schedule
from hetjax.schedule_check import check_schedule
from hetjax.simulate import simulate
from tests.fake_program import FakeProgram, segment

BOUNDARY = 20e6
PROGRAM = FakeProgram(
    tuple(segment(i, 5_000_000, 6e11, BOUNDARY, 4 * BOUNDARY) for i in range(4)),
    tuple(Edge(i, i + 1, BOUNDARY) for i in range(3)),
    global_batch=64,
)
MODEL_BYTES = 4 * 4 * 5_000_000
BLOCKS = (("a", "b"), ("c",))


def cluster(across):
    """`a` and `b` are joined by a fast link and are too small alone; `c` is reached at `across` GB/s."""
    groups = {
        "a": {"kind": "a100-80", "num_devices": 1, "memory_gib": 0.6},
        "b": {"kind": "v100-16", "num_devices": 1, "memory_gib": 0.35},
        "c": {"kind": "a100-80", "num_devices": 1, "memory_gib": 4.0},
    }
    rates = {("a", "b"): 50.0, ("a", "c"): across, ("b", "c"): across}
    links = [{"between": list(pair), "bandwidth_gb_per_s": rate} for pair, rate in rates.items()]
    return Cluster.from_dict({"name": "three", "groups": groups, "links": links})


def search(across=0.3, **more):
    return Search(PROGRAM, cluster(across), AnalyticCosts(), 16, None, None, **more)


def is_replicated(plan):
    """Whether some group has a part in every stage, and the others share them out."""
    return len(plan.stages) > 1 and all("c" in {m.group for m in stage.members} for stage in plan.stages)


def test_links_that_carry_gradients_and_not_activations_make_replicas():
    # Over 0.3 GB/s the gradients take 0.27 s, and all rows' activations (16 bits) more than 2 s each way.
    activations_s = 64 * BOUNDARY / 2 / 0.3e9
    assert activations_s > 2 > 4 * exchange_s(search(), BLOCKS)
    plan = make_plan(PROGRAM, cluster(0.3), num_microbatches=16)
    assert is_replicated(plan)
    # No boundary value passes the thin links: only gradients do.
    sent = [p for p in simulate(plan, PROGRAM).passages if "c" in p.channel]
    assert {p.task.op for p in sent} == {"R"}
    alone = next(r for r in plan.predicted["rejected"] if r["what"].startswith("c alone"))
    assert alone["step_time_s"] > 1.5 * plan.predicted["step_time_s"]


def test_over_a_wide_link_or_a_hopeless_one_there_are_none():
    assert not is_replicated(make_plan(PROGRAM, cluster(50.0), num_microbatches=16))
    plan = make_plan(PROGRAM, cluster(0.001), num_microbatches=16)
    assert {m.group for stage in plan.stages for m in stage.members} == {"c"}


@pytest.mark.parametrize("names", [BLOCKS, (("c",), ("a", "b")), (("b", "a"), ("c",))])
def test_replicas_cover_all_rows_in_each_stage_and_their_own_stages_share_lanes(names):
    plan = combined(search(), names, 16)
    assert plan is not None
    plan.check(PROGRAM)
    check_schedule(plan_schedule(plan, PROGRAM.edges()))
    assert len(plan.stages) == 2
    for stage in plan.stages:
        # The rows of the microbatch, in order, without gaps: of the one pipeline and of the other.
        rows = [m.rows for m in stage.members]
        assert [start for start, _ in rows] == [0, *(stop for _, stop in rows[:-1])]
        assert rows[-1][1] == plan.microbatch_rows == 4
        assert len(stage.members) == 2
    lanes = {}
    for members, stage in zip(plan.lanes, plan.stages, strict=True):
        for lane, member in zip(members, stage.members, strict=True):
            lanes.setdefault(member.group, set()).add(lane)
    assert sorted(map(len, lanes.values())) == [1, 1, 1]
    assert len(set.union(*lanes.values())) == 3
    # Each pipeline keeps its rows from stage to stage, so nothing crosses from one to the other.
    of_c = {m.rows for stage in plan.stages for m in stage.members if m.group == "c"}
    assert len(of_c) == 1


def test_a_set_that_cannot_hold_the_model_makes_no_replica():
    assert combined(search(), (("a", "c"), ("b",)), 16) is None


def test_rows_follow_the_speed_of_each_set():
    found = search()
    shares = rows_of(found, BLOCKS, 64)
    assert shares is not None
    one, two = shares
    assert one + two == 64
    speeds = [sum(1 / found.pricer.model_s(name, 1, 64) for name in block) for block in (("a", "b"), ("c",))]
    assert one == pytest.approx(64 * speeds[0] / sum(speeds), abs=1)
    assert rows_of(found, BLOCKS, 1) is None


def test_gradients_go_round_the_sets_over_the_best_link_of_each_pair():
    # Two sets: each passes on all of the gradients once (half to reduce, half to gather).
    assert exchange_s(search(0.3), BLOCKS) == pytest.approx(MODEL_BYTES / 0.3e9)
    # Three: 4/3 of them, over the slowest of the three links.
    assert exchange_s(search(0.3), (("a",), ("b",), ("c",))) == pytest.approx(4 / 3 * MODEL_BYTES / 0.3e9)


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (2, 1), (3, 4), (4, 14), (5, 15), (6, 31)])
def test_groups_are_divided_in_every_way_up_to_four_and_in_two_beyond(count, expected):
    names = "abcdef"[:count]
    found = partitions(names)
    assert len(found) == expected  # Bell numbers less one; then 2 ** (n - 1) - 1
    assert len({frozenset(map(frozenset, blocks)) for blocks in found}) == expected
    for blocks in found:
        assert sorted(itertools.chain(*blocks)) == list(names)


def test_a_part_of_a_program_has_rows_of_its_own_and_all_else_of_the_whole():
    part = Part(PROGRAM, 12)
    assert part.global_batch == 12
    assert part.segments() == PROGRAM.segments()
    assert part.rows_mode == PROGRAM.rows_mode
