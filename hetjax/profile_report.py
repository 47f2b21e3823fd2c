"""A profile as tables for a person, and the sources of a plan's figures in words."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from hetjax.cluster import Cluster
from hetjax.cost import ProgramLike
from hetjax.profile import Profile, ProfiledCosts

WIDTH = 120
"""Columns that the tables need."""

NUM_CURVE_POINTS = 3
"""Points of a link's curve that its row shows."""


def show(console: Console, profile: Profile, names: Mapping[str, str] | None = None) -> None:
    """Print both tables, whole even where the terminal is narrow."""
    wide = Console(file=console.file, width=max(console.width, WIDTH))
    for table in (segment_table(profile, names), link_table(profile)):
        if table.row_count:
            wide.print(table)


def segment_table(profile: Profile, names: Mapping[str, str] | None = None) -> Table:
    """One row for each class, kind, policy and row count; the numbers of the sources stand below.

    Args:
        profile: What to show.
        names: By segment class, a name that a person knows it by.
    """
    table = Table(title="Segments", title_justify="left", caption_justify="left", box=None)
    for name in ("segment", "kind", "dtype", "remat"):
        table.add_column(name)
    for name in ("tp", "rows", "forward ms", "backward ms", "peak MiB", "update ms"):
        table.add_column(name, justify="right")
    table.add_column("source", justify="right")
    sources = _Sources()
    for entry in profile.entries:
        label = (names or {}).get(entry.segment_class, entry.segment_class)
        for i, point in enumerate(entry.points):
            first = i == 0
            peak = "" if point.peak_bytes is None else f"{point.peak_bytes / 2**20:,.1f}"
            update = "" if entry.update_s is None or not first else f"{entry.update_s * 1e3:.3f}"
            table.add_row(
                label if first else "",
                entry.kind if first else "",
                entry.dtype if first else "",
                entry.remat if first else "",
                str(entry.tp) if first else "",
                str(point.rows),
                f"{point.forward_s * 1e3:.3f}",
                f"{point.backward_s * 1e3:.3f}",
                peak,
                update,
                sources.number(entry.source) if first else "",
            )
    table.caption = sources.text()
    return table


def link_table(profile: Profile) -> Table:
    """One row a link, with some points of its curve."""
    table = Table(title="Links", title_justify="left", caption_justify="left", box=None)
    for name in ("between", "scope"):
        table.add_column(name)
    for name in ("devices", "GB/s", "latency us"):
        table.add_column(name, justify="right")
    table.add_column("GB/s by message")
    table.add_column("source", justify="right")
    sources = _Sources()
    for link in profile.links:
        step = max((len(link.curve) - 1) // (NUM_CURVE_POINTS - 1), 1)
        some = [f"{_size(size)}: {rate:.3g}" for size, rate in link.curve[::-step][::-1]]
        table.add_row(
            " - ".join(link.groups or link.kinds),
            link.scope,
            str(link.num_devices),
            f"{link.bandwidth_gb_per_s:.3g}",
            f"{link.latency_us:.0f}",
            ", ".join(some[-NUM_CURVE_POINTS:]),
            sources.number(link.source),
        )
    table.caption = sources.text()
    return table


class _Sources:
    """Numbers for the sources of a table's rows."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def number(self, source: str) -> str:
        return self.numbers.setdefault(source, str(len(self.numbers) + 1))

    def text(self) -> str:
        return "\n".join(f"{number}: {source}" for source, number in self.numbers.items())


def _size(num_bytes: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def source_lines(program: ProgramLike, cluster: Cluster, costs: ProfiledCosts) -> list[str]:
    """For each group, where the times of the program's segments come from."""
    lines, segments = [], program.segments()
    for group in cluster.groups:
        counts: dict[str, int] = {}
        for segment in segments:
            source = costs.source(segment, group)
            counts[source] = counts.get(source, 0) + 1
        told = "; ".join(f"{count} of {len(segments)} segments {source}" for source, count in counts.items())
        lines.append(f"times on {group.name}: {told}")
    return lines
