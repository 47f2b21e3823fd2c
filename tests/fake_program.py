"""A program as the pure modules see it, made of numbers."""

import dataclasses

from hetjax.program import Edge
from hetjax.program import SegmentInfo as Segment


@dataclasses.dataclass(frozen=True)
class FakeProgram:
    parts: tuple[Segment, ...]
    links: tuple[Edge, ...]
    global_batch: int = 32
    fingerprint: str = "fake"
    rows_mode: str = "split"
    tied: tuple[tuple[int, int, float], ...] = ()

    @property
    def num_segments(self) -> int:
        return len(self.parts)

    def segments(self) -> list[Segment]:
        return list(self.parts)

    def edges(self) -> list[Edge]:
        return list(self.links)


def segment(index: int, params: int, flops: float, boundary: float, activation: float) -> Segment:
    kept = {"none": activation, "dots": activation / 4, "full": boundary}
    return Segment(index, f"s{index}", "block", params, 4 * params, flops, boundary, kept)


def llama(
    num_layers: int = 8,
    hidden: int = 1024,
    seq: int = 512,
    vocab: int = 32000,
    *,
    global_batch: int = 32,
    **more,
) -> FakeProgram:
    """Embedding, `num_layers` blocks, head: sizes in the way of a Llama, float32 bytes."""
    params = 12 * hidden * hidden
    boundary = 4.0 * seq * hidden
    flops = 2.0 * params * seq + 4.0 * seq * seq * hidden
    activation = 34 * boundary / 2 + 4.0 * seq * seq * 16
    parts = [segment(0, vocab * hidden, 0.0, boundary, boundary)]
    parts += [segment(1 + i, params, flops, boundary, activation) for i in range(num_layers)]
    parts.append(
        segment(num_layers + 1, vocab * hidden, 2.0 * vocab * hidden * seq, 8.0, 4.0 * seq * vocab * 2)
    )
    edges = [Edge(i, i + 1, boundary) for i in range(num_layers + 1)]
    return FakeProgram(tuple(parts), tuple(edges), global_batch=global_batch, **more)
