"""What an order has to know of a plan: lanes, who reads from whom, and how many parts each member makes.

A member runs its rows of each microbatch in `splits` equal parts, so its own microbatches may be smaller and
more than another's. Parts of different stages depend on each other where they have rows in common.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from hetjax.devices import Number

if TYPE_CHECKING:
    from hetjax.cost import EdgeLike
    from hetjax.plan import Plan

Unit = tuple[int, int]
"""(stage, member)."""


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """What a schedule has to know of a plan.

    Attributes:
        lanes: Lane of each member of each stage.
        edges: (producer, consumer) stages of everything that crosses, skip connections too.
        rows: Start and stop of each member's rows; None means that every member reads all of each producer.
        splits: Parts in which each member runs its rows of a microbatch; None means one.
        gathers: How often each member's `G` stands in the step: 1, or 2 where the parameters are gathered
            for the forward and again for the backward; None means 1, at the start of the step.
        split: Share of each member's backward that is a task of its own: `B` gives the inputs' gradients, `W`
            the parameters'. None, and 0, mean that the backward stays whole.
        ahead: Parts that each member may keep beyond the schedule's bound, so that slow links or unlike
            stages are waited for less.
    """

    lanes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    rows: tuple[tuple[tuple[int, int], ...], ...] | None = None
    splits: tuple[tuple[int, ...], ...] | None = None
    gathers: tuple[tuple[int, ...], ...] | None = None
    split: tuple[tuple[Number, ...], ...] | None = None
    ahead: int = 0

    @property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.lanes)

    @property
    def num_lanes(self) -> int:
        """How many lanes."""
        return 1 + max(lane for members in self.lanes for lane in members)

    def units(self) -> list[Unit]:
        """Every (stage, member), in order."""
        return [(s, k) for s, members in enumerate(self.lanes) for k in range(len(members))]

    def num_splits(self, unit: Unit) -> int:
        """In how many parts a member runs its rows of a microbatch."""
        return 1 if self.splits is None else self.splits[unit[0]][unit[1]]

    def is_gathered(self, unit: Unit) -> bool:
        """Whether the member's parameters come and go within the step."""
        return self.gathers is not None and self.gathers[unit[0]][unit[1]] > 0

    def is_split(self, unit: Unit) -> bool:
        """Whether the member's backward is split into `B` and `W`."""
        return self.weight_share(unit) > 0

    def weight_share(self, unit: Unit) -> Number:
        """Share of the member's backward that is `W`."""
        return 0.0 if self.split is None else self.split[unit[0]][unit[1]]

    def part_rows(self, unit: Unit) -> list[tuple[int, int]]:
        """Start and stop of the rows of each part, within the microbatch."""
        assert self.rows is not None, "parts are of rows, and this graph does not know them"
        start, stop = self.rows[unit[0]][unit[1]]
        n = self.num_splits(unit)
        return [(start + (stop - start) * p // n, start + (stop - start) * (p + 1) // n) for p in range(n)]

    def overlap(self, a: Unit, b: Unit) -> bool:
        """Whether two members of different stages handle a row in common."""
        if self.rows is None:
            return True
        (start_a, stop_a), (start_b, stop_b) = self.rows[a[0]][a[1]], self.rows[b[0]][b[1]]
        return max(start_a, start_b) < min(stop_a, stop_b)

    def links(self, a: Unit, b: Unit) -> tuple[tuple[int, int, float], ...]:
        """Parts of two members that have rows in common.

        Returns:
            (part of a, part of b, their share of all rows that the members have in common).
        """
        return self._links(a, b)

    @functools.cached_property
    def _links(self):
        return functools.cache(self._find_links)

    def _find_links(self, a: Unit, b: Unit) -> tuple[tuple[int, int, float], ...]:
        if self.num_splits(a) == self.num_splits(b) == 1 or self.rows is None:
            return ((0, 0, 1.0),)
        rows_a, rows_b = self.part_rows(a), self.part_rows(b)
        found = []
        q = 0
        for p, (start, stop) in enumerate(rows_a):
            while q < len(rows_b) and rows_b[q][1] <= start:
                q += 1
            r = q
            while r < len(rows_b) and rows_b[r][0] < stop:
                common = min(stop, rows_b[r][1]) - max(start, rows_b[r][0])
                if common > 0:
                    found.append((p, r, common))
                r += 1
        total = sum(common for _, _, common in found)
        return tuple((p, r, common / total) for p, r, common in found)

    def producers(self, stage: int, member: int) -> list[Unit]:
        """Members whose forward output this one reads."""
        return self._neighbours[stage, member][0]

    def consumers(self, stage: int, member: int) -> list[Unit]:
        """Members that read this one's forward output."""
        return self._neighbours[stage, member][1]

    @functools.cached_property
    def _neighbours(self) -> dict[Unit, tuple[list[Unit], list[Unit]]]:
        result: dict[Unit, tuple[list[Unit], list[Unit]]] = {unit: ([], []) for unit in self.units()}
        for p, c in sorted(self.edges):
            for k in range(len(self.lanes[p])):
                for j in range(len(self.lanes[c])):
                    if self.overlap((p, k), (c, j)):
                        result[p, k][1].append((c, j))
                        result[c, j][0].append((p, k))
        for before, after in result.values():
            before.sort()
            after.sort()
        return result


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Forward activations alive at once, at most: what a schedule promises.

    Attributes:
        unit: Parts (microbatches, where a member does not split them) of each member of each stage.
        lane: Parts per lane, summed over the stages that share it.
    """

    unit: tuple[tuple[int, ...], ...]
    lane: tuple[int, ...]

    @property
    def stage(self) -> tuple[int, ...]:
        """Parts per stage: of the member that may keep the most."""
        return tuple(max(members) for members in self.unit)


def in_flight_bounds(kind: str, graph: StageGraph, num_microbatches: int) -> Bounds:
    """The stated memory bound of a schedule.

    With M microbatches and L lanes:

    Each but the first is raised by the graph's `ahead`, and no member keeps more than M.

    - `gpipe`, `ministage`: M.
    - `1f1b`: for each member min(M, d), where d is how many lanes its rows pass from here to the end, this
      one included; S - s in a chain of S stages on lanes of their own. Where members split their rows, the
      same length in microbatches, counted in parts, and never less than the backward of one part needs.
    - `interleaved`, in a lane with v chunks whose last one has d stages after it:
      (v - 1) * L + min(2 * d + 1, 2 * L); per stage no more than two rounds, min(M, 2 * L), and for the
      lane's last chunk min(M, 2 * L, 2 * d + 1). Where every lane has v chunks dealt round-robin this is
      Megatron-LM's warm-up, (v - 1) * L + 2 * (L - rank - 1), plus one.

    Args:
        kind: One of `plan.SCHEDULES`.
        graph: Lanes, edges, rows and splits.
        num_microbatches: M.
    """
    S, M, L = graph.num_stages, num_microbatches, graph.num_lanes
    chunks: list[list[Unit]] = [[] for _ in range(L)]
    for s, k in graph.units():
        chunks[graph.lanes[s][k]].append((s, k))
    if kind in ("gpipe", "ministage"):
        unit = {u: M * graph.num_splits(u) for u in graph.units()}
    elif kind == "1f1b" or all(len(c) == 1 for c in chunks):
        unit = _shallow(graph, M)
    else:
        lasts = {max(s for s, _ in c) for c in chunks}
        more = graph.ahead
        unit = {
            u: min(M, min(2 * L, 2 * (S - 1 - u[0]) + 1 if u[0] in lasts else 2 * L) + more)
            for u in graph.units()
        }
        lane_bounds = []
        for c in chunks:
            after = S - 1 - max(s for s, _ in c)
            limit = (len(c) - 1) * L + min(2 * after + 1, 2 * L)
            lane_bounds.append(min(sum(unit[u] for u in c), max(limit, len(c)) + more))
        return Bounds(_by_stage(graph, unit), tuple(lane_bounds))
    return Bounds(_by_stage(graph, unit), tuple(sum(unit[u] for u in c) for c in chunks))


def _by_stage(graph: StageGraph, unit: dict[Unit, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(unit[s, k] for k in range(len(members))) for s, members in enumerate(graph.lanes))


def _shallow(graph: StageGraph, num_microbatches: int) -> dict[Unit, int]:
    """1F1B: as many parts as fill the way from a member to the end."""
    length: dict[Unit, Fraction] = {}
    result = {}
    for u in reversed(graph.units()):
        own = Fraction(1, graph.num_splits(u))
        after = Fraction(0)
        for c in graph.consumers(*u):
            same = graph.lanes[u[0]][u[1]] == graph.lanes[c[0]][c[1]]
            after = max(after, length[c] - (Fraction(1, graph.num_splits(c)) if same else 0))
        length[u] = own + after
        result[u] = math.ceil(length[u] / own)
    for u, needed in _needed(graph):
        result[u] = max(result[u], needed)
    return {u: min(n + graph.ahead, num_microbatches * graph.num_splits(u)) for u, n in result.items()}


def _needed(graph: StageGraph) -> Iterator[tuple[Unit, int]]:
    """How many parts of a member have to be forward before the backward of one of them can be.

    More than one where parts of unlike size follow each other: a consumer's part needs all the producer's
    parts that have rows in common with it.
    """
    units = graph.units()
    pairs = [(u, c) for u in units for c in graph.consumers(*u)]
    if all(p == q for u, c in pairs for p, q, _ in graph.links(u, c)):
        return
    for u in units:
        longest = 1
        for part in range(graph.num_splits(u)):
            reach = _reach(graph, u, part)
            longest = max(longest, reach - part + 1)
        yield u, longest


def _reach(graph: StageGraph, unit: Unit, part: int) -> int:
    """The last part of a member that has to be forward before the backward of one part can be."""
    backward: dict[Unit, tuple[int, int]] = {unit: (part, part)}
    forward: dict[Unit, tuple[int, int]] = {}
    queue: list[tuple[str, Unit]] = [("B", unit)]
    while queue:
        op, u = queue.pop()
        if op == "B":
            low, high = backward[u]
            queue += _widen(forward, u, (low, high), "F")
            for c in graph.consumers(*u):
                mine = [q for p, q, _ in graph.links(u, c) if low <= p <= high]
                if mine:
                    queue += _widen(backward, c, (min(mine), max(mine)), "B")
        else:
            low, high = forward[u]
            for before in graph.producers(*u):
                mine = [p for p, q, _ in graph.links(before, u) if low <= q <= high]
                if mine:
                    queue += _widen(forward, before, (min(mine), max(mine)), "F")
    return forward[unit][1]


def _widen(
    reached: dict[Unit, tuple[int, int]], unit: Unit, span: tuple[int, int], op: str
) -> Sequence[tuple[str, Unit]]:
    before = reached.get(unit)
    wider = span if before is None else (min(before[0], span[0]), max(before[1], span[1]))
    if wider == before:
        return ()
    reached[unit] = wider
    return ((op, unit),)


def stage_of_segment(plan: Plan) -> list[int]:
    """The stage of each segment."""
    return [s for s, stage in enumerate(plan.stages) for _ in range(*stage.segments)]


def stage_edges(plan: Plan, edges: Iterable[EdgeLike]) -> dict[tuple[int, int], Number]:
    """Bytes per row that cross from one stage to another, float32, from the edges between segments."""
    stage_of = stage_of_segment(plan)
    result: dict[tuple[int, int], Number] = {}
    for edge in edges:
        pair = stage_of[edge.producer], stage_of[edge.consumer]
        if pair[0] != pair[1]:
            result[pair] = result.get(pair, 0.0) + edge.bytes_per_row
    return dict(sorted(result.items()))
