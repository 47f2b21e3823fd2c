"""Cluster, Group, Link: what devices there are and how they are joined; read from a file or detected."""

from __future__ import annotations

import bisect
import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from hetjax import devices
from hetjax.errors import UserError

if TYPE_CHECKING:
    import jax

Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Latency = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
GIB = 2**30


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


Curve = tuple[tuple[Positive, Positive], ...]
"""Measured bandwidth: (bytes of a message, GB/s) at rising sizes."""


class Link(_Frozen):
    """Bandwidth and latency between two groups.

    Attributes:
        between: The two groups' names.
        bandwidth_gb_per_s: GB/s (1e9 bytes) of long messages in each direction, shared by everything that
            passes that way.
        latency_us: Microseconds before the first byte arrives.
        curve: Bandwidth by size of the message, where it was measured; `bandwidth_gb_per_s` otherwise.
    """

    between: tuple[str, str]
    bandwidth_gb_per_s: Positive
    latency_us: Latency = 20.0
    curve: Curve = ()

    @pydantic.field_validator("curve")
    @classmethod
    def _rising(cls, curve: Curve) -> Curve:
        sizes = [size for size, _ in curve]
        if any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
            raise ValueError(f"the curve's sizes have to rise, and are {sizes}.")
        return curve

    def rate_gb_per_s(self, num_bytes: devices.Number) -> float:
        """Bandwidth for a message of that size: linear in the logarithm of the size, flat outside."""
        if not self.curve:
            return self.bandwidth_gb_per_s
        i = bisect.bisect_left(self.curve, num_bytes, key=lambda point: point[0])
        if i in (0, len(self.curve)):
            return self.curve[min(i, len(self.curve) - 1)][1]
        (low, slow), (high, fast) = self.curve[i - 1 : i + 1]
        return slow + (fast - slow) * math.log(num_bytes / low) / math.log(high / low)

    def occupied_s(self, num_bytes: devices.Number) -> float:
        """Seconds for which a message keeps the link from others; never less than for a smaller one."""
        smaller = (size / (rate * 1e9) for size, rate in self.curve if size <= num_bytes)
        return max(num_bytes / (self.rate_gb_per_s(num_bytes) * 1e9), max(smaller, default=0.0))

    def transfer_s(self, num_bytes: devices.Number) -> float:
        """Seconds that `num_bytes` take over the idle link."""
        return self.latency_us * 1e-6 + self.occupied_s(num_bytes)

    def lanes(self, count: int) -> Link:
        """The same link `count` times side by side."""
        if count == 1:
            return self
        curve = tuple((size * count, rate * count) for size, rate in self.curve)
        return self.model_copy(update={"bandwidth_gb_per_s": self.bandwidth_gb_per_s * count, "curve": curve})


@functools.lru_cache(maxsize=20_000)
def _hosts(devices: tuple[int, ...], devices_per_host: int) -> frozenset[int]:
    return frozenset(d // devices_per_host for d in devices)


class Group(_Frozen):
    """Like devices, joined by one interconnect. Figures left out come from the device catalogue.

    Attributes:
        name: As the cluster file calls it.
        kind: Key of `devices.CATALOGUE`.
        num_devices: How many.
        platform: JAX platform; None takes the kind's.
        backend: JAX backend to take the devices from; None takes the platform.
        memory_gib: Memory that may be used per device; None takes the kind's usable memory.
        compute_dtype: Dtype of the group's computations; None takes the kind's.
        tflops: Achieved dense TFLOP/s per device; None estimates it from the kind.
        devices_per_host: None means that one host holds the whole group.
        intra_bandwidth_gb_per_s: Between two devices of a host, per direction; None takes the kind's.
        inter_host_bandwidth_gb_per_s: Between two hosts of the group, per direction; None takes
            `intra_bandwidth_gb_per_s`.
        intra_latency_us: Between two devices of a host.
        inter_host_latency_us: Between two hosts of the group; None takes `intra_latency_us`.
        intra_curve: Bandwidth between two devices of a host by size of the message, where measured.
        inter_host_curve: The same between two hosts.
    """

    name: str
    kind: str
    num_devices: Annotated[int, pydantic.Field(ge=1, le=1_000_000, strict=True)]
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    backend: str | None = None
    memory_gib: Positive | None = None
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    tflops: Positive | None = None
    devices_per_host: Annotated[int, pydantic.Field(ge=1)] | None = None
    intra_bandwidth_gb_per_s: Positive | None = None
    inter_host_bandwidth_gb_per_s: Positive | None = None
    intra_latency_us: Latency = 10.0
    inter_host_latency_us: Latency | None = None
    intra_curve: Curve = ()
    inter_host_curve: Curve = ()

    @pydantic.field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        devices.lookup(kind)
        return kind

    @property
    def device_kind(self) -> devices.DeviceKind:
        """The catalogue's entry."""
        return devices.lookup(self.kind)

    @property
    def jax_platform(self) -> str:
        """The JAX platform: the file's word, else the kind's."""
        return self.platform or self.device_kind.platform

    @property
    def jax_backend(self) -> str:
        """The name to ask `jax.devices` for."""
        return self.backend or self.jax_platform

    @property
    def dtype(self) -> str:
        """The compute dtype: the file's word, else the kind's."""
        return self.compute_dtype or self.device_kind.compute_dtype

    @property
    def achieved_tflops(self) -> devices.Number:
        """TFLOP/s to expect per device: the file's figure, else the catalogue's estimate for the dtype."""
        return self.tflops or self.device_kind.achieved(self.dtype)

    @property
    def memory_bytes(self) -> devices.Number | None:
        """Bytes that may be used per device; None where unknown."""
        gib = self.memory_gib or self.device_kind.usable_memory_gib
        return None if gib is None else gib * GIB

    @property
    def intra_link(self) -> Link:
        """Between two devices of one host."""
        bandwidth = self.intra_bandwidth_gb_per_s or float(self.device_kind.intra_bandwidth_gb_per_s)
        return Link(
            between=(self.name, self.name),
            bandwidth_gb_per_s=bandwidth,
            latency_us=self.intra_latency_us,
            curve=self.intra_curve,
        )

    @property
    def inter_host_link(self) -> Link:
        """Between two hosts, shared by the devices of each; the hosts' own where the file says nothing."""
        bandwidth = self.inter_host_bandwidth_gb_per_s
        if bandwidth is None:
            return self.intra_link
        latency = self.intra_latency_us if self.inter_host_latency_us is None else self.inter_host_latency_us
        return Link(
            between=(self.name, self.name),
            bandwidth_gb_per_s=bandwidth,
            latency_us=latency,
            curve=self.inter_host_curve,
        )

    def host(self, device: int) -> int:
        """The host of a device."""
        return device // (self.devices_per_host or self.num_devices)

    def inner_link(self, num_devices: int) -> Link:
        """The narrowest way among the first `num_devices` devices of a host, or of several hosts."""
        if not self.devices_per_host or num_devices <= self.devices_per_host:
            return self.intra_link
        ways = self.intra_link, self.inter_host_link
        return min(ways, key=lambda link: link.bandwidth_gb_per_s)

    def between(self, a: Sequence[int], b: Sequence[int]) -> Link:
        """What joins two sets of its devices, each device (or host) sending to one of the others at once."""
        per_host = self.devices_per_host or self.num_devices
        hosts_a, hosts_b = _hosts(tuple(a), per_host), _hosts(tuple(b), per_host)
        if hosts_a & hosts_b:
            return self.intra_link.lanes(min(len(set(a)), len(set(b))))
        return self.inter_host_link.lanes(min(len(hosts_a), len(hosts_b)))


class DefaultLink(_Frozen):
    """The link of every pair that `links` leaves out; fields as in `Link`."""

    bandwidth_gb_per_s: Positive
    latency_us: Latency = 20.0
    curve: Curve = ()


class Cluster(_Frozen):
    """Groups and links.

    Attributes:
        name: For a person; the file's stem by habit.
        description: For a person.
        groups: In file order, which is also the order in which devices are handed out.
        links: Between pairs of groups.
        default_link: For the pairs that `links` leaves out.
    """

    name: str
    groups: tuple[Group, ...]
    description: str = ""
    links: tuple[Link, ...] = ()
    default_link: DefaultLink | None = None

    @pydantic.model_validator(mode="after")
    def _joined(self) -> Cluster:
        names = [g.name for g in self.groups]
        seen: set[frozenset[str]] = set()
        for link in self.links:
            for name in link.between:
                if name not in names:
                    raise ValueError(f"links: {name!r} is not a group. The groups are: {', '.join(names)}.")
            pair = frozenset(link.between)
            if len(pair) == 1:
                raise ValueError(
                    f"links: between = {list(link.between)} names one group twice; set its "
                    "intra_bandwidth_gb_per_s."
                )
            if pair in seen:
                raise ValueError(f"links: the pair {' and '.join(sorted(pair))} is given twice. Keep one.")
            seen.add(pair)
        if self.default_link is None:
            for i, a in enumerate(names):
                for b in names[i + 1 :]:
                    if frozenset((a, b)) not in seen:
                        raise ValueError(
                            f"links: none joins {a!r} and {b!r}. Add it to [[links]], or give a "
                            "[default_link]."
                        )
        return self

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file.

        Raises:
            UserError: The file is missing, is not TOML, or says something that cannot be; names file and key.
        """
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            near = sorted(str(p) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
            hint = f" There are: {', '.join(near)}." if near else ""
            raise UserError(f"Cluster file {path} does not exist.{hint}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cluster file {path} cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"Cluster file {path} is not valid TOML: {error}") from None
        data.setdefault("name", path.stem)
        return cls.from_dict(data, origin=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, origin: str = "cluster") -> Cluster:
        """Build a cluster from the structure of a cluster file.

        Args:
            data: What `to_dict` returns, or a parsed file: `groups` maps names to tables.
            origin: Named in errors.

        Raises:
            UserError: A wrong key or value; names origin and key.
        """
        data = dict(data)
        groups = data.get("groups")
        if (
            not isinstance(groups, Mapping)
            or not groups
            or not all(isinstance(g, Mapping) for g in groups.values())
        ):
            raise UserError(
                f"{origin}: needs at least one group, as a table [groups.NAME] with kind and num_devices."
            )
        for name, table in groups.items():
            if not name or not name.isprintable():
                raise UserError(f"{origin}: a group is named {name!r}. Give it a name that can be printed.")
            if "name" in table:
                raise UserError(
                    f"{origin}: unknown key 'groups.{name}.name'. A group is named by its table: "
                    f"[groups.{name}]."
                )
        data["groups"] = [{**table, "name": name} for name, table in groups.items()]
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise UserError(f"{origin}: {_explain(error, list(groups))}") from None
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None

    @classmethod
    def detect(cls, backends: tuple[str, ...] = ()) -> Cluster:
        """The cluster of the devices that are attached to this process, one group a device kind.

        Link figures are assumptions (through the host): write a cluster file to say better.

        Args:
            backends: JAX backends to look at; the default backend alone when empty.
        """
        import jax

        found: dict[tuple[str, str], list[Any]] = {}
        for backend in backends or (jax.default_backend(),):
            for device in jax.devices(backend):
                found.setdefault((backend, device.device_kind), []).append(device)
        groups: dict[str, dict[str, Any]] = {}
        for (backend, text), members in found.items():
            kind = devices.recognise(text, members[0].platform)
            if kind is None:
                raise UserError(
                    f"Attached device {text!r} ({members[0].platform}) is not in the catalogue. Write a "
                    "cluster file that gives the nearest kind with memory_gib and tflops."
                )
            name = kind.name if kind.name not in groups else f"{kind.name}-{len(groups)}"
            table: dict[str, Any] = {"kind": kind.name, "num_devices": len(members)}
            if backend not in (kind.platform, "cuda", "rocm"):
                table["backend"] = backend
            limit = (members[0].memory_stats() or {}).get("bytes_limit") if kind.platform != "cpu" else None
            if limit:
                table["memory_gib"] = limit / GIB
            groups[name] = table
        return cls.from_dict(
            {"name": "detected", "groups": groups, "default_link": {"bandwidth_gb_per_s": 10.0}}
        )

    def to_dict(self) -> dict[str, Any]:
        """The structure of a cluster file, without what was left to its default."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        data["groups"] = {g.pop("name"): g for g in data["groups"]}
        return data

    def group(self, name: str) -> Group:
        """The group of that name.

        Raises:
            UserError: No such group.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise UserError(
            f"Cluster {self.name!r} has no group {name!r}. Its groups: "
            f"{', '.join(g.name for g in self.groups)}."
        )

    def link(self, a: str, b: str) -> Link:
        """What joins groups `a` and `b`; within one group, its own interconnect."""
        if a == b:
            return self.group(a).inner_link(self.group(a).num_devices)
        for link in self.links:
            if set(link.between) == {a, b}:
                return link
        for name in (a, b):
            self.group(name)
        assert self.default_link is not None, "a cluster joins every pair of its groups"
        return Link(between=(a, b), **self.default_link.model_dump())

    def link_between(self, a: str, devices_a: Sequence[int], b: str, devices_b: Sequence[int]) -> Link:
        """What joins devices of group `a` to devices of group `b`."""
        return self.group(a).between(devices_a, devices_b) if a == b else self.link(a, b)

    def with_tflops(self, tflops: Mapping[str, devices.Number]) -> Cluster:
        """The same cluster with another achieved TFLOP/s per device of some groups, as after measuring."""
        for name in tflops:
            self.group(name)
        groups = tuple(
            g.model_copy(update={"tflops": tflops[g.name]}) if g.name in tflops else g for g in self.groups
        )
        return self.model_copy(update={"groups": groups})

    def num_cpu_devices(self) -> int:
        """What `jax_num_cpu_devices` has to be before JAX starts; 0 where no group is on the CPU backend."""
        return sum(g.num_devices for g in self.groups if g.jax_backend == "cpu")

    def attach(self) -> dict[str, list[jax.Device]]:
        """Hand the attached devices to the groups, in file order.

        Returns:
            For each group its devices, in JAX's order.

        Raises:
            UserError: A backend is missing, has too few devices, or they are of another platform or kind.
        """
        import jax

        taken: dict[str, int] = {}
        result: dict[str, list[jax.Device]] = {}
        for group in self.groups:
            backend = group.jax_backend
            try:
                found = list(jax.devices(backend))
            except RuntimeError as error:
                raise UserError(
                    f"Group {group.name!r} of cluster {self.name!r} needs JAX backend {backend!r}, which "
                    f"is not available here: {error}"
                ) from None
            start = taken.get(backend, 0)
            mine = found[start : start + group.num_devices]
            taken[backend] = start + group.num_devices
            if len(mine) < group.num_devices:
                self._too_few(group, len(found), start)
            _check_alike(group, mine)
            result[group.name] = mine
        return result

    def _too_few(self, group: Group, num_found: int, num_taken: int) -> None:
        wanted = sum(g.num_devices for g in self.groups if g.jax_backend == group.jax_backend)
        text = (
            f"Group {group.name!r} of cluster {self.name!r} needs {group.num_devices} devices of backend "
            f"{group.jax_backend!r}; {num_found} are attached and {min(num_taken, num_found)} of them "
            "belong to the groups before it."
        )
        if group.jax_backend == "cpu":
            fix = f"Call jax.config.update('jax_num_cpu_devices', {wanted}) before JAX is first used."
        else:
            fix = "Change num_devices in the cluster file, or run where more devices are attached."
        raise UserError(f"{text} {fix}")


def _check_alike(group: Group, found: list[jax.Device]) -> None:
    """One platform, one kind, and the kind that the file says (as far as it can be told)."""
    platforms = {"gpu" if d.platform in ("cuda", "rocm") else d.platform for d in found}
    if platforms != {group.jax_platform}:
        raise UserError(
            f"Group {group.name!r} is of platform {group.jax_platform!r}, and backend "
            f"{group.jax_backend!r} gives devices of platform {', '.join(sorted(platforms))}. Change kind, "
            "platform or backend in the cluster file."
        )
    kinds = sorted({d.device_kind for d in found})
    if len(kinds) > 1:
        raise UserError(
            f"Group {group.name!r} would hold devices of several kinds: {', '.join(kinds)}. A group is of "
            "like devices: make one group of each kind."
        )
    known = devices.recognise(kinds[0], found[0].platform)
    if known is not None and known.name != group.kind:
        raise UserError(
            f"Group {group.name!r} is of kind {group.kind!r} in the cluster file, and the attached devices "
            f"are {kinds[0]!r} (kind {known.name!r}). Correct the kind, so that memory and speed are "
            "planned right."
        )


def _explain(error: pydantic.ValidationError, groups: list[str]) -> str:
    """One sentence for each thing that is wrong, with its key as the file writes it."""
    sentences = []
    for item in error.errors():
        place = [str(p) for p in item["loc"]]
        if len(place) > 1 and place[0] == "groups":
            place[1] = groups[int(place[1])]
        key = ".".join(place)
        if item["type"] == "extra_forbidden":
            model: type[pydantic.BaseModel] = {
                "groups": Group,
                "links": Link,
                "default_link": DefaultLink,
            }.get(place[0], Cluster)
            allowed = [k for k in model.model_fields if not (k == "name" and model is Group)]
            sentences.append(f"unknown key {key!r}. Allowed: {', '.join(allowed)}.")
        elif item["type"] == "missing":
            sentences.append(f"key {key!r} is missing.")
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            sentences.append(f"{key}: {message}" if key else message)
        else:
            sentences.append(f"{key} = {item['input']!r}: {item['msg']}.")
    return " ".join(sentences)
