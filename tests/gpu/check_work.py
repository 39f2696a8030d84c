"""Whether plans cost what they are charged (row F6): looks for the program that takes most time for its charge, and prints the worst of
each operation. Exits 1 if a plan that a server accepts, made of one of the ten worst, takes over 100 ms of a step.

python tests/gpu/check_work.py --seconds 600 --seed 1
python tests/gpu/check_work.py --cpu --seconds 600   # on one thread, in that thread's own time
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

PROMISE = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to look")
    parser.add_argument("--seed", type=int, default=0)
    arguments, _ = parser.parse_known_args()

    import costly_plans
    import torch

    from midstream.plan.work import STEP_SECONDS

    torch.set_num_threads(1)  # threads that wait for others count as working
    device = torch.device("cpu" if arguments.cpu else "cuda")
    print(f"seed {arguments.seed}, {torch.get_num_threads()} thread, {device}", flush=True)
    found = costly_plans.search(arguments.seed, arguments.seconds, device)
    in_order = sorted(found.values(), key=lambda each: -each.ratio)
    for each in in_order:
        print(f"{each.ratio:7.2f} of its charge, {each.seconds * 1e3:8.3f} ms: {each.candidate}")
    worst = [each for each in in_order if each.seconds > 2e-4] or in_order
    failed = 0
    for each in worst[:10]:
        whole = costly_plans.at_the_bound(each, device)
        is_kept = whole.seconds < PROMISE
        failed += not is_kept
        print(
            f"{'ok' if is_kept else 'FAILED'}  {whole.seconds * 1e3:.1f} ms of a step, charged {whole.charged * 1e3:.1f} of "
            f"{STEP_SECONDS * 1e3:.0f}: {whole.candidate}",
            flush=True,
        )
    print(f"work: {len(found)} operations, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
