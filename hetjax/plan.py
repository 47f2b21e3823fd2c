"""Plan: which member runs which segments in which order, and what was predicted of it; JSON in and out."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetjax import cost
from hetjax.cluster import GIB, Cluster
from hetjax.devices import Number
from hetjax.errors import UserError
from hetjax.graph import StageGraph
from hetjax.memory import Memory, device_memory, plan_memory

FORMAT = "hetjax-plan-1"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "ministage")
AXES = ("dp", "fsdp", "tp")
BACKWARDS = ("whole", "split")
WEIGHT_SHARE = 0.4
"""Share of a segment's backward that gives the parameters' gradients, where it is split.

Half of the products of a layer's backward are with its inputs and half with its weights; those of attention's
scores, and everything elementwise, go with the inputs. A Llama's layer has 0.43 (7B at 4,096 tokens).
"""
RESIDENCIES = ("resident", "sharded", "gathered", "offloaded")


@dataclasses.dataclass(frozen=True)
class Member:
    """One group's part of a stage.

    Attributes:
        group: Name in the cluster.
        devices: Indices within the group, in mesh order (`dp` major, `tp` minor).
        axes: Size of `dp`, `fsdp` and `tp`; the product is the device count.
        rows: Start and stop of its rows within the microbatch.
        remat: Policy of each segment of the stage: `none`, `full`, `dots`, or a name in
            `jax.checkpoint_policies`.
        residency: Where the parameters live. `resident`: master weights and optimizer state on the member,
            sharded over `fsdp`, with a whole copy to compute with. `sharded`: the state is divided over the
            members of the stage. `gathered`: the copy too comes and goes, once for the forward and once for
            the backward of all the stage's microbatches, and so do the gradients. `offloaded`: as `gathered`,
            the shards in host memory.
        splits: Parts in which it runs its rows of a microbatch one after another: its own microbatches have
            `num_rows / splits` rows, and it has `splits` times as many.
        state_share: Share of the stage's state that it keeps where residency is `sharded`; None shares it
            out evenly by devices.
        seconds: Expected `F` and `B` of one microbatch, by which the schedule orders the tasks; None counts
            all stages as equal.
    """

    group: str
    devices: tuple[int, ...]
    axes: Mapping[str, int]
    rows: tuple[int, int]
    remat: tuple[str, ...]
    residency: str = "resident"
    splits: int = 1
    state_share: Number | None = None
    seconds: tuple[Number, Number] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of a microbatch that the member handles."""
        return self.rows[1] - self.rows[0]

    @property
    def part_rows(self) -> int:
        """Rows of the largest part that it runs at once."""
        return -(-self.num_rows // self.splits)

    @property
    def comes_and_goes(self) -> bool:
        """Whether its parameters are on the devices only while its stage runs."""
        return self.residency in ("gathered", "offloaded")

    def axis(self, name: str) -> int:
        """Size of an axis, 1 where it is not named."""
        return self.axes.get(name, 1)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Neighbouring segments with one placement.

    Attributes:
        segments: Start and stop in model order.
        members: Who runs them; their rows partition the microbatch in order.
        fuse: How many neighbouring segments are compiled as one program, under one remat policy; more
            than the stage holds means all of them.
    """

    segments: tuple[int, int]
    members: tuple[Member, ...]
    fuse: int = 1

    @property
    def num_segments(self) -> int:
        """How many segments the stage runs."""
        return self.segments[1] - self.segments[0]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A placement and an order for one program on one cluster.

    Attributes:
        cluster: What it was made for.
        fingerprint: Of the program.
        num_segments: Of the program.
        global_batch: Rows of one step.
        num_microbatches: Into how many the global batch is cut.
        schedule: One of `SCHEDULES`.
        stages: In model order, which is also the order of their numbers.
        ahead: Microbatches that each member may keep beyond the schedule's bound, so that slow links or
            unlike stages are waited for less.
        backward: `whole`, or `split`: the gradients of the parameters are a task of their own, which fills
            what would be idle. Segments that recompute nothing do so; the others' stays whole.
        predicted: Figures of the planner, for a person; nothing is computed from them.
    """

    cluster: Cluster
    fingerprint: str
    num_segments: int
    global_batch: int
    num_microbatches: int
    schedule: str
    stages: tuple[Stage, ...]
    ahead: int = 0
    backward: str = "whole"
    predicted: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def microbatch_rows(self) -> int:
        """Rows of one microbatch."""
        return self.global_batch // self.num_microbatches

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as the JSON file holds it."""
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "num_segments": self.num_segments,
            "global_batch": self.global_batch,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            **({"ahead": self.ahead} if self.ahead else {}),
            **({"backward": self.backward} if self.backward != "whole" else {}),
            "stages": [
                {
                    "segments": list(stage.segments),
                    "fuse": stage.fuse,
                    "members": [
                        {
                            "group": m.group,
                            "devices": list(m.devices),
                            "axes": dict(m.axes),
                            "rows": list(m.rows),
                            "remat": _short_remat(m.remat),
                            "residency": m.residency,
                            **({"splits": m.splits} if m.splits > 1 else {}),
                            **({} if m.state_share is None else {"state_share": m.state_share}),
                            **({"seconds": list(m.seconds)} if m.seconds else {}),
                        }
                        for m in stage.members
                    ],
                }
                for stage in self.stages
            ],
            "cluster": self.cluster.to_dict(),
            "predicted": dict(self.predicted),
        }

    def to_json(self) -> str:
        """The plan as JSON that a person can edit."""
        return _indent_shallow(self.to_dict()) + "\n"

    @classmethod
    def from_json(cls, text: str, *, origin: str = "plan") -> Plan:
        """Read and validate a plan.

        Args:
            text: JSON as `to_json` writes it; a member's `remat` may be one policy for all its segments.
            origin: Named in errors.

        Raises:
            UserError: Not JSON, a wrong or missing key, or a placement that cannot be.
        """
        try:
            data = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{origin} is not valid JSON: {error}") from None
        from hetjax import plan_reader  # reads into these classes, so it can only be imported once they exist

        return plan_reader.read_plan(data, origin)

    def save(self, path: str | Path) -> None:
        """Write the JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a JSON file.

        Raises:
            UserError: As `from_json`, or the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise UserError(f"Plan file {path} does not exist.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Plan file {path} cannot be read: {error}") from None
        return cls.from_json(text, origin=str(path))

    def check(self, program: cost.ProgramLike | None = None) -> None:
        """Verify everything that can be told without devices.

        Args:
            program: Also compare with this program, and its memory with the devices' as far as both are
                known.

        Raises:
            UserError: Says what is wrong, what is allowed and how to fix it.
        """
        from hetjax import plan_reader

        plan_reader.check_plan(self, program)

    @functools.cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The lane of each member of each stage; members whose devices overlap share one.

        Lanes are numbered by the first stage that uses them.
        """
        units = [(s, k, m) for s, stage in enumerate(self.stages) for k, m in enumerate(stage.members)]
        lane_of_device: dict[tuple[str, int], int] = {}
        parent = list(range(len(units)))

        def root(i: int) -> int:
            while parent[i] != i:
                i = parent[i]
            return i

        for i, (_, _, member) in enumerate(units):
            for device in member.devices:
                j = lane_of_device.setdefault((member.group, device), i)
                low, high = sorted((root(i), root(j)))
                parent[high] = low
        numbers: dict[int, int] = {}
        result: list[list[int]] = [[] for _ in self.stages]
        for i, (s, _, _) in enumerate(units):
            result[s].append(numbers.setdefault(root(i), len(numbers)))
        return tuple(tuple(r) for r in result)

    def graph(self, edges: Iterable[tuple[int, int]]) -> StageGraph:
        """Lanes, rows and parts of the members, as the schedule needs them.

        Args:
            edges: (producer, consumer) stages of everything that crosses.
        """
        lanes = self.lanes
        last_of_lane = {lane: s for s, members in enumerate(lanes) for lane in members}
        mirrored = self.schedule in ("gpipe", "ministage")

        def gathers(s: int, k: int, member: Member) -> int:
            # The last stage of a lane keeps its parameters from the forward to the backward.
            return 0 if not member.comes_and_goes else 2 if mirrored and last_of_lane[lanes[s][k]] != s else 1

        return StageGraph(
            lanes=lanes,
            edges=tuple(sorted(set(edges))),
            rows=tuple(tuple(m.rows for m in stage.members) for stage in self.stages),
            splits=tuple(tuple(m.splits for m in stage.members) for stage in self.stages),
            gathers=tuple(
                tuple(gathers(s, k, m) for k, m in enumerate(stage.members))
                for s, stage in enumerate(self.stages)
            ),
            split=tuple(tuple(self.weight_share(m) for m in stage.members) for stage in self.stages),
            ahead=self.ahead,
        )

    def weight_share(self, member: Member) -> Number:
        """Share of a member's backward that is a task of its own, were all its segments alike."""
        mirrored = self.schedule in ("gpipe", "ministage")
        if self.backward != "split" or (member.comes_and_goes and mirrored) or not member.remat:
            return 0.0
        return WEIGHT_SHARE * member.remat.count("none") / len(member.remat)

    def beyond_runtime(self) -> list[str]:
        """What the plan uses that is priced and simulated and that `Trainer` does not run yet."""
        members = [m for stage in self.stages for m in stage.members]
        found = [f"residency {m.residency!r}" for m in members if m.residency != "resident"]
        found += ["splits" for m in members if m.splits > 1]
        found += ["remat 'offloaded'" for m in members if "offloaded" in m.remat]
        if self.backward == "split":
            found.append("backward 'split'")
        if self.schedule == "ministage":
            found.append("schedule 'ministage'")
        return sorted(set(found))

    def member_memory(self, program: cost.ProgramLike) -> dict[tuple[int, int], Memory]:
        """Bytes per device of each (stage, member), by the schedule's stated bounds."""
        return plan_memory(self, program)

    def device_memory(self, program: cost.ProgramLike) -> dict[tuple[str, int], Number]:
        """Peak bytes of each used device, by the schedule's stated bounds.

        A device that several stages share keeps the parameters of all, and activations up to its lane's
        bound; of what comes and goes, that of two neighbouring stages.
        """
        return device_memory(self, program)

    def __str__(self) -> str:
        return _table(self)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys stand once each: of two, a person means the one that JSON forgets."""
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} stands twice in one object")
    return data


def _short_remat(remat: tuple[str, ...]) -> str | list[str]:
    return remat[0] if len(set(remat)) == 1 else list(remat)


def _indent_shallow(data: Any, depth: int = 0) -> str:
    """JSON with objects and lists of objects spread over lines and lists of numbers on one."""
    pad = "  " * (depth + 1)
    if isinstance(data, Mapping):
        parts = [f"{json.dumps(str(k))}: {_indent_shallow(v, depth + 1)}" for k, v in data.items()]
        flat = all(not isinstance(v, (Mapping, list, tuple)) for v in data.values())
        brackets = "{}"
    elif isinstance(data, (list, tuple)):
        parts = [_indent_shallow(v, depth + 1) for v in data]
        flat = all(not isinstance(v, (Mapping, list, tuple)) for v in data)
        brackets = "[]"
    else:
        return json.dumps(data)
    if flat and sum(map(len, parts)) < 90:
        return brackets[0] + ", ".join(parts) + brackets[1]
    body = ",".join(f"\n{pad}{part}" for part in parts)
    return f"{brackets[0]}{body}\n{pad[2:]}{brackets[1]}"


def counted(number: int, noun: str) -> str:
    """`1 stage`, `3 microbatches`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _table(plan: Plan) -> str:
    """The plan as a text table."""
    rows = [("stage", "segments", "group", "devices", "axes", "rows", "remat")]
    for s, stage in enumerate(plan.stages):
        for k, m in enumerate(stage.members):
            axes = " ".join(f"{a}={n}" for a, n in m.axes.items() if n > 1) or "-"
            axes += "" if m.residency == "resident" else f" {m.residency}"
            rows.append(
                (
                    str(s) if k == 0 else "",
                    f"{stage.segments[0]}-{stage.segments[1] - 1}" if k == 0 else "",
                    m.group,
                    _ranges(m.devices),
                    axes,
                    f"{m.num_rows}",
                    "/".join(dict.fromkeys(m.remat)),
                )
            )
    head = (
        f"Plan for cluster {plan.cluster.name!r}: {plan.num_segments} segments in {len(plan.stages)} "
        f"{'stage' if len(plan.stages) == 1 else 'stages'}, schedule {plan.schedule}"
        f"{f', {plan.ahead} ahead' if plan.ahead else ''}"
        f"{', split backward' if plan.backward == 'split' else ''}, "
        f"{counted(plan.num_microbatches, 'microbatch')} of "
        f"{counted(plan.microbatch_rows, 'row')} (global batch {plan.global_batch})"
    )
    parts = [head, "", columns(rows)]
    if "step_time_s" in plan.predicted:
        parts += ["", *_prediction_lines(plan)]
    return "\n".join(parts)


def _prediction_lines(plan: Plan) -> list[str]:
    """What the planner predicted: the step, each group's use, the alternatives."""
    predicted = plan.predicted
    line = f"Predicted: {_seconds(predicted['step_time_s'])} a step"
    if "rows_per_s" in predicted:
        line += f", {predicted['rows_per_s']:.4g} rows/s"
    if "tokens_per_s" in predicted:
        line += f", {predicted['tokens_per_s']:,.0f} tokens/s"
    if "limit" in predicted and "efficiency" in predicted:
        limit = _seconds(predicted["limit"]["step_time_s"])
        line += f"; limit {limit}, efficiency {predicted['efficiency']:.2f}"
    lines = [line]
    if "binds" in predicted:
        lines.append(f"What binds: {predicted['binds']}")
    rows: list[Sequence[str]] = [("group", "busy", "recompute", "bubble", "transfer", "memory of a device")]
    for name, use in predicted.get("groups", {}).items():
        have = plan.cluster.group(name).memory_bytes
        of = "" if have is None else f" of {have / GIB:.1f}"
        shares = [f"{use[key]:.1%}" for key in ("busy", "recompute", "bubble", "transfer")]
        rows.append((name, *shares, f"{use['peak_gib']:.2f}{of} GiB"))
    if len(rows) > 1:
        lines += ["", columns(rows)]
    rejected = [
        (r["what"], "-" if r["step_time_s"] is None else _seconds(r["step_time_s"]), r["why"])
        for r in predicted.get("rejected", [])
    ]
    if rejected:
        lines += ["", columns([("rejected", "a step", "why"), *rejected])]
    return lines


def _seconds(value: Number) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,6` for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
