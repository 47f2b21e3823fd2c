"""Analytic time and memory of segments on a device kind.

What a program says of itself (FLOPs and bytes per row, counted for float32) times what the catalogue says of
a kind. A profile answers the same questions from measurements: anything with the methods of `Costs` takes its
place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from hetjax import collectives
from hetjax.cluster import Group
from hetjax.devices import DTYPE_BYTES, Number

BACKWARD_PER_FORWARD = 2.0
"""FLOPs of the backward per FLOP of the forward: one product each for inputs and weights."""

RECOMPUTE_PER_FORWARD = {"none": 0.0, "dots": 0.05, "full": 1.0, "offloaded": 1.0}
"""Share of the forward that the backward repeats, by remat policy; other policies count as `dots`.

`dots` repeats elementwise work only: four GPT blocks ran as fast with it as with one big jit (CPU, jax 0.10).
"""

DISPATCH_S = 20e-6
"""Host time of one executable on one device (5 to 32 us on CPU, jax 0.10)."""

DISPATCH_CPU_MESH_S = 260e-6
"""The same on a mesh of several CPU devices."""

BANDWIDTH_SHARE = 0.8
"""Achieved share of a device's memory bandwidth."""

KEPT_TRAFFIC = 2
"""Each value that is kept for the backward is written once and read once by what follows, in each pass; the
backward does as much for values and again for their cotangents."""

GRADIENT_TRAFFIC = 4
"""Bytes moved per float32 byte of parameters in each backward: the gradient is written and read, the sum over
microbatches read and written."""

UPDATE_TRAFFIC = 7
"""Bytes moved per float32 byte of parameters by the update: parameter and two moments read and written, the
gradient read."""

TP_REDUCTIONS = 2
"""All-reduces of the boundary over `tp` in each pass: after attention and after the MLP."""


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
    """`Costs` from FLOPs, bytes and the catalogue: a roofline with an achieved efficiency.

    - Products run at the group's achieved TFLOP/s, at every size. On top comes the memory traffic: of values
      (elementwise work), of the weights in each pass, of gradients that are added up. So little work per
      weight, narrow matrices and few rows reach a smaller share of the peak.
    - Rows of a device: those of the member over `dp`, `fsdp` and `ep`, rounded up.
    - A weight is read where it is used; of a table of embeddings that is the rows that are looked up, but its
      gradient and its update touch all of it.
    - `tp` and `ep` share out parameters and work; `tp` reduces boundary values, `ep` sends them to the
      experts and back.
    """

    def forward_s(self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int]) -> Number:
        """Forward of `rows` rows (of the whole member)."""
        return self._pass_s(segment, group, rows, axes) + _dispatch_s(group, axes)

    def backward_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """Backward of `rows` rows, what the remat policy repeats included."""
        work = self._pass_s(segment, group, rows, axes, backward=True)
        return work + self.recompute_s(segment, group, rows, axes, remat) + _dispatch_s(group, axes)

    def recompute_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """The part of the backward that repeats the forward."""
        share = RECOMPUTE_PER_FORWARD.get(remat, RECOMPUTE_PER_FORWARD["dots"])
        return share * self._pass_s(segment, group, rows, axes) if share else 0.0

    def gather_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Make the compute copy of parameters from their master shards, once a step."""
        mine = param_bytes / (axes.get("tp", 1) * axes.get("ep", 1))
        copied = mine * DTYPE_BYTES[group.dtype] / 4
        read = mine / axes.get("fsdp", 1)
        cast = 0.0 if group.dtype == "float32" else (read + copied) / _memory_rate(group)
        return cast + collectives.all_gather_s(copied, group, axes, "fsdp")

    def reduce_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Reduce the gradients over `dp` and `fsdp`, once a step."""
        mine = param_bytes / (axes.get("tp", 1) * axes.get("ep", 1))
        scatter = collectives.reduce_scatter_s(mine, group, axes, "fsdp")
        return scatter + collectives.all_reduce_s(mine / axes.get("fsdp", 1), group, axes, "dp")

    def update_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Optimizer update, once a step: as long as its bytes take through memory."""
        shard = param_bytes / (axes.get("tp", 1) * axes.get("ep", 1) * axes.get("fsdp", 1))
        return UPDATE_TRAFFIC * shard / _memory_rate(group) + _dispatch_s(group, axes)

    def offload_s(self, num_bytes: Number, group: Group) -> Number:
        """Copy `num_bytes` of one device to its host's memory, or back."""
        if not num_bytes:
            return 0.0
        return num_bytes / (group.device_kind.host_bandwidth_gb_per_s * 1e9) + DISPATCH_S

    def limit_s(self, segment: SegmentLike, group: Group, rows: Number) -> Number:
        """No plan does forward and backward of `rows` rows faster on ALL devices of the group.

        The work that follows the rows, on all devices evenly; without weights, gradients and collectives.
        """
        passes = 1 + BACKWARD_PER_FORWARD
        flops = segment.forward_flops_per_row / (group.achieved_tflops * 1e12)
        traffic = _kept_traffic(segment) + segment.boundary_bytes_per_row
        memory = traffic * DTYPE_BYTES[group.dtype] / 4 / _memory_rate(group)
        return passes * (flops + memory) * rows / group.num_devices

    def source(self, segment: SegmentLike, group: Group) -> str:
        """Where the times of a segment come from."""
        if group.tflops:
            return "analytic, with the cluster file's tflops"
        return f"analytic, {group.device_kind.achieved_source(group.dtype)}"

    def _pass_s(
        self,
        segment: SegmentLike,
        group: Group,
        rows: int,
        axes: Mapping[str, int],
        *,
        backward: bool = False,
    ) -> Number:
        """One pass of one segment: arithmetic, memory traffic, and the collectives of `tp` and `ep`."""
        tp, ep = axes.get("tp", 1), axes.get("ep", 1)
        local_rows = math.ceil(rows / (axes.get("dp", 1) * axes.get("fsdp", 1) * ep))
        size = DTYPE_BYTES[group.dtype] / 4
        passes = BACKWARD_PER_FORWARD if backward else 1.0
        flops = passes * segment.forward_flops_per_row * local_rows / tp
        values = passes * local_rows * (_kept_traffic(segment) / tp + segment.boundary_bytes_per_row)
        # No more weights than multiplications and values looked up: of an embedding, the rows in use.
        used = local_rows * (2 * segment.forward_flops_per_row + segment.boundary_bytes_per_row)
        traffic = size * (values + min(segment.param_bytes / ep, used) / tp)
        if backward:
            traffic += GRADIENT_TRAFFIC * segment.param_bytes / (tp * ep)
        seconds = flops / (group.achieved_tflops * 1e12) + traffic / _memory_rate(group)
        boundary = segment.boundary_bytes_per_row * local_rows * size
        if tp > 1:
            seconds += TP_REDUCTIONS * collectives.all_reduce_s(boundary, group, axes, "tp")
        if ep > 1:
            seconds += 2 * collectives.all_to_all_s(boundary, group, axes, "ep")
        return seconds


def alike(segment: SegmentLike) -> tuple[object, ...]:
    """Segments with the same key cost the same; programs made by hand may call unlike ones a class."""
    return (
        segment.segment_class,
        segment.num_params,
        segment.forward_flops_per_row,
        segment.boundary_bytes_per_row,
    )


class RememberedCosts:
    """Other `Costs`, each question asked once: a search asks the same for thousands of plans.

    Args:
        costs: Where answers come from; for one cluster, whose groups have names of their own.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.limit_s, self.source, self.offload_s = costs.limit_s, costs.source, costs.offload_s
        self._known: dict[tuple[object, ...], Number] = {}

    def forward_s(self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int]) -> Number:
        """Forward of `rows` rows (of the whole member)."""
        key = "F", alike(segment), group.name, rows, *axes.items()
        if key not in self._known:
            self._known[key] = self.costs.forward_s(segment, group, rows, axes)
        return self._known[key]

    def backward_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """Backward of `rows` rows, what the remat policy repeats included."""
        key = "B", alike(segment), group.name, rows, remat, *axes.items()
        if key not in self._known:
            self._known[key] = self.costs.backward_s(segment, group, rows, axes, remat)
        return self._known[key]

    def recompute_s(
        self, segment: SegmentLike, group: Group, rows: int, axes: Mapping[str, int], remat: str
    ) -> Number:
        """The part of the backward that repeats the forward."""
        key = "recompute", alike(segment), group.name, rows, remat, *axes.items()
        if key not in self._known:
            self._known[key] = self.costs.recompute_s(segment, group, rows, axes, remat)
        return self._known[key]

    def gather_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Make the compute copy of parameters from their master shards, once a step."""
        key = "G", param_bytes, group.name, *axes.items()
        if key not in self._known:
            self._known[key] = self.costs.gather_s(param_bytes, group, axes)
        return self._known[key]

    def reduce_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Reduce the gradients over `dp` and `fsdp`, once a step."""
        key = "R", param_bytes, group.name, *axes.items()
        if key not in self._known:
            self._known[key] = self.costs.reduce_s(param_bytes, group, axes)
        return self._known[key]

    def update_s(self, param_bytes: Number, group: Group, axes: Mapping[str, int]) -> Number:
        """Optimizer update, once a step."""
        key = "U", param_bytes, group.name, *axes.items()
        if key not in self._known:
            self._known[key] = self.costs.update_s(param_bytes, group, axes)
        return self._known[key]


def _kept_traffic(segment: SegmentLike) -> Number:
    """Float32 bytes moved per row and pass for the values that a segment computes."""
    return KEPT_TRAFFIC * segment.activation_bytes_per_row.get("none", 0.0)


def _memory_rate(group: Group) -> Number:
    """Bytes a second of one device's memory."""
    return group.device_kind.memory_bandwidth_gb_per_s * 1e9 * BANDWIDTH_SHARE


def _dispatch_s(group: Group, axes: Mapping[str, int]) -> Number:
    several = math.prod(axes.values()) > 1
    return DISPATCH_CPU_MESH_S if several and group.jax_platform == "cpu" else DISPATCH_S
