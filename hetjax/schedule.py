"""Orders as data: which task each lane runs after which, for any placement and any costs.

A lane is the ordered task list of one device set. An order is found by playing the tasks in virtual time:
whenever a lane is free it takes the best task that is ready, as far as the schedule's stated memory bound
lets it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from hetjax.cost import EdgeLike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.errors import UserError
from hetjax.graph import Bounds, StageGraph, Unit, in_flight_bounds, stage_edges
from hetjax.ordering import OrderPlay, Task, with_gathers
from hetjax.plan import SCHEDULES, Plan

Times = Sequence[Number | Sequence[Number]]
"""Seconds per stage: one number for all its members, or one for each."""


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
        play = OrderPlay(kind, prefer, graph, num_microbatches, forward, backward, dict(transfer_s or {}))
        least = play.least_s()
        if least >= longest_s or length <= least * (1 + 1e-6):
            break
        played, seconds = play.run(length)
        if seconds < length * (1 - 1e-9):
            order, length = played, seconds
    if not order:
        raise TooLongError
    order = with_gathers(graph, order)
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
