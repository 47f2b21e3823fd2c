"""What a person fixes before the search: pins, and a plan that is half written."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import pydantic

from hetjax.cluster import Cluster
from hetjax.cost import AnalyticCosts, Costs, ProgramLike
from hetjax.errors import UserError
from hetjax.plan import Plan
from hetjax.planner.explain import predictions
from hetjax.planner.layout import Layout, Slot, Team
from hetjax.planner.limit import compute_limit
from hetjax.planner.refusal import gib
from hetjax.planner.search import Search


def read_pins(texts: Sequence[str], program: ProgramLike) -> dict[int, list[str]]:
    """Pins as a person writes them: `0-3=a100`, `5=a100,v100`, or a segment's name, `head=a100`.

    Args:
        texts: Each names segments and, after `=`, the groups that may run them.
        program: Whose segments are meant.

    Returns:
        By segment, the groups that may run it; several pins of one segment narrow it down.

    Raises:
        UserError: Not of that form, no such segment, or pins that leave a segment no group.
    """
    names = {s.name: s.index for s in program.segments()}
    result: dict[int, list[str]] = {}
    for text in texts:
        where, equals, groups = text.partition("=")
        allowed = [g.strip() for g in groups.split(",") if g.strip()]
        if not equals or not allowed:
            raise UserError(f"Pin {text!r} is not of the form SEGMENTS=GROUP, like 0-3=a100 or 5=a100,v100.")
        for index in _segments(where.strip(), names, program.num_segments, text):
            before = result.get(index)
            result[index] = [g for g in allowed if before is None or g in before]
            if not result[index]:
                raise UserError(f"Pin {text!r} leaves segment {index} no group: another pin allows {before}.")
    return result


def _segments(where: str, names: Mapping[str, int], num_segments: int, text: str) -> range:
    if where in names:
        return range(names[where], names[where] + 1)
    first, dash, last = where.partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else True):
        found = range(int(first), int(last if dash else first) + 1)
        if found and found[-1] < num_segments:
            return found
    known = ", ".join(list(names)[:6]) + (", ..." if len(names) > 6 else "")
    raise UserError(
        f"Pin {text!r} names segments {where!r}. Allowed: numbers from 0 to {num_segments - 1}, like 2 or "
        f"0-3, or a segment's name: {known}."
    )


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class PartialMember(_Strict):
    """Who runs a stage: a group, and which of its devices; None shares the group out over its stages."""

    group: str
    devices: list[int] | None = None


class PartialStage(_Strict):
    """Neighbouring segments and who runs them."""

    segments: tuple[int, int]
    members: Annotated[list[PartialMember], pydantic.Field(min_length=1)]


class PartialPlan(_Strict):
    """A plan with what a person has decided; the planner decides the rest."""

    stages: Annotated[list[PartialStage], pydantic.Field(min_length=1)]
    num_microbatches: Annotated[int, pydantic.Field(ge=1)] | None = None
    schedule: str | None = None
    ahead: Annotated[int, pydantic.Field(ge=0)] | None = None
    remat: Literal["none", "dots", "full"] | None = None


def read_partial(path: str | Path) -> PartialPlan:
    """Read a half-written plan.

    Raises:
        UserError: The file is missing or no JSON, or has other keys than `PartialPlan`.
    """
    try:
        return PartialPlan.model_validate(json.loads(Path(path).read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        detail = error.errors()[0] if isinstance(error, pydantic.ValidationError) else None
        text = f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" if detail else str(error)
        raise UserError(
            f"{path} is no plan to complete: {text}. It needs stages, each with segments [START, STOP] and "
            "members, each with a group and, if you like, devices; optional: num_microbatches, schedule, "
            "ahead, remat."
        ) from None


def complete_plan(
    program: ProgramLike,
    cluster: Cluster,
    partial: PartialPlan,
    *,
    costs: Costs | None = None,
    features: str = "runtime",
    budget_s: float | None = None,
) -> Plan:
    """The fastest plan with the boundaries and groups of a half-written one.

    Args:
        program: What to place.
        cluster: Where.
        partial: Boundaries and groups; devices, microbatches, schedule, ahead and remat where it gives them.
        costs: Seconds of segments; analytic when None.
        features: As in `make_plan`.
        budget_s: As in `make_plan`.

    Raises:
        UserError: Boundaries or groups that cannot be, or nothing fits.
    """
    search = Search(
        program,
        cluster,
        costs or AnalyticCosts(),
        partial.num_microbatches,
        partial.schedule,
        partial.remat,
        features=features,
        deadline=math.inf if budget_s is None else time.monotonic() + budget_s,
    )
    bounds = (0, *(stage.segments[1] for stage in partial.stages))
    for stage, start in zip(partial.stages, bounds, strict=False):
        if stage.segments[0] != start or stage.segments[1] <= start:
            raise UserError(
                f"A stage has segments {list(stage.segments)}, and the one before it ends at {start}. Stages "
                "are listed in model order, each starting where the one before stops."
            )
    if bounds[-1] != program.num_segments:
        raise UserError(
            f"The stages end at segment {bounds[-1]}, and the program has {program.num_segments}."
        )
    teams = _teams(partial, cluster)
    layouts = _layouts(search, partial, teams)
    for layout in layouts:
        search.simulate(layout, bounds)
    if not search.found:
        _refuse(search, layouts, bounds)
    best = min(search.found.values(), key=lambda c: c.rank)
    limit = compute_limit(program, cluster, search.costs)
    predicted = predictions(best, list(search.found.values()), {}, limit, program)
    return dataclasses.replace(best.plan, predicted=predicted)


def _layouts(search: Search, partial: PartialPlan, teams: tuple[Team, ...]) -> list[Layout]:
    """All that the half-written plan leaves open: microbatches, schedules, how far members run ahead."""
    several = len(set(teams)) < len(teams)
    kinds = [partial.schedule] if partial.schedule else ["interleaved" if several else "1f1b", "gpipe"]
    given = partial.ahead
    return [
        Layout(teams, M, kind, steps if given is None else given, backward)
        for M in search.counts
        for kind in kinds
        for steps, backward in search.variants(kind, len(set(teams)), M)
    ]


def _refuse(search: Search, layouts: Sequence[Layout], bounds: Sequence[int]) -> NoReturn:
    """Say by how much the nearest completion is too large, and where."""
    nearest = search.nearest
    for layout in layouts:
        members = search.stages.stages(layout)
        if members is not None:
            over, stage, needs = search.stages.overflow_at(members, bounds)
            name = next((slot.group for slot in layout.teams[stage] if slot.group in needs), "")
            if name and math.isfinite(over) and (nearest is None or over < nearest[0]):
                nearest = over, name, layout.teams[stage][0].devices[0], needs[name]
    if nearest is None:
        raise UserError(
            "No way to complete the plan: the groups of a stage cannot share the rows of any microbatch. "
            "Give a shared stage groups of fewer devices, or the model a larger global batch."
        )
    over, name, _, need = nearest
    raise UserError(
        f"No way to complete the plan fits its devices. The nearest needs {gib(need)} GiB on a device of "
        f"group {name!r}, {gib(over)} GiB too much. Move boundaries, or give its stages more devices."
    )


def _teams(partial: PartialPlan, cluster: Cluster) -> tuple[Team, ...]:
    """The slots of each stage; a group without devices is shared out evenly over its stages."""
    turns: dict[str, int] = {}
    uses: dict[str, int] = {}
    for stage in partial.stages:
        for member in stage.members:
            cluster.group(member.group)
            uses[member.group] = uses.get(member.group, 0) + (member.devices is None)
    teams = []
    for stage in partial.stages:
        team = []
        for member in stage.members:
            n, devices = cluster.group(member.group).num_devices, member.devices
            if devices is None:
                each = n // uses[member.group]
                if not each:
                    raise UserError(
                        f"Group {member.group!r} has {n} devices for {uses[member.group]} stages. Give it "
                        "fewer stages, or name the devices of each, which may then be the same."
                    )
                turn = turns[member.group] = turns.get(member.group, -1) + 1
                devices = list(range(turn * each, (turn + 1) * each))
            if not devices or len(set(devices)) < len(devices) or not all(0 <= d < n for d in devices):
                raise UserError(
                    f"Group {member.group!r} has devices 0 to {n - 1}, and a stage lists {devices}."
                )
            team.append(Slot(member.group, tuple(devices)))
        teams.append(tuple(team))
    return tuple(teams)
