"""Where a run writes to: a directory of its own, told apart from those that hold a run already."""

from __future__ import annotations

from pathlib import Path

from hetjax import train
from hetjax.checkpoint import finished_steps
from hetjax.errors import UserError

RUNS = Path("runs")
JOB_FILE = "job.json"


def choose_out_dir(out: Path | None, name: str, *, resume: bool) -> Path:
    """Decide where a run writes to, without creating anything.

    Raises:
        UserError: It holds a run already and `--resume` is missing, or there is none to resume.
    """
    taken = _runs_of(name)
    if resume:
        chosen = out or (taken[max(taken)] if taken else RUNS / name)
        if not finished_steps(chosen / train.CHECKPOINTS):
            raise UserError(
                f"{chosen} holds no finished checkpoint to resume. Leave out --resume to begin a new run"
                + (", and give another --out." if out is not None and out.exists() else ".")
            )
        return chosen
    if out is None:
        return RUNS / (f"{name}-{max(taken) + 1}" if taken else name)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file. Give a directory.")
    check_free(out)
    return out


def _runs_of(name: str) -> dict[int, Path]:
    """The directories of a job's runs by number: `gpt` is the first, `gpt-2` the second."""
    found = RUNS.iterdir() if RUNS.is_dir() else ()
    numbers = {d: d.name.removeprefix(f"{name}-") for d in found}
    return {
        1 if d.name == name else int(number): d
        for d, number in numbers.items()
        if d.name == name or (number != d.name and number.isdecimal())
    }


def check_free(out_dir: Path) -> None:
    """Refuse a directory that holds a run.

    Raises:
        UserError: It does; says whether that run can be resumed.
    """
    if not (out_dir / JOB_FILE).exists() and not (out_dir / train.CHECKPOINTS).exists():
        return
    if finished_steps(out_dir / train.CHECKPOINTS):
        way_out = "holds a run already. Add --resume to go on with it, or give another --out."
    else:
        way_out = "holds a run that ended before its first checkpoint. Remove it, or give another --out."
    raise UserError(f"{out_dir} {way_out}")
