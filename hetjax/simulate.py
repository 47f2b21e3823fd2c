"""Plays a plan's own task lists on costs and links: timeline, use of each group, memory over time.

In-order compute in each lane, and beside it a stream each for the gathers and the reductions of parameters
that come and go, and for copies to and from the host; messages in the order in which they are sent, one at a
time in each direction between two groups, at the link's full bandwidth; other gradients reduced and all
parameters updated at the end of the step.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetjax.cost import AnalyticCosts, Costs, ProgramLike
from hetjax.devices import Number
from hetjax.graph import Unit
from hetjax.memory import Memory
from hetjax.plan import Plan
from hetjax.schedule import Schedule, Task, plan_schedule
from hetjax.workload import Message, Workload, workload

ASIDE = ("G", "R")
"""Tasks that run on a stream of their own where the member's parameters come and go."""


class Span(NamedTuple):
    """One task on one stream of a lane, from start to end.

    Attributes:
        lane: Of the schedule.
        task: What runs; for a copy to or from the host, the task that it belongs to.
        start_s: Seconds from the start of the step.
        end_s: Seconds from the start of the step.
        stream: `compute`, `gather`, `reduce`, `to host` or `from host`.
    """

    lane: int
    task: Task
    start_s: Number
    end_s: Number
    stream: str = "compute"


class Passage(NamedTuple):
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
        graph = self.graph
        units = graph.units()
        self.splits = {u: graph.num_splits(u) for u in units}
        self.lane = {(s, k): graph.lanes[s][k] for s, k in units}
        self.passing = {u for u in units if graph.is_gathered(u)}
        self.twice = {u for u in self.passing if graph.gathers and graph.gathers[u[0]][u[1]] == 2}
        self.last = {u: "W" if graph.is_split(u) else "B" for u in units}  # what frees a part
        self.heads = [0] * len(schedule.lanes)
        self.busy = [False] * len(schedule.lanes)
        M = schedule.num_microbatches
        # For each part within a microbatch: (unit, splits, part, share of the message) that reads it.
        self.sent: dict[tuple[str, Unit], list[list[tuple[Unit, int, int, float]]]] = {
            (op, u): [[] for _ in range(self.splits[u])] for op in "FB" for u in units
        }
        waits = {(op, u): [0] * self.splits[u] for op in "FB" for u in units}
        for u in units:
            for v in graph.consumers(*u):
                for p, q, share in graph.links(u, v):
                    self.sent["F", u][p].append((v, self.splits[v], q, share))
                    self.sent["B", v][q].append((u, self.splits[u], p, share))
                    waits["F", v][q] += 1
                    waits["B", u][p] += 1
        # What each task still waits for from elsewhere; its own lane's order covers the rest.
        self.missing: dict[tuple[str, Unit], list[int]] = {key: one * M for key, one in waits.items()}
        for u in units:
            others = [j for j, lane in enumerate(graph.lanes[u[0]]) if lane != self.lane[u]]
            self.missing["R", u] = [M * sum(self.splits[u[0], j] for j in others)]
            if u in self.passing:
                self.missing["F", u] = [n + 1 for n in self.missing["F", u]]
            if u in self.twice:
                self.missing["B", u] = [n + 1 for n in self.missing["B", u]]
        self.on_host: dict[Unit, Number] = {u: s for u, s in work.host_copy_s.items() if s > 0}
        # Of members with activations on the host: parts whose copy back is due, and what is back.
        self.copied_back = dict.fromkeys(self.on_host, 0)
        self.returned: set[tuple[Unit, int]] = set()
        self.reductions_left = len(units) + sum(len(work.reductions.get(u, ())) for u in units)
        self.events: list[tuple[Number, int, str, Task, Unit | None, float]] = []
        self.sequence = 0
        self.free: dict[object, Number] = {}
        self.timeline: list[Span] = []
        self.passages: list[Passage] = []
        self.memory: dict[Unit, list[tuple[Number, Number]]] = {u: [] for u in units}
        self.footprints = {
            (op, u): [self.footprint(op, u, part, work.memory[u]) for part in range(self.splits[u])]
            for op in "FBWRU"
            for u in units
            if u in work.memory
        }
        self.end = 0.0

    def post(
        self, time: Number, what: str, task: Task, sender: Unit | None = None, share: float = 1.0
    ) -> None:
        """Something happens at a time: a task is `done`, an input or the `barrier` has `arrived`."""
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, what, task, sender, share))

    def send(self, now: Number, message: Message | None, task: Task, share: float = 1.0) -> Number:
        """Put a message on its channel; when it has arrived."""
        if message is None:
            return now
        size = message.num_bytes * share
        start = max(now, self.free.get(message.channel, 0.0))
        end = start + message.link.occupied_s(size)
        self.free[message.channel] = end
        self.passages.append(Passage(message.channel, task, size, start, end))
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
                _, _, what, task, sender, share = heapq.heappop(self.events)
                if what == "done":
                    lanes |= self.finish(task, now)
                elif what == "arrived":
                    lanes.add(self.receive(task, sender, share, now))
                elif what == "aside":
                    lanes.add(self.arrive_aside(task, now))
                elif what == "returned":
                    self.returned.add(((task.stage, task.member), task.microbatch))
                    lanes.add(self.lane[task.stage, task.member])
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

    def ready(self, task: Task, unit: Unit) -> bool:
        """Whether everything that a task needs from elsewhere is there."""
        op, m = task.op, task.microbatch
        if op in "FB":
            if self.missing[op, unit][m]:
                return False
            return op == "F" or unit not in self.on_host or (unit, m) in self.returned
        if op == "R":
            return not self.missing["R", unit][0]
        return op in "GW" or self.reductions_left < -1

    def advance(self, lane: int, now: Number) -> None:
        """Start the next task of a lane if it can, and what stands before it on streams of its own."""
        tasks = self.schedule.lanes[lane]
        while not self.busy[lane] and self.heads[lane] < len(tasks):
            task = tasks[self.heads[lane]]
            unit = task.stage, task.member
            if task.op == "B" and unit in self.on_host:
                self.fetch(unit, task.microbatch, now)
            if not self.ready(task, unit):
                return
            self.heads[lane] += 1
            if task.op in ASIDE and unit in self.passing:
                self.start_aside(lane, task, unit, now)
                continue
            self.busy[lane] = True
            end = now + self.work.seconds.get((task.op, *unit), 0.0)
            self.timeline.append(Span(lane, task, now, end))
            footprint = self.footprints.get((task.op, unit))
            if footprint is not None:
                before, after = footprint[task.microbatch % len(footprint)]
                self.memory[unit] += ((now, before), (end, after))
                if unit in self.passing:
                    self.pass_through(task, unit, now, end)
            if task.op == "B" and unit in self.on_host:
                self.fetch(unit, task.microbatch + 1, now)
            self.post(end, "done", task)

    def stream(self, lane: int, name: str, task: Task, now: Number, seconds: Number) -> tuple[Number, Number]:
        """Put work on a lane's side stream; its start and end."""
        start = max(now, self.free.get((lane, name), 0.0))
        self.free[lane, name] = start + seconds
        self.timeline.append(Span(lane, task, start, start + seconds, name))
        return start, start + seconds

    def start_aside(self, lane: int, task: Task, unit: Unit, now: Number) -> None:
        """A gather or a reduction, beside the compute."""
        name = "gather" if task.op == "G" else "reduce"
        start, end = self.stream(lane, name, task, now, self.work.seconds.get((task.op, *unit), 0.0))
        memory = self.work.memory.get(unit)
        if memory is not None:
            change = (start, memory.copy_bytes) if task.op == "G" else (end, -memory.accumulator_bytes)
            self.memory[unit].append(change)
        self.post(end, "aside", task)

    def arrive_aside(self, task: Task, now: Number) -> int:
        """A gather or a reduction is done; the lane that may go on."""
        unit = task.stage, task.member
        if task.op == "R":
            self.finish(task, now)
        else:
            op = "F" if task.microbatch == -1 else "B"
            self.missing[op, unit] = [n - 1 for n in self.missing[op, unit]]
        return self.lane[unit]

    def fetch(self, unit: Unit, part: int, now: Number) -> None:
        """Begin the copy back from the host of everything up to a part."""
        last = self.schedule.num_microbatches * self.splits[unit]
        while self.copied_back[unit] <= min(part, last - 1):
            task = Task("B", unit[0], self.copied_back[unit], unit[1])
            start, end = self.stream(self.lane[unit], "from host", task, now, self.on_host[unit])
            self.post(end, "returned", task)
            if unit in self.work.memory:
                self.memory[unit].append((start, self.work.memory[unit].host_kept_bytes_per_part))
            self.copied_back[unit] += 1

    def footprint(self, op: str, unit: Unit, part: int, memory: Memory) -> tuple[Number, Number]:
        """What a task on a part of a microbatch allocates when it starts and when it ends; freed is less."""
        before, after = memory.workspace_bytes, -memory.workspace_bytes
        kept = memory.kept_bytes_per_part
        if op in "FB":
            sizes = self.work.input_bytes if op == "F" else self.work.cotangent_bytes
            sources = self.sent["B" if op == "F" else "F", unit][part]
            used = sum(sizes.get((other, unit), 0.0) * share for other, _, _, share in sources)
            if op == "F":
                before += kept - used + memory.host_kept_bytes_per_part
            else:
                after -= used + memory.host_kept_bytes_per_part
        return (before, after - kept) if op == self.last[unit] else (before, after)

    def pass_through(self, task: Task, unit: Unit, start: Number, end: Number) -> None:
        """Sums that begin to live with the first `B`, copies of parameters that go after their last use."""
        memory, total = self.work.memory[unit], self.schedule.num_microbatches * self.splits[unit]
        if task.op == "B" and task.microbatch == 0:
            self.memory[unit].append((start, memory.accumulator_bytes))
        last = task.microbatch == total - 1
        if last and (task.op == "B" or (task.op == "F" and unit in self.twice)):
            self.memory[unit].append((end, -memory.copy_bytes))

    def receive(self, task: Task, sender: Unit | None, share: float, now: Number) -> int:
        """An input of a task has arrived; the task's lane."""
        unit = task.stage, task.member
        self.missing[task.op, unit][task.microbatch] -= 1
        if sender is not None and unit in self.memory:
            sizes = self.work.input_bytes if task.op == "F" else self.work.cotangent_bytes
            size = sizes.get((sender, unit), 0.0) * share
            if size:
                self.memory[unit].append((now, size))
        return self.lane[unit]

    def finish(self, task: Task, now: Number) -> set[int]:
        """A task is done: send what it made; the lanes that may go on."""
        op, s, m, k = task
        unit = s, k
        lane = self.lane[unit]
        aside = op in ASIDE and unit in self.passing
        if not aside:
            self.busy[lane] = False
        lanes = {lane}
        if op in "FB":
            microbatch, part = divmod(m, self.splits[unit])
            messages = self.work.forward if op == "F" else self.work.backward
            for other, splits, q, share in self.sent[op, unit][part]:
                arrival = self.send(now, messages.get((unit, other)), task, share)
                self.post(
                    arrival, "arrived", Task(op, other[0], microbatch * splits + q, other[1]), unit, share
                )
        if op == "F" and unit in self.on_host:
            _, gone = self.stream(lane, "to host", task, now, self.on_host[unit])
            if unit in self.work.memory:
                self.memory[unit].append((gone, -self.work.memory[unit].host_kept_bytes_per_part))
        if op == self.last[unit]:
            for j, other in enumerate(self.graph.lanes[s]):
                if other != lane:
                    self.missing["R", (s, j)][0] -= 1
                    lanes.add(other)
        elif op == "R":
            self.post(now, "reduced", task)
            for message in self.work.reductions.get(unit, ()):
                self.post(self.send(now, message, task), "reduced", task)
        elif op == "U":
            for message in self.work.updates.get(unit, ()):
                self.end = max(self.end, self.send(now, message, task))
        return lanes


@dataclasses.dataclass(frozen=True)
class GroupUse:
    """Where a group's step goes, as shares of its devices' time.

    Attributes:
        busy: Computing: `F`, `B`, `U`, and what else stands in the lane between them.
        recompute: Part of that which repeats a forward.
        bubble: Idle, 1 - busy.
        transfer: Share of the step in which a message to or from the group is on its way.
        peak_gib: Most memory of one of its devices.
        aside: Share in which a gather, a reduction or a copy to or from the host runs beside the compute.
    """

    busy: Number
    recompute: Number
    bubble: Number
    transfer: Number
    peak_gib: Number
    aside: Number = 0.0


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A plan's step as predicted.

    Attributes:
        plan: What was played.
        step_time_s: Predicted.
        timeline: Every task.
        passages: Every message between groups or submeshes.
        peak_bytes: Of each used device (group, index).
    """

    plan: Plan
    step_time_s: Number
    timeline: tuple[Span, ...]
    passages: tuple[Passage, ...]
    peak_bytes: Mapping[tuple[str, int], Number]
    changes: Mapping[Unit, Sequence[tuple[Number, Number]]] = dataclasses.field(repr=False)
    static_bytes: Mapping[Unit, Number] = dataclasses.field(repr=False)
    recompute_s: Mapping[Unit, Number] = dataclasses.field(repr=False)

    @functools.cached_property
    def groups(self) -> Mapping[str, GroupUse]:
        """Use of every group of the cluster, idle ones too."""
        return _group_use(self)

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


def _peak(
    units: Sequence[Unit],
    changes: Mapping[Unit, Sequence[tuple[Number, Number]]],
    static: Mapping[Unit, Number],
) -> Number:
    """The most of the curve."""
    level = sum(static.get(u, 0.0) for u in units)
    table = np.array([change for u in units for change in changes.get(u, ())], float).reshape(-1, 2)
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    return float(level + np.cumsum(table[:, 1]).max(initial=0.0))


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
            peaks[units] = _peak(units, played.memory, static)
    peak_bytes = {device: peaks[tuple(units)] for device, units in on_device.items()}
    return Simulation(
        plan=plan,
        step_time_s=played.step_time_s,
        timeline=played.timeline,
        passages=played.passages,
        peak_bytes=peak_bytes,
        changes=played.memory,
        static_bytes=static,
        recompute_s=work.recompute_s,
    )


def _group_use(simulation: Simulation) -> dict[str, GroupUse]:
    """Shares of each group's device time."""
    plan, timeline = simulation.plan, simulation.timeline
    total = simulation.step_time_s or math.inf
    busy = {g.name: 0.0 for g in plan.cluster.groups}
    recompute = dict(busy)
    for span in timeline:
        task = span.task
        if span.stream != "compute":
            continue
        member = plan.stages[task.stage].members[task.member]
        busy[member.group] += (span.end_s - span.start_s) * len(member.devices)
        if task.op == "B":
            recompute[member.group] += simulation.recompute_s[task.stage, task.member] * len(member.devices)
    moving: dict[str, list[tuple[Number, Number]]] = {name: [] for name in busy}
    aside: dict[str, list[tuple[Number, Number]]] = {name: [] for name in busy}
    for span in timeline:
        if span.stream != "compute":
            member = plan.stages[span.task.stage].members[span.task.member]
            aside[member.group].append((span.start_s, span.end_s))
    for passage in simulation.passages:
        for name in {str(end) for end in passage.channel} & set(moving):
            moving[name].append((passage.start_s, passage.end_s))
    result = {}
    for group in plan.cluster.groups:
        capacity = total * group.num_devices
        share = busy[group.name] / capacity
        peak = max((b for (name, _), b in simulation.peak_bytes.items() if name == group.name), default=0.0)
        result[group.name] = GroupUse(
            busy=share,
            recompute=recompute[group.name] / capacity,
            bubble=1 - share,
            transfer=covered(moving[group.name]) / total,
            peak_gib=peak / 2**30,
            aside=covered(aside[group.name]) / total,
        )
    return result


def covered(spans: Sequence[tuple[Number, Number]]) -> Number:
    """Length of the union of intervals."""
    length, reach = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return length
