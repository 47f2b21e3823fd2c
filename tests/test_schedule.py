import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from hetjax.errors import UserError
from hetjax.graph import StageGraph
from hetjax.plan import SCHEDULES
from hetjax.schedule import Task, make_schedule, schedule_graph
from hetjax.schedule_check import check_schedule


def length(schedule, forward_s, backward_s):
    """Seconds of F and B when every lane runs its list in order and inputs travel at once."""
    end: dict[Task, float] = {}
    free = [0.0] * len(schedule.lanes)
    for task in schedule.order:
        if task.op in "FB":
            lane = schedule.graph.lanes[task.stage][task.member]
            start = max([free[lane]] + [end[d] for d in schedule.dependencies(task) if d.op in "FB"])
            end[task] = free[lane] = start + (forward_s if task.op == "F" else backward_s)[task.stage]
    return max(end.values())


def ring(num_lanes, num_chunks):
    return [(s % num_lanes,) for s in range(num_lanes * num_chunks)]


@st.composite
def graphs(draw):
    num_stages = draw(st.integers(1, 7))
    num_lanes = draw(st.integers(1, 4))
    members = [draw(st.integers(1, 2)) for _ in range(num_stages)]
    raw = [[draw(st.integers(0, num_lanes - 1)) for _ in range(n)] for n in members]
    names = sorted({lane for lanes in raw for lane in lanes})
    lanes = [tuple(names.index(lane) for lane in lanes) for lanes in raw]
    pairs = [(p, c) for c in range(num_stages) for p in range(c)]
    edges = set(draw(st.lists(st.sampled_from(pairs), max_size=6))) if pairs else set()
    edges |= {(s, s + 1) for s in range(num_stages - 1) if draw(st.booleans())}
    rows = None
    if draw(st.booleans()):
        cuts = [draw(st.integers(1, 5)) for _ in range(num_stages)]
        rows = tuple(
            ((0, 6),) if n == 1 else ((0, cut), (cut, 6)) for n, cut in zip(members, cuts, strict=True)
        )
    seconds = st.floats(0, 3).map(lambda x: round(x, 1))
    forward = [[draw(seconds) for _ in range(n)] for n in members]
    backward = [[draw(seconds) for _ in range(n)] for n in members]
    splits = gathers = None
    if rows is not None and draw(st.booleans()):
        splits = tuple(tuple(draw(st.integers(1, b - a)) for a, b in own) for own in rows)
    if draw(st.booleans()):
        gathers = tuple(tuple(draw(st.integers(0, 2)) for _ in range(n)) for n in members)
    delay = {
        ((p, k), (c, j)): draw(seconds)
        for p, c in sorted(edges)
        for k in range(members[p])
        for j in range(members[c])
        if draw(st.booleans())
    }
    split = tuple(tuple(draw(st.sampled_from([0.0, 0.4])) for _ in range(n)) for n in members)
    split, ahead = draw(st.sampled_from([None, split])), draw(st.integers(0, 3))
    raw = (tuple(lanes), tuple(sorted(edges)), rows, splits, gathers, split, ahead)
    return raw, dict(forward_s=forward, backward_s=backward, transfer_s=delay)


@hypothesis.given(st.sampled_from(SCHEDULES), graphs(), st.integers(1, 9))
@hypothesis.settings(max_examples=250, deadline=None)
def test_any_placement_and_any_costs_give_a_schedule_that_holds_its_promises(kind, graph, num_microbatches):
    raw, more = graph
    graph = StageGraph(*raw)
    if kind == "interleaved":
        graph = dataclasses.replace(graph, splits=None)
    schedule = schedule_graph(kind, graph, num_microbatches, **more)
    check_schedule(schedule)
    assert schedule == schedule_graph(kind, graph, num_microbatches, **more)
    units = graph.units()
    parts = sum(graph.num_splits(u) for u in units) * num_microbatches
    twice = sum(graph.gathers is not None and graph.gathers[s][k] == 2 for s, k in units)
    weights = sum(graph.num_splits(u) for u in units if graph.is_split(u)) * num_microbatches
    assert len(schedule.order) == 3 * len(units) + twice + 2 * parts + weights


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 4), (4, 8), (4, 3), (8, 16)])
def test_equal_stages_idle_as_the_textbook_says(kind, num_stages, num_microbatches):
    schedule = make_schedule(kind, ring(num_stages, 1), num_microbatches)
    seconds = length(schedule, [1] * num_stages, [2] * num_stages)
    bubble = 1 - 3 * num_microbatches / seconds
    assert bubble == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


@pytest.mark.parametrize(
    ("num_lanes", "num_chunks", "num_microbatches"),
    [(2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 4), (3, 2, 6), (8, 2, 16), (8, 4, 32), (2, 4, 16)],
)
def test_interleaving_v_chunks_divides_the_textbooks_bubble_by_v(num_lanes, num_chunks, num_microbatches):
    num_stages = num_lanes * num_chunks
    forward, backward = [1 / num_chunks] * num_stages, [2 / num_chunks] * num_stages
    schedule = make_schedule(
        "interleaved", ring(num_lanes, num_chunks), num_microbatches, forward_s=forward, backward_s=backward
    )
    idle = length(schedule, forward, backward) - 3 * num_microbatches
    assert idle == pytest.approx(3 * (num_lanes - 1) / num_chunks)
    warm_up = [(num_chunks - 1) * num_lanes + 2 * (num_lanes - r - 1) for r in range(num_lanes)]
    most = num_chunks * num_microbatches
    assert schedule.bounds.lane == tuple(min(w + 1, most) for w in warm_up)


def test_bounds_are_those_of_the_schedules():
    lanes = ring(4, 1)
    assert make_schedule("gpipe", lanes, 16).max_in_flight == {0: 16, 1: 16, 2: 16, 3: 16}
    assert make_schedule("1f1b", lanes, 16).max_in_flight == {0: 4, 1: 3, 2: 2, 3: 1}
    assert make_schedule("1f1b", lanes, 2).max_in_flight == {0: 2, 1: 2, 2: 2, 3: 1}
    assert make_schedule("interleaved", lanes, 16).max_in_flight == {0: 4, 1: 3, 2: 2, 3: 1}


def test_one_stage_alternates_forward_and_backward():
    schedule = make_schedule("1f1b", [(0,)], 2)
    assert " ".join(map(str, schedule.order)) == "G0 F0/0 B0/0 F0/1 B0/1 R0 U0"
    assert "lane 0: G0 F0/0" in str(schedule)


def test_a_lane_with_several_stages_goes_through_them_one_by_one_under_gpipe():
    schedule = make_schedule("gpipe", [(0,), (0,)], 2)
    assert (
        " ".join(map(str, schedule.lanes[0])) == "G0 G1 F0/0 F0/1 F1/0 F1/1 B1/0 B1/1 B0/0 B0/1 R1 R0 U0 U1"
    )


def test_a_slow_first_stage_never_waits():
    forward, backward = [4, 1, 1], [8, 2, 2]
    schedule = make_schedule("1f1b", ring(3, 1), 8, forward_s=forward, backward_s=backward)
    assert length(schedule, forward, backward) == 12 * 8


def test_updates_wait_for_all_reductions_and_reductions_for_all_backwards():
    schedule = make_schedule("1f1b", [(0, 1), (1,)], 3)
    assert set(schedule.dependencies(Task("U", 0, -1, 0))) == {
        Task("R", 0, -1, 0), Task("R", 0, -1, 1), Task("R", 1, -1, 0)
    }  # fmt: skip
    assert len(schedule.dependencies(Task("R", 0, -1, 0))) == 6


def test_members_without_a_row_in_common_do_not_wait_for_each_other():
    halves = ((0, 4), (4, 8))
    schedule = make_schedule("1f1b", [(0, 1), (2, 3)], 1, rows=[halves, halves])
    assert schedule.dependencies(Task("F", 1, 0, 1)) == [Task("G", 1, -1, 1), Task("F", 0, 0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zb", [(0,)], 1), "schedule is 'zb'. Allowed: gpipe, 1f1b, interleaved, ministage"),
        (("1f1b", [(0,)], 0), "num_microbatches is 0. It has to be 1 or more"),
        (("1f1b", [(0,), (2,)], 1), "lanes are numbered 0, 1, ..."),
        (("1f1b", [(0,), ()], 1), "Every stage needs a member"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        make_schedule(*arguments)


def test_edges_lead_forward():
    with pytest.raises(UserError, match="Edge 1 -> 0 has to lead from a stage to a later one of 2"):
        make_schedule("1f1b", [(0,), (0,)], 1, edges=[(1, 0)])


def broken(schedule, lane, change):
    lanes = [list(tasks) for tasks in schedule.lanes]
    change(lanes[lane])
    return dataclasses.replace(schedule, lanes=tuple(tuple(tasks) for tasks in lanes))


def test_the_check_finds_each_kind_of_fault():
    good = make_schedule("1f1b", [(0,), (1,)], 3)
    first, second = good.lanes[0][1], good.lanes[1][1]
    faults = [
        (broken(good, 0, lambda tasks: tasks.remove(first)), "Task F0/0 is in no lane"),
        (broken(good, 0, lambda tasks: tasks.append(first)), r"Task F0/0 is listed twice \(lane 0\)"),
        (broken(good, 0, lambda tasks: tasks.append(second)), "Task F1/0 is in lane 0 and belongs in lane 1"),
        (broken(good, 0, lambda tasks: tasks.append(Task("F", 9, 0, 0))), "task F9/0, which the plan does"),
        (broken(good, 0, lambda tasks: tasks.reverse()), "Deadlock: lane 0 waits at U0 for R0, which can"),
        (dataclasses.replace(good, order=good.order[::-1]), "order has U1 where it does not stand in lane 1"),
        (dataclasses.replace(good, order=good.order[1:]), "order has 17 tasks, and the lanes 18"),
        (dataclasses.replace(good, kind="tiny", bounds=make_schedule("1f1b", [(0,), (1,)], 1).bounds),
         "Stage 0 keeps 2 microbatches at F0/1, and the bound of tiny is 1"),
        (dataclasses.replace(good, bounds=dataclasses.replace(good.bounds, lane=(1, 1))),
         "Lane 0 keeps 2 microbatches at F0/1, and the bound of 1f1b is 1"),
    ]  # fmt: skip
    for schedule, message in faults:
        with pytest.raises(UserError, match=message):
            check_schedule(schedule)


def test_an_order_that_runs_ahead_of_its_needs_is_found():
    good = make_schedule("1f1b", [(0,), (1,)], 1)
    order = sorted(good.order, key=lambda task: good.graph.lanes[task.stage][task.member] == 0)
    with pytest.raises(UserError, match="order has F1/0 before F0/0, which it needs"):
        check_schedule(dataclasses.replace(good, order=tuple(order)))
