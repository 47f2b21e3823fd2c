"""Iteration times of plans that others ran, against what hetjax's simulator predicts for them.

Takes a folder of plans in the format of Sailor's measurements (tests/data/sailor/measured/*): pipelines of
stages of replicas, each `[[[kind, devices of a host, zone], ...], tp]`, and `real`, the measured seconds.
Each becomes a hetjax plan, with one group for each stage of a pipeline (all replicas together where they are
alike), that `hetjax.simulate` plays. Nothing is fitted to the measurements. Assumed:

- float32, as profiled. M = gbs / (mbs x replicas of all pipelines) microbatches, in the textbook's 1F1B.
- A layer takes what its profile says for the microbatch and tp, collectives of tp included. A microbatch
  takes no longer than a larger one (`sailor_data.never_longer`; `--times raw` leaves the profile as it is).
  Between profiled microbatches: straight.
- A transfer between stages holds both of its ends, as DeepSpeed's pipeline engine sends and receives: one
  device sends the whole activation (or gradient), at the rate that the network's files have for one sender.
  So it stands in the times of both tasks, and not on the simulator's links. (`--transfers overlapped` puts it
  on the links instead, beside the compute.) A stage that waits for its neighbour pays for the transfer after
  the wait too: while the pipeline fills and empties that is one transfer a boundary and direction too many.
- The network's figures made consistent, as `sailor_data` says.
- Gradients are summed once, after the last backward, over all replicas of a layer: a ring between hosts, each
  host sending with the devices that the plan names, at the rate for messages of bytes / replicas; where
  unlike replicas share it, at the rate of each pair of neighbours in the ring. Inside one host where all
  replicas are on one.
- The update as profiled, for the stage's parameters.
- Unlike replicas are on hosts of their own. Layers between unlike cuts of two pipelines are stages of their
  own for the gradients' sum alone, which begins with each as soon as its own backwards are done.
- A model is told by its number of layers, unless it is given.

The last line has `mape` (mean absolute error in percent), `worst` (the largest), `bias` and the rows as JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.planner import sailor_data
from benchmarks.planner.chain_program import ChainProgram
from hetjax.cluster import Cluster, DefaultLink, Group, Link
from hetjax.cost import SegmentLike
from hetjax.devices import Number
from hetjax.errors import UserError
from hetjax.plan import Member, Plan, Stage
from hetjax.profile import Profile, ProfiledCosts, read_json
from hetjax.profile_formats import SAILOR_KINDS
from hetjax.simulate import simulate


class Transfers(enum.StrEnum):
    """How activations pass from stage to stage."""

    blocking = "blocking"
    """They hold the compute of both ends."""
    overlapped = "overlapped"
    """Beside the compute, on links."""


class Times(enum.StrEnum):
    """Which times of layers count."""

    smoothed = "smoothed"
    """No microbatch takes longer than a larger one."""
    raw = "raw"
    """As profiled."""


# ---- the format ----


@dataclasses.dataclass(frozen=True)
class Replica:
    """Devices that run one stage of one pipeline, tensor-parallel.

    Attributes:
        kind: Sailor's name.
        zone: Where.
        per_host: Devices of each host that take part.
        tp: Devices in all.
    """

    kind: str
    zone: str
    per_host: int
    tp: int


Chain = tuple[tuple[int, int, Replica], ...]
"""One replica of the model: (first layer, stop, devices) of each of its stages."""


@dataclasses.dataclass(frozen=True)
class MeasuredPlan:
    """One plan of a folder.

    Attributes:
        name: The file's stem.
        chains: Every replica of the model.
        microbatch_rows: Rows of a microbatch of one replica.
        global_batch: Rows of one iteration.
        real_s: Measured seconds of an iteration, or None.
    """

    name: str
    chains: tuple[Chain, ...]
    microbatch_rows: int
    global_batch: int
    real_s: float | None

    @property
    def num_layers(self) -> int:
        """Of the model, embedding and head among them."""
        return self.chains[0][-1][1]

    @property
    def num_microbatches(self) -> int:
        """That each replica runs in an iteration."""
        return self.global_batch // (self.microbatch_rows * len(self.chains))

    @property
    def alike(self) -> bool:
        """Whether all replicas are."""
        return len(set(self.chains)) == 1


def read_plan(path: Path) -> MeasuredPlan:
    """Read one plan.

    Raises:
        UserError: The file is missing or not in that format; says where and what is allowed.
    """
    data = read_json(path, "Measured plan")
    try:
        chains = tuple(chain for p in data["pipeline_list"] for chain in _pipeline(p, path))
        rows, batch, real = int(data["mbs"]), int(data["gbs"]), data.get("real")
        real = None if real is None else float(real)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path} is not a plan in Sailor's format ({error!r}). It needs mbs, gbs and pipeline_list, "
            "whose entries have layers_per_stage and tmp_per_stage: for each stage a list of "
            "[[[kind, devices of a host, zone]], tp]."
        ) from None
    if not chains:
        raise UserError(f"{path}: pipeline_list holds no replica.")
    lengths = sorted({chain[-1][1] for chain in chains})
    if len(lengths) > 1:
        raise UserError(
            f"{path}: pipelines of {' and '.join(map(str, lengths))} layers. All have the model's number."
        )
    if rows < 1 or batch < 1 or batch % (rows * len(chains)):
        raise UserError(
            f"{path}: gbs is {batch} and has to be a multiple of mbs x replicas = {rows} x {len(chains)}."
        )
    if real is not None and not 0 < real < float("inf"):
        raise UserError(f"{path}: real is {real} and has to be seconds of an iteration.")
    return MeasuredPlan(path.stem, chains, rows, batch, real)


def _pipeline(data: Mapping[str, Any], path: Path) -> list[Chain]:
    """The replicas of one pipeline."""
    layers, stages = data["layers_per_stage"], data["tmp_per_stage"]
    if len(layers) != len(stages):
        raise UserError(f"{path}: layers for {len(layers)} stages and devices for {len(stages)}.")
    flat = [int(layer) for stage in layers for layer in stage]
    if flat != list(range(len(flat))) or not all(layers):
        raise UserError(
            f"{path}: layers_per_stage is {layers}. It has to give every layer from 0 once, in order."
        )
    counts = sorted({len(replicas) for replicas in stages})
    if len(counts) > 1:
        raise UserError(
            f"{path}: stages of one pipeline with {' and '.join(map(str, counts))} replicas. Each stage of a "
            "pipeline has as many as the others; give replicas of their own shape a pipeline of their own."
        )
    placed = [[_replica(entry, path) for entry in replicas] for replicas in stages]
    return [
        tuple((own[0], own[-1] + 1, placed[s][r]) for s, own in enumerate(layers)) for r in range(counts[0])
    ]


def _replica(entry: Any, path: Path) -> Replica:
    hosts, tp = entry
    kinds = {(str(kind), str(zone)) for kind, _, zone in hosts}
    unknown = sorted(kind for kind, _ in kinds if kind not in SAILOR_KINDS)
    if unknown:
        raise UserError(f"{path}: unknown kind {unknown[0]!r}. Sailor's kinds: {', '.join(SAILOR_KINDS)}.")
    if len(kinds) != 1:
        raise UserError(f"{path}: {entry}: one tensor-parallel replica has to be of one kind in one zone.")
    ((kind, zone),) = kinds
    per_host, total = max(int(count) for _, count, _ in hosts), sum(int(count) for _, count, _ in hosts)
    if int(tp) < 1 or per_host < 1 or int(tp) > total:
        raise UserError(f"{path}: {entry}: tp has to be between 1 and the {total} devices of the replica.")
    return Replica(kind, zone, per_host, int(tp))


def model_of(plan: MeasuredPlan, models: Mapping[str, Any]) -> str:
    """The one model with the plan's number of layers.

    Raises:
        UserError: None has it, or several have.
    """
    counts = {name: len(next(iter(sizes.values()))) for name, sizes in models.items()}
    found = [name for name, count in counts.items() if count == plan.num_layers]
    if len(found) != 1:
        known = ", ".join(f"{name} ({count})" for name, count in counts.items())
        raise UserError(
            f"{plan.name} has {plan.num_layers} layers, as {' and '.join(found) or 'no model'} of "
            f"llm_info.json has. Give --model, one of: {known}."
        )
    return found[0]


# ---- as a plan of hetjax ----


@dataclasses.dataclass(frozen=True)
class Hold:
    """What transfers add to the tasks of a stage.

    Attributes:
        first: Its first layer; on it `before_s` stands.
        last: Its last layer; on it `after_s` stands.
        before_s: A microbatch's transfer from the stage before, or the gradient's back.
        after_s: To the stage after it.
    """

    first: int
    last: int
    before_s: float = 0.0
    after_s: float = 0.0


class MeasuredCosts(ProfiledCosts):
    """Sailor's profile, with transfers that hold the compute of both ends and rings between hosts."""

    def __init__(self, profile: Profile, holds: Mapping[str, Hold]) -> None:
        """Costs of one plan.

        Args:
            profile: Of the layers.
            holds: By group, which is one stage.
        """
        super().__init__(profile)
        self.holds = holds

    def forward_s(self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int]) -> Number:
        """Forward of `rows` rows, and the transfers to and from its neighbours."""
        return super().forward_s(segment, group, rows, axes) + self._held_s(segment, group)

    def backward_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """Backward of `rows` rows, and the transfers of gradients, of the same size."""
        return super().backward_s(segment, group, rows, axes, remat) + self._held_s(segment, group)

    def _held_s(self, segment: SegmentLike, group: Group) -> Number:
        hold = self.holds[group.name]
        first, last = segment.index == hold.first, segment.index == hold.last
        return first * hold.before_s + last * hold.after_s

    def reduce_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """A ring over the replicas; those of `tp` at once share the host's link."""
        dp, tp = axes.get("dp", 1), axes.get("tp", 1)
        if dp == 1:
            return 0.0
        if dp * tp <= (group.devices_per_host or 0):
            return 2 * (dp - 1) * group.intra_link.occupied_s(param_bytes / tp / dp)
        return 2 * (dp - 1) * group.inter_host_link.occupied_s(param_bytes / dp)


@dataclasses.dataclass(frozen=True)
class Case:
    """A measured plan as hetjax plays it."""

    plan: Plan
    program: ChainProgram
    costs: MeasuredCosts


def build(
    measured: MeasuredPlan,
    model: str,
    network: sailor_data.Network,
    profile: Profile,
    transfers: Transfers = Transfers.blocking,
) -> Case:
    """Turn a measured plan into a plan, a program and costs.

    Raises:
        UserError: The network lacks a pair of kinds, or the table of models the model.
    """
    blocking = transfers is Transfers.blocking
    program = sailor_data.program(model, measured.global_batch)
    if program.num_segments != measured.num_layers:
        raise UserError(
            f"{measured.name} has {measured.num_layers} layers, and {model} has {program.num_segments}."
        )
    program = dataclasses.replace(program, moves=not blocking)
    chains = measured.chains[:1] if measured.alike else measured.chains
    replicas = len(measured.chains) if measured.alike else 1
    placed = {_name(r, j): x for r, chain in enumerate(chains) for j, (_, _, x) in enumerate(chain)}
    boundary = [s.boundary_bytes_per_row * measured.microbatch_rows for s in program.parts]
    links: dict[frozenset[str], Link] = {}
    holds: dict[str, Hold] = {}
    for r, chain in enumerate(chains):
        ways = [
            network.link(_end(a), _end(b)) for (_, _, a), (_, _, b) in zip(chain, chain[1:], strict=False)
        ]
        sent = [way.occupied_s(boundary[chain[j][1] - 1]) if blocking else 0.0 for j, way in enumerate(ways)]
        for j, (first, stop, _) in enumerate(chain):
            before, after = [0.0, *sent][j], [*sent, 0.0][j]
            holds[_name(r, j)] = Hold(first, stop - 1, before, after)
        for j, way in enumerate(ways):
            pair = _name(r, j), _name(r, j + 1)
            links[frozenset(pair)] = way.lanes(replicas).model_copy(update={"between": pair})
    stages = tuple(_stages(measured, chains, replicas))
    for stage in stages:
        names = [m.group for m in stage.members]
        for k, name in enumerate(names if len(names) > 1 else ()):
            pair = name, names[(k + 1) % len(names)]
            a, b = (placed[x] for x in pair)
            way = network.link(_end(a), _end(b), min(a.per_host, b.per_host))
            links[frozenset(pair)] = way.model_copy(update={"between": pair})
    cluster = Cluster(
        name=measured.name,
        groups=tuple(_group(name, replica, replicas, network) for name, replica in placed.items()),
        links=tuple(links.values()),
        default_link=DefaultLink(bandwidth_gb_per_s=1.0, latency_us=0.0),  # of pairs that send nothing
    )
    plan = Plan(
        cluster=cluster,
        fingerprint=program.fingerprint,
        num_segments=program.num_segments,
        global_batch=measured.global_batch,
        num_microbatches=measured.num_microbatches,
        schedule="1f1b",
        stages=stages,
    )
    plan.check()
    return Case(plan, program, MeasuredCosts(profile, holds))


def _name(chain: int, stage: int) -> str:
    return f"replica{chain}.stage{stage}"


def _end(replica: Replica) -> sailor_data.End:
    return replica.kind, replica.zone


def _group(name: str, replica: Replica, count: int, network: sailor_data.Network) -> Group:
    """The devices of one stage, of so many replicas."""
    between = network.link(_end(replica), _end(replica), replica.per_host)
    inside = network.inside(replica.kind, replica.per_host)
    known = (
        {}
        if inside is None
        else {
            "intra_bandwidth_gb_per_s": inside.bandwidth_gb_per_s,
            "intra_curve": inside.curve,
        }
    )
    return Group.model_validate(
        {
            "name": name,
            "kind": SAILOR_KINDS[replica.kind],
            "num_devices": replica.tp * count,
            "devices_per_host": replica.per_host,
            "compute_dtype": "float32",
            "intra_latency_us": 0.0,
            "inter_host_bandwidth_gb_per_s": between.bandwidth_gb_per_s,
            "inter_host_curve": between.curve,
            **known,
        }
    )


def _stages(measured: MeasuredPlan, chains: Sequence[Chain], replicas: int) -> Iterable[Stage]:
    """One stage between each two cuts of any pipeline; a pipeline that goes on there stays on its devices."""
    cuts = sorted({0} | {stop for chain in chains for _, stop, _ in chain})
    rows = measured.microbatch_rows * replicas
    for start, stop in zip(cuts, cuts[1:], strict=False):
        members = []
        for r, chain in enumerate(chains):
            j, tp = next((j, x.tp) for j, (first, end, x) in enumerate(chain) if first <= start < end)
            members.append(
                Member(
                    group=_name(r, j),
                    devices=tuple(range(tp * replicas)),
                    axes={"dp": replicas, "fsdp": 1, "tp": tp},
                    rows=(r * rows, (r + 1) * rows),
                    remat=("none",) * (stop - start),
                )
            )
        yield Stage(segments=(start, stop), members=tuple(members))


# ---- the comparison ----


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan's prediction.

    Attributes:
        name: Of the plan.
        real_s: Measured, or None.
        predicted_s: Simulated.
        error: Percent of the measured time, signed, or None.
        analytic: Kinds whose layers the profile lacks, so that their times are analytic.
    """

    name: str
    real_s: float | None
    predicted_s: float
    error: float | None
    analytic: tuple[str, ...]


def predict(
    folder: Path,
    model: str | None = None,
    transfers: Transfers = Transfers.blocking,
    times: Times = Times.smoothed,
) -> list[Row]:
    """Predict every plan of a folder.

    Raises:
        UserError: The folder is missing or empty, or a plan is not in that format or names what is unknown.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        near = sorted(str(p) for p in (sailor_data.DATA / "measured").iterdir())
        raise UserError(f"{folder} holds no plan (*.json). Measured plans are in: {', '.join(near)}.")
    network, profile = sailor_data.Network(), sailor_data.profile()
    if times is Times.smoothed:
        profile = sailor_data.never_longer(profile)
    models, rows = sailor_data.model_sizes(), []
    for path in paths:
        measured = read_plan(path)
        case = build(measured, model or model_of(measured, models), network, profile, transfers)
        seconds = float(simulate(case.plan, case.program, case.costs).step_time_s)
        real = measured.real_s
        sources = {
            g.kind: case.costs.source(s, g) for g in case.plan.cluster.groups for s in case.program.parts
        }
        analytic = tuple(sorted(k for k, source in sources.items() if source.startswith("analytic")))
        error = None if real is None else 100 * (seconds / real - 1)
        rows.append(Row(measured.name, real, seconds, error, analytic))
    return rows


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """`mape`, `worst` and what they are of."""
    errors = {row.name: row.error for row in rows if row.error is not None}
    if not errors:
        raise UserError("No plan of the folder has a measured time (`real`), so there is no error to state.")
    worst = max(errors, key=lambda name: abs(errors[name]))
    return {
        "mape": sum(map(abs, errors.values())) / len(errors),
        "worst": abs(errors[worst]),
        "worst_plan": worst,
        "bias": sum(errors.values()) / len(errors),
        "plans": len(errors),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def main(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of plans in Sailor's format.")],
    model: Annotated[str | None, typer.Option(help="Model of llm_info.json; default: by layers.")] = None,
    transfers: Annotated[Transfers, typer.Option(help="Between stages.")] = Transfers.blocking,
    times: Annotated[Times, typer.Option(help="Of the layers.")] = Times.smoothed,
    as_json: Annotated[bool, typer.Option("--json", help="The last line alone.")] = False,
) -> None:
    """Compare simulated iteration times with measured ones."""
    try:
        rows = predict(folder, model, transfers, times)
        found = figures(rows)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if not as_json:
        typer.echo(f"Measured iterations and hetjax.simulate's prediction; {ASSUMPTIONS}\n")
        typer.echo(f"{'plan':<36}{'real s':>10}{'predicted s':>13}{'error':>9}")
        for row in rows:
            real = "-" if row.real_s is None else f"{row.real_s:.3f}"
            error = "-" if row.error is None else f"{row.error:+.1f}%"
            note = f"  (no profile of {', '.join(row.analytic)}: analytic)" if row.analytic else ""
            typer.echo(f"{row.name:<36}{real:>10}{row.predicted_s:>13.3f}{error:>9}{note}")
        typer.echo(f"\nmean absolute error {found['mape']:.2f}%, worst {found['worst']:.2f}%")
    typer.echo(json.dumps(found))


ASSUMPTIONS = (__doc__ or "").partition("Nothing is fitted")[2].partition("The last line")[0]
ASSUMPTIONS = f"nothing is fitted{ASSUMPTIONS}".rstrip()


if __name__ == "__main__":
    typer.run(main)
