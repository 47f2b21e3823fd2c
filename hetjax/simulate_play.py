"""Plays task lists on costs and links: timeline, messages, memory over time.

In-order compute in each lane, and beside it a stream each for the gathers and the reductions of parameters
that come and go, and for copies to and from the host; messages in the order in which they are sent, one at a
time in each direction between two groups, at the link's full bandwidth; other gradients reduced and all
parameters updated at the end of the step.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetjax.devices import Number
from hetjax.graph import Unit
from hetjax.memory import Memory
from hetjax.schedule import Schedule, Task
from hetjax.workload import Message, Workload

ASIDE = ("G", "R")
"""Tasks that run on a stream of their own where the member's parameters come and go."""


NO_TASK = Task("", 0, -1, 0)
"""Of events that are of no task."""


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


class _Channel:
    """When a channel is free again."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s: Number = 0.0


class _Sent(NamedTuple):
    """What a part of a microbatch sends on to one part of another member's.

    Attributes:
        to: Tasks that read it.
        splits: Parts of a microbatch there.
        part: Which of them reads it.
        share: Of all rows that the two members have in common.
        channel: None where both are on the same devices.
        ends: The channel's.
        num_bytes: Of the message.
        occupied_s: For how long it keeps the channel from others.
        latency_s: From its end to its arrival.
        arrived_bytes: On each device that it arrives at.
    """

    to: _Line
    splits: int
    part: int
    share: float
    channel: _Channel | None = None
    ends: tuple[object, object] = ("", "")
    num_bytes: Number = 0.0
    occupied_s: Number = 0.0
    latency_s: Number = 0.0
    arrived_bytes: Number = 0.0


class _Line:
    """All tasks of one op of one member: what they cost and what they wait for.

    Attributes:
        op: As in `Task`.
        unit: Whose.
        lane: Where.
        seconds: Of one task.
        splits: Parts of a microbatch.
        sent: What each part of a microbatch sends on.
        missing: By part of the step, inputs whose sender is not done; or, of `R`, for the whole of it, `B`
            (or `W`) of the stage in other lanes.
        ready_s: By part of the step, when the last of the inputs so far has arrived.
        footprint: By part of a microbatch, bytes that the task allocates when it starts and when it ends;
            less than 0 is freed. None where memory is not of interest.
        memory: The member's changes of memory.
    """

    __slots__ = (
        "footprint", "lane", "memory", "missing", "op", "ready_s", "seconds", "sent", "splits", "unit",
    )  # fmt: skip

    def __init__(self, op: str, unit: Unit, lane: int, seconds: Number, splits: int, num_tasks: int) -> None:
        self.op, self.unit, self.lane, self.seconds, self.splits = op, unit, lane, seconds, splits
        self.sent: list[list[_Sent]] = [[] for _ in range(splits)]
        self.missing = [0] * num_tasks
        self.ready_s: list[Number] = [0.0] * num_tasks
        self.footprint: list[tuple[Number, Number]] | None = None
        self.memory: list[tuple[Number, Number]] = []


class _Player:
    """The state of one step in simulated time.

    Events are tasks that are done, and whatever may let a lane go on that stands still. An input that arrives
    while its lane is busy is none: that it will have arrived is noted when it is sent.
    """

    def __init__(self, schedule: Schedule, work: Workload) -> None:
        self.schedule, self.work, self.graph = schedule, work, schedule.graph
        graph, M = self.graph, schedule.num_microbatches
        units = graph.units()
        self.splits = {u: graph.num_splits(u) for u in units}
        self.lane = {(s, k): graph.lanes[s][k] for s, k in units}
        self.passing = {u for u in units if graph.is_gathered(u)}
        self.twice = {u for u in self.passing if graph.gathers and graph.gathers[u[0]][u[1]] == 2}
        self.last = {u: "W" if graph.is_split(u) else "B" for u in units}  # what frees a part
        self.heads = [0] * len(schedule.lanes)
        self.busy = [False] * len(schedule.lanes)
        self.lines: dict[tuple[str, int, int], _Line] = {
            (op, *u): _Line(
                op, u, self.lane[u], work.seconds.get((op, *u), 0.0), self.splits[u], M * self.splits[u]
            )
            for op in "GFBWRU"
            for u in units
        }
        self.line_of = [[self.lines[op, s, k] for op, s, _, k in lane] for lane in schedule.lanes]
        self.channels: dict[object, _Channel] = collections.defaultdict(_Channel)
        for u in units:
            for v in graph.consumers(*u):
                for p, q, share in graph.links(u, v):
                    self.connect("F", (u, p), (v, q), share)
                    self.connect("B", (v, q), (u, p), share)
        for line in self.lines.values():
            line.missing = line.missing[: line.splits] * M
        for s, k in units:
            others = [j for j, lane in enumerate(graph.lanes[s]) if lane != self.lane[s, k]]
            self.lines["R", s, k].missing[0] = M * sum(self.splits[s, j] for j in others)
        # `F` and `B` that a gather is not done for yet.
        self.ungathered = {("F", *u) for u in self.passing} | {("B", *u) for u in self.twice}
        self.on_host: dict[Unit, Number] = {u: s for u, s in work.host_copy_s.items() if s > 0}
        # Of members with activations on the host: parts whose copy back is due, and what is back.
        self.copied_out: dict[Unit, list[Number]] = {u: [] for u in self.on_host}
        self.copied_back = dict.fromkeys(self.on_host, 0)
        self.returned: set[tuple[Unit, int]] = set()
        self.reductions_left = len(units) + sum(len(work.reductions.get(u, ())) for u in units)
        self.events: list[tuple[Number, int, str, int, Task]] = []
        self.sequence = 0
        self.timeline: list[Span] = []
        self.passages: list[Passage] = []
        self.memory: dict[Unit, list[tuple[Number, Number]]] = {u: [] for u in units}
        for line in self.lines.values():
            line.memory = self.memory[line.unit]
            memory = work.memory.get(line.unit)
            if memory is not None and line.op != "G":
                line.footprint = [self.footprint(line, part, memory) for part in range(line.splits)]
        self.end = 0.0

    def connect(self, op: str, sender: tuple[Unit, int], reader: tuple[Unit, int], share: float) -> None:
        """Let a part of a microbatch wait for a part of another member's."""
        (u, p), (v, q) = sender, reader
        work = self.work
        messages, sizes = (
            (work.forward, work.input_bytes) if op == "F" else (work.backward, work.cotangent_bytes)
        )
        line, message = self.lines[op, *v], messages.get((u, v))
        size = sizes.get((u, v), 0.0) * share
        sent = _Sent(line, self.splits[v], q, share, arrived_bytes=size)
        if message is not None:
            num_bytes = message.num_bytes * share
            sent = sent._replace(
                channel=self.channels[message.channel],
                ends=message.channel,
                num_bytes=num_bytes,
                occupied_s=message.link.occupied_s(num_bytes),
                latency_s=message.link.latency_us * 1e-6,
            )
        self.lines[op, *u].sent[p].append(sent)
        line.missing[q] += 1

    def post(self, time: Number, what: str, lane: int = 0, task: Task = NO_TASK) -> None:
        """Something happens at a time: a task is `done`, a lane that stands still may `wake`."""
        self.sequence += 1
        heapq.heappush(self.events, (time, self.sequence, what, lane, task))

    def send(self, now: Number, message: Message, task: Task) -> Number:
        """Put a message at the end of the step on its channel; when it has arrived."""
        channel = self.channels[message.channel]
        start = max(now, channel.free_s)
        channel.free_s = end = start + message.link.occupied_s(message.num_bytes)
        self.passages.append(Passage(message.channel, task, message.num_bytes, start, end))
        return end + message.link.latency_us * 1e-6

    def run(self) -> Played:
        """Play to the end."""
        now: Number = 0.0
        lanes, events = set(range(len(self.heads))), self.events
        while True:
            for lane in sorted(lanes):
                if not self.busy[lane]:
                    self.advance(lane, now)
            if not events:
                break
            now, lanes = events[0][0], set()
            while events and events[0][0] == now:
                _, _, what, lane, task = heapq.heappop(events)
                lanes.add(lane)
                if what == "done":
                    self.busy[lane] = False
                    lanes |= self.finish(task, now)
                elif what == "aside":
                    lanes |= self.arrive_aside(task, now)
                elif what == "returned":
                    self.returned.add(((task.stage, task.member), task.microbatch))
                elif what == "reduced":
                    self.reductions_left -= 1
                    if self.reductions_left == 0:
                        self.post(now + self.work.barrier_s, "reduced")
                        self.reductions_left = -1
                    elif self.reductions_left < -1:
                        lanes = set(range(len(self.heads)))
        self.end = max(self.end, now)
        stuck = [lane[h] for lane, h in zip(self.schedule.lanes, self.heads, strict=True) if h < len(lane)]
        assert not stuck, f"a checked schedule never deadlocks, and {stuck[0]} waits for ever"
        return Played(self.end, tuple(self.timeline), tuple(self.passages), self.memory)

    def ready_s(self, task: Task, line: _Line) -> Number:
        """When everything that a task needs from elsewhere is there; infinite where that is not known yet."""
        op, m = task.op, task.microbatch
        if op in "FB":
            if line.missing[m]:
                return math.inf
            if self.ungathered and (op, *line.unit) in self.ungathered:
                return math.inf
            if (
                op == "B"
                and self.on_host
                and line.unit in self.on_host
                and (line.unit, m) not in self.returned
            ):
                return math.inf
            return line.ready_s[m]
        there = not line.missing[0] if op == "R" else op in "GW" or self.reductions_left < -1
        return 0.0 if there else math.inf

    def advance(self, lane: int, now: Number) -> None:
        """Start the next task of a lane if it can, and what stands before it on streams of its own."""
        tasks = self.schedule.lanes[lane]
        while (head := self.heads[lane]) < len(tasks):
            task, line = tasks[head], self.line_of[lane][head]
            op, unit = line.op, line.unit
            from_host = op == "B" and unit in self.on_host
            if from_host:
                self.fetch(unit, task.microbatch, now)
            ready_s = self.ready_s(task, line)
            if ready_s > now:
                if ready_s < math.inf:
                    self.post(ready_s, "wake", lane)
                return
            self.heads[lane] += 1
            if unit in self.passing and op in ASIDE:
                self.start_aside(lane, task, unit, now)
                continue
            self.busy[lane] = True
            end = now + line.seconds
            self.timeline.append(Span(lane, task, now, end))
            if line.footprint is not None:
                before, after = line.footprint[task.microbatch % line.splits]
                line.memory += ((now, before), (end, after))
                if unit in self.passing:
                    self.pass_through(task, unit, now, end)
            if from_host:
                self.fetch(unit, task.microbatch + 1, now)
            self.post(end, "done", lane, task)
            return

    def stream(self, lane: int, name: str, task: Task, now: Number, seconds: Number) -> tuple[Number, Number]:
        """Put work on a lane's side stream; its start and end."""
        channel = self.channels[lane, name]
        start = max(now, channel.free_s)
        channel.free_s = end = start + seconds
        self.timeline.append(Span(lane, task, start, end, name))
        return start, end

    def start_aside(self, lane: int, task: Task, unit: Unit, now: Number) -> None:
        """A gather or a reduction, beside the compute."""
        name = "gather" if task.op == "G" else "reduce"
        start, end = self.stream(lane, name, task, now, self.work.seconds.get((task.op, *unit), 0.0))
        memory = self.work.memory.get(unit)
        if memory is not None:
            change = (start, memory.copy_bytes) if task.op == "G" else (end, -memory.accumulator_bytes)
            self.memory[unit].append(change)
        self.post(end, "aside", lane, task)

    def arrive_aside(self, task: Task, now: Number) -> set[int]:
        """A gather or a reduction is done; other lanes that may go on."""
        if task.op == "R":
            return self.finish(task, now)
        self.ungathered.discard(("F" if task.microbatch == -1 else "B", task.stage, task.member))
        return set()

    def fetch(self, unit: Unit, part: int, now: Number) -> None:
        """Begin the copy back from the host of everything up to a part."""
        out = self.copied_out[unit]
        while self.copied_back[unit] <= min(part, len(out) - 1):
            now = max(now, out[self.copied_back[unit]])
            task = Task("B", unit[0], self.copied_back[unit], unit[1])
            start, end = self.stream(self.lane[unit], "from host", task, now, self.on_host[unit])
            self.post(end, "returned", self.lane[unit], task)
            if unit in self.work.memory:
                self.memory[unit].append((start, self.work.memory[unit].host_kept_bytes_per_part))
            self.copied_back[unit] += 1

    def footprint(self, line: _Line, part: int, memory: Memory) -> tuple[Number, Number]:
        """What a task on a part of a microbatch allocates when it starts and when it ends; freed is less."""
        before, after = memory.workspace_bytes, -memory.workspace_bytes
        kept = memory.kept_bytes_per_part
        if line.op in "FB":
            sizes = self.work.input_bytes if line.op == "F" else self.work.cotangent_bytes
            # Where cotangents come from outputs go, and the other way round.
            sources = self.lines["B" if line.op == "F" else "F", *line.unit].sent[part]
            used = sum(sizes.get((sent.to.unit, line.unit), 0.0) * sent.share for sent in sources)
            if line.op == "F":
                before += kept - used + memory.host_kept_bytes_per_part
            else:
                after -= used + memory.host_kept_bytes_per_part
        return (before, after - kept) if line.op == self.last[line.unit] else (before, after)

    def pass_through(self, task: Task, unit: Unit, start: Number, end: Number) -> None:
        """Sums that begin to live with the first `B`, copies of parameters that go after their last use."""
        memory, total = self.work.memory[unit], self.schedule.num_microbatches * self.splits[unit]
        if task.op == "B" and task.microbatch == 0:
            self.memory[unit].append((start, memory.accumulator_bytes))
        last = task.microbatch == total - 1
        if last and (task.op == self.last[unit] or (task.op == "F" and unit in self.twice)):
            self.memory[unit].append((end, -memory.copy_bytes))

    def hand_on(self, task: Task, line: _Line, now: Number) -> None:
        """Send what an `F` or a `B` made."""
        microbatch, part = divmod(task.microbatch, line.splits)
        for to, splits, q, _, channel, ends, num_bytes, occupied_s, latency_s, arrived_bytes in line.sent[
            part
        ]:
            arrival = now
            if channel is not None:
                start = channel.free_s if channel.free_s > now else now
                channel.free_s = end = start + occupied_s
                self.passages.append(Passage(ends, task, num_bytes, start, end))
                arrival = end + latency_s
            if arrived_bytes:
                to.memory.append((arrival, arrived_bytes))
            m = microbatch * splits + q
            to.missing[m] -= 1
            if arrival > to.ready_s[m]:
                to.ready_s[m] = arrival
            if not to.missing[m] and not self.busy[to.lane]:
                self.post(to.ready_s[m], "wake", to.lane)

    def finish(self, task: Task, now: Number) -> set[int]:
        """A task is done: send what it made; other lanes that may go on."""
        op, s, m, k = task
        line = self.lines[op, s, k]
        unit, lane = line.unit, line.lane
        lanes: set[int] = set()
        if op in "FB":
            self.hand_on(task, line, now)
        if op == "F" and unit in self.on_host:
            _, gone = self.stream(lane, "to host", task, now, self.on_host[unit])
            self.copied_out[unit].append(gone)
            if unit in self.work.memory:
                self.memory[unit].append((gone, -self.work.memory[unit].host_kept_bytes_per_part))
        if op == self.last[unit]:
            for j, other in enumerate(self.graph.lanes[s]):
                if other != lane:
                    self.lines["R", s, j].missing[0] -= 1
                    lanes.add(other)
        elif op == "R":
            self.post(now, "reduced")
            for message in self.work.reductions.get(unit, ()):
                self.post(self.send(now, message, task), "reduced")
        elif op == "U":
            for message in self.work.updates.get(unit, ()):
                self.end = max(self.end, self.send(now, message, task))
        return lanes
