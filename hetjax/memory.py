"""Bytes per device of a member of a stage: what stays, what each microbatch keeps, what comes and goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hetjax.cluster import Group
from hetjax.cost import SegmentLike
from hetjax.devices import DTYPE_BYTES, Number

ADAM_BYTES_PER_PARAM = 8
"""Two float32 moments; other optimizers keep less."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device of one member of a stage.

    Attributes:
        master_bytes: Float32 parameters, sharded over `fsdp` and `tp`.
        optimizer_bytes: Two float32 moments, sharded alike.
        copy_bytes: Compute-dtype copy, gathered over `fsdp`; 0 where the masters serve.
        accumulator_bytes: Unreduced float32 gradients.
        kept_bytes_per_microbatch: What one microbatch keeps from forward to backward.
        in_flight: How many microbatches do so at once.
        waiting_bytes: Boundary values that have arrived and wait.
        workspace_bytes: Temporaries of the largest segment, or of the reduction at the end of the step.
    """

    master_bytes: Number
    optimizer_bytes: Number
    copy_bytes: Number
    accumulator_bytes: Number
    kept_bytes_per_microbatch: Number
    in_flight: int
    waiting_bytes: Number
    workspace_bytes: Number

    @property
    def static_bytes(self) -> Number:
        """What stays for the whole step."""
        return self.master_bytes + self.optimizer_bytes + self.copy_bytes + self.accumulator_bytes

    @property
    def total_bytes(self) -> Number:
        """Peak, were the member alone on its devices."""
        kept = self.in_flight * self.kept_bytes_per_microbatch
        return self.static_bytes + kept + self.waiting_bytes + self.workspace_bytes


def member_memory(
    segments: Sequence[SegmentLike],
    group: Group,
    *,
    rows: int,
    axes: Mapping[str, int],
    remat: Sequence[str],
    in_flight: int,
    waiting_bytes: Number = 0.0,
) -> Memory:
    """Bytes per device of a member.

    Args:
        segments: Of its stage.
        group: Where it runs.
        rows: Rows of a microbatch that the member handles.
        axes: Sizes of `dp`, `fsdp`, `tp`.
        remat: Policy of each segment.
        in_flight: Microbatches between forward and backward at once.
        waiting_bytes: Boundary values that have arrived before they are used.
    """
    tp, fsdp = axes.get("tp", 1), axes.get("fsdp", 1)
    size = DTYPE_BYTES[group.dtype] / 4
    local_rows = rows / (axes.get("dp", 1) * fsdp)
    params = float(sum(s.param_bytes for s in segments))
    optimizer = sum(s.num_params for s in segments) * ADAM_BYTES_PER_PARAM / (fsdp * tp)
    needs_copy = size < 1 or fsdp > 1
    kept = sum(kept_per_row(s, r) for s, r in zip(segments, remat, strict=True)) * local_rows * size / tp
    temporaries = max((kept_per_row(s, "none") + 2 * s.boundary_bytes_per_row for s in segments), default=0.0)
    return Memory(
        master_bytes=params / (fsdp * tp),
        optimizer_bytes=optimizer,
        copy_bytes=params / tp * size if needs_copy else 0.0,
        accumulator_bytes=params / tp,
        kept_bytes_per_microbatch=kept,
        in_flight=in_flight,
        waiting_bytes=waiting_bytes,
        workspace_bytes=max(temporaries * local_rows * size / tp, params / (fsdp * tp)),
    )


def kept_per_row(segment: SegmentLike, remat: str) -> Number:
    """Bytes per row kept under a policy; one that the program does not list counts as `none`, the most."""
    table = segment.activation_bytes_per_row
    return table.get(remat, table.get("none", 0.0))
