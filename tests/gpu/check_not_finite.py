"""Overflow on a GPU, on one model runner: run as a script (see tests/gpu/test_gpu.py), prints one line a check and exits 1 on a failure.

What plain requests get is compared with what they got before anybody overflowed. `--unprotected` leaves out the clearing of KV blocks, to
see what that protects from on this attention backend. `--model` takes one of `tiny_models`: `qwen3_moe`, whose router sees the rows of all
requests, or `gemma3`, with sliding windows.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

FRANCE, EIFFEL = "The capital of France is", "The Eiffel Tower is in the city of"
PLAIN = [FRANCE, EIFFEL, "The capital of Italy is", "The"] * 3
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Checks:
    """The checks, each a method `check_*` on one engine."""

    def __init__(self, model: Any, huge: float) -> None:
        import torch

        self.model = model
        self.vector = torch.full((model.hidden_size,), huge)
        for _ in range(3):  # with what is in the prefix cache from then on
            self.before = self.answers()

    def answers(self) -> list[Any]:
        outputs = self.model.generate(PLAIN, max_tokens=6, logprobs=3, **GREEDY)
        return [
            (token, {t: entry.logprob for t, entry in table.items()})
            for output in outputs
            for token, table in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]

    def expect_unharmed(self) -> None:
        for _ in range(4):
            for (token, table), (old_token, old_table) in zip(self.answers(), self.before, strict=True):
                assert token == old_token and table.keys() == old_table.keys(), (token, old_token)
                assert all(abs(table[t] - old_table[t]) < 2e-2 for t in table), (table, old_table)

    def overflow(self, where: str, *plans: Any, **params: Any) -> None:
        from midstream.errors import MidstreamError, NotFiniteError

        try:
            self.model.generate(
                [EIFFEL * 3] * len(plans), plan=[[plan] for plan in plans], **{"max_tokens": 4, **GREEDY, **params}
            )
        except MidstreamError as error:
            first = getattr(error, "exceptions", [error])[0]
            assert isinstance(first, NotFiniteError) and where in str(first), first
        else:
            raise AssertionError("no error")

    def check_a_plan_in_the_prompt(self) -> None:
        from midstream import Steer

        self.overflow(
            "resid_post of layer 2, position 0", *[Steer("resid_post", layers=2, vector=self.vector, scale=1e38)] * 6
        )
        self.expect_unharmed()

    def check_a_plan_while_generating(self) -> None:
        from midstream import Steer

        plan = Steer("resid_post", layers=[3, 1], vector=self.vector, scale=1e38, phase="decode")
        length = len(self.model.tokenizer(EIFFEL * 3)["input_ids"])
        self.overflow(f"resid_post of layer 1, position {length}", *[plan] * 6, max_tokens=8)
        self.expect_unharmed()

    def check_a_plan_off_the_graphs(self) -> None:
        from midstream import Steer

        plan = Steer("attn_in", layers=1, vector=self.vector, scale=1e38, positions=[1])
        self.overflow("attn_in of layer 1, position 1", plan, plan)
        self.expect_unharmed()

    def check_neighbours_in_the_same_batch(self) -> None:
        from midstream import Steer
        from midstream.errors import MidstreamError

        plan = Steer("resid_post", layers=2, vector=self.vector, scale=1e38, phase="decode")
        try:
            self.model.generate(PLAIN, plan=[[plan], *[None] * (len(PLAIN) - 1)], max_tokens=6, **GREEDY)
        except MidstreamError as error:
            outputs = error.outputs  # type: ignore[attr-defined]
        plain = [token for token, _ in self.before]
        for index in range(1, len(PLAIN)):
            assert list(outputs[index].outputs[0].token_ids) == plain[6 * index : 6 * index + 6], index
        self.expect_unharmed()

    def check_traces(self) -> None:
        from midstream.errors import NotFiniteError

        def graph_site(model: Any) -> None:
            model.layers_output[2][:] = float("inf")

        def module(model: Any) -> None:
            model.model.layers[1].mlp.output[2] = float("nan")

        for body, where in ((graph_site, "resid_post of layer 2"), (module, "position 2")):
            try:
                self.model.run(body, EIFFEL * 3, max_tokens=3, **GREEDY)
            except NotFiniteError as error:
                assert where in str(error), error
            else:
                raise AssertionError("no error")
            self.expect_unharmed()

    def check_a_finite_vector_is_let_through(self) -> None:
        from midstream import Steer

        self.model.generate(
            PLAIN, plan=Steer("resid_post", layers=2, vector=self.vector * 0 + 10), max_tokens=6, **GREEDY
        )
        self.expect_unharmed()

    def check_sampling_beside_it(self) -> None:
        """With top-k and top-p, which sort what may be NaN."""
        from midstream import Steer

        plan = Steer("resid_post", layers=2, vector=self.vector, scale=1e38)
        self.overflow("resid_post", *[plan] * 4, temperature=1.0, top_k=20, top_p=0.9, max_tokens=6)
        self.expect_unharmed()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--unprotected", action="store_true", help="without the clearing of KV blocks")
    parser.add_argument("--model", help="one of tiny_models instead of the bundled model")
    arguments = parsed(parser)
    from midstream import VLLM, demo_model
    from midstream.engine.prefix_cache import EditedBlocks

    if arguments.unprotected:
        EditedBlocks.take = lambda self: []  # type: ignore[method-assign]
    path = demo_model()
    if arguments.model:
        from tiny_models import build

        path = str(build(arguments.model, Path(tempfile.gettempdir()) / "midstream-tiny-models"))
    engine = {**engine_arguments(arguments), "num_gpu_blocks_override": 64}
    engine |= {"max_model_len": 256} if arguments.model else {}
    model = VLLM(path, **engine)
    label = f"{arguments.runner}{' eager' if arguments.eager else ''}{' float32' if arguments.float32 else ''}"
    label += f"{f' {arguments.model}' if arguments.model else ''}{' unprotected' if arguments.unprotected else ''}"
    failed = run_checks(Checks(model, 1e38), label)
    model.close()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
