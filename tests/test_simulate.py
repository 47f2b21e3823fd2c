import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from benchmarks.planner import simulate_time, zorse_program
from hetjax.cluster import Cluster, Link
from hetjax.cost import AnalyticCosts
from hetjax.graph import StageGraph
from hetjax.plan import SCHEDULES, Member, Plan, Stage
from hetjax.schedule import Task, make_schedule, plan_schedule, schedule_graph
from hetjax.simulate import play, simulate
from hetjax.workload import Message, Workload
from tests.fake_program import llama
from tests.test_schedule import graphs

GB = 10**9


def cluster(**more):
    groups = {"a": {"kind": "a100-80", "num_devices": 4}, "v": {"kind": "v100-16", "num_devices": 4}}
    link = {"between": ["a", "v"], "bandwidth_gb_per_s": 12.5, "latency_us": 20}
    return Cluster.from_dict({"name": "c", "groups": groups, "links": [link | more]})


def plan_of(program, cut, *, schedule="1f1b", num_microbatches=4, remat="dots", on=None):
    rows = program.global_batch // num_microbatches
    n = program.num_segments

    def member(group, count):
        return Member(group, (0, 1, 2, 3), {"dp": 4}, (0, rows), (remat,) * count)

    stages = (Stage((0, cut), (member("a", cut),)), Stage((cut, n), (member("v", n - cut),)))
    return Plan(on or cluster(), "fake", n, program.global_batch, num_microbatches, schedule, stages)


def seconds(schedule, forward_s, backward_s, **other):
    times = {("F", s, k): forward_s for s, k in schedule.graph.units()}
    times |= {("B", s, k): backward_s for s, k in schedule.graph.units()}
    times |= {(op, s, k): value for op, value in other.items() for s, k in schedule.graph.units()}
    return times


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 4), (4, 8), (4, 3), (8, 32)])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_equal_stages_idle_as_the_textbook_says(kind, num_stages, num_microbatches):
    schedule = make_schedule(kind, [(s,) for s in range(num_stages)], num_microbatches)
    played = play(schedule, Workload(seconds(schedule, 1.0, 2.0)))
    bubble = 1 - 3 * num_microbatches / played.step_time_s
    assert bubble == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


@pytest.mark.parametrize(
    ("lanes", "chunks", "num_microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)]
)
def test_interleaving_divides_the_textbooks_bubble_by_the_chunks(lanes, chunks, num_microbatches):
    placement = [(s % lanes,) for s in range(lanes * chunks)]
    schedule = make_schedule("interleaved", placement, num_microbatches)
    played = play(schedule, Workload(seconds(schedule, 1 / chunks, 2 / chunks)))
    idle = played.step_time_s - 3 * num_microbatches
    assert idle == pytest.approx(3 * (lanes - 1) / chunks)


def test_messages_in_one_direction_share_the_link_and_the_other_direction_is_free():
    schedule = make_schedule("gpipe", [(0,), (1,)], 3)
    link = Link(between=("a", "b"), bandwidth_gb_per_s=1.0, latency_us=0)
    there, back = Message(("a", "b"), link, 2 * GB), Message(("b", "a"), link, 2 * GB)
    work = Workload(
        seconds(schedule, 1.0, 1.0), forward={((0, 0), (1, 0)): there}, backward={((1, 0), (0, 0)): back}
    )
    played = play(schedule, work)
    forward = [(p.start_s, p.end_s) for p in played.passages if p.channel == ("a", "b")]
    assert forward == [(1, 3), (3, 5), (5, 7)]  # made at 1, 2, 3; two seconds each, one at a time
    backward = [(p.start_s, p.end_s) for p in played.passages if p.channel == ("b", "a")]
    assert backward == [(9, 11), (11, 13), (13, 15)]
    assert played.step_time_s == 16


def test_latency_delays_a_message_but_does_not_occupy_the_link():
    schedule = make_schedule("gpipe", [(0,), (1,)], 2)
    link = Link(between=("a", "b"), bandwidth_gb_per_s=1.0, latency_us=5e6)
    work = Workload(seconds(schedule, 1.0, 1.0), forward={((0, 0), (1, 0)): Message(("a", "b"), link, GB)})
    starts = [s.start_s for s in play(schedule, work).timeline if s.task.op == "F" and s.task.stage == 1]
    assert starts == [1 + 1 + 5, 2 + 1 + 5]


def test_updates_wait_for_the_slowest_reduction_and_the_global_norm():
    schedule = make_schedule("1f1b", [(0,), (1,)], 1)
    times = seconds(schedule, 1.0, 1.0, U=0.5) | {("R", 1, 0): 10.0}
    played = play(schedule, Workload(times, barrier_s=0.25))
    starts = {s.task: s.start_s for s in played.timeline}
    assert starts[Task("R", 1, -1, 0)] == 3
    assert starts[Task("U", 0, -1, 0)] == starts[Task("U", 1, -1, 0)] == 13.25
    assert played.step_time_s == 13.75


def test_tied_parameters_travel_to_their_owner_and_back():
    program = llama(num_layers=4)
    tied = dataclasses.replace(program, tied=((0, 5, 50 * GB),))
    without, with_them = simulate(plan_of(program, 3), program), simulate(plan_of(tied, 3), tied)
    sizes = [(p.channel, p.num_bytes) for p in with_them.passages if p.task.op in "RU"]
    assert sizes == [(("v", "a"), 50 * GB), (("a", "v"), 50 * GB)]
    assert with_them.step_time_s > without.step_time_s + 7.9  # 2 x 4 s, some of it beside other work


def test_the_simulator_plays_the_very_lanes_of_the_schedule():
    program = llama(num_layers=4)
    plan = plan_of(program, 3)
    schedule = plan_schedule(plan, program.edges())
    result = simulate(plan, program, schedule=schedule)
    for number, lane in enumerate(schedule.lanes):
        assert [s.task for s in result.timeline if s.lane == number] == list(lane)


def test_a_skip_connection_goes_over_the_link_too():
    program = llama(num_layers=4)
    skip = dataclasses.replace(program.links[0], producer=1, consumer=4)
    more = dataclasses.replace(program, links=(*program.links, skip))
    plain, both = (simulate(plan_of(p, 3), p) for p in (program, more))
    size = {p.num_bytes for p in plain.passages if p.task.op == "F"}
    double = {p.num_bytes for p in both.passages if p.task.op == "F"}
    assert {2 * x for x in size} == double


def test_shares_of_a_group_add_up():
    program = llama(num_layers=6)
    result = simulate(plan_of(program, 5, remat="full"), program)
    for use in result.groups.values():
        assert use.busy + use.bubble == pytest.approx(1)
        assert 0 < use.recompute < use.busy
        assert 0 < use.transfer <= 1
    single = Plan(
        cluster(), "fake", 8, 32, 4, "1f1b",
        (Stage((0, 8), (Member("a", (0, 1, 2, 3), {"dp": 4}, (0, 8), ("none",) * 8),)),),
    )  # fmt: skip
    result = simulate(single, program)
    assert result.groups["a"].busy == pytest.approx(1)
    assert result.groups["v"].busy == 0
    assert result.groups["v"].bubble == 1


def test_one_group_alone_takes_what_its_tasks_take():
    program = llama(num_layers=2)
    member = Member("a", (0,), {}, (0, 8), ("none",) * 4)
    plan = Plan(cluster(), "fake", 4, 32, 4, "1f1b", (Stage((0, 4), (member,)),))
    group, costs = plan.cluster.group("a"), AnalyticCosts()
    expected = 4 * sum(
        costs.forward_s(s, group, 8, {}) + costs.backward_s(s, group, 8, {}, "none")
        for s in program.segments()
    )
    params = float(sum(s.param_bytes for s in program.segments()))
    expected += costs.gather_s(params, group, {}) + costs.update_s(params, group, {})
    assert simulate(plan, program).step_time_s == pytest.approx(expected)


def test_1f1b_keeps_less_than_gpipe_and_full_remat_less_than_none():
    program = llama(num_layers=6, seq=1024)
    peak = {
        (schedule, remat): simulate(
            plan_of(program, 4, schedule=schedule, num_microbatches=8, remat=remat), program
        ).peak_bytes["a", 0]
        for schedule in ("gpipe", "1f1b")
        for remat in ("none", "full")
    }
    assert peak["1f1b", "none"] < peak["gpipe", "none"]
    assert peak["gpipe", "full"] < peak["gpipe", "none"]
    assert peak["1f1b", "full"] < peak["1f1b", "none"]


def test_memory_over_time_starts_and_ends_with_what_stays():
    program = llama(num_layers=4)
    plan = plan_of(program, 3)
    curve = simulate(plan, program).memory_over_time("v", 0)
    static = plan.member_memory(program)[1, 0].static_bytes
    assert curve[0] == (0.0, static)
    assert curve[-1][1] == pytest.approx(static)
    assert min(level for _, level in curve) == pytest.approx(static)


@hypothesis.given(
    st.integers(1, 7),
    st.sampled_from(["gpipe", "1f1b"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(6, 7),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_simulated_memory_stays_within_the_stated_bound(cut, schedule, num_microbatches, layers):
    program = llama(num_layers=layers, seq=256)
    plan = plan_of(program, cut, schedule=schedule, num_microbatches=num_microbatches)
    bound = plan.device_memory(program)
    for device, peak in simulate(plan, program).peak_bytes.items():
        assert peak <= bound[device] * (1 + 1e-9)


@hypothesis.given(st.integers(1, 5), st.floats(0.01, 100), st.floats(1.01, 10))
@hypothesis.settings(max_examples=40, deadline=None)
def test_a_faster_link_is_never_slower_for_the_same_lanes(cut, bandwidth, factor):
    program = llama(num_layers=4)
    schedule = plan_schedule(plan_of(program, cut), program.edges())
    slow = simulate(
        plan_of(program, cut, on=cluster(bandwidth_gb_per_s=bandwidth)), program, schedule=schedule
    )
    fast_plan = plan_of(program, cut, on=cluster(bandwidth_gb_per_s=bandwidth * factor))
    assert simulate(fast_plan, program, schedule=schedule).step_time_s <= slow.step_time_s * (1 + 1e-9)


def test_members_of_one_stage_exchange_their_gradients():
    program = llama(num_layers=2)
    members = (
        Member("a", (0, 1), {"dp": 2}, (0, 6), ("dots",) * 4),
        Member("v", (0, 1), {"dp": 2}, (6, 8), ("dots",) * 4),
    )
    plan = Plan(cluster(), "fake", 4, 32, 4, "1f1b", (Stage((0, 4), members),))
    result = simulate(plan, program)
    params = sum(s.param_bytes for s in program.segments())
    assert [(p.channel, p.num_bytes) for p in result.passages] == [
        (("a", "v"), params),
        (("v", "a"), params),
    ] or [(p.channel, p.num_bytes) for p in result.passages] == [(("v", "a"), params), (("a", "v"), params)]


def starts_by_recursion(schedule, seconds, messages):
    """Start of every F, B and W, from the definition: after its lane's task before it and all its inputs.

    Each pair of members has a channel of its own, so its messages go in the order of the sender's tasks.
    """
    graph, start, end, free_s, before, passages = schedule.graph, {}, {}, {}, {}, []
    arrival: dict[tuple[Task, Task], float] = {}
    for task in (t for t in schedule.order if t.op in "FBW"):
        unit = task.stage, task.member
        lane = graph.lanes[task.stage][task.member]
        inputs = [d for d in schedule.dependencies(task) if d.op in "FB"]
        start[task] = max([before.get(lane, 0.0), *(arrival.get((d, task), end[d]) for d in inputs)])
        end[task] = before[lane] = start[task] + seconds[task.op, *unit]
        for other in (t for t in schedule.order if t.op == task.op in "FB"):
            pair = unit, (other.stage, other.member)
            if pair in messages and task in schedule.dependencies(other):
                (p, m), (q, n) = (divmod(t.microbatch, graph.num_splits((t.stage, t.member)))[::-1]
                                  for t in (task, other))  # fmt: skip
                a, b, x, y = (*pair, p, q) if task.op == "F" else (*pair[::-1], q, p)
                share = next(z for i, j, z in graph.links(a, b) if (i, j) == (x, y))
                assert m == n
                begin = max(end[task], free_s.get(pair, 0.0))
                free_s[pair] = begin + messages[pair].num_bytes * share / GB
                arrival[task, other] = free_s[pair] + messages[pair].link.latency_us * 1e-6
                passages.append((begin, free_s[pair]))
    return start, passages


@hypothesis.given(st.sampled_from(SCHEDULES), graphs(), st.integers(1, 3), st.data())
@hypothesis.settings(max_examples=80, deadline=None)
def test_every_task_starts_once_its_lane_is_free_and_its_inputs_are_there(
    kind, graph, num_microbatches, data
):
    raw, more = graph
    graph = dataclasses.replace(StageGraph(*raw), gathers=None)
    if kind == "interleaved":
        graph = dataclasses.replace(graph, splits=None)
    schedule = schedule_graph(kind, graph, num_microbatches, **more)
    drawn = st.sampled_from([0.0, 0.5, 1.0, 1.7, 3.1])
    # Other than what the order was made for.
    seconds: dict[tuple[str, int, int], float] = {
        (op, *u): data.draw(drawn) for op in "FBW" for u in graph.units()
    }
    link = Link(between=("a", "b"), bandwidth_gb_per_s=1.0, latency_us=data.draw(st.sampled_from([0, 4e5])))
    pairs = [(u, v) for u in graph.units() for v in graph.consumers(*u) if data.draw(st.booleans())]
    forward = {pair: Message(pair, link, data.draw(drawn) * GB) for pair in pairs}
    backward = {(v, u): Message((v, u), link, data.draw(drawn) * GB) for u, v in pairs}
    played = play(schedule, Workload(seconds, forward=forward, backward=backward))
    expected, passages = starts_by_recursion(schedule, seconds, forward | backward)
    assert {s.task: s.start_s for s in played.timeline if s.task.op in "FBW"} == pytest.approx(expected)
    found = sorted((p.start_s, p.end_s) for p in played.passages)
    assert [x for pair in found for x in pair] == pytest.approx(
        [x for pair in sorted(passages) for x in pair]
    )


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_the_benchmark_times_is_a_checked_plan_with_messages(kind):
    program = zorse_program.program("7b", 4096)
    plan = simulate_time.plan_of(program, kind, 16, 8)
    plan.check(program)
    result = simulate(plan, program)
    assert len(plan.stages) == 16
    assert len([p for p in result.passages if p.task.op in "FB"]) == 2 * 15 * 8
