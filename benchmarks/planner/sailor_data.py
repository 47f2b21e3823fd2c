"""Sailor's models, networks and clusters, and the formula that Sailor's project scores plans with.

From eth-easl/sailor (tests/data/sailor, MIT): seconds of every layer by microbatch and tensor parallelism on
seven kinds of device, in float32; sizes of four models; bandwidth by size of the message, kinds, zones and
devices a host. What is assumed beyond it:

- A row is one sequence. Times of a layer are the mean of its class (`hetjax.profile_formats`).
- Where the models' sizes are asked for and not given: forward FLOPs of a layer are 2 x weights x tokens and
  4 s^2 h of attention, with h the width that 12 h^2 parameters have. They count only where the profile is
  silent.
- A figure of the network is the rate of a host, all its senders together. Where figures contradict each other
  the larger holds: n devices reach at least what fewer of them reach, and their share of what more of them
  reach; both directions alike. (One RTX-2080 sends 0.11 GB/s to a Titan, says the file, and two send 2.8.)

Run alone it prints the iterations per second that perfect balance without communication would give on the
clusters of A100-40 and V100-16: no plan at the profiled microbatches can be faster.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.planner.chain_program import ChainProgram
from hetjax import profile_formats
from hetjax.cluster import Cluster, Curve, Group, Link
from hetjax.cost import Costs, ProgramLike
from hetjax.errors import UserError
from hetjax.plan import Plan
from hetjax.profile import Entry, Profile, ProfiledCosts, read_json
from hetjax.program import SegmentInfo
from hetjax.workload import workload

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "sailor"

MODEL = "OPT-350"
"""Of the published comparison."""

GLOBAL_BATCH = 1024
"""Rows of one step of the published comparison."""

PUBLISHED_PER_S = {"16+16": {"sailor": 0.0769}, "32+96": {"metis": 0.1855}}
"""Iterations per second of the best published plans, under the project's formula."""

DEVICES_PER_HOST = 4
"""Of Sailor's A100 and V100 hosts."""

LAB_HOSTS = {"RTX-3090": 1, "RTX-2080": 2, "Titan-RTX": 1}
"""Hosts of 8 devices that Sailor's measured plan of the most of them uses."""

LAB_GB_PER_S = 0.11
"""Between hosts of unlike kinds: what the network file gives for all of them with 8 devices."""

LAYER_PARAMS_PER_WIDTH_SQUARED = 12


# ---- models ----


def model_sizes(data: Path = DATA) -> Mapping[str, Any]:
    """By model, tp and layer: parameters and activations."""
    return read_json(data / "llm_info.json", "Sailor's table of models")


def program(model: str = MODEL, global_batch: int = GLOBAL_BATCH, *, data: Path = DATA) -> ChainProgram:
    """A model of Sailor's.

    Raises:
        UserError: No such model; lists those that there are.
    """
    table = model_sizes(data)
    if model not in table:
        raise UserError(f"Sailor's llm_info.json has no model {model!r}. It has: {', '.join(table)}.")
    by_tp = {int(tp): layers for tp, layers in table[model].items()}
    tp = min(by_tp)
    layers = by_tp[tp]
    classes = profile_formats.sailor_classes(layers)
    class_of = {number: name for name, numbers in classes.items() for number in numbers}
    inner = layers[str(classes["layer"][0])]
    width = math.sqrt(tp * inner["params_floats"] / LAYER_PARAMS_PER_WIDTH_SQUARED)
    tokens = inner["act_output_floats"] / width
    parts: list[SegmentInfo] = []
    for number in sorted(class_of):
        sizes, name = layers[str(number)], class_of[number]
        params = tp * sizes["params_floats"]
        attention = 4 * tokens * inner["act_output_floats"] if name == "layer" else 0.0
        flops = 0.0 if name == "embedding" else 2.0 * params * tokens + attention
        # What Sailor has as the head's input holds its logits too: recomputing keeps the boundary alone.
        taken = parts[-1].boundary_bytes_per_row if parts else float(sizes["act_input_bytes"])
        kept = {"none": float(sizes["act_mem_bytes"] * tp), "full": taken}
        parts.append(
            SegmentInfo(
                index=number,
                name=f"{name}[{number}]",
                segment_class=f"{model}/{name}",
                num_params=params,
                param_bytes=tp * sizes["params_bytes"],
                forward_flops_per_row=flops,
                boundary_bytes_per_row=float(sizes["act_output_bytes"]),
                activation_bytes_per_row=kept,
            )
        )
    return ChainProgram(tuple(parts), global_batch, f"sailor-{model}")


# ---- times ----


@functools.cache
def profile(data: Path = DATA) -> Profile:
    """Everything that Sailor measured, as hetjax imports it."""
    return profile_formats.sailor_profile(data)


def costs(data: Path = DATA) -> ProfiledCosts:
    """`Costs` of Sailor's models from its profiles; collectives and copies are analytic."""
    return ProfiledCosts(profile(data))


def never_longer(found: Profile) -> Profile:
    """The profile with no microbatch slower than a larger one.

    Fewer rows can always be padded to more, so a time above that of more rows is the profiler's overhead
    (of its first microbatches, as a rule). Forward and backward each for itself.
    """

    def smooth(entry: Entry) -> Entry:
        points = list(entry.points)
        for i in range(len(points) - 2, -1, -1):
            after = points[i + 1]
            points[i] = points[i].model_copy(
                update={
                    "forward_s": min(points[i].forward_s, after.forward_s),
                    "backward_s": min(points[i].backward_s, after.backward_s),
                }
            )
        return entry.model_copy(update={"points": tuple(points)})

    return found.model_copy(update={"entries": tuple(map(smooth, found.entries))})


# ---- networks ----

End = tuple[str, str]
"""Sailor's name of a kind, and its zone."""


class Network:
    """Bandwidths of Sailor's `network/` folder, made consistent as the module's docstring says."""

    def __init__(self, path: Path = DATA / "network") -> None:
        """Read the folder.

        Raises:
            UserError: A file is missing or not in that format.
        """
        alike = read_json(path / "network_coeffs_all_homo.json", "Sailor's network")
        zones = read_json(path / "multizone_bandwidths_het.json", "Sailor's network")
        self._between: dict[tuple[End, End], dict[int, Curve]] = {}
        self._inside: dict[str, dict[int, Curve]] = {}
        self._alike: dict[str, dict[int, Curve]] = {}
        try:
            for kind, counts in alike["intra"].items():
                self._inside[kind] = {int(n): profile_formats.sailor_curve(*f) for n, f in counts.items()}
            for kind, counts in alike["inter"].items():
                self._alike[kind] = {int(n): profile_formats.sailor_curve(*f) for n, f in counts.items()}
            for zone, kinds in zones.items():
                for kind, counts in kinds.items():
                    for count, receivers in counts.items():
                        self._read(((kind, zone), count), receivers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is not in the format of Sailor's network/ ({error!r}).") from None

    def _read(self, sender: tuple[End, str], receivers: Mapping[str, Any]) -> None:
        """What one kind in one zone sends with so many devices to as many of the others."""
        end, count = sender
        for zone, kinds in receivers.items():
            for kind, counts in kinds.items():
                if count in counts:
                    curve = profile_formats.sailor_curve(*counts[count])
                    self._between.setdefault((end, (kind, zone)), {})[int(count)] = curve

    def link(self, a: End, b: End, senders: int = 1) -> Link:
        """Between two hosts, so many devices of each sending at once; the rate is of all of them together.

        Raises:
            UserError: The files have nothing of that pair.
        """
        found: list[tuple[int, Curve]] = []
        for pair in {(a, b), (b, a)}:
            found += self._between.get(pair, {}).items()
        if a == b:
            found += self._alike.get(a[0], {}).items()
        if not found:
            known = sorted({f"{k} in {z}" for pair in self._between if a in pair for k, z in pair})
            hint = f" {a[0]} in {a[1]} is joined to: {', '.join(known)}." if known else ""
            raise UserError(
                f"Sailor's network has no bandwidth between {a[0]} in {a[1]} and {b[0]} in {b[1]}.{hint}"
            )
        return _link(found, senders)

    def inside(self, kind: str, devices: int) -> Link | None:
        """Between the devices of one host, so many of them at once; None where it was not measured."""
        found = list(self._inside.get(kind, {}).items())
        nearest = min(found, key=lambda item: (abs(item[0] - devices), item[0]), default=None)
        return None if nearest is None else _link([nearest], nearest[0])


def _link(found: Iterable[tuple[int, Curve]], senders: int) -> Link:
    """At each size the largest rate that any of the figures shows to be possible."""
    best: dict[float, float] = {}
    for count, curve in found:
        for size, rate in curve:
            best[size] = max(best.get(size, 0.0), rate * min(1.0, senders / count))
    curve = tuple(sorted(best.items()))
    return Link(between=("a", "b"), bandwidth_gb_per_s=curve[-1][1], latency_us=0.0, curve=curve)


# ---- clusters of the published comparison ----


def mixed_cluster(num_a100: int, num_v100: int) -> Cluster:
    """A100-40 and V100-16 in hosts of 4 in one zone of a cloud, in float32, with Sailor's links."""
    counts = {"a100": ("a100-40", num_a100), "v100": ("v100-16", num_v100)}
    groups = tuple(
        Group(
            name=name,
            kind=kind,
            num_devices=count,
            devices_per_host=DEVICES_PER_HOST,
            inter_host_bandwidth_gb_per_s=1.0,
            compute_dtype="float32",
        )
        for name, (kind, count) in counts.items()
    )
    link = Link(between=("a100", "v100"), bandwidth_gb_per_s=1.0, latency_us=0.0)
    cluster = Cluster(name=f"sailor_{num_a100}_{num_v100}", groups=groups, links=(link,))
    return profile().apply(cluster)


def lab_cluster(hosts: Mapping[str, int] | None = None) -> Cluster:
    """RTX-3090, RTX-2080 and Titan-RTX in hosts of 8, unlike kinds joined at `LAB_GB_PER_S`, in float32.

    Args:
        hosts: Hosts of each kind by Sailor's name; `LAB_HOSTS` when None.
    """
    names = {kind: profile_formats.SAILOR_KINDS[kind] for kind in hosts or LAB_HOSTS}
    groups = tuple(
        Group(
            name=kind.lower(),
            kind=names[kind],
            num_devices=8 * count,
            devices_per_host=8,
            inter_host_bandwidth_gb_per_s=1.0,
            compute_dtype="float32",
        )
        for kind, count in (hosts or LAB_HOSTS).items()
    )
    links = tuple(
        Link(between=(a.name, b.name), bandwidth_gb_per_s=LAB_GB_PER_S, latency_us=0.0)
        for i, a in enumerate(groups)
        for b in groups[i + 1 :]
    )
    cluster = profile().apply(Cluster(name="sailor_lab", groups=groups, links=links))
    return cluster.model_copy(update={"links": links})


def compute_limit_per_s(cluster: Cluster, model: str = MODEL, global_batch: int = GLOBAL_BATCH) -> float:
    """Iterations per second in perfect balance, each kind at its best profiled microbatch and tp.

    Raises:
        UserError: The profile lacks the model on one of the kinds.
    """
    rows_per_s = 0.0
    for group in cluster.groups:
        totals: dict[tuple[int, int], float] = {}
        for entry in profile().entries:
            if entry.segment_class.startswith(f"{model}/") and entry.kind == group.kind:
                for p in entry.points:
                    key = entry.tp, p.rows
                    totals[key] = totals.get(key, 0.0) + entry.count * (p.forward_s + p.backward_s)
        if not totals:
            raise UserError(f"Sailor's profiles have no times of {model} on {group.kind}.")
        rows_per_s += group.num_devices / min(tp * t / rows for (tp, rows), t in totals.items())
    return rows_per_s / global_batch


# ---- the formula ----


@dataclasses.dataclass(frozen=True)
class Score:
    """One iteration under Sailor's formula, in seconds.

    Attributes:
        steady_s: (M - 1) times the slowest stage.
        stages_s: The sum of the stages, forward and backward of one microbatch.
        transfers_s: One microbatch's activations there and gradients back, over all boundaries.
        update_s: Of the optimizer, on the slowest lane.
        reduce_s: The sum of the gradients, on the slowest lane.
    """

    steady_s: float
    stages_s: float
    transfers_s: float
    update_s: float
    reduce_s: float

    @property
    def total_s(self) -> float:
        """The iteration."""
        return self.steady_s + self.stages_s + self.transfers_s + self.update_s + self.reduce_s


def score(plan: Plan, program: ProgramLike, costs: Costs) -> Score:
    """Price a plan as Sailor's project does: no bubble of the order, no waiting for transfers but the first.

    iteration = (M - 1) x slowest stage + sum of the stages + transfers + update + gradient sum. A stage is as
    slow as its slowest member. Where one plan has more than that formula knows: stages on one lane count as
    one; a member with a count of microbatches of its own (`splits`) has its own M; stages and transfers are
    summed along the rows of each replica, and the longest sum counts; gradients are reduced in the member and
    then between members.
    """
    work = workload(plan, program, costs)
    lanes = plan.lanes
    slots: dict[int, float] = {}
    updates: dict[int, float] = {}
    reductions: dict[int, float] = {}
    part_s: dict[tuple[int, int], float] = {}
    for s, stage in enumerate(plan.stages):
        for k, member in enumerate(stage.members):
            lane = lanes[s][k]
            seconds = sum(float(work.seconds.get((op, s, k), 0.0)) for op in "FBW")
            part_s[s, k] = seconds
            count = plan.num_microbatches * member.splits
            slots[lane] = slots.get(lane, 0.0) + (count - 1) * seconds
            updates[lane] = updates.get(lane, 0.0) + float(work.seconds["U", s, k])
            sent = sum(m.link.transfer_s(m.num_bytes) for m in work.reductions.get((s, k), ()))
            reductions[lane] = reductions.get(lane, 0.0) + float(work.seconds["R", s, k] + sent)
    best = 0.0, 0.0
    for row in sorted({m.rows[0] for stage in plan.stages for m in stage.members}):
        chain = [
            (s, next(k for k, m in enumerate(stage.members) if m.rows[0] <= row < m.rows[1]))
            for s, stage in enumerate(plan.stages)
        ]
        best = max(best, _chain_s(plan, chain, part_s, work), key=sum)
    return Score(
        steady_s=max(slots.values()),
        stages_s=best[0],
        transfers_s=best[1],
        update_s=max(updates.values()),
        reduce_s=max(reductions.values()),
    )


def _chain_s(
    plan: Plan, chain: Sequence[tuple[int, int]], part_s: Mapping[tuple[int, int], float], work: Any
) -> tuple[float, float]:
    """Stages and transfers of one part along the members that handle a row."""
    transfers = 0.0
    for table in (work.forward, work.backward):
        for (a, b), message in table.items():
            if a in chain and b in chain:
                splits = max(plan.stages[s].members[k].splits for s, k in (a, b))
                transfers += float(message.link.transfer_s(message.num_bytes / splits))
    return sum(part_s[unit] for unit in chain), transfers


def main(as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False) -> None:
    """Print the compute limit of the clusters of the published comparison, in iterations per second."""
    figures = {f"{a}+{b}": compute_limit_per_s(mixed_cluster(a, b)) for a, b in ((16, 16), (32, 96))} | {
        "lab": compute_limit_per_s(lab_cluster())
    }
    if as_json:
        typer.echo(json.dumps(figures))
        return
    typer.echo(f"Iterations per second of {MODEL} at a batch of {GLOBAL_BATCH} in perfect balance")
    for name, figure in figures.items():
        typer.echo(f"{name:<10}{figure:>10.4f}")


if __name__ == "__main__":
    typer.run(main)
