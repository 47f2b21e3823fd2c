"""What is attached to this machine, how fast it is, and what is off about it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetjax.cluster import GIB, Cluster
from hetjax.errors import UserError

if TYPE_CHECKING:
    import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
_MATMUL_SIZE = {"cpu": 768}
_ACCELERATOR_MATMUL_SIZE = 4096
_PUT_BYTES = 16 << 20
_NUM_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """What was found of one group.

    Attributes:
        name: Of the group.
        kind: Device kind as JAX reports it.
        num_devices: How many.
        memory_gib: Per device as the allocator reports it; on CPU that of the machine, shared by all.
        dtype: Compute dtype of the group.
        tflops: Measured matmul TFLOP/s per device, every device of the cluster busy; None if not measured.
    """

    name: str
    kind: str
    num_devices: int
    memory_gib: float | None
    dtype: str
    tflops: float | None


@dataclasses.dataclass(frozen=True)
class LinkReport:
    """A measured copy between two devices.

    Attributes:
        source: Group and device index.
        target: Group and device index.
        bandwidth_gb_per_s: GB/s of `jax.device_put`.
    """

    source: str
    target: str
    bandwidth_gb_per_s: float


@dataclasses.dataclass(frozen=True)
class Report:
    """All that `examine` found.

    Attributes:
        versions: Of Python and the packages.
        groups: Of the cluster file, or one a device kind.
        links: Measured copies.
        advice: Sentences, each with what to do; empty if nothing is off.
    """

    versions: Mapping[str, str]
    groups: Sequence[GroupReport]
    links: Sequence[LinkReport]
    advice: Sequence[str]


def examine(cluster: Cluster | None = None) -> Report:
    """Look at versions, devices, speeds and surroundings.

    Args:
        cluster: Whose groups to look for; None looks at what is attached.

    Returns:
        The report. A cluster that does not fit what is attached is advice, not an error.
    """
    advice = [*surroundings()]
    if cluster is None:
        cluster = Cluster.detect()
    try:
        attached = cluster.attach()
    except UserError as error:
        advice.insert(0, str(error))
        attached = {}
    speeds = measure_tflops(cluster, attached)
    groups = [
        GroupReport(
            name=group.name,
            kind=attached[group.name][0].device_kind,
            num_devices=len(attached[group.name]),
            memory_gib=_memory_gib(attached[group.name][0]),
            dtype=group.dtype,
            tflops=speeds.get(group.name),
        )
        for group in cluster.groups
        if group.name in attached
    ]
    advice += _about_groups(cluster, attached)
    return Report(versions=versions(), groups=groups, links=measure_links(attached), advice=advice)


def versions() -> dict[str, str]:
    """Give the versions of Python and of the packages that matter; "missing" where one is not installed."""
    found = {"python": platform.python_version()}
    for name in ("hetjax", *_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def measure_tflops(cluster: Cluster, attached: Mapping[str, Sequence[jax.Device]]) -> dict[str, float]:
    """Measure a matmul in each group's compute dtype, with all devices busy at once, as in training.

    CPU devices share the machine's cores, so that measuring one alone would promise all cores to each.

    Args:
        cluster: Says in which dtype a group computes.
        attached: Devices by group, as `Cluster.attach` gives them.

    Returns:
        TFLOP/s per device by group. Takes about a second.
    """
    import jax
    import jax.numpy as jnp

    work: list[tuple[str, Any, float]] = []
    multiply = jax.jit(lambda a: a @ a / a.shape[0])
    for name, devices in attached.items():
        group = cluster.group(name)
        size = _MATMUL_SIZE.get(group.jax_platform, _ACCELERATOR_MATMUL_SIZE)
        for device in devices:
            with jax.default_device(device):
                array = jax.device_put(jnp.ones((size, size), group.dtype), device)
            work.append((name, array, 2.0 * size**3))
    for _, array, _ in work:
        jax.block_until_ready(multiply(array))
    times: dict[str, list[float]] = {name: [] for name in attached}
    for _ in range(_NUM_ROUNDS if work else 0):
        begun = time.perf_counter()
        running = [(name, multiply(array)) for name, array, _ in work]
        for name, result in running:
            jax.block_until_ready(result)
            times[name].append(time.perf_counter() - begun)
    if work and {cluster.group(name).jax_platform for name in attached} == {"cpu"}:
        # one pool of cores serves them all in no fair order: the last to end tells the share of each
        longest = [max(t) for t in zip(*(_rounds(t) for t in times.values()), strict=True)]
        times = {name: longest for name in attached}
    flops = {name: amount for name, _, amount in work}
    return {name: flops[name] / statistics.median(_rounds(t)) / 1e12 for name, t in times.items()}


def _rounds(times: Sequence[float]) -> list[float]:
    """Give the time at which a group's last device ended, for each round."""
    per_round = len(times) // _NUM_ROUNDS
    return [max(times[i : i + per_round]) for i in range(0, len(times), per_round)]


def measure_links(attached: Mapping[str, Sequence[jax.Device]]) -> list[LinkReport]:
    """Measure `jax.device_put` between the first two devices of each group and between the first of any two.

    Args:
        attached: Devices by group.
    """
    pairs = [
        ((name, 0, devices[0]), (name, 1, devices[1]))
        for name, devices in attached.items()
        if len(devices) > 1
    ]
    firsts = [(name, 0, devices[0]) for name, devices in attached.items()]
    pairs += [(a, b) for a in firsts for b in firsts if a is not b]
    return [
        LinkReport(f"{a[0]}[{a[1]}]", f"{b[0]}[{b[1]}]", _put_bandwidth(a[2], b[2]) / 1e9) for a, b in pairs
    ]


def _put_bandwidth(source: jax.Device, target: jax.Device) -> float:
    import jax
    import jax.numpy as jnp

    array = jax.block_until_ready(jax.device_put(jnp.ones(_PUT_BYTES // 4, jnp.float32), source))
    times = []
    for _ in range(_NUM_ROUNDS + 1):
        begun = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, target))
        times.append(time.perf_counter() - begun)
    return _PUT_BYTES / min(times[1:])


def machine_memory_gib() -> float:
    """The memory of this machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _memory_gib(device: jax.Device) -> float | None:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit / GIB
    if device.platform == "cpu":
        return machine_memory_gib()
    return None


def _about_groups(cluster: Cluster, attached: Mapping[str, Sequence[jax.Device]]) -> list[str]:
    advice = []
    num_cpu = sum(len(d) for name, d in attached.items() if cluster.group(name).jax_platform == "cpu")
    if num_cpu > num_cores():
        advice.append(
            f"{num_cpu} CPU devices share {num_cores()} cores: right for trying a plan out, but the times "
            "say nothing about real devices."
        )
    for name, devices in attached.items():
        limit, planned = _memory_gib(devices[0]), cluster.group(name).memory_gib
        if planned and limit and planned > limit:
            advice.append(
                f"Group {name!r} may use memory_gib = {planned:g} per device by the cluster file, and "
                f"{limit:.1f} GiB can be had. Lower memory_gib, so that no plan is made that does not fit."
            )
    return advice


def surroundings() -> list[str]:
    """Give advice on this process's surroundings: versions, settings, other processes."""
    import jax

    advice = []
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        advice.append(f"Python {platform.python_version()} is untried. Use 3.11, 3.12 or 3.13.")
    numbers = tuple(int(n) for n in jax.__version__.split(".")[:2])
    if not (0, 10) <= numbers < (0, 13):
        advice.append(f"jax {jax.__version__} is untried. Install jax>=0.10,<0.13.")
    backend = jax.default_backend()
    if backend == "cpu" and shutil.which("nvidia-smi"):
        advice.append(
            "There is an NVIDIA driver, and JAX sees no GPU. Install the plugin: pip install 'jax[cuda12]' "
            "(or cuda13, as nvidia-smi says), and unset JAX_PLATFORMS."
        )
    kinds = {d.device_kind for d in jax.devices()}
    if backend != "cpu" and len(kinds) > 1:
        advice.append(
            f"One process sees devices of several kinds ({', '.join(sorted(kinds))}), which JAX does not "
            "handle reliably. Hide all but one kind with CUDA_VISIBLE_DEVICES."
        )
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        advice.append(
            "XLA_FLAGS sets the number of CPU devices, which hetjax sets from the cluster file. Remove "
            "--xla_force_host_platform_device_count from XLA_FLAGS."
        )
    busy = busy_cores()
    if busy is not None and busy > 0.5:
        advice.append(
            f"Other processes keep about {busy:.1f} of {num_cores()} cores busy: measured times will be too "
            "long. Stop them, or measure again later."
        )
    return advice


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_cores(seconds: float = 0.25) -> float | None:
    """Measure how many cores other processes keep busy, over `seconds`; None where /proc/stat is missing."""
    if not Path("/proc/stat").exists():
        return None

    def ticks() -> tuple[float, float]:
        fields = [float(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all, and idle or waiting for a disk

    total, idle = ticks()
    own = time.process_time()
    time.sleep(seconds)
    own = time.process_time() - own
    later_total, later_idle = ticks()
    if later_total <= total:
        return None
    share = 1 - (later_idle - idle) / (later_total - total)
    return max(share * (os.cpu_count() or 1) - own / seconds, 0.0)


def report_lines(report: Report) -> list[str]:
    """Write the report as lines of text."""
    lines = ["Versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items()), ""]
    for g in report.groups:
        memory = "" if g.memory_gib is None else f", {g.memory_gib:.1f} GiB"
        speed = "" if g.tflops is None else f", {g.tflops:.3g} TFLOP/s each in {g.dtype} (measured matmul)"
        count = f"{g.num_devices} device" + ("s" if g.num_devices > 1 else "")
        lines.append(f"Group {g.name}: {count} of kind {g.kind}{memory}{speed}")
    if report.links:
        lines += ["", "Copies with device_put, measured:"]
        width = max(len(f"{link.source} -> {link.target}") for link in report.links)
        for link in report.links:
            lines.append(
                f"  {f'{link.source} -> {link.target}':<{width}}  {link.bandwidth_gb_per_s:.2f} GB/s"
            )
    lines += ["", "Advice:" if report.advice else "Nothing is off."]
    return lines + [f"  - {sentence}" for sentence in report.advice]
