"""Wall times of `make setup`, `make train` and `make test` from a clean clone, and what was downloaded.

The clone, its environment and all caches lie in a temporary directory that is removed afterwards. Downloads
are counted as the bytes in pip's cache at the end (wheels that pip finds in a local directory are not among
them).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import common


def main(
    train_arguments: Annotated[str, typer.Option(help="ARGS of make train.")] = "",
    test_arguments: Annotated[str, typer.Option(help="ARGS of make test.")] = "",
    python: Annotated[str, typer.Option(help="Interpreter; default: what make finds.")] = "",
    venv: Annotated[Path | None, typer.Option(help="Use this environment; nothing is set up.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Six steps of a tiny job, one test file.")] = False,
) -> None:
    """Time the way from a clone to a trained model and passed tests."""
    model = "models/gpt_small.toml"
    if quick:
        model, train_arguments, test_arguments = "models/gpt_tiny.toml", "--steps 6", "tests/test_devices.py"
    common.introduce("A clean clone: make setup, make train, make test")
    with tempfile.TemporaryDirectory(prefix="hetjax-clone-") as folder:
        clone, pip_cache = Path(folder, "hetjax"), Path(folder, "pip")
        run("git", "clone", "--quiet", "--no-hardlinks", str(common.ROOT), str(clone))
        env = os.environ | {
            "PIP_CACHE_DIR": str(pip_cache),
            "XDG_CACHE_HOME": str(Path(folder, "cache")),
        }
        for name in ("PIP_NO_CACHE_DIR", "PYTHONPATH", "VIRTUAL_ENV", "PYTHON", "VENV"):
            env.pop(name, None)
        make = ["make", "-C", str(clone), f"PYTHON={python}", f"MODEL={model}"]
        if venv:
            make += ["-o", "setup", f"VENV={venv.absolute()}"]
        times = {
            "setup_s": run(*make, "setup", env=env),
            "train_s": run(*make, "train", f"ARGS={train_arguments}", env=env),
            "test_s": run(*make, "test", f"ARGS={test_arguments}", env=env),
        }
        figures = {
            **times,
            "setup_and_train_s": times["setup_s"] + times["train_s"],
            "downloaded_mib": size(pip_cache) / common.MIB,
            "environment_mib": size(venv or clone / ".venv") / common.MIB,
            "data_cache_mib": size(Path(folder, "cache")) / common.MIB,
        }
    common.finish(figures)


def run(*command: str, env: dict[str, str] | None = None) -> float:
    """Run a command to its end; its output passes through. Returns the seconds that it took.

    Raises:
        typer.Exit: It failed.
    """
    common.say(f"$ {' '.join(command)}")
    begin = time.perf_counter()
    status = subprocess.run(command, env=env, stdin=subprocess.DEVNULL).returncode
    if status:
        common.say(f"That failed with status {status}.")
        raise typer.Exit(1)
    return time.perf_counter() - begin


def size(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(f.lstat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())


if __name__ == "__main__":
    typer.run(main)
