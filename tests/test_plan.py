import dataclasses
import json

import pytest

from hetjax.cluster import Cluster
from hetjax.errors import UserError
from hetjax.graph import StageGraph, in_flight_bounds
from hetjax.plan import Member, Plan, Stage
from hetjax.schedule import plan_schedule
from hetjax.schedule_check import check_schedule
from tests.fake_program import FakeProgram, Segment, llama

CLUSTER = Cluster.from_dict(
    {
        "name": "two",
        "groups": {
            "a": {"kind": "a100-80", "num_devices": 4},
            "t": {"kind": "t4", "num_devices": 8},
        },
        "default_link": {"bandwidth_gb_per_s": 10},
    }
)
PROGRAM = llama(num_layers=4, global_batch=32)


def member(group, devices, rows=(0, 8), num_segments=3, remat="dots", **axes):
    return Member(group, tuple(devices), axes or {"dp": len(devices)}, rows, (remat,) * num_segments)


def two_stages(**more):
    stages = (Stage((0, 3), (member("a", range(4)),)), Stage((3, 6), (member("t", range(8)),)))
    plan = Plan(CLUSTER, "fake", 6, 32, 4, "1f1b", stages, predicted={"step_time_s": 1.5})
    return dataclasses.replace(plan, **more)


def edit(change):
    data = two_stages().to_dict()
    change(data)
    return json.dumps(data)


def test_a_plan_survives_the_way_through_json_and_a_file(tmp_path):
    plan = two_stages()
    assert Plan.from_json(plan.to_json()) == plan
    timed = dataclasses.replace(plan.stages[0].members[0], seconds=(0.1, 0.2), remat=("none", "none", "dots"))
    plan = dataclasses.replace(plan, stages=(Stage((0, 3), (timed,), fuse=2), plan.stages[1]))
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == plan


def test_the_json_is_short_enough_for_a_person():
    text = two_stages().to_json()
    assert '"devices": [0, 1, 2, 3]' in text
    assert '"remat": "dots"' in text
    assert len(text.splitlines()) < 60


def test_a_good_plan_passes():
    two_stages().check(PROGRAM)


STAGES = "stages"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("schedule"), "plan: key 'schedule' is missing"),
        (lambda d: d.update(extra=1), "plan: unknown key 'extra'. Allowed: num_segments, global_batch"),
        (lambda d: d.update(schedule="zb"), "plan: schedule is 'zb'. Allowed: gpipe, 1f1b, interleaved"),
        (lambda d: d.update(schedule=3), "schedule has to be of type str, and is 3"),
        (lambda d: d.update(format="hetjax-plan-0"), "format is 'hetjax-plan-0', and this version reads"),
        (
            lambda d: d.update(num_microbatches=5),
            "num_microbatches is 5 and has to divide global_batch, .* 32",
        ),
        (lambda d: d.update(stages=[]), "stages is empty"),
        (lambda d: d.update(stages=[3]), r"stages\[0\] has to be a JSON object, and is 3"),
        (lambda d: d[STAGES][0].update(segments=[0, 2]), r"Segment 2 is on no stage: stage 1 starts at 3"),
        (
            lambda d: d[STAGES][0].update(segments=[0]),
            r"segments has to be a list of 2 integers, and is \[0\]",
        ),
        (lambda d: d[STAGES][1].update(segments=[2, 6]), "Segment 2 is placed twice: stage 1 starts at 2"),
        (
            lambda d: d[STAGES][1].update(segments=[3, 5]),
            "Segment 5 is on no stage: the last stage ends at 5",
        ),
        (lambda d: d[STAGES][1].update(segments=[3, 7]), "ends at segment 7, and there are only 6 segments"),
        (lambda d: d[STAGES][1].update(segments=[3, 3]), r"Stage 1 has segments \[3, 3\], which holds none"),
        (lambda d: d[STAGES][1].update(members=[]), "Stage 1 has no members"),
        (
            lambda d: d[STAGES][1].update(segments=[3, 10**9]),
            f"ends at segment {10**9}, and there are only 6",
        ),
        (
            lambda d: d.update(global_batch=10**12, num_microbatches=7),
            "has to divide global_batch, .* 1, 2, 4",
        ),
        (lambda d: d.update(predicted={"step_time_s": "short"}), "predicted does not hold what the planner"),
        (
            lambda d: d.update(predicted={"step_time_s": 1.0, "groups": [3]}),
            "predicted does not hold .* remove",
        ),
        (lambda d: d[STAGES][1].update(fuse=0), "Stage 1 has fuse 0. It has to be 1 or more"),
        (lambda d: d["cluster"].pop("default_link"), "plan: cluster: links: none joins 'a' and 't'"),
    ],
)
def test_a_wrong_plan_is_told_what_is_wrong(change, message):
    with pytest.raises(UserError, match=message):
        Plan.from_json(edit(change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "b"}, "has no group 'b'. Its groups: a, t"),
        (
            {"devices": [0, 1, 2, 4]},
            r"lists devices \[0, 1, 2, 4\]. It needs at least one, each once, of 0 to 3",
        ),
        ({"devices": [0, 1, 2, 2]}, r"lists devices \[0, 1, 2, 2\]. It needs at least one, each once"),
        ({"devices": "all"}, "devices has to be of type list, and is 'all'"),
        ({"axes": {"dp": 3}}, r"lists 4 devices, and dp=3 needs 3. The product of the axes has to equal"),
        ({"axes": {"pp": 4}}, "has axis 'pp'. Allowed: dp, fsdp, tp"),
        ({"axes": {"dp": "4"}}, r"members\[0\].axes.dp has to be a list of 1 integers"),
        ({"rows": [0, 4]}, "Stage 0 covers rows 0 to 4 of a microbatch of 8"),
        ({"rows": [1, 8]}, r"has rows \[1, 8\], and has to start at 0 with at least one row"),
        ({"remat": ["dots"]}, "lists 1 remat policies for 3 segments. Give one for each"),
        ({"remat": [1, 2, 3]}, "remat has to name one policy, or one for each segment; it has 1"),
        ({"residency": "lent"}, "has residency 'lent'. Allowed: resident, sharded, gathered, offloaded"),
        ({"seconds": [1]}, r"seconds has to be the seconds of F and of B, and is \[1\]"),
        ({"seconds": [10**400, 1]}, "seconds has to be the seconds of F and of B, and is "),
        ({"seconds": [True, 1]}, "seconds has to be the seconds of F and of B, and is "),
        ({"color": "red"}, r"members\[0\]: unknown key 'color'. Allowed: group, devices, axes, rows"),
    ],
)
def test_a_wrong_member_is_told_what_is_wrong(fields, message):
    with pytest.raises(UserError, match=message):
        Plan.from_json(edit(lambda d: d["stages"][0]["members"][0].update(fields)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "plan is not valid JSON: "),
        ('{"global_batch": ' + "9" * 5000 + "}", "plan is not valid JSON: "),
        ('{"schedule": "1f1b", "schedule": "gpipe"}', "key 'schedule' stands twice in one object"),
    ],
)
def test_text_that_is_no_plan_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        Plan.from_json(text)


def test_members_of_one_stage_have_devices_of_their_own():
    halves = (member("a", [0, 1], rows=(0, 4)), member("a", [1, 2], rows=(4, 8)))
    with pytest.raises(UserError, match="Stage 0, members 0 and 1 both list device 1 of group 'a'"):
        two_stages(stages=(Stage((0, 3), halves), two_stages().stages[1])).check(PROGRAM)


def test_an_unknown_remat_policy_is_refused_before_anything_is_placed():
    stage = Stage((0, 3), (member("a", range(4), remat="fulll"),))
    with pytest.raises(UserError, match="The remat policy 'fulll' is unknown. Allowed: none, full, dots, "):
        two_stages(stages=(stage, two_stages().stages[1])).check(PROGRAM)


def test_rows_have_to_divide_by_the_shards():
    odd = dataclasses.replace(two_stages(), num_microbatches=8, global_batch=48)
    odd = dataclasses.replace(
        odd,
        stages=tuple(
            dataclasses.replace(s, members=(dataclasses.replace(s.members[0], rows=(0, 6)),))
            for s in odd.stages
        ),
    )
    with pytest.raises(UserError, match=r"has 6 rows, and dp=4 x fsdp=1 splits them into 4 parts. Give it a"):
        odd.check()


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match="no.json does not exist"):
        Plan.load(tmp_path / "no.json")
    with pytest.raises(UserError, match="cannot be read"):
        Plan.load(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="bad.json is not valid JSON: "):
        Plan.load(tmp_path / "bad.json")


def test_a_plan_for_another_program_is_refused():
    with pytest.raises(UserError, match="The plan is for 6 segments, and the program has 7"):
        two_stages().check(llama(num_layers=5))
    with pytest.raises(UserError, match="made for another program .fingerprint fake, this one is other"):
        two_stages().check(dataclasses.replace(PROGRAM, fingerprint="other"))
    with pytest.raises(UserError, match="for a global batch of 32 rows, and the program has 64"):
        two_stages().check(dataclasses.replace(PROGRAM, global_batch=64))
    with pytest.raises(
        UserError, match="mixes the rows of a batch .rows='whole'., so its rows cannot be split"
    ):
        two_stages().check(dataclasses.replace(PROGRAM, rows_mode="whole"))


def test_memory_over_capacity_is_refused_with_the_amount():
    big = llama(num_layers=4, hidden=8192, seq=2048)
    with pytest.raises(
        UserError, match=r"of group 't' needs about .* GiB and has 15.0 GiB \(.* GiB too much\)"
    ):
        two_stages().check(big)


def test_memory_is_what_a_hand_count_says():
    one = Segment(0, "s", "c", 1000, 4000, 1.0, 8.0, {"none": 400.0, "dots": 100.0, "full": 8.0})
    program = FakeProgram((one,), (), global_batch=16)
    plan = Plan(
        CLUSTER, "", 1, 16, 2, "gpipe", (Stage((0, 1), (member("t", range(4), num_segments=1, fsdp=4),)),)
    )
    memory = plan.member_memory(program)[0, 0]
    assert memory.master_bytes == 4000 / 4
    assert memory.optimizer_bytes == 8000 / 4
    assert memory.copy_bytes == 4000 / 2  # float16, gathered
    assert memory.accumulator_bytes == 4000
    assert memory.kept_bytes_per_part == 2 * 100 / 2  # two rows a device, float16
    assert memory.in_flight == 2
    assert plan.device_memory(program)["t", 3] == memory.total_bytes


def test_members_share_a_lane_exactly_where_their_devices_overlap():
    stages = (
        Stage((0, 1), (member("a", [0, 1]),)),
        Stage((1, 2), (member("t", [0, 1], (0, 4)), member("t", [2, 3], (4, 8)))),
        Stage((2, 3), (member("a", [2, 3]),)),
        Stage((3, 4), (member("a", [1]),)),
        Stage((4, 5), (member("t", [1, 2]),)),
    )
    plan = two_stages(stages=stages)
    assert plan.lanes == ((0,), (1, 1), (2,), (0,), (1,))


def test_the_stated_bounds():
    def bounds_of(kind, lanes, num_microbatches):
        chain = tuple((s, s + 1) for s in range(len(lanes) - 1))
        return in_flight_bounds(kind, StageGraph(tuple(lanes), chain), num_microbatches)

    assert bounds_of("gpipe", [(0,), (1,)], 5).stage == (5, 5)
    assert bounds_of("1f1b", [(0,), (1,), (2,)], 5).stage == (3, 2, 1)
    assert bounds_of("1f1b", [(0,), (1,), (0,)], 5).lane == (4, 2)
    assert bounds_of("interleaved", [(0,), (1,), (0,), (1,)], 8).lane == (5, 3)
    assert bounds_of("interleaved", [(0,), (1,), (0,), (1,), (0,)], 8).lane == (5, 5)


def test_a_plan_gives_its_schedule_with_skip_connections_and_times():
    links = (*PROGRAM.links, dataclasses.replace(PROGRAM.links[0], producer=1, consumer=5))
    program = dataclasses.replace(PROGRAM, links=links)
    plan = two_stages()
    schedule = plan_schedule(plan, program.edges())
    check_schedule(schedule)
    assert schedule.graph.edges == ((0, 1),)
    slow = dataclasses.replace(plan.stages[0].members[0], seconds=(1.0, 2.0))
    fast = dataclasses.replace(plan.stages[1].members[0], seconds=(0.1, 0.2))
    timed = two_stages(stages=(Stage((0, 3), (slow,)), Stage((3, 6), (fast,))))
    check_schedule(plan_schedule(timed, program.edges()))


def test_the_table_tells_stages_groups_axes_and_rows():
    text = str(two_stages())
    assert "6 segments in 2 stages, schedule 1f1b, 4 microbatches of 8 rows (global batch 32)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "0-2", "a", "0-3", "dp=4", "8", "dots"] in lines
    assert ["1", "3-5", "t", "0-7", "dp=8", "8", "dots"] in lines
