"""Measured costs of segment classes and links: a JSON store, and `Costs` that answer from it.

A profile holds seconds of a segment's forward and backward at several row counts on one kind of device, and
bandwidths by size of the message. What it lacks is filled from other `Costs`, as a rule the analytic ones.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from hetjax.cluster import Cluster, Curve, Group, Latency, Positive
from hetjax.cost import RECOMPUTE_PER_FORWARD, AnalyticCosts, Costs, SegmentLike
from hetjax.devices import Number
from hetjax.errors import UserError

FORMAT = "hetjax-profile-1"
"""Value of the file's key `format`."""

_HALF = {"bfloat16": "float16", "float16": "bfloat16"}
"""The two 2-byte dtypes run alike: one stands in for the other."""

Seconds = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=1)]


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Point(_Frozen):
    """One measurement of a segment.

    Attributes:
        rows: On one device (of its tensor-parallel set).
        forward_s: Seconds of the forward.
        backward_s: Seconds of the backward, with what the entry's remat policy repeats.
        peak_bytes: Most bytes of one device while it runs: arguments, results and temporaries.
    """

    rows: Count
    forward_s: Seconds
    backward_s: Seconds
    peak_bytes: Bytes | None = None


class Entry(_Frozen):
    """What is known of a segment class on a kind of device.

    Attributes:
        segment_class: As `SegmentInfo.segment_class`; importers choose their own.
        kind: Key of `devices.CATALOGUE`, or another name where the catalogue lacks it.
        dtype: Compute dtype.
        tp: Devices that share each row's work.
        remat: Policy under which the backward was measured; `none` repeats nothing.
        points: At rising rows.
        update_s: Seconds of the optimizer's update of one segment on one device, or None.
        param_bytes: float32 bytes of the parameters on one device that `update_s` is for, or None.
        count: Segments that the figures are the mean of.
        source: In words, beginning with "measured" or "imported".
    """

    segment_class: str
    kind: str
    dtype: Literal["float32", "bfloat16", "float16"]
    tp: Count = 1
    remat: str = "none"
    points: Annotated[tuple[Point, ...], pydantic.Field(min_length=1)]
    update_s: Seconds | None = None
    param_bytes: Bytes | None = None
    count: Count = 1
    source: str

    @pydantic.field_validator("points")
    @classmethod
    def _rising(cls, points: tuple[Point, ...]) -> tuple[Point, ...]:
        rows = [p.rows for p in points]
        if any(a >= b for a, b in zip(rows, rows[1:], strict=False)):
            raise ValueError(f"the rows of the points have to rise, and are {rows}.")
        return points

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What tells it from other entries."""
        return self.segment_class, self.kind, self.dtype, self.tp, self.remat

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory at the most rows where it is known."""
        return next((p.peak_bytes for p in reversed(self.points) if p.peak_bytes is not None), None)


class LinkEntry(_Frozen):
    """What is known of a link.

    Attributes:
        kinds: Of the devices at its ends.
        scope: `intra` inside a host, `inter_host` between hosts of a group, `groups` between two groups.
        groups: The groups of the cluster that it was measured in; None where it holds for any of those kinds.
        num_devices: Devices of each host (or side) that sent at once.
        bandwidth_gb_per_s: GB/s (1e9 bytes) of long messages, per direction.
        latency_us: Microseconds before the first byte arrives.
        curve: (bytes of a message, GB/s) at rising sizes.
        source: In words, beginning with "measured" or "imported".
    """

    kinds: tuple[str, str]
    scope: Literal["intra", "inter_host", "groups"]
    groups: tuple[str, str] | None = None
    num_devices: Count = 1
    bandwidth_gb_per_s: Positive
    latency_us: Latency
    curve: Curve = ()
    source: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other entries; its two ends are alike."""
        ends = sorted(self.groups) if self.groups else None
        return tuple(sorted(self.kinds)), self.scope, tuple(ends) if ends else None, self.num_devices


class Origin(_Frozen):
    """Where some of a profile's figures come from.

    Attributes:
        what: `measured`, or `imported from FORMAT`.
        devices: By kind, what JAX calls the device; empty for imports.
        versions: Of python, jax and jaxlib, or of nothing for imports.
        date: ISO, of the day on which they were measured or imported.
        notes: What was left out or replaced.
    """

    what: str
    devices: Mapping[str, str] = {}
    versions: Mapping[str, str] = {}
    date: str
    notes: tuple[str, ...] = ()


class Profile(_Frozen):
    """A store of measurements.

    Attributes:
        format: `FORMAT`.
        origins: Of the parts that it was merged from.
        entries: Of segments; no two with one key.
        links: No two with one key.
    """

    format: Literal["hetjax-profile-1"] = FORMAT
    origins: tuple[Origin, ...] = ()
    entries: tuple[Entry, ...] = ()
    links: tuple[LinkEntry, ...] = ()

    @pydantic.model_validator(mode="after")
    def _unlike(self) -> Profile:
        for what, items in (("entries", self.entries), ("links", self.links)):
            seen = set()
            for item in items:
                if item.key in seen:
                    raise ValueError(f"{what}: {item.key} is given twice. Keep one.")
                seen.add(item.key)
        return self

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            UserError: The file is missing, is no JSON or no profile; names file and key.
        """
        data = read_json(path, "Profile")
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise UserError(
                f"{path} is no profile of hetjax: its format is {found!r} and has to be {FORMAT!r}. Profiles "
                "come from run.py profile, which also imports others' (--import)."
            )
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise UserError(f"{path}: {explain(error)}") from None

    def save(self, path: str | Path) -> None:
        """Write it as JSON, one entry a line; figures come back exactly."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        lines = [f'{{\n "format": {json.dumps(FORMAT)}']
        for name in ("origins", "entries", "links"):
            items = ",\n".join(f"  {json.dumps(item)}" for item in data.get(name, ()))
            lines.append(f',\n "{name}": [\n{items}\n ]' if items else f',\n "{name}": []')
        Path(path).write_text("".join([*lines, "\n}\n"]), encoding="utf-8")

    def merge(self, other: Profile) -> Profile:
        """Both together; of two entries with one key, the one of `other`."""
        return Profile(
            origins=_distinct(self.origins + other.origins),
            entries=_latest(self.entries + other.entries),
            links=_latest(self.links + other.links),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds with figures of segments, sorted."""
        return tuple(sorted({e.kind for e in self.entries}))

    def with_classes(self, names: Mapping[str, str]) -> Profile:
        """The profile with further names for its classes.

        Args:
            names: By the further name, the class in the profile; classes that it lacks are passed over.
        """
        known: dict[str, list[Entry]] = {}
        for entry in self.entries:
            known.setdefault(entry.segment_class, []).append(entry)
        more = [
            entry.model_copy(update={"segment_class": name})
            for name, old in names.items()
            for entry in known.get(old, ())
        ]
        return self.model_copy(update={"entries": _latest((*self.entries, *more))})

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster with the profile's links in place of its own.

        Inside a group the figures for the devices of a host, or those measured with fewer; between groups
        those that were measured between groups of these names, else between these kinds.
        """
        groups = tuple(g.model_copy(update=self._inside(g)) for g in cluster.groups)
        links = {frozenset(link.between): link for link in cluster.links}
        for i, a in enumerate(cluster.groups):
            for b in cluster.groups[i + 1 :]:
                found = self._find("groups", a, b)
                if found is not None:
                    link = cluster.link(a.name, b.name)
                    links[frozenset((a.name, b.name))] = link.model_copy(update=_figures(found))
        return cluster.model_copy(update={"groups": groups, "links": tuple(links.values())})

    def _inside(self, group: Group) -> dict[str, Any]:
        """Fields of a group that the profile knows better."""
        update: dict[str, Any] = {}
        for scope in ("intra", "inter_host"):
            found = self._find(scope, group, group)
            if found is not None:
                update |= {f"{scope}_{name}": value for name, value in _figures(found).items()}
        return update

    def _find(self, scope: str, a: Group, b: Group) -> LinkEntry | None:
        most = max(min(g.num_devices, g.devices_per_host or g.num_devices) for g in (a, b))
        kinds, names = sorted((a.kind, b.kind)), sorted((a.name, b.name))
        fitting = [
            x
            for x in self.links
            if x.scope == scope
            and sorted(x.kinds) == kinds
            and (x.groups is None or sorted(x.groups) == names)
        ]
        # Groups of these names before any of the kinds; then the most devices that the host has.
        return max(
            fitting,
            key=lambda x: (x.groups is not None, x.num_devices <= most, -abs(x.num_devices - most)),
            default=None,
        )


def _figures(link: LinkEntry) -> dict[str, Any]:
    return {
        "bandwidth_gb_per_s": link.bandwidth_gb_per_s,
        "latency_us": link.latency_us,
        "curve": link.curve,
    }


Item = TypeVar("Item", Entry, LinkEntry)


def _distinct(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    return tuple({origin.model_dump_json(): origin for origin in origins}.values())


def _latest(items: Iterable[Item]) -> tuple[Item, ...]:
    return tuple({item.key: item for item in items}.values())


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file that a person named.

    Raises:
        UserError: It is missing, cannot be read or is not JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
        hint = f" There are: {', '.join(near)}." if near else ""
        raise UserError(f"{what} {path} does not exist.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{what} {path} is not valid JSON: {error}") from None


def explain(error: pydantic.ValidationError) -> str:
    """Say the first things that are wrong, with their places."""
    found = []
    for item in error.errors()[:3]:
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ").rstrip(".")
        given = "" if item["type"] in ("missing", "value_error") else f" = {item['input']!r}"
        found.append(f"{place}{given}: {message}." if place else f"{message}.")
    return " ".join(found)


class _Series:
    """Seconds by rows: linear between the points, never less than a proportional share beyond them."""

    __slots__ = ("_known", "rows", "seconds", "slope")

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        self.rows, self.seconds = list(rows), list(seconds)
        last = self.seconds[-1] / self.rows[-1]
        if len(self.rows) > 1:
            rise = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            last = max(last, rise)
        self.slope = last
        self._known: dict[int, float] = dict(zip(self.rows, self.seconds, strict=True))

    def at(self, rows: int) -> float:
        """Seconds at any number of rows; below the first point its own."""
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._between(rows)
        return found

    def _between(self, rows: int) -> float:
        i = bisect.bisect_left(self.rows, rows)
        if i == 0:
            return self.seconds[0]
        if i == len(self.rows):
            return self.seconds[-1] + self.slope * (rows - self.rows[-1])
        low, high = self.rows[i - 1], self.rows[i]
        share = (rows - low) / (high - low)
        return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])


class _Curves:
    """What is known of a class on a kind in one dtype with one tp: by remat policy.

    `Costs.forward_s` knows no policy, so the forward is that of the policy that keeps most; what a policy's
    own forward takes less or more is counted to its backward, so that both together are as measured.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        by_policy = {e.remat: e for e in entries}
        order = sorted(by_policy, key=lambda policy: (_share(policy), policy))
        self.first = by_policy[order[0]]
        self.forward = _series(self.first, "forward_s")
        self._series = {p: (_series(e, "forward_s"), _series(e, "backward_s")) for p, e in by_policy.items()}
        self._times: dict[tuple[str, int], float] = {}

    def backward_s(self, rows: int, remat: str) -> float:
        """Backward under a policy: measured, else that of the first one and the recompute on top."""
        found = self._times.get((remat, rows))
        if found is None:
            found = self._times[remat, rows] = self._backward_s(rows, remat)
        return found

    def _backward_s(self, rows: int, remat: str) -> float:
        first = self.first.remat
        if remat != first and remat in self._series:
            forward, backward = self._series[remat]
            return max(0.0, forward.at(rows) + backward.at(rows) - self.forward.at(rows))
        more = max(0.0, _share(remat) - _share(first))
        return self._series[first][1].at(rows) + more * self.forward.at(rows)

    def recompute_s(self, rows: int, remat: str) -> float:
        """What the backward takes beyond that without recompute."""
        if "none" not in self._series:
            return _share(remat) * self.forward.at(rows)
        return max(0.0, self.backward_s(rows, remat) - self.backward_s(rows, "none"))

    def least_s_per_row(self) -> float:
        """No row count and no policy has less forward and backward per row.

        All series are straight between their points, so the least of each sum is at one of them.
        """
        forward = min(self.forward.at(r) / r for r in self.forward.rows)
        return min(
            max(forward, min((f.at(r) + b.at(r)) / r for r in {*f.rows, *b.rows}))
            for f, b in self._series.values()
        )


def _series(entry: Entry, name: str) -> _Series:
    return _Series([p.rows for p in entry.points], [getattr(p, name) for p in entry.points])


def _share(remat: str) -> float:
    return RECOMPUTE_PER_FORWARD.get(remat, RECOMPUTE_PER_FORWARD["dots"])


class ProfiledCosts:
    """`Costs` from a profile; what it lacks comes from other costs.

    - Rows between two points: straight between them. Above the last: the time per row of the curve's last
      piece or of its last point, whichever is more. Below the first: the first point's time.
    - `dp` and `fsdp` divide the rows; the device with the most counts.
    - `tp`: as measured. Another tp is the nearest measured one times the ratio of the fallback's times, and
      never less work in all.
    - A remat policy that was not measured: that without recompute, and the share of the forward in
      `cost.RECOMPUTE_PER_FORWARD`. Of one that was, forward and backward together are as measured.
    - float16 and bfloat16 stand in for each other.
    - The update: seconds per byte of all that was measured on the kind.
    """

    def __init__(self, profile: Profile, fallback: Costs | None = None) -> None:
        """Index the profile.

        Args:
            profile: Measurements.
            fallback: Asked where the profile has nothing; analytic when None.
        """
        self.profile, self.fallback = profile, fallback or AnalyticCosts()
        grouped: dict[tuple[str, str, str], dict[int, list[Entry]]] = {}
        for entry in profile.entries:
            by_tp = grouped.setdefault((entry.segment_class, entry.kind, entry.dtype), {})
            by_tp.setdefault(entry.tp, []).append(entry)
        self._curves = {
            key: {tp: _Curves(entries) for tp, entries in sorted(by_tp.items())}
            for key, by_tp in grouped.items()
        }
        self._found: dict[tuple[str, str, str], Mapping[int, _Curves] | None] = {}
        self._ratios: dict[tuple[Any, ...], tuple[_Curves, float, float]] = {}
        self._least: dict[tuple[str, str, str], float] = {}
        self._update = _update_rates(profile.entries)

    def forward_s(self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int]) -> Number:
        """Forward of `rows` rows (of the whole member)."""
        curves, local, forward, _ = self._look_up(segment, group, rows, axes)
        if curves is None:
            return self.fallback.forward_s(segment, group, rows, axes)
        return forward * curves.forward.at(local)

    def backward_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """Backward of `rows` rows, what the remat policy repeats included."""
        curves, local, _, backward = self._look_up(segment, group, rows, axes)
        if curves is None:
            return self.fallback.backward_s(segment, group, rows, axes, remat)
        return backward * curves.backward_s(local, remat)

    def recompute_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """The part of the backward that repeats the forward."""
        curves, local, _, backward = self._look_up(segment, group, rows, axes)
        if curves is None:
            return self.fallback.recompute_s(segment, group, rows, axes, remat)
        return backward * curves.recompute_s(local, remat)

    def gather_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Make the compute copy of parameters from their master shards: the fallback's."""
        return self.fallback.gather_s(param_bytes, group, axes)

    def reduce_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Reduce the gradients over `dp` and `fsdp`: the fallback's."""
        return self.fallback.reduce_s(param_bytes, group, axes)

    def offload_s(self, num_bytes: Number, group: Group) -> Number:
        """Copy between a device and its host's memory: the fallback's."""
        return self.fallback.offload_s(num_bytes, group)

    def update_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Optimizer update, once a step."""
        rate = self._update.get(group.kind)
        if rate is None:
            return self.fallback.update_s(param_bytes, group, axes)
        return rate * param_bytes / (axes.get("tp", 1) * axes.get("fsdp", 1))

    def limit_s(self, segment: SegmentLike, group: Group, rows: Number) -> Number:
        """No plan does forward and backward of `rows` rows faster on ALL devices of the group."""
        key = segment.segment_class, group.kind, group.dtype
        least = self._least.get(key)
        if least is None:
            by_tp = self._by_tp(*key)
            if by_tp is None:
                return self.fallback.limit_s(segment, group, rows)
            least = self._least[key] = min(tp * c.least_s_per_row() for tp, c in by_tp.items())
        return least * rows / group.num_devices

    def source(self, segment: SegmentLike, group: Group) -> str:
        """Where a segment's times on a group come from, in words."""
        by_tp = self._by_tp(segment.segment_class, group.kind, group.dtype)
        return self.fallback.source(segment, group) if by_tp is None else by_tp[min(by_tp)].first.source

    def _by_tp(self, segment_class: str, kind: str, dtype: str) -> Mapping[int, _Curves] | None:
        """Curves of a class on a kind by tp, in the dtype or its like."""
        key = segment_class, kind, dtype
        if key not in self._found:
            other = (segment_class, kind, _HALF.get(dtype, dtype))
            self._found[key] = self._curves.get(key) or self._curves.get(other)
        return self._found[key]

    def _look_up(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int]
    ) -> tuple[_Curves | None, int, float, float]:
        """Curves, rows of one device, and factors on the forward and the backward."""
        by_tp = self._by_tp(segment.segment_class, group.kind, group.dtype)
        if by_tp is None:
            return None, 0, 0.0, 0.0
        tp, local = axes.get("tp", 1), -(-rows // (axes.get("dp", 1) * axes.get("fsdp", 1)))
        curves = by_tp.get(tp)
        if curves is not None:
            return curves, local, 1.0, 1.0
        key = segment.segment_class, group, local, tp
        if key not in self._ratios:
            near = max((t for t in by_tp if t < tp), default=min(by_tp))
            one, other = {"tp": near}, {"tp": tp}
            ask, least = self.fallback, near / tp
            there = ask.forward_s(segment, group, local, other), ask.forward_s(segment, group, local, one)
            back = (
                ask.backward_s(segment, group, local, other, "none"),
                ask.backward_s(segment, group, local, one, "none"),
            )
            forward, backward = (max(float(a / b), least) if b else least for a, b in (there, back))
            self._ratios[key] = by_tp[near], forward, backward
        curves, forward, backward = self._ratios[key]
        return curves, local, forward, backward


def _update_rates(entries: Iterable[Entry]) -> dict[str, float]:
    """Seconds of the update per float32 byte of parameters, by kind."""
    sums: dict[str, tuple[float, float]] = {}
    for entry in entries:
        if entry.update_s and entry.param_bytes:
            seconds, num_bytes = sums.get(entry.kind, (0.0, 0.0))
            sums[entry.kind] = (
                seconds + entry.count * entry.update_s,
                num_bytes + entry.count * entry.param_bytes,
            )
    return {kind: seconds / num_bytes for kind, (seconds, num_bytes) in sums.items()}


def require_kinds(profile: Profile, cluster: Cluster, path: str | Path) -> None:
    """Refuse a profile that says nothing of a cluster.

    Raises:
        UserError: It has figures of none of the cluster's kinds, neither of segments nor of links.
    """
    wanted = {g.kind for g in cluster.groups}
    known = set(profile.kinds) | {k for link in profile.links for k in link.kinds}
    if not wanted & known:
        raise UserError(
            f"The profile {path} has figures of {', '.join(sorted(known)) or 'no kind of device'}, and "
            f"cluster {cluster.name!r} has groups of {', '.join(sorted(wanted))}. Measure one with run.py "
            "profile, or leave it out."
        )
