"""Analytic time and memory of segments on a device kind.

What a program says of itself (FLOPs and bytes per row, counted for float32) times what the catalogue says of
a kind. A profile answers the same questions from measurements: anything with the methods of `Costs` takes its
place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from hetjax.cluster import Group
from hetjax.devices import DTYPE_BYTES, Number

BACKWARD_PER_FORWARD = 2.0
"""FLOPs of the backward per FLOP of the forward: one product each for inputs and weights."""

RECOMPUTE_PER_FORWARD = {"none": 0.0, "dots": 0.05, "full": 1.0}
"""Share of the forward that the backward repeats, by remat policy; other policies count as `dots`.

`dots` repeats elementwise work only: four GPT blocks ran as fast with it as with one big jit (CPU, jax 0.10).
"""

DISPATCH_S = 20e-6
"""Host time of one executable on one device (5 to 32 us on CPU, jax 0.10)."""

DISPATCH_CPU_MESH_S = 260e-6
"""The same on a mesh of several CPU devices."""

BANDWIDTH_SHARE = 0.8
"""Achieved share of a device's memory bandwidth, and of an interconnect's, in large transfers."""


@runtime_checkable
class SegmentLike(Protocol):
    """What is known of a segment; all bytes are of float32 values.

    Attributes:
        index: Position in model order.
        name: For a person.
        segment_class: Segments of one class have the same structure.
        num_params: Parameters that it reads.
        param_bytes: Their float32 bytes.
        forward_flops_per_row: FLOPs of the forward, per row of the microbatch.
        boundary_bytes_per_row: Bytes that leave it forward.
        activation_bytes_per_row: Bytes kept from forward to backward, by remat policy.
    """

    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def segment_class(self) -> str: ...  # noqa: D102
    @property
    def num_params(self) -> int: ...  # noqa: D102
    @property
    def param_bytes(self) -> int: ...  # noqa: D102
    @property
    def forward_flops_per_row(self) -> Number: ...  # noqa: D102
    @property
    def boundary_bytes_per_row(self) -> Number: ...  # noqa: D102
    @property
    def activation_bytes_per_row(self) -> Mapping[str, Number]: ...  # noqa: D102


@runtime_checkable
class EdgeLike(Protocol):
    """A value that one segment makes and another reads.

    Attributes:
        producer: Segment that makes it.
        consumer: Segment that reads it.
        bytes_per_row: Its size, float32, per row of the microbatch.
    """

    @property
    def producer(self) -> int: ...  # noqa: D102
    @property
    def consumer(self) -> int: ...  # noqa: D102
    @property
    def bytes_per_row(self) -> Number: ...  # noqa: D102


@runtime_checkable
class ProgramLike(Protocol):
    """A program as the pure modules see it.

    Attributes:
        num_segments: How many.
        fingerprint: Of its structure.
        global_batch: Rows of one step.
        rows_mode: `split`, or `whole` where rows cannot be split.
        tied: (owner, reader, bytes) for each parameter that several segments read.
    """

    @property
    def num_segments(self) -> int: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def global_batch(self) -> int: ...  # noqa: D102
    @property
    def rows_mode(self) -> str: ...  # noqa: D102
    @property
    def tied(self) -> Sequence[tuple[int, int, Number]]: ...  # noqa: D102

    def segments(self) -> Sequence[SegmentLike]:
        """In model order."""
        ...

    def edges(self) -> Sequence[EdgeLike]:
        """Everything that crosses a cut, skip connections too."""
        ...


@runtime_checkable
class Costs(Protocol):
    """What planner and simulator ask; answers in seconds on one member, all its devices working."""

    def forward_s(self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int]) -> Number:
        """Forward of `rows` rows (of the whole member)."""
        ...

    def backward_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """Backward of `rows` rows, what the remat policy repeats included."""
        ...

    def recompute_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """The part of the backward that repeats the forward."""
        ...

    def gather_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Make the compute copy of parameters from their master shards, once a step."""
        ...

    def reduce_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Reduce the gradients over `dp` and `fsdp`, once a step."""
        ...

    def update_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Optimizer update, once a step."""
        ...

    def offload_s(self, num_bytes: Number, group: Group) -> Number:
        """Copy `num_bytes` of one device to its host's memory, or back."""
        ...

    def limit_s(self, segment: SegmentLike, group: Group, rows: Number) -> Number:
        """No plan does forward and backward of `rows` rows faster on ALL devices of the group."""
        ...

    def source(self, segment: SegmentLike, group: Group) -> str:
        """Where the times of a segment come from, beginning with `measured`, `imported` or `analytic`."""
        ...


@dataclasses.dataclass(frozen=True)
class AnalyticCosts:
    """`Costs` from FLOPs, bytes and the catalogue: a roofline with an achieved efficiency."""

    def forward_s(self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int]) -> Number:
        """Forward of `rows` rows (of the whole member)."""
        return self._compute_s(segment, group, rows, axes, 1.0, 1.0) + _dispatch_s(group, axes)

    def backward_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """Backward of `rows` rows, what the remat policy repeats included."""
        work = self._compute_s(segment, group, rows, axes, BACKWARD_PER_FORWARD, 2.0)
        return work + self.recompute_s(segment, group, rows, axes, remat) + _dispatch_s(group, axes)

    def recompute_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """The part of the backward that repeats the forward."""
        share = RECOMPUTE_PER_FORWARD.get(remat, RECOMPUTE_PER_FORWARD["dots"])
        return share * self._compute_s(segment, group, rows, axes, 1.0, 1.0)

    def gather_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Make the compute copy of parameters from their master shards, once a step."""
        tp, fsdp = axes.get("tp", 1), axes.get("fsdp", 1)
        copied = param_bytes / tp * DTYPE_BYTES[group.dtype] / 4
        cast = 0.0 if group.dtype == "float32" else (param_bytes / (tp * fsdp) + copied) / _memory_rate(group)
        return cast + _ring_s(copied, group, axes, "fsdp", times=1)

    def reduce_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Reduce the gradients over `dp` and `fsdp`, once a step."""
        shard = param_bytes / axes.get("tp", 1)
        scatter = _ring_s(shard, group, axes, "fsdp", times=1)
        return scatter + _ring_s(shard / axes.get("fsdp", 1), group, axes, "dp", times=2)

    def update_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Optimizer update, once a step: reads and writes parameters and moments, reads the gradient."""
        shard = param_bytes / (axes.get("tp", 1) * axes.get("fsdp", 1))
        return 7 * shard / _memory_rate(group) + _dispatch_s(group, axes)

    def offload_s(self, num_bytes: Number, group: Group) -> Number:
        """Copy `num_bytes` of one device to its host's memory, or back."""
        if not num_bytes:
            return 0.0
        return num_bytes / (group.device_kind.host_bandwidth_gb_per_s * 1e9) + DISPATCH_S

    def source(self, segment: SegmentLike, group: Group) -> str:
        """Where the times of a segment come from."""
        if group.tflops:
            return "analytic, with the cluster file's tflops"
        return f"analytic, {group.device_kind.achieved_source}"

    def limit_s(self, segment: SegmentLike, group: Group, rows: Number) -> Number:
        """No plan does forward and backward of `rows` rows faster on ALL devices of the group."""
        flops = segment.forward_flops_per_row * rows * (1 + BACKWARD_PER_FORWARD)
        return flops / (group.achieved_tflops * 1e12 * group.num_devices)

    def _compute_s(
        self,
        segment: SegmentLike,
        group: Group,
        rows: int,
        axes: Mapping[str, int],
        flops_per_forward: Number,
        passes: Number,
    ) -> Number:
        """Roofline of one segment: the slower of arithmetic and memory, plus the collectives of `tp`."""
        tp = axes.get("tp", 1)
        local_rows = rows / (axes.get("dp", 1) * axes.get("fsdp", 1))
        size = DTYPE_BYTES[group.dtype] / 4
        flops = segment.forward_flops_per_row * local_rows / tp * flops_per_forward
        touched = segment.param_bytes / tp + local_rows * (
            segment.activation_bytes_per_row.get("none", 0.0) / tp + segment.boundary_bytes_per_row
        )
        compute = flops / (group.achieved_tflops * 1e12)
        memory = passes * touched * size / _memory_rate(group)
        # Two all-reduces of the boundary a pass: after attention and after the MLP.
        boundary = segment.boundary_bytes_per_row * local_rows * size
        return max(compute, memory) + 2 * passes * _ring_s(boundary, group, axes, "tp", times=2)


def _memory_rate(group: Group) -> Number:
    """Bytes a second of one device's memory."""
    return group.device_kind.memory_bandwidth_gb_per_s * 1e9 * BANDWIDTH_SHARE


def _dispatch_s(group: Group, axes: Mapping[str, int]) -> Number:
    several = axes.get("dp", 1) * axes.get("fsdp", 1) * axes.get("tp", 1) > 1
    return DISPATCH_CPU_MESH_S if several and group.jax_platform == "cpu" else DISPATCH_S


def _ring_s(num_bytes: Number, group: Group, axes: Mapping[str, int], axis: str, *, times: int) -> Number:
    """A ring over one axis that passes the whole array `times` times (2 for an all-reduce)."""
    size = axes.get(axis, 1)
    if size <= 1:
        return 0.0
    inner = {"tp": 1, "fsdp": axes.get("tp", 1), "dp": axes.get("tp", 1) * axes.get("fsdp", 1)}[axis]
    link = group.inner_link(size * inner)
    per_pass = (size - 1) / size * num_bytes / (link.bandwidth_gb_per_s * 1e9 * BANDWIDTH_SHARE)
    return times * (per_pass + (size - 1) * link.latency_us * 1e-6)
