"""The search: which groups take part, in what order, cut into which slots, with how many microbatches.

Layouts are enumerated, cut exactly (`stages.py`) and ranked by formula; the best are simulated, then improved
by small changes. The plain answers (each group alone) are always among them, so that "don't pipeline" can
win.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from hetjax.cluster import GIB, Cluster
from hetjax.cost import AnalyticCosts, Costs, ProgramLike
from hetjax.devices import Number
from hetjax.errors import UserError
from hetjax.plan import SCHEDULES, Member, Plan, Stage
from hetjax.planner.limit import Limit, compute_limit
from hetjax.planner.rows import split_plans
from hetjax.planner.stages import Cut, Layout, Pricer, Slot, used_devices
from hetjax.simulate import Simulation, simulate
from hetjax.workload import timed

NUM_SIMULATED = 16
"""Ranked layouts that are simulated before the small changes begin."""

WORTH = 1.2
"""Layouts that cannot come within this factor of the shortest estimate are not cut."""

ALIKE = 1.005
"""Of plans whose predicted times are within this factor, the one with the fewest stages is taken."""

MAX_TASKS = 60_000
"""Tasks simulated in one search, in all: a bound on its time that does not depend on the machine."""

REMAT = ("none", "dots", "full")
"""Remat policies that the planner chooses from, the cheapest in time first."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that fits, with its simulation."""

    label: str
    plan: Plan
    simulation: Simulation

    @property
    def rank(self) -> tuple[Number, int, str]:
        """Order of preference: step time, then fewer stages, then the name."""
        time = self.simulation.step_time_s
        return float(f"{time:.9e}"), len(self.plan.stages), self.label


def make_plan(
    program: ProgramLike,
    cluster: Cluster,
    *,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    remat: str | None = None,
    allow_row_split: bool = True,
    costs: Costs | None = None,
) -> Plan:
    """Find the fastest plan that fits.

    Args:
        program: What to place.
        cluster: Where; groups may stay idle.
        num_microbatches: Of one step; the planner chooses when None.
        schedule: `gpipe`, `1f1b` or `interleaved`; the planner chooses when None.
        remat: One policy for every segment; when None `none`, and `dots` or `full` where memory needs it.
        allow_row_split: Also offer one stage that several groups share, each with its part of the rows,
            unless a schedule (of stages) is asked for.
        costs: Seconds of segments; analytic when None.

    Returns:
        A checked plan; `predicted` tells its step time, the limit, and what was rejected. The same arguments
        give the same plan.

    Raises:
        UserError: A choice that is not allowed, or nothing fits: says by how much, where, and what would make
            it fit.
    """
    search = _Search(program, cluster, costs or AnalyticCosts(), num_microbatches, schedule, remat)
    candidates = search.run(allow_row_split)
    if not candidates:
        search.refuse()
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


class _Search:
    """One search: its choices, and what it has found."""

    def __init__(
        self,
        program: ProgramLike,
        cluster: Cluster,
        costs: Costs,
        num_microbatches: int | None,
        schedule: str | None,
        remat: str | None,
    ) -> None:
        self.program, self.cluster, self.costs = program, cluster, costs
        if schedule is not None and schedule not in SCHEDULES:
            raise UserError(f"schedule is {schedule!r}. Allowed: {', '.join(SCHEDULES)}.")
        self.schedule = schedule
        self.counts = _microbatch_counts(program, num_microbatches)
        self.pricer = Pricer(program, cluster, costs, REMAT if remat is None else (remat,))
        self.found: dict[tuple[Layout, tuple[int, ...]], Candidate] = {}
        self.tried: set[tuple[Layout, tuple[int, ...]]] = set()
        self.tasks_left = MAX_TASKS
        self.unfit: dict[str, str] = {}
        self.nearest: tuple[Number, str, int, Number] | None = (
            None  # the least that a simulated plan was over
        )

    def run(self, allow_row_split: bool) -> list[Candidate]:
        """Enumerate, rank, simulate, improve."""
        ranked: list[tuple[Number, int, Layout, Cut]] = []
        shortest = math.inf
        floors = [(self.pricer.floor_s(x), i, x) for i, x in enumerate(self.layouts())]
        for floor, number, layout in sorted(floors, key=lambda item: item[:2]):
            alone = len({slot.group for slot in layout.slots}) == 1
            if not alone and floor > WORTH * shortest:
                continue
            cut = self.pricer.cut(layout)
            if cut is not None:
                shortest = min(shortest, cut.estimate_s)
                ranked.append((cut.estimate_s, number, layout, cut))
        ranked.sort(key=lambda item: item[:2])
        plain: dict[str, tuple[Number, int, Layout, Cut]] = {}
        for item in ranked:
            names = {slot.group for slot in item[2].slots}
            if len(names) == 1:
                plain.setdefault(min(names), item)
        for group in self.cluster.groups:
            if group.name not in plain:
                self.unfit[f"{group.name} alone"] = self.shortfall(group.name)
        for _, _, layout, cut in [*ranked[:NUM_SIMULATED], *plain.values()]:
            self.simulate(layout, cut.bounds, cut)
        self.improve()
        result = list(self.found.values())
        if allow_row_split and self.schedule is None and self.program.rows_mode == "split":
            for label, plan in split_plans(self.program, self.cluster, self.costs, self.pricer, self.counts):
                candidate = self.evaluate(label, plan)
                if candidate is not None:
                    result.append(candidate)
        return result

    # ---- layouts ----

    def layouts(self) -> Iterator[Layout]:
        """Every layout that is priced: orders of groups x slot sizes x microbatch counts x schedules."""
        for names in _orders(self.cluster):
            for slots in self.slot_rows(names):
                if len(slots) > self.program.num_segments:
                    continue
                for M in self.counts:
                    for schedule, repeats in self.schedules(len(slots)):
                        yield Layout(slots * repeats, M, schedule)

    def schedules(self, num_slots: int) -> list[tuple[str, int]]:
        """Schedules to price, with how often the row of slots is repeated."""
        chunked = [("interleaved", v) for v in (2, 3, 4) if num_slots * v <= self.program.num_segments]
        if self.schedule == "interleaved":
            return chunked or [("interleaved", 1)] if num_slots > 1 else [("interleaved", 1)]
        if self.schedule is not None:
            return [(self.schedule, 1)]
        return [("1f1b", 1), *chunked] if num_slots > 1 else [("1f1b", 1)]

    def slot_rows(self, names: Sequence[str]) -> list[tuple[Slot, ...]]:
        """Groups in an order, each cut into slots of at most so many devices; whole groups first."""
        most = max(self.cluster.group(name).num_devices for name in names)
        steps = sorted({most, *(2**i for i in range(6) if 2**i < most)}, reverse=True)
        if self.program.rows_mode == "whole":
            # Rows stay together, so a slot is one device: one a group where that fits, else more.
            rows = [tuple(x for name in names for x in self.slots(name, 1)[:n]) for n in reversed(steps)]
        else:
            rows = [tuple(slot for name in names for slot in self.slots(name, size)) for size in steps]
        return list(dict.fromkeys(rows))

    def slots(self, name: str, size: int) -> list[Slot]:
        """One group as equal slots of at most `size` devices."""
        n = self.cluster.group(name).num_devices
        each = max(d for d in range(1, min(size, n) + 1) if n % d == 0)
        return [Slot(name, tuple(range(i, i + each))) for i in range(0, n, each)]

    # ---- candidates ----

    def simulate(self, layout: Layout, bounds: tuple[int, ...], cut: Cut | None = None) -> Candidate | None:
        """Simulate a layout with given boundaries, once."""
        key = layout, bounds
        if key in self.tried:
            return self.found.get(key)
        num_tasks = 2 * len(layout.slots) * layout.num_microbatches
        if self.found and num_tasks > self.tasks_left:
            return None
        self.tried.add(key)
        cut = cut or self.pricer.cut_at(layout, bounds)
        if cut is None:
            return None
        self.tasks_left -= num_tasks
        candidate = self.evaluate(_label(layout), self.plan_of(layout, cut))
        if candidate is not None:
            self.found[key] = candidate
        return candidate

    def evaluate(self, label: str, plan: Plan) -> Candidate | None:
        """Simulate a plan; None where it does not fit."""
        result = simulate(plan, self.program, self.costs)
        overshoots = []
        for memory in (plan.device_memory(self.program), result.peak_bytes):
            for (name, device), need in memory.items():
                have = self.cluster.group(name).memory_bytes
                if have is not None and need > have:
                    overshoots.append((need - have, name, device, need))
        if overshoots:
            worst = max(overshoots)
            self.nearest = min(self.nearest or worst, worst)
            return None
        return Candidate(label, plan, result)

    def plan_of(self, layout: Layout, cut: Cut) -> Plan:
        """The plan of a cut layout."""
        M = layout.num_microbatches
        rows = self.program.global_batch // M
        stages = []
        for slot, way, start, stop in zip(layout.slots, cut.ways, cut.bounds, cut.bounds[1:], strict=False):
            devices = slot.devices[: used_devices(slot, rows, self.program.rows_mode)]
            member = Member(slot.group, devices, dict(way.axes), (0, rows), (way.remat,) * (stop - start))
            stages.append(Stage((start, stop), (member,)))
        return timed(
            Plan(
                cluster=self.cluster,
                fingerprint=self.program.fingerprint,
                num_segments=self.program.num_segments,
                global_batch=self.program.global_batch,
                num_microbatches=M,
                schedule=layout.schedule,
                stages=tuple(stages),
            ),
            self.program,
            self.costs,
        )

    # ---- improvement ----

    def improve(self) -> None:
        """Small changes to the best, as long as they help and tasks are left."""
        while self.found:
            key, best = min(self.found.items(), key=lambda item: item[1].rank)
            for layout, bounds in self.neighbours(*key):
                better = self.simulate(layout, bounds)
                if better is not None and better.rank < best.rank:
                    break
            else:
                return

    def neighbours(self, layout: Layout, bounds: tuple[int, ...]) -> Iterator[tuple[Layout, tuple[int, ...]]]:
        """Layouts and boundaries one small change away."""
        for j in range(1, len(bounds) - 1):
            for step in (1, -1):
                moved = (*bounds[:j], bounds[j] + step, *bounds[j + 1 :])
                if all(a < b for a, b in itertools.pairwise(moved)):
                    yield layout, moved
        for other in self.similar(layout):
            cut = self.pricer.cut(other)
            if cut is not None:
                yield other, cut.bounds

    def similar(self, layout: Layout) -> Iterator[Layout]:
        """Other microbatch counts, schedules, orders and slot sizes."""
        at = self.counts.index(layout.num_microbatches)
        for M in self.counts[max(at - 1, 0) : at + 2]:
            yield dataclasses.replace(layout, num_microbatches=M)
        row = tuple(dict.fromkeys(layout.slots))
        if self.schedule is None and len(row) > 1:
            yield Layout(row, layout.num_microbatches, "gpipe")
            yield Layout(row, layout.num_microbatches, "1f1b")
        repeats = len(layout.slots) // len(row)
        names = list(dict.fromkeys(slot.group for slot in row))
        parts = {name: [slot for slot in row if slot.group == name] for name in names}
        for i in range(len(names) - 1):
            swapped = [*names[:i], names[i + 1], names[i], *names[i + 2 :]]
            yield dataclasses.replace(layout, slots=tuple(s for n in swapped for s in parts[n]) * repeats)
        if self.program.rows_mode == "whole":
            return
        for name in names:
            n, size = self.cluster.group(name).num_devices, len(parts[name][0].devices)
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            at = divisors.index(size)
            for other in divisors[max(at - 1, 0) : at + 2]:
                slots = tuple(s for x in names for s in (self.slots(x, other) if x == name else parts[x]))
                if other != size and len(slots) * repeats <= self.program.num_segments:
                    yield dataclasses.replace(layout, slots=slots * repeats)

    # ---- when nothing fits ----

    def closest(self, names: Sequence[str]) -> tuple[Number, int, dict[str, Number], Layout]:
        """The layout of some groups that misses by the least, as `Pricer.least_overflow` and the layout."""
        schedule = "gpipe" if self.schedule == "gpipe" else "1f1b"
        options = []
        for slots in self.slot_rows(names):
            if len(slots) <= self.program.num_segments or len(slots) == 1:
                for M in self.counts:
                    layout = Layout(slots, M, schedule)
                    options.append((*self.pricer.least_overflow(layout), layout))
        return min(options, key=lambda option: option[0])

    def shortfall(self, name: str) -> str:
        """In words, by how much a group alone is too small."""
        over, stage, needs, layout = self.closest([name])
        need = needs.get(layout.slots[stage].group, 0.0)
        return f"needs {_gib(need)} GiB on each device, {_gib(over)} GiB too much"

    def refuse(self) -> NoReturn:
        """Say by how much nothing fits, where, and what would make it fit.

        Raises:
            UserError: Always.
        """
        orders = [x for x in _orders(self.cluster) if len(x) <= self.program.num_segments]
        over, stage, needs, layout = min((self.closest(x) for x in orders), key=lambda option: option[0])
        if over <= 0 and self.nearest is not None:  # fits by the bounds and not in simulated time
            over, name, device, need = self.nearest
            needs, where = {name: need}, f"device {device} of group {name!r}"
        else:
            name = layout.slots[stage].group
            need = needs.get(name, 0.0)
            where = f"each device of stage {stage}, in group {name!r}"
        have = self.cluster.group(name).memory_bytes or 0.0
        largest = max(self.pricer.segments, key=lambda s: s.param_bytes)
        used = " -> ".join(dict.fromkeys(slot.group for slot in layout.slots))
        closest = (
            f"{used}, {_count(len(layout.slots), 'stage')}, {_count(layout.num_microbatches, 'microbatch')}, "
            f"parameters sharded, remat {self.pricer.policies[-1]}"
        )
        enough = ", ".join(f"{group} = {_gib(size)}" for group, size in needs.items())
        raise UserError(
            f"No plan fits on cluster {self.cluster.name!r}. The closest one ({closest}) needs "
            f"{_gib(need)} GiB on {where}, where {_gib(have)} GiB can be used: {_gib(over)} GiB too much. It "
            f"would fit with this memory_gib: {enough}; else give it more devices, fewer rows, or cuts in "
            f"the largest segment ({largest.name!r}, {_gib(largest.param_bytes)} GiB of float32 parameters)."
        )


def _gib(num_bytes: Number) -> str:
    """GiB with two decimals, rounded up, so that the figure is enough."""
    return f"{math.ceil(num_bytes / GIB * 100) / 100:.2f}"


def _microbatch_counts(program: ProgramLike, wanted: int | None) -> list[int]:
    """Allowed numbers of microbatches; no more than about a dozen."""
    batch = program.global_batch
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    if wanted is not None:
        if wanted not in divisors:
            raise UserError(
                f"num_microbatches is {wanted} and has to divide the global batch, which is {batch} rows. "
                f"Allowed: {', '.join(map(str, divisors[:12]))}{', ...' if len(divisors) > 12 else ''}."
            )
        divisors = [wanted]
    if program.rows_mode == "whole":
        if wanted not in (None, 1):
            raise UserError(
                f"num_microbatches is {wanted}, and the program mixes the rows of a batch (rows='whole'), "
                "so it has to be 1."
            )
        return [1]
    if len(divisors) <= 12:
        return divisors
    return sorted({min(divisors, key=lambda d: abs(d - batch ** (i / 11))) for i in range(12)})


def _orders(cluster: Cluster) -> list[tuple[str, ...]]:
    """Orders of subsets of the groups that are tried: all of up to three groups, the likely ones of more."""
    names = [g.name for g in cluster.groups]
    if len(names) <= 3:
        return [p for n in range(1, len(names) + 1) for p in itertools.permutations(names, n)]
    speed = {g.name: g.achieved_tflops * g.num_devices for g in cluster.groups}
    memory = {g.name: g.memory_bytes or 0.0 for g in cluster.groups}
    ranked = sorted(names, key=lambda n: (-speed[n], n))
    result: list[tuple[str, ...]] = [(n,) for n in ranked]
    for size in range(2, len(names) + 1):
        for key in (speed, memory):
            order = sorted(ranked[:size], key=lambda n: (-key[n], n))
            result += [tuple(order), tuple(reversed(order))]
        result += [_near(cluster, ranked[:size], first) for first in ranked[:size]]
    return list(dict.fromkeys(result))


def _near(cluster: Cluster, names: Iterable[str], first: str) -> tuple[str, ...]:
    """From a first group always on to the one with the widest link."""
    left = [n for n in names if n != first]
    order = [first]
    while left:
        order.append(max(left, key=lambda n: (cluster.link(order[-1], n).bandwidth_gb_per_s, n)))
        left.remove(order[-1])
    return tuple(order)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _label(layout: Layout) -> str:
    """For a person: which groups in which order."""
    row = tuple(dict.fromkeys(layout.slots))
    parts = []
    for name, slots in itertools.groupby(row, key=lambda slot: slot.group):
        count = len(list(slots))
        parts.append(name if count == 1 else f"{name} x{count}")
    groups = " -> ".join(parts)
    if len({slot.group for slot in row}) == 1:
        groups = f"{row[0].group} alone" + (f", {len(row)} stages" if len(row) > 1 else "")
    return f"{groups}, {layout.schedule}" if len(row) > 1 else groups


def predictions(
    best: Candidate,
    candidates: Sequence[Candidate],
    unfit: dict[str, str],
    limit: Limit,
    program: ProgramLike,
) -> dict[str, object]:
    """What `print(plan)` tells and `--json` gives."""
    step = best.simulation.step_time_s
    memory = best.plan.member_memory(program)
    others: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.rank):
        if candidate.label != best.label:
            others.setdefault(candidate.label, candidate)
    # The alternatives that a person asks for first: each group alone, then the best of the rest.
    plain = [c for label, c in others.items() if " alone" in label]
    shown = sorted([*plain, *[c for c in others.values() if c not in plain][:3]], key=lambda c: c.rank)
    rejected: list[dict[str, object]] = [
        {
            "what": f"{c.label}, {_count(c.plan.num_microbatches, 'microbatch')}",
            "step_time_s": c.simulation.step_time_s,
            "why": f"{c.simulation.step_time_s / step:.2f} times as long",
        }
        for c in shown
    ]
    rejected += [
        {"what": what, "step_time_s": None, "why": f"does not fit: {why}"} for what, why in unfit.items()
    ]
    return {
        "step_time_s": step,
        "rows_per_s": program.global_batch / step if step else 0.0,
        "limit": {"step_time_s": limit.step_time_s, "group_shares": dict(limit.group_shares)},
        "efficiency": limit.step_time_s / step if step else 1.0,
        "binds": _binds(best.simulation),
        "groups": {name: dataclasses.asdict(use) for name, use in best.simulation.groups.items()},
        "memory_gib": [
            [memory[s, k].total_bytes / GIB for k in range(len(stage.members))]
            for s, stage in enumerate(best.plan.stages)
        ],
        "rejected": rejected,
    }


def _binds(simulation: Simulation) -> str:
    """What keeps the step from being shorter, in a few words."""
    name, use = max(simulation.groups.items(), key=lambda item: (item[1].busy, item[0]))
    moving, link = max(simulation.groups.items(), key=lambda item: (item[1].transfer, item[0]))
    if link.transfer > max(use.busy, 0.5):
        return f"transfers of group {moving}, on their way {link.transfer:.0%} of the step"
    if use.busy > 0.85:
        return f"compute of group {name}, busy {use.busy:.0%} of the step"
    return f"filling and draining the pipeline: even group {name} is busy only {use.busy:.0%} of the step"
