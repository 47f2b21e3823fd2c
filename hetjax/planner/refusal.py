"""When nothing fits: by how much, where, and what would make it fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from hetjax.cluster import GIB
from hetjax.devices import Number
from hetjax.errors import UserError
from hetjax.plan import counted
from hetjax.planner.coarse import slot_counts
from hetjax.planner.layout import Layout
from hetjax.planner.orders import orders, subsets

if TYPE_CHECKING:
    from hetjax.planner.search import Search


def closest(search: Search, names: Sequence[str]) -> tuple[Number, int, Mapping[str, Number], Layout]:
    """The layout of some groups that misses by the least, as `Stages.least_overflow` and the layout."""
    schedule = search.schedule if search.schedule in ("gpipe", "ministage") else "1f1b"
    n = search.program.num_segments
    options = []
    most = max(search.cluster.group(name).num_devices for name in names)
    steps = sorted({most, *(2**i for i in range(11) if 2**i < most)})
    for size in steps:
        teams = []
        for name in names:
            counts = slot_counts(search.pricer, name, len(names))
            devices = search.cluster.group(name).num_devices
            count = min(counts, key=lambda c: abs(math.log(devices / c / size)))
            teams += [(slot,) for slot in search.slots(name, count)]
        if len(teams) <= n or len(teams) == 1:
            for M in search.counts:
                layout = Layout(tuple(teams), M, schedule)
                options.append((*search.stages.least_overflow(layout), layout))
    return min(options, key=lambda option: option[0])


def chains(search: Search) -> list[tuple[str, ...]]:
    """Orders of sets of groups that could form a pipeline."""

    return [
        order
        for names in subsets(search.cluster, search.names)
        if len(names) <= search.program.num_segments
        for order in orders(search.cluster, names, thorough=False)
    ]


def rescue(search: Search) -> list[Layout]:
    """The most frugal layout of each chain, where it fits: what the search's formula was too quick about."""
    found = [closest(search, chain) for chain in chains(search)]
    return [layout for over, _, _, layout in found if over <= 0]


def shortfall(search: Search, name: str) -> str:
    """In words, by how much a group alone is too small."""
    over, stage, needs, layout = closest(search, [name])
    need = needs.get(layout.teams[stage][0].group, 0.0)
    if math.isinf(over):
        return "the pins leave it out, or it has too few devices for the rows"
    if over <= 0:
        return "its stages fit one by one, and not over the time of a step"
    return f"needs {gib(need)} GiB on each device, {gib(over)} GiB too much"


def refuse(search: Search) -> NoReturn:
    """Say by how much nothing fits, where, and what would make it fit.

    Raises:
        UserError: Always.
    """
    over, stage, needs, layout = min((closest(search, x) for x in chains(search)), key=lambda x: x[0])
    if over <= 0 and search.nearest is not None:  # fits by the bounds and not in simulated time
        over, name, device, need = search.nearest
        needs, where = {name: need}, f"device {device} of group {name!r}"
    else:
        name = layout.teams[stage][0].group
        need = needs.get(name, 0.0)
        where = f"each device of stage {stage}, in group {name!r}"
    if math.isinf(over):
        raise UserError(
            f"No plan on cluster {search.cluster.name!r} keeps to the pins: no order of the groups has every "
            "pinned segment on a group that may run it. Pin fewer segments, or to more groups."
        )
    have = search.cluster.group(name).memory_bytes or 0.0
    largest = max(search.pricer.segments, key=lambda s: s.param_bytes)
    used = " -> ".join(layout.groups)
    plan = (
        f"{used}, {counted(len(layout.teams), 'stage')}, {counted(layout.num_microbatches, 'microbatch')}, "
        f"parameters sharded, remat {search.pricer.policies[-1]}"
    )
    enough = ", ".join(f"{group} = {gib(size)}" for group, size in needs.items())
    raise UserError(
        f"No plan fits on cluster {search.cluster.name!r}. The closest one ({plan}) needs {gib(need)} GiB on "
        f"{where}, where {gib(have)} GiB can be used: {gib(over)} GiB too much. It would fit with this "
        f"memory_gib: {enough}; else give it more devices, fewer rows, or cuts in the largest segment "
        f"({largest.name!r}, {gib(largest.param_bytes)} GiB of float32 parameters)."
    )


def gib(num_bytes: Number) -> str:
    """GiB with two decimals, rounded up, so that the figure is enough."""
    return f"{math.ceil(num_bytes / GIB * 100) / 100:.2f}"
