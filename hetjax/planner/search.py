"""The search: which groups take part, in what order, cut into which slots, with how many microbatches.

A formula ranks all shapes at once (`coarse.py`); the best are cut exactly (`stages.py`) and simulated, then
improved by small changes, the simulator always being the judge. The plain answers (each group alone, one
stage over all) are always among them, so that "don't pipeline" can win.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts, Costs, ProgramLike, RememberedCosts
from hetjax.devices import DTYPE_BYTES, Number
from hetjax.errors import UserError
from hetjax.memory import share_state
from hetjax.plan import SCHEDULES, Member, Plan, Stage
from hetjax.planner import exhaustive, moves, refusal, replicas, shared_cuts
from hetjax.planner.coarse import Shape, shapes
from hetjax.planner.explain import Candidate, predictions
from hetjax.planner.layout import Cut, Layout, Slot, Team
from hetjax.planner.limit import compute_limit
from hetjax.planner.orders import microbatch_counts, orders, subsets
from hetjax.planner.pricer import Pricer
from hetjax.planner.stages import Stages
from hetjax.schedule import TooLongError, plan_schedule
from hetjax.simulate import simulate
from hetjax.workload import timed

NUM_SHAPES = 5
"""Shapes of each set of groups and number of repeats that are cut."""

NUM_ALONE = 8
"""The same of a group alone."""

NUM_SURE = 2
"""Layouts that are cut of every set of groups."""

NUM_CUT = 100
"""Layouts of several groups that are cut for each number of repeats; fewer of few
devices."""

WORTH = 1.25
"""Layouts whose formula gives more than this times the shortest estimate are not looked at."""

NUM_PART = 3
"""The same of one of several pipelines."""

CLOSE = 1.4
"""Layouts whose estimate is more than this times the shortest simulated time are not simulated."""

WORTH_SHOWING = 1.03
"""Plans whose tasks alone take longer than this times the best are not simulated to the end."""

ALIKE = 1.000001
"""Of plans whose predicted times are within this factor, the one with the fewest stages is taken."""

MAX_TASKS = 200_000
"""Tasks simulated in one search, in all: a bound on its time that does not depend on the machine."""

LEAST_TASKS = 200
"""What a plan counts besides its own tasks."""

NUM_STARTS = 4
"""Plans of a small problem that are improved at the end."""

REMAT = ("none", "dots", "full")
"""Remat policies that the planner chooses from, the cheapest in time first."""

FEATURES = ("runtime", "all")
"""`runtime`: plans that `Trainer` runs; `all`: whatever can be planned and simulated."""


def make_plan(
    program: ProgramLike,
    cluster: Cluster,
    *,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    remat: str | None = None,
    allow_row_split: bool = True,
    costs: Costs | None = None,
    features: str = "runtime",
    pins: Mapping[int, Sequence[str]] | None = None,
    exclude: Sequence[str] = (),
    budget_s: float | None = None,
    seed: int = 0,
) -> Plan:
    """Find the fastest plan that fits.

    Args:
        program: What to place.
        cluster: Where; groups may stay idle.
        num_microbatches: Of one step; the planner chooses when None.
        schedule: One of `plan.SCHEDULES`; the planner chooses when None.
        remat: One policy for every segment; when None `none`, and `dots` or `full` for as many segments as
            memory asks for.
        allow_row_split: Also offer stages that several groups share, each with its part of the rows, unless a
            schedule (of stages) is asked for.
        costs: Seconds of segments; analytic when None.
        features: One of `FEATURES`.
        pins: Groups that may run a segment, by the segment's index.
        exclude: Names of groups that stay idle.
        budget_s: Stop improving after so many seconds and return the best so far; when None the search ends
            by itself, and the same arguments give the same plan.
        seed: Of the order in which small changes are tried.

    Returns:
        A checked plan; `predicted` tells its step time, the limit, and what was rejected.

    Raises:
        UserError: A choice that is not allowed, or nothing fits: says by how much, where, and what would make
            it fit.
    """
    if features not in FEATURES:
        raise UserError(f"features is {features!r}. Allowed: {', '.join(FEATURES)}.")
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    search = Search(
        program,
        cluster,
        costs or AnalyticCosts(),
        num_microbatches,
        schedule,
        remat,
        features=features,
        pins=pins,
        exclude=exclude,
        shared=allow_row_split and schedule is None and program.rows_mode == "split",
        deadline=deadline,
        seed=seed,
    )
    candidates = search.run()
    if not candidates:
        refusal.refuse(search)
    shortest = min(c.simulation.step_time_s for c in candidates)
    alike = [c for c in candidates if c.simulation.step_time_s <= shortest * ALIKE]
    best = min(alike, key=lambda c: (len(c.plan.stages), c.rank))
    limit = compute_limit(program, cluster, search.costs)
    predicted = predictions(best, candidates, search.unfit, limit, program)
    plan = dataclasses.replace(best.plan, predicted=predicted)
    plan.check(program)
    return plan


def predict(program: ProgramLike, plan: Plan, costs: Costs | None = None) -> Plan:
    """The same plan with figures of its own: those in a plan that was edited are another plan's.

    Args:
        program: What it places.
        plan: A checked plan.
        costs: Seconds of segments; analytic when None.
    """
    costs = costs or AnalyticCosts()
    given = Candidate("as given", plan, simulate(plan, program, costs))
    limit = compute_limit(program, plan.cluster, costs)
    return dataclasses.replace(plan, predicted=predictions(given, [given], {}, limit, program))


class Search:
    """One search: its choices, and what it has found."""

    def __init__(
        self,
        program: ProgramLike,
        cluster: Cluster,
        costs: Costs,
        num_microbatches: int | None,
        schedule: str | None,
        remat: str | None,
        *,
        features: str = "runtime",
        pins: Mapping[int, Sequence[str]] | None = None,
        exclude: Sequence[str] = (),
        shared: bool = True,
        deadline: float = math.inf,
        seed: int = 0,
        whole_sets: bool = False,
    ) -> None:
        self.program, self.cluster = program, cluster
        self.costs = costs if isinstance(costs, RememberedCosts) else RememberedCosts(costs)
        if schedule is not None and schedule not in SCHEDULES:
            raise UserError(f"schedule is {schedule!r}. Allowed: {', '.join(SCHEDULES)}.")
        if schedule == "ministage" and features == "runtime":
            raise UserError(
                "schedule is 'ministage', which needs features = 'all': it is planned and simulated, and the "
                "runtime does not play it yet."
            )
        for name in exclude:
            cluster.group(name)
        for index, allowed in (pins or {}).items():
            if not 0 <= index < program.num_segments:
                raise UserError(
                    f"A pin names segment {index}, and the program has segments 0 to "
                    f"{program.num_segments - 1}."
                )
            for name in allowed:
                cluster.group(name)
        self.names = [g.name for g in cluster.groups if g.name not in exclude]
        if not self.names:
            raise UserError(f"exclude names all groups of cluster {cluster.name!r}. Leave one.")
        self.schedule, self.features, self.shared, self.deadline = schedule, features, shared, deadline
        self.random = random.Random(seed)
        self.whole_sets = whole_sets
        self.backwards = ("whole", "split") if features == "all" else ("whole",)
        self.counts = microbatch_counts(program, num_microbatches)
        policies = REMAT if remat is None else (remat,)
        self.pricer = Pricer(program, cluster, self.costs, policies, pins, offload=features == "all")
        self.stages = Stages(self.pricer, sharded=features == "all")
        self.found: dict[tuple[Layout, tuple[int, ...]], Candidate] = {}
        self.tried: set[tuple[Layout, tuple[int, ...]]] = set()
        self.tasks_left = MAX_TASKS
        self.worth = WORTH_SHOWING
        self.unfit: dict[str, str] = {}
        # The least by which a simulated plan was too large: bytes over, group, device, bytes needed.
        self.nearest: tuple[Number, str, int, Number] | None = None

    @property
    def out_of_time(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() > self.deadline

    def run(self) -> list[Candidate]:
        """Rank, cut, simulate, improve."""
        ranked = self.ranked()
        alone: dict[str, Layout] = {}
        for _, _, layout, _ in ranked:
            if len(layout.groups) == 1:
                alone.setdefault(layout.groups[0], layout)
        for name in self.names:
            if name not in alone:
                over, _, _, frugal = refusal.closest(self, [name])
                if over > 0 or self.simulate_first(frugal) is None:
                    self.unfit[f"{name} alone"] = refusal.shortfall(self, name)
        shortest = math.inf
        for _, _, layout, cut in ranked:
            if layout in alone.values():
                candidate = self.simulate(layout, cut.bounds)
                if candidate is not None:
                    shortest = min(shortest, candidate.simulation.step_time_s)
        self.tasks_left = MAX_TASKS  # whatever those took
        for estimate, _, layout, cut in ranked:
            # The formula may be wrong: everything near the best is simulated, and of small plans more.
            if estimate > CLOSE * shortest or self.tasks_left < MAX_TASKS / 2:
                continue
            if cut.lower_s > WORTH_SHOWING * shortest:
                continue
            candidate = self.simulate(layout, cut.bounds)
            if candidate is not None:
                shortest = min(shortest, candidate.simulation.step_time_s)
        if not self.found:
            for layout in refusal.rescue(self):
                self.simulate_first(layout)
        self.improve()
        if exhaustive.improve(self):
            self.improve(NUM_STARTS)
        result = list(self.found.values())
        if self.shared and result:
            best = min(result, key=lambda c: c.rank)
            step_s = best.simulation.step_time_s
            for base in shared_cuts.bases(result):
                for label, plan in shared_cuts.shared(self, base):
                    result += self.judged(label, plan, min(c.simulation.step_time_s for c in result))
            for label, plan in replicas.replicated(self, step_s / 2, best.plan.num_microbatches):
                result += self.judged(label, plan, WORTH_SHOWING * step_s)
        return result

    def judged(self, label: str, plan: Plan, worse_than_s: Number) -> list[Candidate]:
        """A plan as a candidate, or nothing; see `evaluate`."""
        candidate = self.evaluate(label, plan, worse_than_s)
        return [] if candidate is None else [candidate]

    def within(self, program: ProgramLike, names: Sequence[str], num_microbatches: int) -> Search:
        """A search of one pipeline over some of the groups, for part of the rows."""
        return Search(
            program,
            self.cluster,
            self.costs,
            num_microbatches,
            "1f1b",
            None if len(self.pricer.policies) > 1 else self.pricer.policies[0],
            features=self.features,
            exclude=[g.name for g in self.cluster.groups if g.name not in names],
            shared=False,
            deadline=self.deadline,
            whole_sets=True,
        )

    def simulate_first(self, layout: Layout) -> Candidate | None:
        """Cut and simulate a layout."""
        cut = self.stages.cut(layout)
        return None if cut is None else self.simulate(layout, cut.bounds)

    # ---- layouts ----

    def ranked(self) -> list[tuple[float, int, Layout, Cut]]:
        """Layouts that fit, with their exact cuts, by estimate."""
        result: list[tuple[float, int, Layout, Cut]] = []
        num_devices = sum(self.cluster.group(name).num_devices for name in self.names)
        most = NUM_PART if self.whole_sets else min(NUM_CUT, 20 + 2 * num_devices)
        shortest, left = math.inf, dict.fromkeys(range(9), most)
        seen: collections.Counter[frozenset[str]] = collections.Counter()
        for number, (score, layout) in enumerate(self.layouts()):
            # Of every set of groups some are looked at, whatever the formula says.
            names = frozenset(layout.groups)
            lone = len(names) == 1 or seen[names] < NUM_SURE
            if not lone and (score > WORTH * shortest or not left[layout.repeats]):
                continue
            cut = self.stages.cut(layout)
            left[layout.repeats] -= not lone
            if cut is not None:
                seen[names] += 1
                shortest = min(shortest, cut.estimate_s)
                result.append((cut.estimate_s, number, layout, cut))
        return sorted(result, key=lambda item: item[:2])

    def layouts(self) -> list[tuple[float, Layout]]:
        """What is worth a cut, by the formula's time: slot sizes x orders x microbatch counts x schedules."""
        found: dict[Layout, float] = {}
        sets = [tuple(self.names)] if self.whole_sets else subsets(self.cluster, self.names)
        for names in sets:
            lone = len(names) == 1
            keep = 2 if self.whole_sets else NUM_ALONE if lone else NUM_SHAPES
            best = shapes(self.pricer, names, self.counts, self.repeats(), keep)
            for rank, shape in enumerate(best):
                for order in orders(self.cluster, names, thorough=rank % NUM_SHAPES < 2):
                    link_s = self.links_s(shape, order)
                    for layout in self.layouts_of(shape, order):
                        found.setdefault(layout, max(shape.score_s, link_s))
        if self.shared:
            for layout, score in self.shared_layouts():
                found.setdefault(layout, score)
        return [(score, layout) for layout, score in sorted(found.items(), key=lambda item: item[1])]

    def links_s(self, shape: Shape, order: Sequence[str]) -> float:
        """Seconds for which the busiest link between two groups of an order is busy, at the thinnest cuts."""
        crossing = self.pricer.crossing[1:-1].min(initial=math.inf) * self.program.global_batch
        if len(order) == 1 or not math.isfinite(crossing):
            return 0.0
        longest = 0.0
        for a, b in itertools.pairwise(order):
            size = min(DTYPE_BYTES[self.cluster.group(name).dtype] for name in (a, b)) / 4
            longest = max(longest, self.cluster.link(a, b).occupied_s(float(crossing * size)))
        return longest * shape.repeats

    def repeats(self) -> tuple[int, ...]:
        """How many stages a slot may run."""
        if self.schedule in ("interleaved", "ministage"):
            return (1, 2, 3, 4)
        return (1, 2, 3, 4) if self.schedule is None else (1,)

    def layouts_of(self, shape: Shape, order: Sequence[str]) -> Iterator[Layout]:
        """The layouts of a shape with its groups in an order."""
        slots = dict(zip(shape.groups, shape.num_slots, strict=True))
        teams = tuple((slot,) for name in order for slot in self.slots(name, slots[name]))
        M, v = shape.num_microbatches, shape.repeats
        if self.schedule is not None:
            kinds = [self.schedule]
        else:
            kinds = ["1f1b" if v == 1 else "interleaved"]
            if self.features == "all" and len(teams) > 1:
                kinds.append("ministage")
        for kind in kinds:
            for ahead, backward in self.variants(kind, len(teams), M):
                yield Layout(teams * v, M, kind, ahead, backward)

    def variants(self, kind: str, num_lanes: int, num_microbatches: int) -> list[tuple[int, str]]:
        """How far members may run ahead, and whether backwards are split."""
        if kind not in ("1f1b", "interleaved") or num_lanes == 1:
            return [(0, "whole")]
        steps = {0, min(num_lanes // 2 + 2, num_microbatches)}
        return [(a, b) for b in self.backwards for a in sorted(steps)]

    def slots(self, name: str, count: int) -> list[Slot]:
        """One group as equal slots; of one device where rows stay whole."""
        n = self.cluster.group(name).num_devices
        each = n // count
        if self.program.rows_mode == "whole":
            return [Slot(name, (i * each,)) for i in range(count)]
        return [Slot(name, tuple(range(i, i + each))) for i in range(0, n, each)]

    def shared_layouts(self) -> Iterator[tuple[Layout, float]]:
        """One stage over several groups, each with rows in proportion to its speed."""
        for names in subsets(self.cluster, self.names):
            if len(names) < 2:
                continue
            team: Team = tuple(slot for name in names for slot in self.slots(name, 1))
            for M in self.counts:
                rows = self.program.global_batch // M
                shares = self.stages.shares(team, rows)
                if shares is not None:
                    seconds = max(
                        self.pricer.model_s(slot.group, len(slot.devices), own)
                        for slot, own in zip(team, shares, strict=True)
                    )
                    exchange = self.stages.exchange_s(team, float(self.pricer.params[-1]))
                    yield Layout((team,), M, "1f1b"), M * seconds + exchange

    # ---- candidates ----

    def simulate(self, layout: Layout, bounds: tuple[int, ...]) -> Candidate | None:
        """Simulate a layout with given boundaries, once."""
        key = layout, bounds
        if key in self.tried:
            return self.found.get(key)
        num_tasks = LEAST_TASKS + 2 * len(layout.teams) * layout.num_microbatches
        if self.found and (num_tasks > self.tasks_left or self.out_of_time):
            return None
        bound = math.inf
        if self.found and len(layout.groups) > 1:
            bound = self.worth * self.shortest_s
        if self.try_cut(layout, bounds, bound) is not None:
            self.tasks_left -= num_tasks
        return self.found.get(key)

    def try_cut(self, layout: Layout, bounds: tuple[int, ...], shorter_than_s: float) -> int | None:
        """Simulate a layout with given boundaries as far as its step may be shorter than a bound.

        Returns:
            The tasks that it took; None where memory is too small.
        """
        key = layout, bounds
        if key in self.tried:
            return 0
        self.tried.add(key)
        cut = self.stages.cut_at(layout, bounds)
        if cut is None:
            return None
        if cut.lower_s >= shorter_than_s:
            return LEAST_TASKS // 20
        candidate = self.evaluate(layout.label, self.plan_of(layout, cut), shorter_than_s - cut.update_s)
        if candidate is not None:
            self.found[key] = candidate
        return LEAST_TASKS + 2 * len(layout.teams) * layout.num_microbatches

    @property
    def shortest_s(self) -> float:
        """The shortest step found."""
        return min((float(c.simulation.step_time_s) for c in self.found.values()), default=math.inf)

    def evaluate(self, label: str, plan: Plan, worse_than_s: Number = math.inf) -> Candidate | None:
        """Simulate a plan; None where it does not fit, or where its tasks alone take longer than a bound."""
        overshoots = self.overshoots(plan.device_memory(self.program).items())
        if not overshoots:
            try:
                schedule = plan_schedule(plan, self.program.edges(), worse_than_s)
            except TooLongError:
                return None
            result = simulate(plan, self.program, self.costs, schedule)
            overshoots = self.overshoots(result.peak_bytes.items())
            if not overshoots:
                return Candidate(label, plan, result)
        worst = max(overshoots)
        self.nearest = min(self.nearest or worst, worst)
        return None

    def overshoots(
        self, memory: Iterable[tuple[tuple[str, int], Number]]
    ) -> list[tuple[Number, str, int, Number]]:
        """Bytes over, group, device and bytes needed of each device that is too small."""
        result = []
        for (name, device), need in memory:
            have = self.cluster.group(name).memory_bytes
            if have is not None and need > have:
                result.append((need - have, name, device, need))
        return result

    def plan_of(self, layout: Layout, cut: Cut) -> Plan:
        """The plan of a cut layout."""
        M = layout.num_microbatches
        stages = []
        for runs, start, stop in zip(cut.runs, cut.bounds, cut.bounds[1:], strict=False):
            members, row = [], 0
            for run in runs:
                members.append(
                    Member(
                        group=run.slot.group,
                        devices=run.slot.devices[: run.num_devices],
                        axes=dict(run.way.axes),
                        rows=(row, row + run.rows),
                        remat=run.remat,
                        residency=run.way.residency,
                        splits=run.splits,
                    )
                )
                row += run.rows
            if any(m.residency == "sharded" for m in members):
                members = [dataclasses.replace(m, residency="sharded") for m in members]
            stages.append(Stage((start, stop), tuple(members)))
        plan = Plan(
            cluster=self.cluster,
            fingerprint=self.program.fingerprint,
            num_segments=self.program.num_segments,
            global_batch=self.program.global_batch,
            num_microbatches=M,
            schedule=layout.schedule,
            stages=tuple(stages),
            ahead=layout.ahead,
            backward=layout.backward,
        )
        return timed(share_state(plan, self.program), self.program, self.costs)

    # ---- improvement ----

    def improve(self, starts: int = 1) -> None:
        """Small changes to the best, as long as they help and tasks are left.

        Args:
            starts: How many of the best, each of other teams, are improved.
        """
        ranked = sorted(self.found.items(), key=lambda item: item[1].rank)
        first = {key[0].teams: key for key, _ in reversed(ranked)}
        for key in [key for key, _ in ranked if first[key[0].teams] == key][:starts]:
            self.descend(key)

    def descend(self, key: tuple[Layout, tuple[int, ...]]) -> None:
        """From one candidate on to whatever near it is faster."""
        while not self.out_of_time:
            here = self.found[key]
            self.worth = here.simulation.step_time_s / self.shortest_s
            for layout, bounds in moves.neighbours(self, *key, here):
                better = self.simulate(layout, bounds)
                if better is not None and better.rank < here.rank:
                    key = layout, bounds
                    break
            else:
                return
