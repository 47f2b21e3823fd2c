"""The plan of every cluster file as text, by name. `python -m tests.golden` writes them to tests/golden/."""

import json
import sys
from pathlib import Path

from hetjax.cluster import Cluster
from hetjax.planner import make_plan
from tests.fake_program import llama

MESHES = Path(__file__).parent.parent / "meshes"
GOLDEN = Path(__file__).parent / "golden"


def plans() -> dict[str, str]:
    program = llama(num_layers=12, hidden=2048, seq=1024, vocab=32000, global_batch=64)
    result = {}
    for path in sorted(MESHES.glob("*.toml")):
        plan = make_plan(program, Cluster.load(path))
        plan.check(program)
        result[path.stem] = f"{plan}\n"
    return result


if __name__ == "__main__":
    found = plans()
    if "--print" in sys.argv:
        print(json.dumps(found))
    else:
        GOLDEN.mkdir(exist_ok=True)
        for name, text in found.items():
            (GOLDEN / f"{name}.txt").write_text(text, encoding="utf-8")
