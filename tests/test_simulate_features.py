"""Parts, split backwards, ministages, host copies, channels: timelines and peaks worked out by hand."""

import dataclasses

import pytest

from hetjax.cluster import Cluster, Link
from hetjax.cost import AnalyticCosts
from hetjax.graph import StageGraph
from hetjax.memory import Memory
from hetjax.plan import Member, Plan, Stage
from hetjax.schedule import Task, schedule_graph
from hetjax.simulate import play, simulate
from hetjax.workload import Message, Workload, member_seconds
from tests.fake_program import FakeProgram, llama, segment

GB = 10**9
CHAIN = (((0,), (1,)), ((0, 1),))
PAIR = ((0, 0), (1, 0))


def link(latency_s=0.0):
    return Link(between=("a", "b"), bandwidth_gb_per_s=1.0, latency_us=latency_s * 1e6)


def schedule_of(kind, graph, M, F=1.0, B=1.0, delay_s=0.0):
    n = graph.num_stages
    delays = {(u, v): delay_s for u in graph.units() for v in graph.consumers(*u)}
    return schedule_graph(kind, graph, M, forward_s=[F] * n, backward_s=[B] * n, transfer_s=delays)


def played(schedule, seconds, **more):
    """By op, or (op, stage): seconds; the rest of `Workload` as given."""
    table = {}
    for s, k in schedule.graph.units():
        for key, value in seconds.items():
            op, where = key if isinstance(key, tuple) else (key, s)
            if where == s:
                table[op, s, k] = value
    return play(schedule, Workload(table, **more))


def spans(result, op, stage=0, member=0, stream="compute"):
    """(start, end) of each part, in order."""
    found = [s for s in result.timeline if s.task.op == op and s.stream == stream]
    return [(s.start_s, s.end_s) for s in found if (s.task.stage, s.task.member) == (stage, member)]


# ---- parts of microbatches ----


def test_stages_of_unlike_parts_wait_for_the_parts_that_they_share_rows_with():
    # Four rows: two parts of two, then four parts of one.
    graph = StageGraph(*CHAIN, rows=(((0, 4),), ((0, 4),)), splits=((2,), (4,)))
    there, back = Message(("a", "b"), link(), 4 * GB), Message(("b", "a"), link(), 4 * GB)
    result = played(
        schedule_of("gpipe", graph, 1),
        {("F", 0): 2.0, ("B", 0): 2.0, ("F", 1): 1.0, ("B", 1): 1.0},
        forward={PAIR: there},
        backward={PAIR[::-1]: back},
    )
    assert spans(result, "F", 0) == [(0, 2), (2, 4)]
    sent = [(p.start_s, p.end_s) for p in result.passages if p.channel == ("a", "b")]
    assert sent == [(2, 3), (3, 4), (4, 5), (5, 6)]  # one GB for each part of the reader
    assert spans(result, "F", 1) == [(3, 4), (4, 5), (5, 6), (6, 7)]
    assert spans(result, "B", 1) == [(7, 8), (8, 9), (9, 10), (10, 11)]
    assert spans(result, "B", 0) == [(10, 12), (12, 14)]
    assert result.step_time_s == 14


def test_a_part_that_lies_over_two_of_its_producers_waits_for_both():
    # Six rows: two parts of three, then three parts of two; the middle one has a row of each.
    graph = StageGraph(*CHAIN, rows=(((0, 6),), ((0, 6),)), splits=((2,), (3,)))
    message = Message(("a", "b"), link(), 6 * GB)
    result = played(schedule_of("gpipe", graph, 1), {"F": 1.0, "B": 1.0}, forward={PAIR: message})
    sent = [(round(p.num_bytes / GB, 9), round(p.end_s, 9)) for p in result.passages]
    assert sent == [(2, 3), (1, 4), (1, 5), (2, 7)]
    assert [start for start, _ in spans(result, "F", 1)] == pytest.approx([3, 5, 7])


# ---- how far stages run ahead ----


@pytest.mark.parametrize(("ahead", "step_time_s"), [(0, 22), (2, 16)])
def test_a_stage_that_runs_ahead_hides_a_slow_link(ahead, step_time_s):
    # Three seconds each way. Two in flight: rounds of F F, wait, B F B F, wait, B B. Four: all F, then all B.
    graph = StageGraph(*CHAIN, ahead=ahead)
    messages = {PAIR: Message(("a", "b"), link(3.0), 0)}, {PAIR[::-1]: Message(("b", "a"), link(3.0), 0)}
    schedule = schedule_of("1f1b", graph, 4, delay_s=3.0)
    result = played(schedule, {"F": 1.0, "B": 1.0}, forward=messages[0], backward=messages[1])
    assert schedule.bounds.unit[0][0] == 2 + ahead
    assert result.step_time_s == step_time_s


# ---- split backward ----


@pytest.mark.parametrize(("share", "ahead", "step_time_s"), [(0.0, 0, 9), (0.5, 0, 8), (0.5, 1, 7)])
def test_gradients_of_parameters_fill_what_would_be_idle(share, ahead, step_time_s):
    # Whole: the first stage waits for two seconds of the second one's B each time. Split: for one. With room
    # for one more, the second stage puts off its W, and nothing waits but the first and last second.
    graph = StageGraph(*CHAIN, split=((share,), (share,)), ahead=ahead)
    schedule = schedule_of("1f1b", graph, 2, B=2.0)
    result = played(schedule, {"F": 1.0, "B": 1.0, "W": 1.0} if share else {"F": 1.0, "B": 2.0})
    assert result.step_time_s == step_time_s
    assert len(spans(result, "W", 1)) == (2 if share else 0)


def memory_of(**sizes):
    return dataclasses.replace(
        Memory(0, 0, 0, 0, 0, in_flight=0, waiting_bytes=0, workspace_bytes=0), **sizes
    )


def test_what_a_forward_kept_goes_when_its_last_backward_ends():
    for share, end in ((0.0, 2.0), (0.5, 3.0)):
        graph = StageGraph(((0,),), (), split=((share,),))
        seconds = {"F": 1.0, "B": 1.0, "W": 1.0} if share else {"F": 1.0, "B": 1.0}
        work = {"memory": {(0, 0): memory_of(kept_bytes_per_part=10.0, workspace_bytes=1.0)}}
        changes = played(schedule_of("1f1b", graph, 1), seconds, **work).memory[0, 0]
        assert level_at(changes, end - 0.5) == 11
        assert level_at(changes, end) == 0


def level_at(changes, time):
    return sum(change for when, change in changes if when <= time)


# ---- copies to the host ----


def test_copies_to_and_from_the_host_run_beside_the_compute_in_both_directions():
    schedule = schedule_of("gpipe", StageGraph(((0,),), ()), 3)
    memory = {(0, 0): memory_of(host_kept_bytes_per_part=10.0)}
    result = played(schedule, {"F": 1.0, "B": 1.0}, host_copy_s={(0, 0): 2.0}, memory=memory)
    assert spans(result, "F") == [(0, 1), (1, 2), (2, 3)]
    assert spans(result, "F", stream="to host") == [(1, 3), (3, 5), (5, 7)]
    assert spans(result, "B", stream="from host") == [(3, 5), (5, 7), (7, 9)]
    assert spans(result, "B") == [(5, 6), (7, 8), (9, 10)]
    # On the device: each part while it is made and on its way out, and from when it comes back to its end.
    there = [(0, 3), (1, 5), (2, 7), (3, 6), (5, 8), (7, 10)]
    changes = result.memory[0, 0]
    for time in (t / 4 + 0.1 for t in range(44)):
        assert level_at(changes, time) == 10 * sum(a <= time < b for a, b in there)


def test_host_copies_that_are_quick_are_hidden_but_for_the_first():
    gpipe = schedule_of("gpipe", StageGraph(((0,),), ()), 4)
    assert played(gpipe, {"F": 1.0, "B": 2.0}, host_copy_s={(0, 0): 0.5}).step_time_s == 4 * 3 + 0.5


# ---- shared channels ----


def two_pairs():
    """Two members on each of two stages; the halves of the rows don't meet."""
    halves = ((0, 2), (2, 4))
    return StageGraph(((0, 1), (2, 3)), ((0, 1),), rows=(halves, halves))


@pytest.mark.parametrize("shared", [True, False])
def test_messages_of_unlike_senders_queue_on_one_channel_and_not_on_two(shared):
    def messages(way):
        ends = [("a", "b"), ("a", "b")] if shared else [("a0", "b0"), ("a1", "b1")]
        names = [(x, y) if way == "there" else (y, x) for x, y in ends]
        pairs = [((0, k), (1, k)) if way == "there" else ((1, k), (0, k)) for k in range(2)]
        return {p: Message(n, link(), 2 * GB) for p, n in zip(pairs, names, strict=True)}

    result = played(
        schedule_of("gpipe", two_pairs(), 1),
        {"F": 1.0, "B": 1.0},
        forward=messages("there"),
        backward=messages("back"),
    )
    passages = [(p.task.op, p.task.member, p.start_s, p.end_s) for p in result.passages]
    second = 2 if shared else 0  # behind the first one's two seconds
    assert sorted(passages) == [
        ("B", 0, 5, 7),
        ("B", 1, 5 + second, 7 + second),
        ("F", 0, 1, 3),
        ("F", 1, 1 + second, 3 + second),
    ]
    assert spans(result, "B", 0, 1) == [(7 + second, 8 + second)]


def test_a_message_on_its_way_back_does_not_wait_for_one_on_its_way_there():
    # The first member's cotangents leave while the second one's activations are still arriving.
    sizes = {0: GB, 1: 8 * GB}
    there = {((0, k), (1, k)): Message(("a", "b"), link(), sizes[k]) for k in range(2)}
    back = {((1, k), (0, k)): Message(("b", "a"), link(), GB) for k in range(2)}
    result = played(schedule_of("1f1b", two_pairs(), 1), {"F": 1.0, "B": 1.0}, forward=there, backward=back)
    passages = {(p.channel[0], p.task.member): (p.start_s, p.end_s) for p in result.passages}
    assert passages["a", 1] == (2, 10)
    assert passages["b", 0] == (4, 5)
    assert spans(result, "B", 0, 0) == [(5, 6)]


# ---- parameters that come and go ----


class Fixed(AnalyticCosts):
    """A second for each F and two for each B of a segment; a half for G, a quarter for R."""

    def forward_s(self, segment, group, rows, axes):
        return 1.0

    def backward_s(self, segment, group, rows, axes, remat):
        return 2.0

    def recompute_s(self, segment, group, rows, axes, remat):
        return 0.0

    def gather_s(self, param_bytes, group, axes):
        return 0.5

    def reduce_s(self, param_bytes, group, axes):
        return 0.25

    def update_s(self, param_bytes, group, axes):
        return 0.0

    def offload_s(self, num_bytes, group):
        return 0.125 if num_bytes else 0.0


PROGRAM = FakeProgram(
    (segment(0, 1000, 1.0, 64.0, 640.0), segment(1, 3000, 1.0, 64.0, 320.0)),
    (),
    global_batch=4,
)
ONE_GROUP = Cluster.from_dict({"name": "one", "groups": {"a": {"kind": "cpu", "num_devices": 1}}})


def ministages(residency):
    """Two stages in one lane, two microbatches of two rows."""
    member = Member("a", (0,), {}, (0, 2), ("none",), residency)
    stages = (Stage((0, 1), (member,)), Stage((1, 2), (member,)))
    return Plan(ONE_GROUP, "fake", 2, 4, 2, "ministage", stages)


def test_ministages_gather_one_ahead_and_reduce_at_once():
    result = simulate(ministages("gathered"), PROGRAM, Fixed())
    assert [spans(result, "F", s) for s in (0, 1)] == [[(0.5, 1.5), (1.5, 2.5)], [(2.5, 3.5), (3.5, 4.5)]]
    assert [spans(result, "B", s) for s in (0, 1)] == [[(8.5, 10.5), (10.5, 12.5)], [(4.5, 6.5), (6.5, 8.5)]]
    # The second stage's parameters stay from its forward to its backward; the first one's come again.
    assert spans(result, "G", 0, stream="gather") == [(0, 0.5), (4.5, 5)]
    assert spans(result, "G", 1, stream="gather") == [(0.5, 1)]
    assert spans(result, "R", 1, stream="reduce") == [(8.5, 8.75)]
    assert spans(result, "R", 0, stream="reduce") == [(12.5, 12.75)]
    assert result.step_time_s == 12.75


@pytest.mark.parametrize("residency", ["gathered", "resident"])
def test_memory_of_ministages_over_time_is_what_is_alive(residency):
    plan = ministages(residency)
    result = simulate(plan, PROGRAM, Fixed())
    params = {0: 4000, 1: 12000}
    kept = {0: 2 * 640, 1: 2 * 320}
    # Temporaries: what one microbatch computes and two boundaries; or a gradient, where that is larger.
    temporaries = {0: max(kept[0] + 2 * 2 * 64, 4000), 1: max(kept[1] + 2 * 2 * 64, 12000)}
    static = sum(3 * n for n in params.values())  # masters and two moments, float32
    if residency == "gathered":
        static += sum(params.values())  # reduced gradients, on one device all of them
        alive = [(0, 2.5, 4000), (0.5, 8.5, 12000), (4.5, 12.5, 4000)]  # copies
        alive += [(4.5, 8.75, 12000), (8.5, 12.75, 4000)]  # sums
        first = 0.5
    else:
        static += sum(params.values())  # sums
        alive, first = [], 1.0  # both gathers stand in the lane before the first forward
    runs = {}
    for i, (s, op) in enumerate([(0, "F")] * 2 + [(1, "F")] * 2):
        runs[op, s, i % 2] = (first + i, first + i + 1)
    for i, (s, op) in enumerate([(1, "B")] * 2 + [(0, "B")] * 2):
        runs[op, s, i % 2] = (first + 4 + 2 * i, first + 6 + 2 * i)
    alive += [(a, b, temporaries[s]) for (_, s, _), (a, b) in runs.items()]
    alive += [(runs["F", s, m][0], runs["B", s, m][1], kept[s]) for s in (0, 1) for m in (0, 1)]
    curve = result.memory_over_time("a", 0)
    for time in (t / 16 + 0.01 for t in range(16 * 13)):
        level = [bytes_ for when, bytes_ in curve if when <= time][-1]
        assert level == static + sum(n for a, b, n in alive if a <= time < b), time
    peak = max(static + sum(n for a, b, n in alive if a <= t < b) for t, _, _ in alive)
    assert result.peak_bytes["a", 0] == peak
    assert peak <= plan.device_memory(PROGRAM)["a", 0]


def test_offloaded_parameters_come_from_the_host_and_take_no_room_between():
    plan = ministages("offloaded")
    seconds = member_seconds(plan, PROGRAM, Fixed())
    assert [seconds[op, 0, 0] for op in "GRU"] == [0.5 + 0.125, 0.25 + 0.125, 0.125]
    result = simulate(plan, PROGRAM, Fixed())
    curve = result.memory_over_time("a", 0)
    assert curve[0][1] == curve[-1][1] == 0
    assert spans(result, "F", 0)[0] == (0.625, 1.625)
    gathered = simulate(ministages("gathered"), PROGRAM, Fixed())
    # Masters, two moments and reduced gradients of 4,000 parameters.
    assert gathered.peak_bytes["a", 0] - result.peak_bytes["a", 0] == 4 * 4 * 4000


def test_the_simulated_peak_of_each_residency_is_within_the_stated_bound():
    program = llama(num_layers=4, hidden=256, seq=64, global_batch=16)
    for residency in ("resident", "sharded", "gathered"):
        members = [Member("a", (0, 1), {"fsdp": 2}, (0, 4), ("full",) * 2, residency) for _ in range(3)]
        groups = {"a": {"kind": "a100-80", "num_devices": 2}}
        cluster = Cluster.from_dict({"name": "c", "groups": groups})
        stages = tuple(Stage((2 * i, 2 * i + 2), (m,)) for i, m in enumerate(members))
        plan = Plan(cluster, "fake", 6, 16, 4, "ministage", stages)
        plan.check(program)
        result = simulate(plan, program)
        assert 0 < result.peak_bytes["a", 0] <= plan.device_memory(program)["a", 0] * (1 + 1e-9)
        tasks = [s.task for s in result.timeline]
        twice = Task("G", 0, -2, 0) in tasks
        assert twice == (residency == "gathered")
