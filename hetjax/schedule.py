"""Orders as data: which task each lane runs after which, for any placement and any costs.

A lane is the ordered task list of one device set. An order is found by playing the tasks in virtual time:
whenever a lane is free it takes the best task that is ready, as far as the schedule's stated memory bound
lets it.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hetjax.cost import EdgeLike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.errors import UserError
from hetjax.plan import SCHEDULES, Bounds, Plan, in_flight_bounds, stage_edges

Times = Sequence[Number | Sequence[Number]]
"""Seconds per stage: one number for all its members, or one for each."""


class Task(NamedTuple):
    """One piece of work of one member.

    Attributes:
        op: `G` gather parameters, `F` forward, `B` backward, `R` reduce gradients, `U` update.
        stage: Number in the plan.
        microbatch: Number within the step; -1 for `G`, `R`, `U`, which are of the whole step.
        member: Number within the stage.
    """

    op: str
    stage: int
    microbatch: int
    member: int

    def __str__(self) -> str:
        member = f".{self.member}" if self.member else ""
        return f"{self.op}{self.stage}{member}" + ("" if self.microbatch < 0 else f"/{self.microbatch}")


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """What a schedule has to know of a plan.

    Attributes:
        lanes: Lane of each member of each stage.
        edges: (producer, consumer) stages of everything that crosses, skip connections too.
        rows: Start and stop of each member's rows; None means that every member reads all of each producer.
    """

    lanes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    rows: tuple[tuple[tuple[int, int], ...], ...] | None = None

    @property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.lanes)

    @property
    def num_lanes(self) -> int:
        """How many lanes."""
        return 1 + max(lane for members in self.lanes for lane in members)

    def units(self) -> list[tuple[int, int]]:
        """Every (stage, member), in order."""
        return [(s, k) for s, members in enumerate(self.lanes) for k in range(len(members))]

    def overlap(self, a: tuple[int, int], b: tuple[int, int]) -> bool:
        """Whether two members of different stages handle a row in common."""
        if self.rows is None:
            return True
        (start_a, stop_a), (start_b, stop_b) = self.rows[a[0]][a[1]], self.rows[b[0]][b[1]]
        return max(start_a, start_b) < min(stop_a, stop_b)

    def producers(self, stage: int, member: int) -> list[tuple[int, int]]:
        """Members whose forward output this one reads."""
        stages = sorted({p for p, c in self.edges if c == stage})
        return [
            (p, k) for p in stages for k in range(len(self.lanes[p])) if self.overlap((p, k), (stage, member))
        ]

    def consumers(self, stage: int, member: int) -> list[tuple[int, int]]:
        """Members that read this one's forward output."""
        stages = sorted({c for p, c in self.edges if p == stage})
        return [
            (c, k) for c in stages for k in range(len(self.lanes[c])) if self.overlap((c, k), (stage, member))
        ]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The task lists of one step.

    Attributes:
        kind: `gpipe`, `1f1b` or `interleaved`.
        graph: What it was made for.
        num_microbatches: In one step.
        lanes: The tasks of each lane, in order.
        order: All tasks in one order that agrees with every lane and every dependency: what a single
            dispatching thread follows.
        bounds: The stated memory bound.
    """

    kind: str
    graph: StageGraph
    num_microbatches: int
    lanes: tuple[tuple[Task, ...], ...]
    order: tuple[Task, ...]
    bounds: Bounds

    @property
    def max_in_flight(self) -> dict[int, int]:
        """By stage: forward activations alive at once, at most."""
        return dict(enumerate(self.bounds.stage))

    def dependencies(self, task: Task) -> list[Task]:
        """What has to be done before a task, wherever it runs."""
        return dependencies(self.graph, self.num_microbatches, task)

    def __str__(self) -> str:
        lines = [f"lane {i}: " + " ".join(map(str, lane)) for i, lane in enumerate(self.lanes)]
        return "\n".join([f"{self.kind}, {self.num_microbatches} microbatches", *lines])


def dependencies(graph: StageGraph, num_microbatches: int, task: Task) -> list[Task]:
    """What has to be done before a task.

    `F` needs `G` of its member and `F` of every producer; `B` its own `F` and `B` of every consumer; `R`
    every `B` of its stage, on all members; `U` every `R` (the global norm needs all gradients).
    """
    op, s, m, k = task
    if op == "F":
        return [Task("G", s, -1, k)] + [Task("F", p, m, j) for p, j in graph.producers(s, k)]
    if op == "B":
        return [Task("F", s, m, k)] + [Task("B", c, m, j) for c, j in graph.consumers(s, k)]
    if op == "R":
        return [Task("B", s, i, j) for i in range(num_microbatches) for j in range(len(graph.lanes[s]))]
    if op == "U":
        return [Task("R", s, -1, j) for s, j in graph.units()]
    assert op == "G", f"a task's op is one of G, F, B, R, U, and not {op!r}"
    return []


def make_schedule(
    kind: str,
    lanes: Sequence[Sequence[int]],
    num_microbatches: int,
    *,
    edges: Iterable[tuple[int, int]] | None = None,
    rows: Sequence[Sequence[tuple[int, int]]] | None = None,
    forward_s: Times | None = None,
    backward_s: Times | None = None,
    transfer_s: Mapping[tuple[int, int], Number] | None = None,
) -> Schedule:
    """Order the tasks of one step.

    Args:
        kind: `gpipe`: all forwards, then all backwards; a lane with several stages takes them one after the
            other. `1f1b`: backwards as soon as they can be, so that few activations live. `interleaved`: 1F1B
            in rounds of as many microbatches as there are lanes, for lanes with several stages.
        lanes: Lane of each member of each stage, numbered from 0 without gaps.
        num_microbatches: In one step.
        edges: (producer, consumer) stages; a chain when None.
        rows: Start and stop of each member's rows; None means that every member reads all of each producer.
        forward_s: Virtual seconds of `F`; equal when None.
        backward_s: Virtual seconds of `B`; twice `forward_s` when None.
        transfer_s: Virtual seconds from one stage to another; none when None.

    Returns:
        A schedule that `check_schedule` accepts, the same for the same arguments.

    Raises:
        UserError: Unknown kind, no microbatches, or edges that do not lead forward.
    """
    if kind not in SCHEDULES:
        raise UserError(f"schedule is {kind!r}. Allowed: {', '.join(SCHEDULES)}.")
    if num_microbatches < 1:
        raise UserError(f"num_microbatches is {num_microbatches}. It has to be 1 or more.")
    chain = [(s, s + 1) for s in range(len(lanes) - 1)]
    graph = StageGraph(
        lanes=tuple(tuple(members) for members in lanes),
        edges=tuple(sorted(set(chain if edges is None else edges))),
        rows=None if rows is None else tuple(tuple(r) for r in rows),
    )
    _check_graph(graph)
    forward = _per_unit(graph, forward_s, 1.0)
    backward = [2 * f for f in forward] if backward_s is None else _per_unit(graph, backward_s, 2.0)
    # Which does a free lane prefer? With equal stages `interleaved` needs F for the textbook's bubble; with
    # unequal ones neither is always the shorter. B is tried first, since it keeps less where both are equal.
    order: list[Task] = []
    length = math.inf
    for prefer in ("B",) if kind == "gpipe" else ("B", "F"):
        play = _Play(kind, prefer, graph, num_microbatches, forward, backward, dict(transfer_s or {}))
        played, seconds = play.run()
        if seconds < length * (1 - 1e-9):
            order, length = played, seconds
    by_lane: list[list[Task]] = [[] for _ in range(graph.num_lanes)]
    for task in order:
        by_lane[graph.lanes[task.stage][task.member]].append(task)
    return Schedule(
        kind=kind,
        graph=graph,
        num_microbatches=num_microbatches,
        lanes=tuple(tuple(lane) for lane in by_lane),
        order=tuple(order),
        bounds=in_flight_bounds(kind, graph.lanes, num_microbatches),
    )


def plan_schedule(plan: Plan, edges: Iterable[EdgeLike]) -> Schedule:
    """The task lists of a plan: the same for planner, simulator and runtime.

    Args:
        plan: Its members' `seconds` and its cluster's links are the virtual times.
        edges: Between the program's segments.
    """
    crossing = stage_edges(plan, edges)
    seconds = [[m.seconds for m in stage.members] for stage in plan.stages]
    known = all(pair is not None for members in seconds for pair in members)
    return make_schedule(
        plan.schedule,
        plan.lanes(),
        plan.num_microbatches,
        edges=crossing,
        rows=[[m.rows for m in stage.members] for stage in plan.stages],
        forward_s=[[pair[0] for pair in members if pair] for members in seconds] if known else None,
        backward_s=[[pair[1] for pair in members if pair] for members in seconds] if known else None,
        transfer_s={pair: _transfer_s(plan, *pair, size) for pair, size in crossing.items()}
        if known
        else None,
    )


def _transfer_s(plan: Plan, producer: int, consumer: int, bytes_per_row: Number) -> float:
    """The longest way from a member of one stage to a member of another."""
    longest = 0.0
    for a in plan.stages[producer].members:
        for b in plan.stages[consumer].members:
            num_rows = min(a.rows[1], b.rows[1]) - max(a.rows[0], b.rows[0])
            if num_rows > 0 and (a.group, a.devices) != (b.group, b.devices):
                link = plan.cluster.link(a.group, b.group)
                size = DTYPE_BYTES[plan.cluster.group(a.group).dtype] / 4
                longest = max(longest, link.transfer_s(bytes_per_row * num_rows * size))
    return longest


def _check_graph(graph: StageGraph) -> None:
    used = {lane for members in graph.lanes for lane in members}
    if not used or used != set(range(len(used))) or any(not members for members in graph.lanes):
        raise UserError(
            f"Lanes are {graph.lanes}. Every stage needs a member, and lanes are numbered 0, 1, ...."
        )
    for p, c in graph.edges:
        if not 0 <= p < c < graph.num_stages:
            raise UserError(f"Edge {p} -> {c} has to lead from a stage to a later one of {graph.num_stages}.")


def _per_unit(graph: StageGraph, times: Times | None, default: float) -> list[float]:
    """Seconds of each (stage, member)."""
    if times is None:
        return [default for _ in graph.units()]
    result = []
    for s, k in graph.units():
        value = times[s]
        result.append(float(value[k] if isinstance(value, Sequence) else value))
    return result


class _Play:
    """Plays the tasks in virtual time and notes in which order they start.

    Deadlock cannot happen: F and B of one member go in order of microbatches, so nothing later fills the
    place of the lowest unfinished microbatch in a stage; and a lane's bound keeps room for what that
    microbatch still has to do in the lane. So its next task can always run.
    """

    def __init__(
        self,
        kind: str,
        prefer: str,
        graph: StageGraph,
        num_microbatches: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        transfer_s: Mapping[tuple[int, int], Number],
    ) -> None:
        self.kind, self.prefer, self.graph, self.num_microbatches = kind, prefer, graph, num_microbatches
        self.bounds = in_flight_bounds(kind, graph.lanes, num_microbatches)
        self.units = graph.units()
        index = {unit: u for u, unit in enumerate(self.units)}
        n = len(self.units)
        self.stage = [s for s, _ in self.units]
        self.lane = [graph.lanes[s][k] for s, k in self.units]
        self.seconds = {"F": forward_s, "B": backward_s}
        self.delay = transfer_s
        self.producers = [[index[p] for p in graph.producers(*unit)] for unit in self.units]
        self.consumers = [[index[c] for c in graph.consumers(*unit)] for unit in self.units]
        self.mine = [[u for u in range(n) if self.lane[u] == lane] for lane in range(graph.num_lanes)]
        # Next microbatch of each member, and the inputs that each of them still waits for.
        self.next = {"F": [0] * n, "B": [0] * n}
        M = num_microbatches
        self.missing = {
            "F": [[len(p)] * M for p in self.producers],
            "B": [[len(c) + 1] * M for c in self.consumers],
        }
        # By lane and microbatch k: what is alive of k and later ones, and what k still has to run forward.
        self.need = [[len(us)] * M for us in self.mine]
        self.lane_forwards_left = [len(us) * M for us in self.mine]
        self.lane_left = [2 * len(us) * M for us in self.mine]
        self.unfinished = [n] * M  # members whose B of a microbatch is not done
        self.lowest = 0  # lowest unfinished microbatch
        self.round = graph.num_lanes

    def priority(self, op: str, u: int, m: int) -> tuple[bool, int, int, int]:
        """What a lane prefers: the smallest key among what is ready."""
        stage = self.stage[u] if op == "F" else -self.stage[u]
        if self.kind == "gpipe":
            return op == "B", stage, m, 0
        if self.kind == "1f1b":
            return op != self.prefer, m, stage, 0
        return op != self.prefer, m // self.round, stage, m

    def admits(self, u: int, m: int) -> bool:
        """Whether the stated bound lets a member start `F` of microbatch `m`."""
        if self.next["F"][u] - self.next["B"][u] >= self.bounds.stage[self.stage[u]]:
            return False
        if self.kind != "interleaved":
            return True
        lane = self.lane[u]
        return all(need < self.bounds.lane[lane] for need in self.need[lane][self.lowest : m])

    def pick(self, lane: int) -> tuple[str, int] | None:
        """The best task that the lane can start now."""
        best: tuple[tuple[bool, int, int, int], str, int] | None = None
        for u in self.mine[lane]:
            for op in ("B", "F"):
                m = self.next[op][u]
                if m == self.num_microbatches or self.missing[op][u][m]:
                    continue
                if op == "F" and not self.admits(u, m):
                    continue
                if op == "B" and self.kind == "gpipe" and self.lane_forwards_left[lane]:
                    continue
                key = self.priority(op, u, m)
                if best is None or key < best[0]:
                    best = key, op, u
        return None if best is None else best[1:]

    def start(self, op: str, u: int) -> Task:
        """Account for a task that starts."""
        m = self.next[op][u]
        lane = self.lane[u]
        self.next[op][u] += 1
        if op == "F":
            self.lane_forwards_left[lane] -= 1
            if self.kind == "interleaved":
                for k in range(self.lowest, m):
                    self.need[lane][k] += 1
        self.lane_left[lane] -= 1
        return Task(op, self.stage[u], m, self.units[u][1])

    def run(self) -> tuple[list[Task], float]:
        """Play the whole step.

        Returns:
            All tasks in order of their start, and how long the step takes in virtual time.
        """
        graph = self.graph
        order = [Task("G", s, -1, k) for s, k in self.units]
        reduces = _Reduces(self)
        # Events: (time, sequence, what, op, member, microbatch); `what` is 0 task done, 1 input arrived.
        events: list[tuple[float, int, int, str, int, int]] = []
        sequence = 0
        idle = set(range(graph.num_lanes))
        now, touched, drained = 0.0, set(idle), False
        while True:
            for lane in sorted(touched & idle):
                choice = self.pick(lane)
                if choice is not None:
                    op, u = choice
                    task = self.start(op, u)
                    order.append(task)
                    idle.discard(lane)
                    drained |= self.lane_left[lane] == 0
                    sequence += 1
                    heapq.heappush(events, (now + self.seconds[op][u], sequence, 0, op, u, task.microbatch))
            if drained:
                order += reduces.ready()
            if not events:
                break
            now, touched = events[0][0], set()
            while events and events[0][0] == now:
                _, _, what, op, u, m = heapq.heappop(events)
                touched.add(self.lane[u])
                if what == 1:
                    self.missing[op][u][m] -= 1
                    continue
                idle.add(self.lane[u])
                for target_op, v, delay in self.finish(op, u, m):
                    if delay:
                        sequence += 1
                        heapq.heappush(events, (now + delay, sequence, 1, target_op, v, m))
                    else:
                        self.missing[target_op][v][m] -= 1
                        touched.add(self.lane[v])
                if op == "B":
                    touched |= self.settle(m)
        left = [
            str(self.units[u]) for u in range(len(self.units)) if self.next["B"][u] < self.num_microbatches
        ]
        assert not left, f"a schedule never deadlocks, and {left} still have work"
        return order + [Task("U", s, -1, k) for s, k in self.units], now

    def finish(self, op: str, u: int, m: int) -> list[tuple[str, int, float]]:
        """Account for a task that is done; the inputs that it provides and how long they travel."""
        if op == "F":
            sent = [("F", v, self.delay.get((self.stage[u], self.stage[v]), 0.0)) for v in self.consumers[u]]
            return [("B", u, 0.0), *sent]
        if self.kind == "interleaved":
            for k in range(self.lowest, m + 1):
                self.need[self.lane[u]][k] -= 1
        return [("B", v, self.delay.get((self.stage[v], self.stage[u]), 0.0)) for v in self.producers[u]]

    def settle(self, m: int) -> set[int]:
        """Note one member's `B` of a microbatch.

        Returns:
            The lanes that may admit more, because the lowest unfinished microbatch moved.
        """
        self.unfinished[m] -= 1
        before = self.lowest
        while self.lowest < self.num_microbatches and self.unfinished[self.lowest] == 0:
            self.lowest += 1
        return set(range(self.graph.num_lanes)) if self.lowest != before else set()


class _Reduces:
    """`R` of each member once its lane has no `F` or `B` left, the last stage first, in every lane alike."""

    def __init__(self, play: _Play) -> None:
        self.play = play
        self.waiting = [list(reversed(us)) for us in play.mine]

    def ready(self) -> list[Task]:
        """Tasks that can be issued now: all `B` of their stage have been."""
        play, result = self.play, []
        for lane, units in enumerate(self.waiting):
            while units and play.lane_left[lane] == 0 and self._issued(play.stage[units[0]]):
                s, k = play.units[units.pop(0)]
                result.append(Task("R", s, -1, k))
        return result

    def _issued(self, stage: int) -> bool:
        play = self.play
        return all(
            play.next["B"][u] == play.num_microbatches for u, (s, _) in enumerate(play.units) if s == stage
        )


def check_schedule(schedule: Schedule) -> None:
    """Verify a schedule: every task once, no deadlock, the stated bound.

    Raises:
        UserError: Names the first task or stage that is wrong.
    """
    graph, M = schedule.graph, schedule.num_microbatches
    expected = {Task(op, s, -1, k) for op in "GRU" for s, k in graph.units()}
    expected |= {Task(op, s, m, k) for op in "FB" for s, k in graph.units() for m in range(M)}
    seen: set[Task] = set()
    for number, lane in enumerate(schedule.lanes):
        for task in lane:
            if task not in expected:
                raise UserError(f"Lane {number} has task {task}, which the plan does not know.")
            if task in seen:
                raise UserError(f"Task {task} is listed twice (lane {number}).")
            if graph.lanes[task.stage][task.member] != number:
                right = graph.lanes[task.stage][task.member]
                raise UserError(f"Task {task} is in lane {number} and belongs in lane {right}.")
            seen.add(task)
    if seen != expected:
        raise UserError(f"Task {min(expected - seen)} is in no lane.")
    _check_deadlock(schedule)
    _check_order(schedule)
    _check_bounds(schedule)


def _check_deadlock(schedule: Schedule) -> None:
    """Play the lanes without time: every lane's head must get its turn."""
    done: set[Task] = set()
    heads = [0] * len(schedule.lanes)
    moved = True
    while moved:
        moved = False
        for number, lane in enumerate(schedule.lanes):
            while heads[number] < len(lane):
                task = lane[heads[number]]
                if not all(d in done for d in schedule.dependencies(task)):
                    break
                done.add(task)
                heads[number] += 1
                moved = True
    stuck = [(n, lane[heads[n]]) for n, lane in enumerate(schedule.lanes) if heads[n] < len(lane)]
    if stuck:
        number, task = stuck[0]
        missing = next(d for d in schedule.dependencies(task) if d not in done)
        raise UserError(f"Deadlock: lane {number} waits at {task} for {missing}, which can never run.")


def _check_order(schedule: Schedule) -> None:
    """`order` agrees with the lanes and the dependencies."""
    if len(schedule.order) != sum(map(len, schedule.lanes)):
        raise UserError(
            f"order has {len(schedule.order)} tasks, and the lanes {sum(map(len, schedule.lanes))}."
        )
    heads = [0] * len(schedule.lanes)
    done: set[Task] = set()
    for task in schedule.order:
        number = schedule.graph.lanes[task.stage][task.member]
        lane = schedule.lanes[number]
        if heads[number] == len(lane) or lane[heads[number]] != task:
            raise UserError(f"order has {task} where it does not stand in lane {number}.")
        missing = [d for d in schedule.dependencies(task) if d not in done]
        if missing:
            raise UserError(f"order has {task} before {missing[0]}, which it needs.")
        heads[number] += 1
        done.add(task)


def _check_bounds(schedule: Schedule) -> None:
    """Replay each lane and count what is alive."""
    for number, lane in enumerate(schedule.lanes):
        alive: dict[tuple[int, int], int] = {}
        for task in lane:
            unit = task.stage, task.member
            if task.op in "FB":
                alive[unit] = alive.get(unit, 0) + (1 if task.op == "F" else -1)
            if alive.get(unit, 0) > schedule.bounds.stage[task.stage]:
                raise UserError(
                    f"Stage {task.stage} keeps {alive[unit]} microbatches at {task}, and the bound of "
                    f"{schedule.kind} is {schedule.bounds.stage[task.stage]}."
                )
            if sum(alive.values()) > schedule.bounds.lane[number]:
                raise UserError(
                    f"Lane {number} keeps {sum(alive.values())} microbatches at {task}, and the bound of "
                    f"{schedule.kind} is {schedule.bounds.lane[number]}."
                )
