"""What a person fixes before the search: pins, groups left out, half-written plans."""

import json
from typing import Any

import pytest

from hetjax.cluster import Cluster
from hetjax.errors import UserError
from hetjax.planner import make_plan
from hetjax.planner.choices import PartialPlan, complete_plan, read_partial, read_pins
from hetjax.schedule import plan_schedule
from hetjax.schedule_check import check_schedule
from tests.fake_program import llama

PROGRAM = llama(num_layers=2, hidden=128, seq=64, vocab=500, global_batch=8)  # s0 to s3


def cluster(**sizes):
    kinds = {"a": "a100-80", "v": "v100-16", "t": "t4"}
    groups = {
        name: {"kind": kinds[name], "num_devices": n} for name, n in (sizes or {"a": 1, "v": 1}).items()
    }
    return Cluster.from_dict({"name": "c", "groups": groups, "default_link": {"bandwidth_gb_per_s": 10.0}})


def groups_of(plan):
    """By segment, the groups that run it."""
    return {i: {m.group for m in stage.members} for stage in plan.stages for i in range(*stage.segments)}


# ---- pins ----


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], {}),
        (["0-1=a"], {0: ["a"], 1: ["a"]}),
        (["2=a,v"], {2: ["a", "v"]}),
        ([" 2 = a , v "], {2: ["a", "v"]}),
        (["s3=v"], {3: ["v"]}),
        (["0-3=a,v", "3=v", "s0=a"], {0: ["a"], 1: ["a", "v"], 2: ["a", "v"], 3: ["v"]}),
        (["1-1=a"], {1: ["a"]}),
    ],
)
def test_pins_name_segments_by_number_by_range_or_by_name(texts, expected):
    assert read_pins(texts, PROGRAM) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["0-3"], "Pin '0-3' is not of the form SEGMENTS=GROUP, like 0-3=a100"),
        (["0="], "Pin '0=' is not of the form"),
        (["0= , "], "is not of the form"),
        (["4=a"], "names segments '4'. Allowed: numbers from 0 to 3, like 2 or 0-3, or a segment's name: s0"),
        (["2-4=a"], "names segments '2-4'. Allowed: numbers from 0 to 3"),
        (["3-1=a"], "names segments '3-1'"),
        (["-1=a"], "names segments '-1'"),
        (["1-=a"], "names segments '1-'"),
        (["head=a"], "names segments 'head'"),
        (["=a"], "names segments ''"),
        (["0=a", "0=v"], r"Pin '0=v' leaves segment 0 no group: another pin allows \['a'\]"),
    ],
)
def test_a_pin_that_cannot_be_says_why(texts, message):
    with pytest.raises(UserError, match=message):
        read_pins(texts, PROGRAM)


def test_pinned_segments_run_where_they_are_pinned_and_excluded_groups_stay_idle():
    pins = read_pins(["0=v", "s3=a,v"], PROGRAM)
    plan = make_plan(PROGRAM, cluster(a=1, v=1, t=1), pins=pins, exclude=["t"], num_microbatches=2)
    found = groups_of(plan)
    assert found[0] == {"v"}
    assert set().union(*found.values()) <= {"a", "v"}
    assert plan.predicted["groups"]["t"]["busy"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pins": {9: ["a"]}}, "A pin names segment 9, and the program has segments 0 to 3"),
        ({"pins": {0: ["x"]}}, "has no group 'x'. Its groups: a, v"),
        ({"exclude": ["x"]}, "has no group 'x'. Its groups: a, v"),
        ({"exclude": ["a", "v"]}, "exclude names all groups of cluster 'c'. Leave one"),
    ],
)
def test_pins_and_exclusions_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make_plan(PROGRAM, cluster(), **options)


# ---- half-written plans ----


def written(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


HALVES = [
    {"segments": [0, 2], "members": [{"group": "v"}]},
    {"segments": [2, 4], "members": [{"group": "a", "devices": [0]}]},
]


def test_a_half_written_plan_keeps_what_it_says_and_gets_the_rest(tmp_path):
    path = written(
        tmp_path / "half.json", {"stages": HALVES, "num_microbatches": 4, "remat": "full", "ahead": 1}
    )
    plan = complete_plan(PROGRAM, cluster(), read_partial(path))
    plan.check(PROGRAM)
    check_schedule(plan_schedule(plan, PROGRAM.edges()))
    assert [stage.segments for stage in plan.stages] == [(0, 2), (2, 4)]
    assert [[m.group for m in stage.members] for stage in plan.stages] == [["v"], ["a"]]
    assert (plan.num_microbatches, plan.ahead) == (4, 1)
    assert {r for stage in plan.stages for m in stage.members for r in m.remat} == {"full"}
    assert all(m.num_rows == 2 for stage in plan.stages for m in stage.members)
    assert plan.predicted["step_time_s"] > 0


def test_what_is_left_open_is_chosen_no_worse_than_by_hand():
    free = complete_plan(PROGRAM, cluster(), PartialPlan.model_validate({"stages": HALVES}))
    for M in (1, 2, 4, 8):
        for schedule in ("gpipe", "1f1b"):
            fixed = {"stages": HALVES, "num_microbatches": M, "schedule": schedule}
            plan = complete_plan(PROGRAM, cluster(), PartialPlan.model_validate(fixed))
            assert (plan.num_microbatches, plan.schedule) == (M, schedule)
            assert free.predicted["step_time_s"] <= plan.predicted["step_time_s"] * (1 + 1e-9)


def test_a_group_without_devices_is_shared_out_evenly_over_its_stages():
    stages: list[Any] = [{"segments": [i, i + 1], "members": [{"group": "a"}]} for i in range(3)]
    stages.append({"segments": [3, 4], "members": [{"group": "v", "devices": [1]}]})
    partial = PartialPlan.model_validate({"stages": stages, "num_microbatches": 2})
    plan = complete_plan(PROGRAM, cluster(a=7, v=2), partial)
    given = [set(m.devices) for stage in plan.stages for m in stage.members]
    for own, allowed in zip(given, [{0, 1}, {2, 3}, {4, 5}, {1}], strict=True):
        assert own and own <= allowed


def test_members_of_one_stage_share_its_rows():
    stages = [{"segments": [0, 4], "members": [{"group": "a"}, {"group": "v"}]}]
    partial = PartialPlan.model_validate({"stages": stages, "num_microbatches": 2})
    (stage,) = complete_plan(PROGRAM, cluster(), partial).stages
    assert [m.group for m in stage.members] == ["a", "v"]
    assert sum(m.num_rows for m in stage.members) == 4


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"segments": [0, 2]}, {"segments": [3, 4]}], r"segments \[3, 4\], and the one before it ends at 2"),
        ([{"segments": [1, 4]}], r"segments \[1, 4\], and the one before it ends at 0"),
        ([{"segments": [0, 0]}, {"segments": [0, 4]}], r"segments \[0, 0\]"),
        ([{"segments": [0, 3]}], "The stages end at segment 3, and the program has 4"),
        ([{"segments": [0, 5]}], "The stages end at segment 5, and the program has 4"),
        ([{"segments": [0, 4], "members": [{"group": "x"}]}], "has no group 'x'. Its groups: a, v"),
        (
            [{"segments": [0, 4], "members": [{"group": "a", "devices": [1]}]}],
            r"Group 'a' has devices 0 to 0, and a stage lists \[1\]",
        ),
        ([{"segments": [0, 4], "members": [{"group": "a", "devices": []}]}], r"a stage lists \[\]"),
        ([{"segments": [0, 4], "members": [{"group": "a", "devices": [0, 0]}]}], r"a stage lists \[0, 0\]"),
        (
            [{"segments": [0, 2]}, {"segments": [2, 4]}],
            "Group 'a' has 1 devices for 2 stages. Give it fewer stages, or name the devices of each",
        ),
    ],
)
def test_boundaries_and_groups_that_cannot_be_are_refused(stages, message):
    data = {"stages": [{"members": [{"group": "a"}]} | stage for stage in stages], "num_microbatches": 2}
    with pytest.raises(UserError, match=message):
        complete_plan(PROGRAM, cluster(), PartialPlan.model_validate(data))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_microbatches": 3}, "num_microbatches is 3 and has to divide the global batch, which is 8"),
        ({"schedule": "zb"}, "schedule is 'zb'. Allowed: gpipe, 1f1b"),
    ],
)
def test_other_choices_of_a_half_written_plan_that_cannot_be_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        complete_plan(PROGRAM, cluster(), PartialPlan.model_validate({"stages": HALVES} | fields))


def test_stages_that_do_not_fit_are_refused():
    tables: dict[str, Any] = cluster().to_dict()
    tables["groups"]["v"]["memory_gib"] = 0.001
    narrow = Cluster.from_dict(tables)
    partial = PartialPlan.model_validate({"stages": HALVES, "num_microbatches": 2})
    with pytest.raises(UserError, match="No way to complete the plan fits its devices.* GiB too much. Move"):
        complete_plan(PROGRAM, narrow, partial)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "half.json is no plan to complete: Expecting property name"),
        ({}, "half.json is no plan to complete: stages: Field required. It needs stages, each with segments"),
        ({"stages": []}, "stages: List should have at least 1 item"),
        ({"stages": HALVES, "microbatches": 2}, "microbatches: Extra inputs are not permitted"),
        ({"stages": [{"segments": [0, 4], "members": []}]}, "stages.0.members: List should have at least 1"),
        ({"stages": [{"segments": [0], "members": [{"group": "a"}]}]}, "stages.0.segments.1: Field required"),
        (
            {"stages": [{"segments": [0, 4], "members": [{"devices": [0]}]}]},
            "members.0.group: Field required",
        ),
        ({"stages": HALVES, "num_microbatches": "many"}, "num_microbatches: Input should be a valid integer"),
        ([], "Input should be a valid dictionary"),
    ],
)
def test_a_file_that_is_no_half_written_plan_says_what_is_wrong(tmp_path, data, message):
    with pytest.raises(UserError, match=message):
        read_partial(written(tmp_path / "half.json", data))


def test_a_file_that_is_missing_or_is_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="none.json is no plan to complete: .*No such file"):
        read_partial(tmp_path / "none.json")
    (tmp_path / "half.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is no plan to complete"):
        read_partial(tmp_path / "half.json")
