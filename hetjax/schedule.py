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
from hetjax.graph import Bounds, StageGraph, Unit, in_flight_bounds, stage_edges
from hetjax.plan import SCHEDULES, Plan

Times = Sequence[Number | Sequence[Number]]
"""Seconds per stage: one number for all its members, or one for each."""


class Task(NamedTuple):
    """One piece of work of one member.

    Attributes:
        op: `G` gather parameters, `F` forward, `B` backward (of the inputs alone where it is split), `W`
            backward of the parameters where it is split, `R` reduce gradients, `U` update.
        stage: Number in the plan.
        microbatch: Number within the step, counted in the member's own parts; -1 for `G`, `R`, `U`, which
            are of the whole step, and -2 for the `G` that gathers once more for the backward.
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
class Schedule:
    """The task lists of one step.

    Attributes:
        kind: One of `plan.SCHEDULES`.
        graph: What it was made for.
        num_microbatches: In one step.
        lanes: The tasks of each lane, in order.
        order: All tasks in one order that agrees with every lane and every dependency: what a single
            dispatching thread follows.
        bounds: The stated memory bound.
        length_s: Of the `F`, `B` and `W` in virtual time.
    """

    kind: str
    graph: StageGraph
    num_microbatches: int
    lanes: tuple[tuple[Task, ...], ...]
    order: tuple[Task, ...]
    bounds: Bounds
    length_s: Number = 0.0

    @property
    def max_in_flight(self) -> dict[int, int]:
        """By stage: forward activations alive at once, at most, of the member that may keep the most."""
        return dict(enumerate(self.bounds.stage))

    def dependencies(self, task: Task) -> list[Task]:
        """What has to be done before a task, wherever it runs."""
        return dependencies(self.graph, self.num_microbatches, task)

    def __str__(self) -> str:
        lines = [f"lane {i}: " + " ".join(map(str, lane)) for i, lane in enumerate(self.lanes)]
        return "\n".join([f"{self.kind}, {self.num_microbatches} microbatches", *lines])


def dependencies(graph: StageGraph, num_microbatches: int, task: Task) -> list[Task]:
    """What has to be done before a task.

    `F` needs `G` of its member and `F` of every producer's parts that have rows in common with it; `B` its
    own `F`, `B` of every such consumer's part, and the second `G` where there is one; `W` its own `B`; `R`
    every `B` (or `W`) of its stage, on all members; `U` every `R` (the global norm needs all gradients).
    """
    op, s, m, k = task
    splits = graph.num_splits((s, k))
    if op == "F":
        result = [Task("G", s, -1, k)]
        for p in graph.producers(s, k):
            base = m // splits * graph.num_splits(p)
            result += [
                Task("F", p[0], base + i, p[1]) for i, j, _ in graph.links(p, (s, k)) if j == m % splits
            ]
        return result
    if op == "B":
        result = [Task("F", s, m, k)]
        if graph.gathers is not None and graph.gathers[s][k] == 2:
            result.append(Task("G", s, -2, k))
        for c in graph.consumers(s, k):
            base = m // splits * graph.num_splits(c)
            result += [
                Task("B", c[0], base + j, c[1]) for i, j, _ in graph.links((s, k), c) if i == m % splits
            ]
        return result
    if op == "W":
        return [Task("B", s, m, k)]
    if op == "R":
        return [
            Task("W" if graph.is_split((s, j)) else "B", s, i, j)
            for j in range(len(graph.lanes[s]))
            for i in range(num_microbatches * graph.num_splits((s, j)))
        ]
    if op == "U":
        return [Task("R", s, -1, j) for s, j in graph.units()]
    assert op == "G", f"a task's op is one of G, F, B, W, R, U, and not {op!r}"
    return []


class TooLongError(Exception):
    """The step takes longer than was asked for."""


def make_schedule(
    kind: str,
    lanes: Sequence[Sequence[int]],
    num_microbatches: int,
    *,
    edges: Iterable[tuple[int, int]] | None = None,
    rows: Sequence[Sequence[tuple[int, int]]] | None = None,
    forward_s: Times | None = None,
    backward_s: Times | None = None,
    transfer_s: Mapping[tuple[Unit, Unit], Number] | None = None,
) -> Schedule:
    """Order the tasks of one step of a placement without parts and gathers; see `schedule_graph`.

    Args:
        kind: As in `schedule_graph`.
        lanes: Lane of each member of each stage, numbered from 0 without gaps.
        num_microbatches: In one step.
        edges: (producer, consumer) stages; a chain when None.
        rows: Start and stop of each member's rows; None means that every member reads all of each producer.
        forward_s: Virtual seconds of `F`; equal when None.
        backward_s: Virtual seconds of `B`; twice `forward_s` when None.
        transfer_s: Virtual seconds from one member to another; none when None.

    Returns:
        A schedule that `check_schedule` accepts, the same for the same arguments.

    Raises:
        UserError: Unknown kind, no microbatches, or edges that do not lead forward.
    """
    chain = [(s, s + 1) for s in range(len(lanes) - 1)]
    graph = StageGraph(
        lanes=tuple(tuple(members) for members in lanes),
        edges=tuple(sorted(set(chain if edges is None else edges))),
        rows=None if rows is None else tuple(tuple(r) for r in rows),
    )
    return schedule_graph(
        kind, graph, num_microbatches, forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s
    )


def schedule_graph(
    kind: str,
    graph: StageGraph,
    num_microbatches: int,
    *,
    forward_s: Times | None = None,
    backward_s: Times | None = None,
    transfer_s: Mapping[tuple[Unit, Unit], Number] | None = None,
    longest_s: Number = math.inf,
) -> Schedule:
    """Order the tasks of one step.

    Args:
        kind: `gpipe`: all forwards, then all backwards; a lane with several stages takes them one after the
            other. `1f1b`: backwards as soon as they can be, so that few activations live. `interleaved`: 1F1B
            in rounds of as many microbatches as there are lanes, for lanes with several stages. `ministage`:
            a lane does the forward of all its microbatches through one stage before it begins the next, and
            the backward in the mirror image, so that each stage's parameters are needed for two stretches of
            time only (Zorse, arXiv 2507.10392).
        graph: Lanes, edges, rows, parts and gathers.
        num_microbatches: In one step.
        forward_s: Virtual seconds of `F` of one part; equal when None.
        backward_s: Virtual seconds of `B`, and of `W` with it; twice `forward_s` when None.
        transfer_s: Virtual seconds of one part's message from one member to another; none when None.
        longest_s: Give up where the step takes at least so many virtual seconds.

    Returns:
        A schedule that `check_schedule` accepts, the same for the same arguments.

    Raises:
        TooLongError: The step takes `longest_s` or more.
        UserError: Unknown kind, no microbatches, edges that do not lead forward, or parts where the kind does
            not allow them.
    """
    if kind not in SCHEDULES:
        raise UserError(f"schedule is {kind!r}. Allowed: {', '.join(SCHEDULES)}.")
    if num_microbatches < 1:
        raise UserError(f"num_microbatches is {num_microbatches}. It has to be 1 or more.")
    _check_graph(graph)
    if kind == "interleaved" and any(graph.num_splits(u) > 1 for u in graph.units()):
        raise UserError(
            "schedule is 'interleaved', whose rounds are of microbatches, and a member has splits. Set them "
            "to 1, or take '1f1b', 'gpipe' or 'ministage'."
        )
    forward = _per_unit(graph, forward_s, 1.0)
    backward = [2 * f for f in forward] if backward_s is None else _per_unit(graph, backward_s, 2.0)
    # Which does a free lane prefer? With equal stages `interleaved` needs F for the textbook's bubble; with
    # unequal ones neither is always the shorter. B is tried first, since it keeps less where both are equal.
    # Where nothing can be shorter, no other is tried.
    order: list[Task] = []
    length = longest_s
    for prefer in {"ministage": ("B",), "gpipe": ("F",)}.get(kind, ("B", "F")):
        play = _Play(kind, prefer, graph, num_microbatches, forward, backward, dict(transfer_s or {}))
        least = play.least_s()
        if least >= longest_s or length <= least * (1 + 1e-6):
            break
        played, seconds = play.run(length)
        if seconds < length * (1 - 1e-9):
            order, length = played, seconds
    if not order:
        raise TooLongError
    order = _with_gathers(graph, order)
    by_lane: list[list[Task]] = [[] for _ in range(graph.num_lanes)]
    for task in order:
        by_lane[graph.lanes[task.stage][task.member]].append(task)
    return Schedule(
        kind=kind,
        graph=graph,
        num_microbatches=num_microbatches,
        lanes=tuple(tuple(lane) for lane in by_lane),
        order=tuple(order),
        bounds=in_flight_bounds(kind, graph, num_microbatches),
        length_s=length,
    )


def plan_schedule(plan: Plan, edges: Iterable[EdgeLike], longest_s: Number = math.inf) -> Schedule:
    """The task lists of a plan: the same for planner, simulator and runtime.

    Args:
        plan: Its members' `seconds` and its cluster's links are the virtual times.
        edges: Between the program's segments.
        longest_s: Give up where the step takes at least so many virtual seconds.

    Raises:
        TooLongError: The step takes `longest_s` or more.
    """
    crossing = stage_edges(plan, edges)
    graph = plan.graph(crossing)
    seconds = [[m.seconds for m in stage.members] for stage in plan.stages]
    known = all(pair is not None for members in seconds for pair in members)
    return schedule_graph(
        plan.schedule,
        graph,
        plan.num_microbatches,
        forward_s=[[pair[0] for pair in members if pair] for members in seconds] if known else None,
        backward_s=[[pair[1] for pair in members if pair] for members in seconds] if known else None,
        transfer_s=_delays(plan, graph, crossing) if known else None,
        longest_s=longest_s,
    )


def _delays(
    plan: Plan, graph: StageGraph, crossing: Mapping[tuple[int, int], Number]
) -> dict[tuple[Unit, Unit], float]:
    """Seconds of one part's message between members that do not share their devices."""
    result = {}
    for a in graph.units():
        one = plan.stages[a[0]].members[a[1]]
        size = DTYPE_BYTES[plan.cluster.group(one.group).dtype] / 4
        for b in graph.consumers(*a):
            two = plan.stages[b[0]].members[b[1]]
            if (one.group, one.devices) == (two.group, two.devices):
                continue
            common = min(one.rows[1], two.rows[1]) - max(one.rows[0], two.rows[0])
            link = plan.cluster.link_between(one.group, one.devices, two.group, two.devices)
            share = max(x for _, _, x in graph.links(a, b))
            result[a, b] = link.transfer_s(crossing[a[0], b[0]] * common * size * share)
    return result


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

    Deadlock cannot happen: F and B of one member go in order of its parts, so nothing later fills the place
    of the lowest unfinished one in a stage; and a lane's bound keeps room for what that one still has to do
    in the lane. So its next task can always run.
    """

    def __init__(
        self,
        kind: str,
        prefer: str,
        graph: StageGraph,
        num_microbatches: int,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        transfer_s: Mapping[tuple[Unit, Unit], Number],
    ) -> None:
        self.kind, self.graph, self.num_microbatches = kind, graph, num_microbatches
        self.preferred = ("F", "B") if prefer == "F" else ("B", "F")
        self.bounds = in_flight_bounds(kind, graph, num_microbatches)
        self.units = graph.units()
        index = {unit: u for u, unit in enumerate(self.units)}
        n = len(self.units)
        self.stage = [s for s, _ in self.units]
        self.lane = [graph.lanes[s][k] for s, k in self.units]
        self.split = [graph.is_split(unit) for unit in self.units]
        shares = [graph.weight_share(unit) for unit in self.units]
        pairs = list(zip(backward_s, shares, strict=True))
        self.seconds = {
            "F": forward_s,
            "B": [b * (1 - share) for b, share in pairs],
            "W": [b * share for b, share in pairs],
        }
        self.delay = transfer_s
        self.mine = [[u for u in range(n) if self.lane[u] == lane] for lane in range(graph.num_lanes)]
        self.splits = [graph.num_splits(unit) for unit in self.units]
        self.parts = [num_microbatches * splits for splits in self.splits]
        self.bound = [self.bounds.unit[s][k] for s, k in self.units]
        # For each part within a microbatch: (unit, splits, part) that reads it, forward and backward, and
        # how long it travels.
        self.sent: dict[str, list[list[list[tuple[int, int, int, float]]]]] = {
            op: [[[] for _ in range(splits)] for splits in self.splits] for op in "FB"
        }
        waits = {"F": [[0] * x for x in self.splits], "B": [[1] * x for x in self.splits]}
        for u, unit in enumerate(self.units):
            for consumer in graph.consumers(*unit):
                v = index[consumer]
                delay = float(transfer_s.get((unit, consumer), 0.0))
                for p, q, _ in graph.links(unit, consumer):
                    self.sent["F"][u][p].append((v, self.splits[v], q, delay))
                    self.sent["B"][v][q].append((u, self.splits[u], p, delay))
                    waits["F"][v][q] += 1
                    waits["B"][u][p] += 1
        # Next part of each member, and the inputs that each of them still waits for.
        self.next = {"F": [0] * n, "B": [0] * n, "W": [0] * n}
        self.last = ["W" if split else "B" for split in self.split]  # what frees a part
        self.done = {"B": [0] * n}
        self.missing = {op: [one * num_microbatches for one in waits[op]] for op in "FB"}
        self.lane_forwards_left = [sum(self.parts[u] for u in us) for us in self.mine]
        self.lane_left = [sum(self.parts[u] * (3 if self.split[u] else 2) for u in us) for us in self.mine]
        # Of `interleaved`, by lane and microbatch k: what is alive of k and later ones, and what k still has
        # to run forward; members whose B of a microbatch is not done; the lowest unfinished microbatch.
        self.need = [[len(us)] * num_microbatches for us in self.mine]
        self.unfinished = [n] * num_microbatches
        self.lowest = 0
        self.round = graph.num_lanes

    def least_s(self) -> Number:
        """No order is shorter: a lane's own work, and the way there and back for one microbatch."""
        index = {unit: u for u, unit in enumerate(self.units)}
        there, back = [0.0] * len(self.units), [0.0] * len(self.units)
        for u, unit in enumerate(self.units):
            for producer in self.graph.producers(*unit):
                p, delay = index[producer], float(self.delay.get((producer, unit), 0.0))
                there[u] = max(there[u], there[p] + self.seconds["F"][p] + delay)
                back[u] = max(back[u], back[p] + self.seconds["B"][p] + delay)
        return max(
            min(there[u] for u in us)
            + min(back[u] for u in us)
            + sum(self.parts[u] * sum(self.seconds[op][u] for op in "FBW") for u in us)
            for us in self.mine
        )

    def priority(self, op: str, u: int, m: int) -> tuple[Number, int, int]:
        """What a lane prefers: the smallest key among what is ready of an op."""
        stage = self.stage[u] if op == "F" else -self.stage[u]
        if self.kind == "gpipe":
            return stage, m, 0
        if self.kind == "1f1b":
            return m / self.splits[u], stage, 0
        return m // self.round, stage, m

    def admits(self, u: int, m: int) -> bool:
        """Whether the stated bound lets a member start `F` of part `m`."""
        if self.next["F"][u] - self.next[self.last[u]][u] >= self.bound[u]:
            return False
        if self.kind != "interleaved":
            return True
        lane = self.lane[u]
        return all(need < self.bounds.lane[lane] for need in self.need[lane][self.lowest : m])

    def pick(self, lane: int) -> tuple[str, int] | None:
        """The best task that the lane can start now."""
        if self.kind == "ministage":
            return self.pick_in_turn(lane)
        for op in self.preferred:
            following, missing = self.next[op], self.missing[op]
            if op == "B" and self.kind == "gpipe" and self.lane_forwards_left[lane]:
                continue
            ready = [
                u
                for u in self.mine[lane]
                if (m := following[u]) < self.parts[u]
                and not missing[u][m]
                and (op == "B" or self.admits(u, m))
            ]
            if len(ready) == 1:
                return op, ready[0]
            if ready:
                return op, min(ready, key=lambda u: self.priority(op, u, following[u]))
        return self.pick_weights(lane)

    def pick_weights(self, lane: int) -> tuple[str, int] | None:
        """The oldest `W` that can start: what is done when nothing that others wait for can be."""
        ready = [u for u in self.mine[lane] if self.split[u] and self.next["W"][u] < self.done["B"][u]]
        return (
            ("W", min(ready, key=lambda u: (self.next["W"][u] / self.splits[u], -self.stage[u])))
            if ready
            else None
        )

    def pick_in_turn(self, lane: int) -> tuple[str, int] | None:
        """The lane's next task stage by stage, if it can start now."""
        turns = [("F", u) for u in self.mine[lane]] + [("B", u) for u in reversed(self.mine[lane])]
        for op, u in turns:
            m = self.next[op][u]
            if m < self.parts[u]:
                return self.pick_weights(lane) if self.missing[op][u][m] else (op, u)
        return self.pick_weights(lane)

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

    def run(self, longest_s: Number) -> tuple[list[Task], float]:
        """Play the whole step, or as much of it as begins before a time.

        Returns:
            All tasks in order of their start, and how long the step takes in virtual time.
        """
        graph = self.graph
        order = [Task("G", s, -1, k) for s, k in self.units]
        reduces = _Reduces(self)
        # Events: (time, sequence, what, op, member, part); `what` is 0 task done, 1 input arrived.
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
            if now >= longest_s:
                return order, now
            while events and events[0][0] == now:
                _, _, what, op, u, m = heapq.heappop(events)
                touched.add(self.lane[u])
                if what == 1:
                    self.missing[op][u][m] -= 1
                    continue
                idle.add(self.lane[u])
                for target_op, v, part, delay in self.finish(op, u, m):
                    if delay:
                        sequence += 1
                        heapq.heappush(events, (now + delay, sequence, 1, target_op, v, part))
                    else:
                        self.missing[target_op][v][part] -= 1
                        touched.add(self.lane[v])
                if op == self.last[u] and self.kind == "interleaved":
                    touched |= self.settle(m)
        left = [
            str(self.units[u]) for u in range(len(self.units)) if self.next[self.last[u]][u] < self.parts[u]
        ]
        assert not left, f"a schedule never deadlocks, and {left} still have work"
        return order + [Task("U", s, -1, k) for s, k in self.units], now

    def finish(self, op: str, u: int, m: int) -> list[tuple[str, int, int, float]]:
        """Account for a task that is done; the inputs that it provides and how long they travel."""
        if op == "W":
            self.lower(u, m)
            return []
        if op == "B":
            self.done["B"][u] += 1
        microbatch, part = divmod(m, self.splits[u])
        result = [("B", u, m, 0.0)] if op == "F" else []
        for v, splits, other, delay in self.sent[op][u][part]:
            result.append((op, v, microbatch * splits + other, delay))
        if op == "B" and not self.split[u]:
            self.lower(u, m)
        return result

    def lower(self, u: int, m: int) -> None:
        """Note that a member keeps nothing of a part any more."""
        if self.kind == "interleaved":
            for k in range(self.lowest, m + 1):
                self.need[self.lane[u]][k] -= 1

    def settle(self, m: int) -> set[int]:
        """Note one member's last task of a microbatch.

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
            play.next[play.last[u]][u] == play.parts[u] for u, (s, _) in enumerate(play.units) if s == stage
        )


def _with_gathers(graph: StageGraph, order: list[Task]) -> list[Task]:
    """The order with `G` and `R` of parameters that come and go where they belong.

    A stage's parameters are gathered while its lane runs the stage before, so that no more than two stages'
    are there at once; its gradients are reduced as soon as its last `B` is issued.
    """
    passing = {u for u in graph.units() if graph.is_gathered(u)}
    if not passing:
        return order
    in_lane: dict[int, list[Unit]] = {}
    for s, k in graph.units():
        in_lane.setdefault(graph.lanes[s][k], []).append((s, k))
    # By the first task of a stage on a lane: what is gathered when it is issued, unless it has been.
    ahead: dict[tuple[str, Unit], list[Task]] = {}
    for units in in_lane.values():
        for i, (s, k) in enumerate(units):
            if (s, k) not in passing:
                continue
            own = [("F", Task("G", s, -1, k), units[max(i - 1, 0)])]
            if graph.gathers is not None and graph.gathers[s][k] == 2:
                own.append(("B", Task("G", s, -2, k), units[min(i + 1, len(units) - 1)]))
            for op, gather, before in own:
                for unit in {before, (s, k)}:
                    ahead.setdefault((op, unit), []).append(gather)
    issued: set[Task] = set()

    def is_last(task: Task) -> bool:
        return task.op == ("W" if graph.is_split((task.stage, task.member)) else "B")

    num_left = {s: sum(1 for t in order if t.stage == s and is_last(t)) for s, _ in passing}
    result: list[Task] = []
    for task in order:
        unit = task.stage, task.member
        if task.op in "GR" and unit in passing:
            continue
        if task.op in "FB" and task.microbatch == 0:
            due = [g for g in ahead.get((task.op, unit), []) if g not in issued]
            result += due
            issued.update(due)
        result.append(task)
        if task.stage in num_left and is_last(task):
            num_left[task.stage] -= 1
            if num_left[task.stage] == 0:
                members = range(len(graph.lanes[task.stage]))
                result += [Task("R", task.stage, -1, j) for j in members if (task.stage, j) in passing]
    return result
