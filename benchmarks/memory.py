"""Peak memory against the stated bounds: remat `full` against `none`, and 1F1B against GPipe.

Two measurements of each case, in a fresh process:

- buffers: the arrays that are alive at each call of a compiled function, plus what XLA says that the function
  needs beside them (`memory_analysis()`: outputs, less what they take over from donated inputs, and
  temporaries). The largest sum is the peak of a device that runs its tasks in order.
- rss: how far the process's resident memory rises above what it was before the step.

Both count only what comes on top of parameters and optimizer state. The stated bound of a stage:
gradients and copies of parameters that others own + (microbatches in flight, see
`hetjax.plan.in_flight_bounds`) x (what the first forward left) + waiting boundary values + the largest
workspace of a call.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import optax
import typer

import hetjax
from benchmarks import common
from hetjax.memory import Memory
from hetjax.placement import Place
from hetjax.plan import Plan
from hetjax.program import Program

# Large blocks go back to the system when they are freed, so that resident memory follows what is alive.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    num_layers: int = 8
    embed_dim: int = 128
    num_heads: int = 4
    vocab_size: int = 1024
    seq_len: int = 128
    global_batch: int = 32


def main(
    num_layers: Annotated[int, typer.Option(min=1)] = Sizes.num_layers,
    embed_dim: Annotated[int, typer.Option(min=1)] = Sizes.embed_dim,
    num_heads: Annotated[int, typer.Option(min=1)] = Sizes.num_heads,
    vocab_size: Annotated[int, typer.Option(min=2)] = Sizes.vocab_size,
    seq_len: Annotated[int, typer.Option(min=1)] = Sizes.seq_len,
    global_batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = Sizes.global_batch,
    num_microbatches: Annotated[int, typer.Option(min=1, help="Of 1F1B and GPipe.")] = 16,
    remat: Annotated[str, typer.Option(help="Policy under 1F1B and GPipe.")] = "dots",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: only whether it works.")] = False,
    case: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure the peak memory of remat policies and of schedules."""
    sizes = Sizes(num_layers, embed_dim, num_heads, vocab_size, seq_len, global_batch)
    if quick:
        sizes, num_microbatches = Sizes(1, 32, 2, 64, 32, 8), 4
    if case is not None:
        common.finish(measure(sizes, *json.loads(case)))
        return
    common.introduce(
        f"Peak memory of a step beyond parameters and optimizer state, GPT: {sizes}; "
        f"{num_microbatches} microbatches under 1F1B and GPipe"
    )
    cases: dict[str, tuple[int, str, int, str]] = {
        "remat_none": (1, "none", 1, "gpipe"),
        "remat_full": (1, "full", 1, "gpipe"),
        "gpipe": (2, remat, num_microbatches, "gpipe"),
        "1f1b": (2, remat, num_microbatches, "1f1b"),
    }
    if not quick:
        cases["remat_dots"] = (1, "dots", 1, "gpipe")
    figures: dict[str, Any] = {}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(sizes).items()]
    for name, settings in cases.items():
        arguments = [*options, f"--case={json.dumps(settings)}"]
        found = common.in_fresh_process("benchmarks.memory", arguments, ENVIRONMENT)
        for what, value in found.items():
            figures[f"{name}_{what}"] = value
            common.say(f"  {name:>10} {what:<32} {value:10.2f}")
    figures["remat_full_to_none"] = figures["remat_full_buffers_mib"] / figures["remat_none_buffers_mib"]
    figures["1f1b_to_gpipe"] = figures["1f1b_buffers_mib"] / figures["gpipe_buffers_mib"]
    if "gpipe_rss_mib" in figures:
        figures["remat_full_to_none_rss"] = figures["remat_full_rss_mib"] / figures["remat_none_rss_mib"]
        figures["1f1b_to_gpipe_rss"] = figures["1f1b_rss_mib"] / figures["gpipe_rss_mib"]
    figures["within_bounds"] = all(v <= 1 for name, v in figures.items() if name.endswith("of_bound"))
    common.finish(figures)


def measure(
    sizes: Sizes, num_stages: int, remat: str, num_microbatches: int, schedule: str
) -> dict[str, float]:
    """Measure one case in this process.

    Args:
        sizes: Of the model.
        num_stages: On as many CPU devices.
        remat: Policy of every segment.
        num_microbatches: Of a step.
        schedule: `gpipe` or `1f1b`.

    Returns:
        MiB, and shares: `stage0_of_bound` is the stage's measured peak over its stated bound,
        `stage0_of_prediction` over the plan's analytic one.
    """
    common.start_cpu(num_stages)
    model = common.gpt(
        sizes.vocab_size,
        sizes.seq_len,
        num_layers=sizes.num_layers,
        embed_dim=sizes.embed_dim,
        num_heads=sizes.num_heads,
    )
    program, batch = common.trace(model, sizes.global_batch), common.random_batch(model, sizes.global_batch)
    plan = common.plan_by_hand(
        program,
        common.cpu_groups(*[1] * num_stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
        remat=remat,
    )
    trainer = hetjax.Trainer(program, plan, optax.adamw(1e-3))
    state, _ = trainer.step(trainer.init(0), batch)  # compiles
    jax.block_until_ready(state.masters)
    resident = Resident()
    state, _ = trainer.step(state, batch)
    jax.block_until_ready(state.masters)
    found = {"rss_mib": grown / common.MIB} if (grown := resident.grown()) is not None else {}
    watch = Watch(trainer)
    with common.wrapped(trainer, watch.around):
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.masters)
    found["buffers_mib"] = sum(watch.peaks.values()) / common.MIB
    for stage, memory in stated(program, plan).items():
        place = trainer.placement.members[stage, 0]
        peak = watch.peaks[place.index]
        bound = (
            foreign_bytes(trainer, place)
            + memory.accumulator_bytes
            + memory.in_flight * watch.left_by_forward[place.index]
            + memory.waiting_bytes
            + watch.workspace[place.index]
        )
        predicted = memory.total_bytes - memory.master_bytes - memory.optimizer_bytes - memory.copy_bytes
        name = f"stage{stage}"
        found |= {
            f"{name}_buffers_mib": peak / common.MIB,
            f"{name}_microbatch_mib": watch.left_by_forward[place.index] / common.MIB,
            f"{name}_in_flight": memory.in_flight,
            f"{name}_of_bound": peak / bound,
            f"{name}_of_prediction": peak / predicted,
        }
    return found


def stated(program: Program, plan: Plan) -> dict[int, Memory]:
    """What the plan says of each stage's memory; the stages have one member each."""
    return {stage: memory for (stage, _), memory in plan.member_memory(program).items()}


def foreign_bytes(trainer: hetjax.Trainer, place: Place) -> int:
    """Bytes of the parameters that a place reads and another one owns (a tied table): copied once a step."""
    placement = trainer.placement
    foreign = [p for p in placement.reads(True)[place.index] if placement.owner_place[p] is not place]
    specs = [trainer.program.piece_spec(piece) for piece in foreign]
    return sum(spec.size * spec.dtype.itemsize for spec in specs)


class Watch:
    """Finds the peak of each place: arrays alive plus what the function that is called needs beside them.

    Attributes:
        peaks: By place, bytes beyond those alive at the start.
        left_by_forward: By place, bytes that the first microbatch's forward of the stage left alive.
        workspace: By place, the most bytes that a call needed beside its inputs.
    """

    def __init__(self, trainer: hetjax.Trainer) -> None:
        places = trainer.placement.places
        self._start = {p.index: live_bytes(p) for p in places}
        self.peaks = {p.index: 0 for p in places}
        self.left_by_forward = {p.index: 0 for p in places}
        self.workspace = {p.index: 0 for p in places}
        self._units = {r.place.index: len(r.units) for r in trainer.placement.training.values()}
        self._calls = {p.index: 0 for p in places}
        self._before_forward: dict[int, int] = {}
        self._needs: dict[Any, int] = {}

    def around(self, place: Place, function: Any) -> Any:
        """Measure at every call of a compiled function on a place."""

        def call(*args: Any) -> Any:
            before = live_bytes(place)
            needs = self._needed(function, args)
            self.workspace[place.index] = max(self.workspace[place.index], needs)
            self.peaks[place.index] = max(self.peaks[place.index], before + needs - self._start[place.index])
            result = function(*args)
            self._count_forward(place, before)
            return result

        return call

    def _needed(self, function: Any, args: tuple) -> int:
        """Bytes beside the inputs: temporaries, and outputs that take over no donated input."""
        if function not in self._needs:
            analysis = function.lower(*args).compile().memory_analysis()
            outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            self._needs[function] = analysis.temp_size_in_bytes + outputs
        return self._needs[function]

    def _count_forward(self, place: Place, before: int) -> None:
        """The first calls on a place are the first forward, one for each unit."""
        self._calls[place.index] += 1
        self._before_forward.setdefault(place.index, before)
        if self._calls[place.index] == self._units[place.index]:
            self.left_by_forward[place.index] = live_bytes(place) - self._before_forward[place.index]


def live_bytes(place: Place) -> int:
    """Bytes of all arrays on the (single) device of a place."""
    device = place.submesh.mesh.devices.flat[0]
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.device_set == {device})


class Resident:
    """The rise of this process's resident memory; nothing where the system does not tell (Linux does)."""

    def __init__(self) -> None:
        """Begin: give back what is free, and forget the peak so far."""
        self._before: int | None = None
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                return
            self._before = self._read("VmRSS")

    def grown(self) -> int | None:
        """Bytes from the beginning to the highest point since."""
        return None if self._before is None else self._read("VmHWM") - self._before

    @staticmethod
    def _read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


if __name__ == "__main__":
    typer.run(main)
