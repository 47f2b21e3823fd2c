"""A program made of numbers whose segments form a chain, for planner and simulator."""

from __future__ import annotations

import dataclasses

from hetjax.program import Edge, SegmentInfo


@dataclasses.dataclass(frozen=True)
class ChainProgram:
    """Segments in a row; a `ProgramLike`.

    Attributes:
        parts: The segments, in model order.
        global_batch: Rows of one step.
        fingerprint: Of the structure.
        moves: Whether boundary values cost time on the links; False where the costs of the tasks hold it.
        rows_mode: As in `ProgramLike`.
        tied: As in `ProgramLike`: nothing.
    """

    parts: tuple[SegmentInfo, ...]
    global_batch: int
    fingerprint: str = "chain"
    moves: bool = True
    rows_mode: str = "split"
    tied: tuple[tuple[int, int, float], ...] = ()

    @property
    def num_segments(self) -> int:
        """How many."""
        return len(self.parts)

    def segments(self) -> list[SegmentInfo]:
        """In model order."""
        return list(self.parts)

    def edges(self) -> list[Edge]:
        """From each segment to the next."""
        return [
            Edge(s.index, s.index + 1, s.boundary_bytes_per_row if self.moves else 0.0)
            for s in self.parts[:-1]
        ]
