"""Plays a plan's own task lists on costs and links: timeline, use of each group, memory over time.

In-order compute in each lane; messages in the order in which they are sent, one at a time in each direction
between two groups, at the link's full bandwidth; gradients reduced and parameters updated at the end of the
step.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from hetjax.cluster import Link
from hetjax.cost import AnalyticCosts, Costs, ProgramLike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.memory import Memory
from hetjax.plan import Plan, stage_edges, stage_of_segment
from hetjax.schedule import Schedule, StageGraph, Task, plan_schedule

Unit = tuple[int, int]
"""(stage, member)."""


@dataclasses.dataclass(frozen=True)
class Message:
    """What one member sends to another.

    Attributes:
        channel: Messages with the same channel go one after the other.
        link: What they go over.
        num_bytes: Size.
    """

    channel: tuple[object, object]
    link: Link
    num_bytes: Number


@dataclasses.dataclass(frozen=True)
class Workload:
    """Everything that the tasks of a schedule cost.

    Attributes:
        seconds: By (op, stage, member).
        recompute_s: Part of a member's `B` that repeats the forward.
        forward: Message from producer to consumer, one a microbatch; none where they share their devices.
        backward: The same in the other direction, keyed (consumer, producer).
        reductions: Sent after a member's `R`: to the other members of its stage, to the owner of tied
            parameters.
        updates: Sent after a member's `U`: from the owner of tied parameters to a reader.
        barrier_s: Between the last reduction and the first update: the global norm goes round.
        memory: Bytes per device of each member.
        input_bytes: Per device, of one microbatch's inputs from another member, keyed as `forward`.
        cotangent_bytes: Per device, of one microbatch's cotangents, keyed as `backward`.
    """

    seconds: Mapping[tuple[str, int, int], Number]
    recompute_s: Mapping[Unit, Number] = dataclasses.field(default_factory=dict)
    forward: Mapping[tuple[Unit, Unit], Message] = dataclasses.field(default_factory=dict)
    backward: Mapping[tuple[Unit, Unit], Message] = dataclasses.field(default_factory=dict)
    reductions: Mapping[Unit, Sequence[Message]] = dataclasses.field(default_factory=dict)
    updates: Mapping[Unit, Sequence[Message]] = dataclasses.field(default_factory=dict)
    barrier_s: Number = 0.0
    memory: Mapping[Unit, Memory] = dataclasses.field(default_factory=dict)
    input_bytes: Mapping[tuple[Unit, Unit], Number] = dataclasses.field(default_factory=dict)
    cotangent_bytes: Mapping[tuple[Unit, Unit], Number] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Span:
    """One task on one lane, from start to end."""

    lane: int
    task: Task
    start_s: Number
    end_s: Number


@dataclasses.dataclass(frozen=True)
class Passage:
    """One message on one channel, from its first byte to its last."""

    channel: tuple[object, object]
    task: Task
    num_bytes: Number
    start_s: Number
    end_s: Number


@dataclasses.dataclass(frozen=True)
class Played:
    """What happens in one step.

    Attributes:
        step_time_s: From the start to the last update or message.
        timeline: Every task, in order of its start.
        passages: Every message, in order of its start.
        memory: For each member, (time, change in bytes per device) of what comes and goes; what stays is in
            the workload.
    """

    step_time_s: Number
    timeline: tuple[Span, ...]
    passages: tuple[Passage, ...]
    memory: Mapping[Unit, Sequence[tuple[Number, Number]]]


def play(schedule: Schedule, work: Workload) -> Played:
    """Play one step of a schedule.

    Args:
        schedule: Its lanes are followed to the letter.
        work: What each task costs.

    Returns:
        The step; its time is exact for these costs.
    """
    return _Player(schedule, work).run()


class _Player:
    """The state of one step in simulated time."""

    def __init__(self, schedule: Schedule, work: Workload) -> None:
        self.schedule, self.work, self.graph = schedule, work, schedule.graph
        graph: StageGraph = self.graph
        units = graph.units()
        self.producers = {u: graph.producers(*u) for u in units}
        self.consumers = {u: graph.consumers(*u) for u in units}
        self.heads = [0] * len(schedule.lanes)
        self.busy = [False] * len(schedule.lanes)
        # What each task still waits for from elsewhere; its own lane's order covers the rest.
        self.missing: dict[Task, int] = {}
        for s, k in units:
            others = sum(1 for lane in graph.lanes[s] if lane != graph.lanes[s][k])
            self.missing[Task("R", s, -1, k)] = others * schedule.num_microbatches
            for m in range(schedule.num_microbatches):
                self.missing[Task("F", s, m, k)] = len(self.producers[s, k])
                self.missing[Task("B", s, m, k)] = len(self.consumers[s, k])
        self.reductions_left = len(units) + sum(len(work.reductions.get(u, ())) for u in units)
        self.events: list[tuple[Number, int, str, Task, Unit | None]] = []
        self.sequence = 0
        self.free: dict[tuple[object, object], Number] = {}
        self.timeline: list[Span] = []
        self.passages: list[Passage] = []
        self.memory: dict[Unit, list[tuple[Number, Number]]] = {u: [] for u in units}
        self.end = 0.0

    def post(self, time: Number, what: str, task: Task, sender: Unit | None = None) -> None:
        """Something happens at a time: a task is `done`, an input or the `barrier` has `arrived`."""
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, what, task, sender))

    def send(self, now: Number, message: Message | None, task: Task) -> Number:
        """Put a message on its channel; when it has arrived."""
        if message is None:
            return now
        start = max(now, self.free.get(message.channel, 0.0))
        end = start + message.num_bytes / (message.link.bandwidth_gb_per_s * 1e9)
        self.free[message.channel] = end
        self.passages.append(Passage(message.channel, task, message.num_bytes, start, end))
        return end + message.link.latency_us * 1e-6

    def run(self) -> Played:
        """Play to the end."""
        now: Number = 0.0
        lanes = set(range(len(self.heads)))
        while True:
            for lane in sorted(lanes):
                self.advance(lane, now)
            if not self.events:
                break
            now, lanes = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, _, what, task, sender = heapq.heappop(self.events)
                if what == "done":
                    lanes |= self.finish(task, now)
                elif what == "arrived":
                    lanes.add(self.receive(task, sender, now))
                else:
                    self.reductions_left -= 1
                    if self.reductions_left == 0:
                        self.post(now + self.work.barrier_s, "reduced", task)
                        self.reductions_left = -1
                    elif self.reductions_left < -1:
                        lanes = set(range(len(self.heads)))
            self.end = max(self.end, now)
        stuck = [lane[h] for lane, h in zip(self.schedule.lanes, self.heads, strict=True) if h < len(lane)]
        assert not stuck, f"a checked schedule never deadlocks, and {stuck[0]} waits for ever"
        return Played(self.end, tuple(self.timeline), tuple(self.passages), self.memory)

    def advance(self, lane: int, now: Number) -> None:
        """Start the next task of a lane if it can."""
        tasks = self.schedule.lanes[lane]
        if self.busy[lane] or self.heads[lane] == len(tasks):
            return
        task = tasks[self.heads[lane]]
        if self.missing.get(task, 0) or (task.op == "U" and self.reductions_left >= -1):
            return
        self.heads[lane] += 1
        self.busy[lane] = True
        unit = task.stage, task.member
        end = now + self.work.seconds.get((task.op, *unit), 0.0)
        self.timeline.append(Span(lane, task, now, end))
        memory = self.work.memory.get(unit)
        if memory is not None:
            self.memory[unit] += self.footprint(task, unit, memory, now, end)
        self.post(end, "done", task)

    def footprint(
        self, task: Task, unit: Unit, memory: Memory, start: Number, end: Number
    ) -> list[tuple[Number, Number]]:
        """What a task allocates and frees, and when."""
        changes = [] if task.op == "G" else [(start, memory.workspace_bytes), (end, -memory.workspace_bytes)]
        kept = memory.kept_bytes_per_microbatch
        if task.op == "F":
            used = sum(self.work.input_bytes.get((p, unit), 0.0) for p in self.producers[unit])
            changes += [(start, kept - used)]
        elif task.op == "B":
            used = sum(self.work.cotangent_bytes.get((c, unit), 0.0) for c in self.consumers[unit])
            changes += [(end, -kept - used)]
        return changes

    def receive(self, task: Task, sender: Unit | None, now: Number) -> int:
        """An input of a task has arrived; the task's lane."""
        self.missing[task] -= 1
        unit = task.stage, task.member
        if sender is not None and unit in self.memory:
            sizes = self.work.input_bytes if task.op == "F" else self.work.cotangent_bytes
            size = sizes.get((sender, unit), 0.0)
            if size:
                self.memory[unit].append((now, size))
        return self.graph.lanes[task.stage][task.member]

    def finish(self, task: Task, now: Number) -> set[int]:
        """A task is done: send what it made; the lanes that may go on."""
        op, s, m, k = task
        lane = self.graph.lanes[s][k]
        self.busy[lane] = False
        lanes = {lane}
        if op == "F":
            for c in self.consumers[s, k]:
                arrival = self.send(now, self.work.forward.get(((s, k), c)), task)
                self.post(arrival, "arrived", Task("F", c[0], m, c[1]), (s, k))
        elif op == "B":
            for p in self.producers[s, k]:
                arrival = self.send(now, self.work.backward.get(((s, k), p)), task)
                self.post(arrival, "arrived", Task("B", p[0], m, p[1]), (s, k))
            for j, other in enumerate(self.graph.lanes[s]):
                if other != lane:
                    self.missing[Task("R", s, -1, j)] -= 1
                    lanes.add(other)
        elif op == "R":
            self.post(now, "reduced", task)
            for message in self.work.reductions.get((s, k), ()):
                self.post(self.send(now, message, task), "reduced", task)
        elif op == "U":
            for message in self.work.updates.get((s, k), ()):
                self.end = max(self.end, self.send(now, message, task))
        return lanes


def member_seconds(plan: Plan, program: ProgramLike, costs: Costs) -> dict[tuple[str, int, int], Number]:
    """Seconds of every (op, stage, member)."""
    segments = program.segments()
    result: dict[tuple[str, int, int], Number] = {}
    for s, stage in enumerate(plan.stages):
        inside = segments[slice(*stage.segments)]
        params = float(sum(x.param_bytes for x in inside))
        for k, member in enumerate(stage.members):
            group, axes, rows = plan.cluster.group(member.group), member.axes, member.num_rows
            result["F", s, k] = sum(costs.forward_s(x, group, rows, axes) for x in inside)
            result["B", s, k] = sum(
                costs.backward_s(x, group, rows, axes, r) for x, r in zip(inside, member.remat, strict=True)
            )
            result["G", s, k] = costs.gather_s(params, group, axes)
            result["R", s, k] = costs.reduce_s(params, group, axes)
            result["U", s, k] = costs.update_s(params, group, axes)
    return result


def timed(plan: Plan, program: ProgramLike, costs: Costs) -> Plan:
    """The plan with each member's expected seconds, by which its schedule orders the tasks."""
    seconds = member_seconds(plan, program, costs)
    stages = tuple(
        dataclasses.replace(
            stage,
            members=tuple(
                dataclasses.replace(m, seconds=(float(seconds["F", s, k]), float(seconds["B", s, k])))
                for k, m in enumerate(stage.members)
            ),
        )
        for s, stage in enumerate(plan.stages)
    )
    return dataclasses.replace(plan, stages=stages)


def workload(plan: Plan, program: ProgramLike, costs: Costs) -> Workload:
    """What the tasks of a plan cost."""
    segments = program.segments()
    forward, backward, inputs, cotangents = _boundaries(plan, program)
    recompute = {}
    for s, stage in enumerate(plan.stages):
        for k, member in enumerate(stage.members):
            group = plan.cluster.group(member.group)
            recompute[s, k] = sum(
                costs.recompute_s(x, group, member.num_rows, member.axes, r)
                for x, r in zip(segments[slice(*stage.segments)], member.remat, strict=True)
            )
    used = sorted({m.group for stage in plan.stages for m in stage.members})
    latencies = [plan.cluster.link(a, b).latency_us for a in used for b in used if a != b]
    reductions, updates = _end_of_step(plan, program)
    return Workload(
        seconds=member_seconds(plan, program, costs),
        recompute_s=recompute,
        forward=forward,
        backward=backward,
        reductions=reductions,
        updates=updates,
        barrier_s=2e-6 * max(latencies, default=0.0),
        memory=plan.member_memory(program),
        input_bytes=inputs,
        cotangent_bytes=cotangents,
    )


def _message(plan: Plan, a: Unit, b: Unit, num_bytes: Number) -> Message | None:
    """From one member to another; None where both are on the same devices."""
    one, two = plan.stages[a[0]].members[a[1]], plan.stages[b[0]].members[b[1]]
    if (one.group, one.devices) == (two.group, two.devices):
        return None
    same = one.group == two.group
    channel = (one.devices, two.devices) if same else (one.group, two.group)
    return Message(channel, plan.cluster.link(one.group, two.group), num_bytes)


def _boundaries(
    plan: Plan, program: ProgramLike
) -> tuple[
    dict[tuple[Unit, Unit], Message],
    dict[tuple[Unit, Unit], Message],
    dict[tuple[Unit, Unit], Number],
    dict[tuple[Unit, Unit], Number],
]:
    """Forward and backward messages, and the bytes per device that they fill where they arrive."""
    forward: dict[tuple[Unit, Unit], Message] = {}
    backward: dict[tuple[Unit, Unit], Message] = {}
    inputs: dict[tuple[Unit, Unit], Number] = {}
    cotangents: dict[tuple[Unit, Unit], Number] = {}
    for (s, t), per_row in stage_edges(plan, program.edges()).items():
        for k, a in enumerate(plan.stages[s].members):
            for j, b in enumerate(plan.stages[t].members):
                num_rows = min(a.rows[1], b.rows[1]) - max(a.rows[0], b.rows[0])
                if num_rows <= 0:
                    continue
                # A value keeps its producer's dtype, and its cotangent has the same.
                size = per_row * num_rows * DTYPE_BYTES[plan.cluster.group(a.group).dtype] / 4
                there, back = _message(plan, (s, k), (t, j), size), _message(plan, (t, j), (s, k), size)
                if there is not None and back is not None:
                    forward[(s, k), (t, j)] = there
                    backward[(t, j), (s, k)] = back
                    inputs[(s, k), (t, j)] = size / (b.axis("dp") * b.axis("fsdp"))
                    cotangents[(t, j), (s, k)] = size / (a.axis("dp") * a.axis("fsdp"))
    return forward, backward, inputs, cotangents


def _end_of_step(
    plan: Plan, program: ProgramLike
) -> tuple[dict[Unit, list[Message]], dict[Unit, list[Message]]]:
    """Gradients between the members of a stage; gradients and values of tied parameters."""
    segments = program.segments()
    reductions: dict[Unit, list[Message]] = {}
    updates: dict[Unit, list[Message]] = {}

    def add(table: dict[Unit, list[Message]], a: Unit, b: Unit, num_bytes: Number) -> None:
        message = _message(plan, a, b, num_bytes)
        if message is not None:
            table.setdefault(a, []).append(message)

    for s, stage in enumerate(plan.stages):
        n = len(stage.members)
        params = float(sum(x.param_bytes for x in segments[slice(*stage.segments)]))
        for k in range(n if n > 1 else 0):
            add(reductions, (s, k), (s, (k + 1) % n), 2 * (n - 1) / n * params)
    stage_of = stage_of_segment(plan)
    for owner, reader, num_bytes in program.tied:
        a, b = stage_of[owner], stage_of[reader]
        if a != b:
            add(reductions, (b, 0), (a, 0), num_bytes)
            for k in range(len(plan.stages[b].members)):
                add(updates, (a, 0), (b, k), num_bytes)
    return reductions, updates


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """Where a group's step goes, as shares of its devices' time.

    Attributes:
        busy: Running tasks.
        recompute: Part of that which repeats a forward.
        bubble: Idle, 1 - busy.
        transfer: Share of the step in which a message to or from the group is on its way.
        peak_gib: Most memory of one of its devices.
    """

    busy: Number
    recompute: Number
    bubble: Number
    transfer: Number
    peak_gib: Number


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A plan's step as predicted.

    Attributes:
        plan: What was played.
        step_time_s: Predicted.
        timeline: Every task.
        passages: Every message between groups or submeshes.
        groups: Use of every group of the cluster, idle ones too.
        peak_bytes: Of each used device (group, index).
    """

    plan: Plan
    step_time_s: Number
    timeline: tuple[Span, ...]
    passages: tuple[Passage, ...]
    groups: Mapping[str, GroupUse]
    peak_bytes: Mapping[tuple[str, int], Number]
    changes: Mapping[Unit, Sequence[tuple[Number, Number]]] = dataclasses.field(repr=False)
    static_bytes: Mapping[Unit, Number] = dataclasses.field(repr=False)

    def memory_over_time(self, group: str, device: int) -> list[tuple[Number, Number]]:
        """(seconds, bytes) at every change of one device's memory."""
        units = [
            (s, k)
            for s, stage in enumerate(self.plan.stages)
            for k, m in enumerate(stage.members)
            if m.group == group and device in m.devices
        ]
        return _curve(units, self.changes, self.static_bytes)


def _curve(
    units: Sequence[Unit],
    changes: Mapping[Unit, Sequence[tuple[Number, Number]]],
    static: Mapping[Unit, Number],
) -> list[tuple[Number, Number]]:
    # At one instant what is freed goes first: the next task can take its place.
    merged = sorted(change for u in units for change in changes.get(u, ()))
    level = sum(static.get(u, 0.0) for u in units)
    curve = [(0.0, level)]
    for time, change in merged:
        level += change
        curve.append((time, level))
    return curve


def simulate(
    plan: Plan, program: ProgramLike, costs: Costs | None = None, schedule: Schedule | None = None
) -> Simulation:
    """Predict one step of a plan.

    Args:
        plan: A checked plan.
        program: What it places.
        costs: Seconds of segments; analytic when None.
        schedule: The plan's own when None.

    Returns:
        The step, with the memory of each device over time.
    """
    schedule = schedule or plan_schedule(plan, program.edges())
    work = workload(plan, program, costs or AnalyticCosts())
    played = play(schedule, work)
    static = {u: memory.static_bytes for u, memory in work.memory.items()}
    on_device: dict[tuple[str, int], list[Unit]] = {}
    for s, stage in enumerate(plan.stages):
        for k, member in enumerate(stage.members):
            for device in member.devices:
                on_device.setdefault((member.group, device), []).append((s, k))
    peaks: dict[tuple[Unit, ...], Number] = {}
    for units in map(tuple, on_device.values()):
        if units not in peaks:
            peaks[units] = max(level for _, level in _curve(units, played.memory, static))
    peak_bytes = {device: peaks[tuple(units)] for device, units in on_device.items()}
    return Simulation(
        plan=plan,
        step_time_s=played.step_time_s,
        timeline=played.timeline,
        passages=played.passages,
        groups=_group_use(plan, work, played, peak_bytes),
        peak_bytes=peak_bytes,
        changes=played.memory,
        static_bytes=static,
    )


def _group_use(
    plan: Plan, work: Workload, played: Played, peak_bytes: Mapping[tuple[str, int], Number]
) -> dict[str, GroupUse]:
    """Shares of each group's device time."""
    total = played.step_time_s or math.inf
    busy = {g.name: 0.0 for g in plan.cluster.groups}
    recompute = dict(busy)
    for span in played.timeline:
        task = span.task
        member = plan.stages[task.stage].members[task.member]
        busy[member.group] += (span.end_s - span.start_s) * len(member.devices)
        if task.op == "B":
            recompute[member.group] += work.recompute_s[task.stage, task.member] * len(member.devices)
    moving = {name: [] for name in busy}
    for passage in played.passages:
        for name in {str(end) for end in passage.channel} & set(moving):
            moving[name].append((passage.start_s, passage.end_s))
    result = {}
    for group in plan.cluster.groups:
        capacity = total * group.num_devices
        share = busy[group.name] / capacity
        peak = max((b for (name, _), b in peak_bytes.items() if name == group.name), default=0.0)
        result[group.name] = GroupUse(
            busy=share,
            recompute=recompute[group.name] / capacity,
            bubble=1 - share,
            transfer=covered(moving[group.name]) / total,
            peak_gib=peak / 2**30,
        )
    return result


def covered(spans: Sequence[tuple[Number, Number]]) -> Number:
    """Length of the union of intervals."""
    length, reach = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return length
