"""What the planner decides about a plan before it cuts the model: who forms a stage, in which order."""

from __future__ import annotations

import dataclasses
import itertools

from hetjax.graph import StageGraph


@dataclasses.dataclass(frozen=True)
class Slot:
    """Devices that work as one submesh.

    Attributes:
        group: Their group.
        devices: Their indices; as many of them are used as the rows divide by.
    """

    group: str
    devices: tuple[int, ...]


Team = tuple[Slot, ...]
"""Slots that share a stage, each with its part of the rows."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a slot runs a stage, remat apart.

    Attributes:
        axes: Sizes of `dp`, `fsdp` and `tp`.
        residency: As in `plan.Member`.
    """

    axes: tuple[tuple[str, int], ...]
    residency: str = "resident"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Teams in pipeline order, with everything that the prices depend on.

    Attributes:
        teams: One for each stage; a team may come several times (`interleaved`, `ministage`).
        num_microbatches: Of one step.
        schedule: Whose bounds the memory follows.
        ahead: As in `plan.Plan`.
        backward: As in `plan.Plan`.
        splits: Parts in which each team of the row runs its rows of a microbatch; empty means one each.
        ways: Stage, number of the slot in its team, and number in `Pricer.ways` of each slot that runs in a
            given way; the others run in their cheapest.
    """

    teams: tuple[Team, ...]
    num_microbatches: int
    schedule: str
    ahead: int = 0
    backward: str = "whole"
    splits: tuple[int, ...] = ()
    ways: tuple[tuple[int, int, int], ...] = ()

    def num_splits(self, stage: int) -> int:
        """Parts in which a stage runs its rows of a microbatch."""
        return self.splits[stage % len(self.splits)] if self.splits else 1

    def with_way(self, stage: int, slot: int, way: int) -> Layout:
        """The same with one slot of one stage in a given way."""
        others = tuple(w for w in self.ways if w[:2] != (stage, slot))
        return dataclasses.replace(self, ways=tuple(sorted((*others, (stage, slot, way)))))

    @property
    def row(self) -> tuple[Team, ...]:
        """The teams, each once."""
        return tuple(dict.fromkeys(self.teams))

    @property
    def repeats(self) -> int:
        """How many stages each team runs."""
        return len(self.teams) // len(self.row)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that take part, in order."""
        return tuple(dict.fromkeys(slot.group for team in self.teams for slot in team))

    def graph(self, num_rows: int) -> StageGraph:
        """A chain of the teams' lanes; the slots of a team have the same bounds, so one stands for all.

        Args:
            num_rows: Of a microbatch.
        """
        numbers: dict[Team, int] = {}
        lanes = tuple((numbers.setdefault(team, len(numbers)),) for team in self.teams)
        chain = tuple((s, s + 1) for s in range(len(lanes) - 1))
        if not self.splits:
            return StageGraph(lanes, chain, ahead=self.ahead)
        rows = tuple(((0, num_rows),) for _ in self.teams)
        splits = tuple((self.num_splits(j),) for j in range(len(self.teams)))
        return StageGraph(lanes, chain, rows, splits, ahead=self.ahead)

    @property
    def label(self) -> str:
        """For a person: which groups in which order."""
        names = [" + ".join(dict.fromkeys(slot.group for slot in team)) for team in self.row]
        parts = []
        for name, same in itertools.groupby(names):
            count = len(list(same))
            parts.append(name if count == 1 else f"{name} x{count}")
        if len(set(names)) > 1:
            return f"{' -> '.join(parts)}, {self.schedule}"
        if len(self.row) == 1:
            return f"rows over {names[0]}" if len(self.row[0]) > 1 else f"{names[0]} alone"
        alone = "" if len(self.row[0]) > 1 else " alone"
        return f"{names[0]}{alone}, {len(self.row)} stages, {self.schedule}"


@dataclasses.dataclass(frozen=True)
class Run:
    """How one slot runs one stage.

    Attributes:
        slot: Where.
        num_devices: How many of its devices work.
        way: Axes and residency.
        rows: Of each microbatch.
        splits: Parts in which it runs them.
        remat: Policy of each segment.
    """

    slot: Slot
    num_devices: int
    way: Way
    rows: int
    splits: int
    remat: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """Boundaries for a layout.

    Attributes:
        bounds: Where each stage starts, and the number of segments.
        runs: For each stage, how each slot of its team runs it.
        estimate_s: Step time by formula; the simulator knows better.
        lower_s: Below which the step time is not.
        update_s: Least seconds between the last backward and the end of the step.
    """

    bounds: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    estimate_s: float
    lower_s: float = 0.0
    update_s: float = 0.0
