"""hetjax's planner on two regions joined by a thin link: what it sends over it, and what that is worth.

Instances of eight GPUs of unlike kinds stand in two AWS regions. Inside a region and between the two, each
pair of instances has the delay and the bandwidth that DT-FM gives (tests/data/dtfm, MIT): 2 Gbit/s and 5 ms
inside, 0.3 to 1.2 Gbit/s and up to 265 ms between. Llamas of Zorse's profile (3B, which it lacks on these
kinds, by analytic costs), 256 rows of 1,024 tokens a step. Compared under the same simulator:

- `ours`: the planner's plan.
- `ignoring`: the best plan of a planner that ignores links. It is the planner's own, on a copy of the cluster
  whose links between groups are infinitely fast (links inside an instance stay true), played on the true
  links. At its best: of its plans within 2% of its shortest, like groups under each other's names too, the
  one that is fastest on the true links, run as far ahead as is best there.
- `data_parallel`: one stage over all groups, each with its part of the rows.
- `first_region`, `second_region`: the planner's plan of one region alone.

The last line has, over all cases, `time_ratio` (median of ignoring / ours), `worst_time_ratio`,
`traffic_ratio` (median of ours / ignoring, bytes over the thin link), `thin_link_mb` and
`thin_link_mb_ignoring` (medians, the busier direction), `gradient_mb` (the most that ours sends over it
after the backwards: gradients and new values), `worst_region_ratio` (the better region alone / ours) and the
rows as JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from benchmarks.planner import zorse_program
from hetjax.cluster import Cluster
from hetjax.cost import Costs
from hetjax.errors import UserError
from hetjax.plan import Plan
from hetjax.planner import choices, make_plan
from hetjax.planner.search import Search
from hetjax.simulate import Simulation, simulate

DATA = zorse_program.ROOT / "tests" / "data" / "dtfm" / "aws_region_delay_bandwidth.json"

SEQ_LEN = 1024
GLOBAL_BATCH = 256

PAIRS = ("Virginia-Ohio", "Oregon-Virginia", "Oregon-Tokyo", "Sydney-London")
"""Regions, the nearest first."""

SMALL, LARGE = "v100-16 t4 | a10g t4", "a100-40 v100-16 | a10g t4"
MIXED = "a100-40 t4 | v100-16 a10g"

CASES = (("3b", SMALL), ("7b", SMALL), ("13b", SMALL), ("33b", LARGE), ("33b", MIXED))
"""Model, and the kinds in each region. 3B and 7B fit in either region, 13B in the second, 33B in neither."""

NEAR = 1.02
"""Plans of the planner that ignores links within this factor of its shortest are tried on the true links."""

MOST_TRIED = 40
"""How many of them at most, the shortest first."""

AHEAD = (2, 4, 8, 16, 32)
"""Further microbatches that the plan which ignores links may run ahead."""


def links_of(pair: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """(ms, Gbit/s) inside a region, and between the two of a pair."""
    table = json.loads(DATA.read_text())
    return tuple(table["within_region"]), tuple(table["pairs"][pair])


def region_of(kinds: str) -> dict[str, int]:
    """The region, 0 or 1, of each group; a kind in both regions is two groups."""
    return {
        kind if kinds.split().count(kind) == 1 else f"{kind}-{region + 1}": region
        for region, part in enumerate(kinds.split("|"))
        for kind in part.split()
    }


def cluster_of(kinds: str, pair: str, num_devices: int = 8) -> Cluster:
    """One instance of each kind in its region, joined as DT-FM's data say.

    Args:
        kinds: Of each region, like `a100-40 t4 | v100-16 a10g`.
        pair: Two regions of the data.
        num_devices: Of an instance.
    """
    inside, across = links_of(pair)
    region = region_of(kinds)
    names = list(region)
    listed = kinds.replace("|", " ").split()
    groups = {
        name: {"kind": kind, "num_devices": num_devices, "compute_dtype": "float16"}
        for name, kind in zip(names, listed, strict=True)
    }
    links = []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            delay_ms, gbit_per_s = inside if region[a] == region[b] else across
            links.append(
                {"between": [a, b], "bandwidth_gb_per_s": gbit_per_s / 8, "latency_us": 1e3 * delay_ms}
            )
    return Cluster.from_dict({"name": pair, "groups": groups, "links": links})


def without_links(cluster: Cluster) -> Cluster:
    """The same groups, joined by links that take no time."""
    fast = {"bandwidth_gb_per_s": 1e6, "latency_us": 0.0, "curve": ()}
    return cluster.model_copy(update={"links": tuple(link.model_copy(update=fast) for link in cluster.links)})


def renamed(plan: Plan) -> Iterator[Plan]:
    """A plan with like groups in each other's places, in every way: without links all take the same time."""
    alike: dict[Any, list[str]] = {}
    for group in plan.cluster.groups:
        alike.setdefault(group.model_copy(update={"name": ""}), []).append(group.name)
    before = [name for names in alike.values() for name in names]
    for after in itertools.product(*(itertools.permutations(names) for names in alike.values())):
        name_of = dict(zip(before, itertools.chain(*after), strict=True))
        stages = [
            dataclasses.replace(
                stage, members=tuple(dataclasses.replace(m, group=name_of[m.group]) for m in stage.members)
            )
            for stage in plan.stages
        ]
        yield dataclasses.replace(plan, stages=tuple(stages))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A plan on the true links.

    Attributes:
        plan: What was played.
        step_time_s: Simulated.
        mb: Over the thin link from the first region to the second, and back.
        gradient_mb: Part of both directions' that is sent after the backwards: gradients and new values.
        num_crossings: Neighbouring stages in unlike regions.
    """

    plan: Plan
    step_time_s: float
    mb: tuple[float, float]
    gradient_mb: float
    num_crossings: int

    def row(self) -> dict[str, Any]:
        """For the table and the JSON."""
        groups = [" + ".join(m.group for m in stage.members) for stage in self.plan.stages]
        runs = [name for i, name in enumerate(groups) if i == 0 or groups[i - 1] != name]
        return {
            "plan": " -> ".join(runs),
            "num_stages": len(groups),
            "num_microbatches": self.plan.num_microbatches,
            "schedule": self.plan.schedule,
            "ahead": self.plan.ahead,
            "step_time_s": self.step_time_s,
            "mb_there": self.mb[0],
            "mb_back": self.mb[1],
            "gradient_mb": self.gradient_mb,
            "num_crossings": self.num_crossings,
        }


def outcome(plan: Plan, simulation: Simulation, region: Mapping[str, int]) -> Outcome:
    """What a simulated plan sends over the thin link."""
    mb, gradient_mb = [0.0, 0.0], 0.0
    for passage in simulation.passages:
        a, b = passage.channel
        ends = region.get(str(a)), region.get(str(b))  # inside a group a channel is of device sets
        if None not in ends and ends[0] != ends[1]:
            mb[ends[0] or 0] += passage.num_bytes / 1e6
            gradient_mb += passage.num_bytes / 1e6 * (passage.task.op in "RU")
    where = [{region[m.group] for m in stage.members} for stage in plan.stages]
    crossings = sum(a != b for a, b in zip(where, where[1:], strict=False))
    return Outcome(plan, float(simulation.step_time_s), (mb[0], mb[1]), gradient_mb, crossings)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A program and its costs, with what a planner that ignores links makes of it."""

    program: zorse_program.LlamaProgram
    costs: Costs
    candidates: tuple[Plan, ...]

    @classmethod
    def of(cls, program: zorse_program.LlamaProgram, costs: Costs, cluster: Cluster) -> Setting:
        """Plan without links: the shortest plans, the very shortest first.

        Raises:
            UserError: Nothing fits.
        """
        found = Search(program, without_links(cluster), costs, None, None, None).run()
        if not found:
            raise UserError(f"{program.fingerprint} does not fit on {cluster.name}, links or not.")
        found.sort(key=lambda candidate: candidate.rank)
        bound = NEAR * found[0].simulation.step_time_s
        near = [c.plan for c in found if c.simulation.step_time_s <= bound]
        return cls(program, costs, tuple(near[:MOST_TRIED]))

    def play(self, plan: Plan, region: Mapping[str, int]) -> Outcome | None:
        """Simulate a plan; None where it does not fit."""
        simulation = simulate(plan, self.program, self.costs)
        for (group, _), need in simulation.peak_bytes.items():
            if need > (plan.cluster.group(group).memory_bytes or math.inf):
                return None
        return outcome(plan, simulation, region)

    def ignoring(self, cluster: Cluster, region: Mapping[str, int]) -> Outcome:
        """The plan that ignores links, on the true ones, at its best."""
        there = [dataclasses.replace(plan, cluster=cluster) for plan in self.candidates]
        played = [self.play(same, region) for plan in there for same in renamed(plan)]
        best = min((o for o in played if o is not None), key=lambda o: o.step_time_s)
        for more in AHEAD:
            plan = dataclasses.replace(best.plan, ahead=best.plan.ahead + more)
            if plan.schedule in ("1f1b", "interleaved") and len(plan.stages) > 1:
                tried = self.play(plan, region)
                if tried is not None and tried.step_time_s < best.step_time_s:
                    best = tried
        return best

    def planned(self, cluster: Cluster, region: Mapping[str, int], *, without: int = -1) -> Outcome | None:
        """The planner's plan, perhaps without a region; None where nothing fits."""
        exclude = [name for name, r in region.items() if r == without]
        try:
            plan = make_plan(self.program, cluster, costs=self.costs, exclude=exclude)
        except UserError:
            return None
        return self.play(plan, region)

    def data_parallel(self, cluster: Cluster, region: Mapping[str, int]) -> Outcome | None:
        """One stage over all groups; None where it does not fit."""
        members = [choices.PartialMember(group=name) for name in region]
        stage = choices.PartialStage(segments=(0, self.program.num_segments), members=members)
        partial = choices.PartialPlan(stages=[stage])
        try:
            plan = choices.complete_plan(self.program, cluster, partial, costs=self.costs)
        except UserError:
            return None
        return self.play(plan, region)


def compare(setting: Setting, kinds: str, pair: str, num_devices: int = 8) -> dict[str, Any]:
    """All plans of one program on one pair of regions."""
    cluster, region = cluster_of(kinds, pair, num_devices), region_of(kinds)
    ours = setting.planned(cluster, region)
    assert ours is not None, "where a plan fits without links, one fits with them"
    ignoring = setting.ignoring(cluster, region)
    others = {
        "data_parallel": setting.data_parallel(cluster, region),
        "first_region": setting.planned(cluster, region, without=1),
        "second_region": setting.planned(cluster, region, without=0),
    }
    alone_s = min(
        (o.step_time_s for name in ("first_region", "second_region") if (o := others[name]) is not None),
        default=None,
    )
    sent = sum(ignoring.mb)
    return {
        "pair": pair,
        "model": setting.program.sizes.name,
        "kinds": kinds,
        "time_ratio": ignoring.step_time_s / ours.step_time_s,
        "traffic_ratio": sum(ours.mb) / sent if sent else 1.0,
        "region_ratio": None if alone_s is None else alone_s / ours.step_time_s,
        "ours": ours.row(),
        "ignoring": ignoring.row(),
        **{name: None if o is None else o.row() for name, o in others.items()},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all rows."""

    def busier(name: str) -> float:
        return statistics.median(max(row[name]["mb_there"], row[name]["mb_back"]) for row in rows)

    alone = [row["region_ratio"] for row in rows if row["region_ratio"] is not None]
    return {
        "time_ratio": statistics.median(row["time_ratio"] for row in rows),
        "worst_time_ratio": min(row["time_ratio"] for row in rows),
        "traffic_ratio": statistics.median(row["traffic_ratio"] for row in rows),
        "thin_link_mb": busier("ours"),
        "thin_link_mb_ignoring": busier("ignoring"),
        "gradient_mb": max(row["ours"]["gradient_mb"] for row in rows),
        "worst_region_ratio": min(alone) if alone else None,
        "rows": rows,
    }


def quick_rows() -> list[dict[str, Any]]:
    """Two small programs on instances of one device: one needs both regions, one fits in either."""
    rows = []
    kinds, near, far = "v100-16 t4 | a10g", PAIRS[0], PAIRS[-1]
    for num_layers, name, pairs in ((5, "5 layers", (near, far)), (2, "2 layers", (far,))):
        sizes = dataclasses.replace(zorse_program.llama_sizes("13b"), name=name, num_layers=num_layers)
        program = zorse_program.LlamaProgram(sizes, SEQ_LEN, halves=False, global_batch=8)
        costs = zorse_program.zorse_costs(("b",))
        setting = Setting.of(program, costs, cluster_of(kinds, near, num_devices=1))
        rows += [compare(setting, kinds, pair, num_devices=1) for pair in pairs]
    return rows


def all_rows(model: str, pair: str, *, quiet: bool) -> list[dict[str, Any]]:
    """Every case that is asked for; printed as they come."""
    rows = []
    costs = zorse_program.zorse_costs(("b",))
    for name, kinds in CASES:
        if model not in ("", name):
            continue
        program = dataclasses.replace(
            zorse_program.program(name, SEQ_LEN, halves=False), global_batch=GLOBAL_BATCH
        )
        setting = Setting.of(program, costs, cluster_of(kinds, PAIRS[0]))
        for regions in PAIRS:
            if pair in ("", regions):
                rows.append(compare(setting, kinds, regions))
                if not quiet:
                    typer.echo(text_of(rows[-1]) + "\n")
    return rows


def text_of(row: dict[str, Any]) -> str:
    """One case as a person reads it."""
    inside, across = links_of(row["pair"])
    lines = [
        f"{row['pair']} ({across[0]} ms, {across[1]} Gbit/s; inside {inside[0]} ms, {inside[1]} Gbit/s), "
        f"{row['model']} on {row['kinds']}"
    ]
    ours_s = row["ours"]["step_time_s"]
    for name in ("ours", "ignoring", "data_parallel", "first_region", "second_region"):
        one = row[name]
        if one is None:
            lines.append(f"  {name:<14} does not fit")
            continue
        lines.append(
            f"  {name:<14} {one['step_time_s']:8.1f} s {one['step_time_s'] / ours_s:6.2f}x  "
            f"{one['mb_there']:7.0f} MB there {one['mb_back']:7.0f} back ({one['gradient_mb']:.0f} of them "
            f"gradients), {one['num_crossings']} crossings; {one['plan']}, {one['num_stages']} stages, "
            f"{one['num_microbatches']} microbatches, {one['schedule']}, {one['ahead']} ahead"
        )
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Option(help="3b, 7b, 13b or 33b; all of them when empty.")] = "",
    pair: Annotated[str, typer.Option(help=f"One of {', '.join(PAIRS)}; all of them when empty.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Two small programs, for tests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the last line.")] = False,
) -> None:
    """Print the plans of each pair of regions and their figures."""
    rows = quick_rows() if quick else all_rows(model, pair, quiet=as_json)
    if quick and not as_json:
        typer.echo("\n\n".join(text_of(row) for row in rows))
    typer.echo(json.dumps(summary(rows)))


if __name__ == "__main__":
    typer.run(main)
