"""What every plan has to compute, send and hold, as a small mixed-integer program.

Segments that are alike are one kind, and the variables are averages over the kind: the rules are linear, so
what holds for each segment holds for the average. They are:

- Every row of a segment is computed by some group, and no group works longer than the step.
- Rows that one segment leaves in one group and the next takes up in another cross the link between the two,
  forward and, as cotangents, backward.
- A segment runs wholly in one block of groups, or several blocks share it. Those that share it exchange its
  gradients once a step: a ring's two passes over at least two members, or one pass of gradients and one of
  new values where the state is divided over the members.
- Where a block has a segment to itself, all rows go through that block. Rows that are elsewhere at another
  segment have crossed the block's border between the two.
- No link carries more in either direction than its bandwidth times the step.

Blocks are the groups, and the sets of groups that wide links join (regions, say). Whether a block has any
segment to itself is a yes or no: without it, the average of "everything in the one region" and "everything in
the other" would be a plan that sends nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from scipy import optimize, sparse

from hetjax.cluster import Cluster, Group
from hetjax.cost import Costs, ProgramLike, SegmentLike
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.memory import member_memory
from hetjax.plan import RESIDENCIES

Term = tuple[Number, int]
"""Coefficient and variable."""

MAX_NODES = 2000
"""Of the branch and bound; what it has proved by then is the bound, so it depends on no clock."""

SAFETY = 1e-6
"""The solver's tolerance, taken off its bound."""


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Segments that are alike in everything that the limit asks.

    Attributes:
        of_segment: For each segment the index of its kind.
        counts: Segments of each kind.
        first: One segment of each kind.
        seconds: `[kind, group]`: all rows of one segment on all devices of the group.
    """

    of_segment: tuple[int, ...]
    counts: np.ndarray
    first: tuple[SegmentLike, ...]
    seconds: np.ndarray


def find_kinds(program: ProgramLike, cluster: Cluster, costs: Costs) -> Kinds:
    """Group the segments of a program by class, sizes and seconds."""
    rows = float(program.global_batch)
    known: dict[object, int] = {}
    of_segment, first, seconds = [], [], []
    for s in program.segments():
        times = tuple(float(costs.limit_s(s, g, rows)) for g in cluster.groups)
        kept = tuple(sorted(s.activation_bytes_per_row.items()))
        key = (s.segment_class, s.num_params, s.param_bytes, s.boundary_bytes_per_row, kept, times)
        index = known.setdefault(key, len(known))
        if index == len(first):
            first.append(s)
            seconds.append(times)
        of_segment.append(index)
    counts = np.bincount(of_segment, minlength=len(first)).astype(float)
    return Kinds(tuple(of_segment), counts, tuple(first), np.array(seconds))


@dataclasses.dataclass(frozen=True)
class EdgeKind:
    """Edges between the same two kinds, of the same size.

    Attributes:
        bytes_per_row: Of one edge, float32.
        count: How many.
        producers: For each segment of the producers' kind, how many of the edges it makes.
        consumers: For each segment of the consumers' kind, how many it reads.
        kinds: Of producer and consumer.
    """

    bytes_per_row: Number
    count: int
    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    kinds: tuple[int, int]


def find_edges(program: ProgramLike, kinds: Kinds) -> list[EdgeKind]:
    """The edges of a program by kind."""
    found: dict[tuple[int, int, float], list[tuple[int, int]]] = {}
    for edge in program.edges():
        pair = kinds.of_segment[edge.producer], kinds.of_segment[edge.consumer]
        found.setdefault((*pair, float(edge.bytes_per_row)), []).append((edge.producer, edge.consumer))
    members: dict[int, list[int]] = {}
    for s, k in enumerate(kinds.of_segment):
        members.setdefault(k, []).append(s)

    def tally(ends: Sequence[int], kind: int) -> tuple[int, ...]:
        return tuple(ends.count(s) for s in members[kind])

    return [
        EdgeKind(
            size,
            len(pairs),
            tally([p for p, _ in pairs], a),
            tally([c for _, c in pairs], b),
            (a, b),
        )
        for (a, b, size), pairs in found.items()
    ]


def narrowest_bytes(program: ProgramLike) -> float:
    """Float32 bytes per row that cross at least between any two segments on different groups.

    Between two segments there is a way over edges that are each at least as wide as this, and one of them
    crosses. It is the narrowest edge of the widest spanning tree; 0 where the segments do not hang together.
    """
    widths: dict[tuple[int, int], float] = {}
    for edge in program.edges():
        pair = edge.producer, edge.consumer
        widths[pair] = widths.get(pair, 0.0) + float(edge.bytes_per_row)
    narrowest = math.inf
    trees = {s: {s} for s in range(program.num_segments)}
    for (a, b), width in sorted(widths.items(), key=lambda item: -item[1]):
        if trees[a] is not trees[b]:
            trees[a] |= trees[b]
            trees.update(dict.fromkeys(trees[b], trees[a]))
            narrowest = width
    return narrowest if len(trees[0]) == program.num_segments and program.num_segments > 1 else 0.0


def capacity(cluster: Cluster, a: str, b: str) -> float:
    """Most bytes a second from one group to another: the link's rate at the size that suits it best."""
    link = cluster.link(a, b)
    return 1e9 * max((rate for _, rate in link.curve), default=link.bandwidth_gb_per_s)


def find_levels(cluster: Cluster) -> list[tuple[frozenset[int], ...]]:
    """Partitions of the groups into blocks: each alone, then joined by ever narrower links."""
    names = [g.name for g in cluster.groups]
    pairs = list(itertools.combinations(range(len(names)), 2))
    rates = {(i, j): capacity(cluster, names[i], names[j]) for i, j in pairs}
    blocks = {i: frozenset([i]) for i in range(len(names))}
    levels = []
    for rate in sorted(set(rates.values()), reverse=True):
        level = tuple(sorted(set(blocks.values()), key=min))
        if level not in levels:
            levels.append(level)
        for (i, j), r in rates.items():
            if r >= rate and blocks[i] is not blocks[j]:
                joined = blocks[i] | blocks[j]
                blocks.update(dict.fromkeys(joined, joined))
    return [level for level in levels if len(level) > 1]


def fits(segment: SegmentLike, group: Group) -> bool:
    """Whether any way to run a segment on a group fits its devices: one row, over all devices, any policy."""
    if group.memory_bytes is None:
        return True
    policies = {*segment.activation_bytes_per_row, "full", "offloaded"}
    least = min(
        _alone(segment, group, policy, residency).total_bytes
        for policy in policies
        for residency in RESIDENCIES
    )
    return least <= group.memory_bytes


def resident_bytes(segment: SegmentLike, group: Group) -> float:
    """Bytes of all devices of a group together that a resident segment fills at least, for the whole step."""
    return float(_alone(segment, group, "full", "resident").static_bytes) * group.num_devices


def _alone(segment: SegmentLike, group: Group, policy: str, residency: str):
    # Over `tp` everything is divided, so no other axes make any part smaller.
    return member_memory(
        [segment],
        group,
        rows=1,
        axes={"tp": group.num_devices},
        remat=[policy],
        in_flight=1,
        residency=residency,
        state_share=0.0,
    )


class Rows:
    """Constraints of a linear program, gathered one by one."""

    def __init__(self) -> None:
        """Start with none."""
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: Iterable[Term], low: Number = -math.inf, high: Number = math.inf) -> None:
        """Keep the sum of factor times variable between two values."""
        row = len(self.low)
        self.entries += [(row, int(variable), float(factor)) for factor, variable in terms if factor]
        self.low.append(low)
        self.high.append(high)

    def constraint(self, num_variables: int) -> optimize.LinearConstraint:
        """All of them."""
        rows, columns, factors = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        matrix = sparse.csr_array((factors, (rows, columns)), shape=(len(self.low), num_variables))
        return optimize.LinearConstraint(matrix, self.low, self.high)  # pyrefly: ignore[bad-argument-type]


class Relaxation:
    """The program of a model and a cluster; `solve` gives the bound."""

    def __init__(
        self, program: ProgramLike, cluster: Cluster, kinds: Kinds, *, unit_s: float, resident: bool = False
    ) -> None:
        """Set the program up.

        Args:
            program: What is to be placed.
            cluster: Where.
            kinds: Of the program's segments.
            unit_s: Seconds in which the solver counts, about a step.
            resident: Also ask for memory as if all state were resident (`plan.Member.residency`).
        """
        self.kinds, self.groups, self.cluster = kinds, cluster.groups, cluster
        self.unit_s, self.batch = unit_s, float(program.global_batch)
        self.edges = find_edges(program, kinds)
        self.levels = find_levels(cluster)
        self.blocks = list(dict.fromkeys(b for level in self.levels for b in level))
        self.narrowest = narrowest_bytes(program)
        self.sizes = [DTYPE_BYTES[g.dtype] / 4 for g in self.groups]
        K, G, E, B = len(kinds.first), len(self.groups), len(self.edges), len(self.blocks)
        self.rows, self.upper, self.is_integer = Rows(), list[float](), list[int]()
        self.step = int(self.variables(1)[0])
        # Shares of the rows of a kind's segments by group; of its segments, those that a block has to itself
        # and those that it shares with others; whether a block has any to itself.
        self.share = self.variables(K, G)
        self.own, self.common = self.variables(K, B, upper=1.0), self.variables(K, B, upper=1.0)
        self.has_own = self.variables(B, upper=1.0, integer=True)
        # Of an edge kind: summed shares of the producers, of the consumers, and of what moves between groups.
        self.made, self.read = self.variables(E, G), self.variables(E, G)
        self.moved = self.variables(E, G, G)
        self.gradients = self.variables(G, G)
        self.compute()
        self.placement()
        self.flows()
        if B:
            self.exchange()
            self.borders()
            self.links()
        self.memory(resident)

    def variables(self, *shape: int, upper: Number = math.inf, integer: bool = False) -> np.ndarray:
        """New variables, at least 0; their indices."""
        first, count = len(self.upper), math.prod(shape)
        self.upper += [upper] * count
        self.is_integer += [int(integer)] * count
        return np.array(range(first, first + count), dtype=object).reshape(shape)

    def solve(self) -> float:
        """The least step in seconds; infinite where the memory holds no plan."""
        n = len(self.upper)
        target = np.zeros(n)
        target[self.step] = 1.0
        with _nothing_on_stdout():
            solved = optimize.milp(
                target,
                integrality=np.array(self.is_integer),
                bounds=optimize.Bounds(0, np.array(self.upper)),
                constraints=self.rows.constraint(n),
                options={"node_limit": MAX_NODES, "mip_rel_gap": 1e-6},
            )
        if solved.status == 2:
            return math.inf
        bound = solved.mip_dual_bound
        if bound is None:
            bound = solved.fun if solved.status == 0 else 0.0
        return max(float(bound), 0.0) * self.unit_s * (1 - SAFETY)

    # ---- rules ----

    def inside(self, k: int, block: frozenset[int], factor: Number = 1.0) -> list[Term]:
        """The share of a kind's rows in a block, as terms."""
        return [(factor, self.share[k, g]) for g in block]

    def compute(self) -> None:
        """All rows are computed, and no group works longer than the step."""
        for k in range(len(self.kinds.first)):
            self.rows.add([(1.0, x) for x in self.share[k]], 1.0, 1.0)
        work = self.kinds.counts[:, None] * self.kinds.seconds / self.unit_s
        for g in range(len(self.groups)):
            terms = [(work[k, g], self.share[k, g]) for k in range(len(work))]
            self.rows.add([*terms, (-1.0, self.step)], high=0.0)

    def placement(self) -> None:
        """A block has a segment to itself or shares it; at each level at least two blocks share one."""
        for k in range(len(self.kinds.first)):
            for b, block in enumerate(self.blocks):
                own, common = self.own[k, b], self.common[k, b]
                self.rows.add([*self.inside(k, block), (-1.0, own)], low=0.0)
                self.rows.add([(1.0, common), (1.0, own), *self.inside(k, block, -1.0)], low=0.0)
                self.rows.add([(1.0, own), (-1.0, self.has_own[b])], high=0.0)
            for level in self.levels:
                at = [self.blocks.index(block) for block in level]
                owned = [(1.0, self.own[k, b]) for b in at]
                self.rows.add([*((1.0, self.common[k, b]) for b in at), *((2 * f, x) for f, x in owned)], 2.0)
                for b in at:
                    self.rows.add([(1.0, self.common[k, b]), *owned], high=1.0)

    def flows(self) -> None:
        """Rows that change groups between producer and consumer move from the one to the other."""
        others = [[h for h in range(len(self.groups)) if h != g] for g in range(len(self.groups))]
        for e, edge in enumerate(self.edges):
            for side, tally, kind in (
                (self.made, edge.producers, edge.kinds[0]),
                (self.read, edge.consumers, edge.kinds[1]),
            ):
                self.rows.add([(1.0, x) for x in side[e]], edge.count, edge.count)
                for g in range(len(self.groups)):
                    self.ends(side[e, g], tally, self.share[kind, g])
            for g, rest in enumerate(others):
                out, into = self.moved[e, g, rest], self.moved[e, rest, g]
                away = [(1.0, x) for x in out]
                self.rows.add([*away, (-1.0, self.made[e, g])], high=0.0)
                balance = [*away, *((-1.0, x) for x in into), (-1.0, self.made[e, g]), (1.0, self.read[e, g])]
                self.rows.add(balance, 0.0, 0.0)

    def ends(self, total: int, tally: Sequence[int], share: int) -> None:
        """The summed share at the ends of some edges, of which segments of the kind may have unlike numbers.

        Exact where all have as many; else between what the fewest and the most allow.
        """
        n, low, high = len(tally), min(tally), max(tally)
        excess, lack = sum(tally) - n * low, n * high - sum(tally)
        self.rows.add([(1.0, total), (-float(n * low), share)], 0.0, float(excess))
        self.rows.add([(1.0, total), (-float(n * high), share)], -float(lack), 0.0)

    def exchange(self) -> None:
        """Blocks that share a segment send its gradients on and take others' in."""
        factor = min(min(1.0, 0.5 * (1 + size)) for size in self.sizes)
        sent = factor * self.kinds.counts * [s.param_bytes for s in self.kinds.first]
        unit = self.batch * max((e.bytes_per_row for e in self.edges), default=1.0)
        self.gradient_unit = max(unit, float(sent.max()), 1.0)
        for b, block in enumerate(self.blocks):
            outside = [g for g in range(len(self.groups)) if g not in block]
            terms = [(-sent[k] / self.gradient_unit, self.common[k, b]) for k in range(len(sent))]
            for way in (
                self.gradients[np.ix_(sorted(block), outside)],
                self.gradients.T[np.ix_(sorted(block), outside)],
            ):
                self.rows.add([*((1.0, x) for x in way.ravel()), *terms], low=0.0)

    def borders(self) -> None:
        """Where a block has a segment to itself, rows that are elsewhere at another cross its border."""
        if not self.narrowest:
            return
        for b, block in enumerate(self.blocks):
            outside = [g for g in range(len(self.groups)) if g not in block]
            crossing = [
                (edge.bytes_per_row / self.narrowest, x)
                for e, edge in enumerate(self.edges)
                for g in block
                for h in outside
                for x in (self.moved[e, g, h], self.moved[e, h, g])
            ]
            for k in range(len(self.kinds.first)):
                self.rows.add([*crossing, *self.inside(k, block), (-1.0, self.has_own[b])], low=0.0)
            for c, other in enumerate(self.blocks):
                if not block & other:
                    self.rows.add([*crossing, (-1.0, self.has_own[b]), (-1.0, self.has_own[c])], low=-1.0)

    def links(self) -> None:
        """No link carries more in one direction than it can."""
        for g, h in itertools.permutations(range(len(self.groups)), 2):
            can = capacity(self.cluster, self.groups[g].name, self.groups[h].name) * self.unit_s
            terms = [(self.gradient_unit / can, self.gradients[g, h])]
            for e, edge in enumerate(self.edges):
                # A value has its producer's dtype, and so has its cotangent on the way back.
                size = edge.bytes_per_row * self.batch / can
                terms += [
                    (size * self.sizes[g], self.moved[e, g, h]),
                    (size * self.sizes[h], self.moved[e, h, g]),
                ]
            self.rows.add([*terms, (-1.0, self.step)], high=0.0)

    def memory(self, resident: bool) -> None:
        """What fits on no way stays away; resident state fills the memory for the whole step."""
        for k, segment in enumerate(self.kinds.first):
            for g, group in enumerate(self.groups):
                if not fits(segment, group):
                    self.rows.add([(1.0, self.share[k, g])], high=0.0)
        if not resident:
            return
        where = {next(iter(block)): b for b, block in enumerate(self.blocks) if len(block) == 1}
        for g, group in enumerate(self.groups):
            if group.memory_bytes is None:
                continue
            have = group.memory_bytes * group.num_devices
            terms: list[Term] = []
            for k, segment in enumerate(self.kinds.first):
                part = self.kinds.counts[k] * resident_bytes(segment, group) / have
                # Whoever shares a segment holds all of it.
                held = (self.own[k, where[g]], self.common[k, where[g]]) if where else (self.share[k, g],)
                terms += [(part, x) for x in held]
            self.rows.add(terms, high=1.0)


def bounds(program: ProgramLike, cluster: Cluster, kinds: Kinds, unit_s: float) -> Mapping[str, Number]:
    """The bounds with links: `any` plan's, and that of plans whose state is all `resident`."""
    return {
        name: Relaxation(program, cluster, kinds, unit_s=unit_s, resident=resident).solve()
        for name, resident in (("any", False), ("resident", True))
    }


@contextlib.contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """HiGHS writes some messages past Python and its own option: a plan as JSON goes the same way."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
