"""Random programs from the whole table with hostile numbers, alone and in banks: prints a line for each check and exits 1 on a failure.

python tests/gpu/check_hostile_programs.py --seconds 3600 --seed 7
python tests/gpu/check_hostile_programs.py --cpu

Nothing that the check accepts may raise, and no row may depend on another one. A bank computes what each of its programs computes. After a
failed assertion of the device nothing runs there any more, so the first failure ends a check. It names the number of the program:
`--first NUMBER` begins with it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from on_gpu import run_checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on the CPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="of both checks together")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    arguments = parser.parse_args()

    import torch
    from drawn_programs import DTYPES, attack, compare_bank, drawn_alone

    from midstream.plan.rowwise import RULES

    device, names = torch.device("cpu" if arguments.cpu else "cuda"), sorted(RULES)
    print(f"seed {arguments.seed}", flush=True)

    def repeated(one: Callable[[random.Random, str, int], Any]) -> Callable[[], None]:
        def check() -> None:
            ends, drawn, ran, seen = time.monotonic() + arguments.seconds / 2, 0, 0, set[str]()
            for number in itertools.count(arguments.first):
                if time.monotonic() > ends:
                    break
                op = names[number % len(names)]
                try:
                    program = one(random.Random(f"{arguments.seed} {number}"), op, number)
                except BaseException as error:
                    error.add_note(f"--seed {arguments.seed} --first {number}")
                    raise
                drawn += 1
                if program is not None:
                    ran += 1
                    seen |= {step.op for step in program.steps}
            missing = " ".join(op for op in names if op not in seen) or "none"
            print(f"{ran} of {drawn} programs ran; operations that were in none of them: {missing}", flush=True)
            assert ran > drawn // 3

        return check

    def hostile(rng: random.Random, op: str, number: int) -> Any:
        return attack(rng, device, op)

    def in_banks(rng: random.Random, op: str, number: int) -> Any:
        program = drawn_alone(rng, op, DTYPES[number // len(names) % len(DTYPES)])
        return program if program is not None and compare_bank(rng, program, device) else None

    checks = SimpleNamespace(check_hostile_numbers=repeated(hostile), check_banks=repeated(in_banks))
    return 1 if run_checks(checks, str(device)) else 0


if __name__ == "__main__":
    sys.exit(main())
