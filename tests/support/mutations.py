"""Changes plans on the wire at random."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from written_programs import redigested

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**31) - 1, 1e308, -1e308, 1e39, 0.1, "", "x", "all", "resid_post", "zeros",
    "\ud800", [], [0], [[]], {}, {"vector": "x"}, {"named": "calm"}, {"run": "f" * 32}, {"zeros": True}, {"span": "The"}, "a" * 9_999,
    [0] * 3000, list(range(500)), {"consumer": "log"}, "/tmp/x", ["../x"], float("inf"), float("nan"),
]  # fmt: skip


def mutated(rng: random.Random, plan: Any) -> Any:
    """A copy with one or two places changed."""
    plan = copy.deepcopy(plan)
    for _ in range(rng.randint(1, 2)):
        places = list(_places(plan))
        if not places:
            return rng.choice(ODD)
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0 | 1:
                holder[key] = copy.deepcopy(rng.choice(ODD))
            case 2 if isinstance(holder, dict):
                holder[
                    rng.choice(["to", "kind", "site", "layer", "position", "extra", "source_layer", "version", "runs"])
                ] = holder[key]
            case 3 if isinstance(holder, dict):
                del holder[key]
            case 4 if isinstance(holder, list):
                holder[:] = holder * rng.randint(0, 3)
            case _ if isinstance(holder[key], (int, float)):
                holder[key] = holder[key] * rng.choice([-1, 0, 1e6, 1e30])
    if isinstance(plan, dict) and isinstance(plan.get("programs"), dict) and rng.random() < 0.9:
        text = json.dumps(plan)
        for old, given in plan["programs"].items():
            (new,) = redigested({old: given}, plan.get("constants", {}))
            text = text.replace(json.dumps(old), json.dumps(new))
        plan = json.loads(text)
    return plan


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in it; of long lists of numbers the first alone."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
