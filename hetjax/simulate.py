"""Predicts a plan's step: plays its own task lists; use of each group, memory of each device over time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hetjax.cost import AnalyticCosts, Costs, ProgramLike
from hetjax.devices import Number
from hetjax.graph import Unit
from hetjax.plan import Plan
from hetjax.schedule import Schedule, plan_schedule
from hetjax.simulate_play import Passage, Span, play
from hetjax.workload import workload


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
    flat = [x for u in units for change in changes.get(u, ()) for x in change]
    table = np.array(flat, float).reshape(-1, 2)
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
