"""Run by test_ray.py in a process of its own: an engine on Ray, what plans and traces give on it, and how it ends.

python ray_script.py DIRECTORY ARGUMENTS     what came is saved to DIRECTORY/came.pt; ARGUMENTS are the engine's, as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from engines import alive, start
from forked import forked

from midstream import Capture, Steer

PROMPT = "The capital of France is"


def traced(model: Any) -> dict[str, Any]:
    with model.trace(PROMPT, max_tokens=3, temperature=0.0) as tracer:
        hidden, ids = list().save(), list().save()
        for _ in tracer.iter[:]:
            early = model.layers_output[1]
            model.layers_output[6] += 0.5 * early
            hidden.append(model.layers_output[6][-1].clone())
            ids.append(model.samples.item())
    return {"hidden": hidden, "ids": ids, "tokens": list(tracer.result.outputs[0].token_ids)}


def main(directory: Path, arguments: dict[str, Any]) -> None:
    with forked(server=False):
        model = start(enforce_eager=True, distributed_executor_backend="ray", **arguments)
    steer = Steer("resid_post", layers=[1, 6], vector=torch.ones(model.hidden_size))
    plan = [steer, Capture("resid_post", positions="all_prompt", when="after")]
    (plain,) = model.generate([PROMPT], max_tokens=5, temperature=0.0)
    (planned,) = model.generate([PROMPT], plan=plan, max_tokens=5, temperature=0.0)
    came = {
        "plain": list(plain.outputs[0].token_ids),
        "planned": list(planned.outputs[0].token_ids),
        "captures": {key: planned.captures[key] for key in planned.captures},
        "trace": traced(model),
        "alive": alive(model),
        "workers": len(model.gauges()),
    }
    torch.save(came, directory / "came.pt")
    model.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
