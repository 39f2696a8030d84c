"""Probes, gates and features on a GPU and on one model runner: prints one line a check and exits 1 on a failure.

python tests/gpu/check_probes.py --runner v2 --float32
python tests/gpu/check_probes.py --tp 2   # two GPUs

The oracle is the captured row itself, multiplied in float64: in float32 as in a probe, and so closely in bfloat16, too.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

from on_gpu import engine_arguments, parsed, parser_of, run_checks

PROMPTS = ["The Eiffel Tower is in the city of", "The capital of France is", "One two three"]
LAYER, STEPS = 3, 12
GREEDY = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}


def main() -> int:
    arguments = parsed(parser_of(__doc__, ranks=True))

    import torch

    from midstream import SAE, VLLM, Capture, Clamp, Probe, Steer, When, demo_model

    made = torch.Generator().manual_seed(0)

    async def all_checks() -> int:
        ranks = {"pipeline_parallel_size": arguments.pp, "tensor_parallel_size": arguments.tp}
        model = VLLM(demo_model(), mode="async", **ranks, **engine_arguments(arguments))
        await model.start()
        width = model.hidden_size
        weights = [torch.randn(width, generator=made) / 16 for _ in range(8)]
        classes = torch.randn(width, 5, generator=made) / 16

        async def generated(prompts: Any, plans: Any) -> list[Any]:
            async def one(prompt: str, plan: Any) -> Any:
                (output,) = await model.generate([prompt], plan=plan and [plan], **GREEDY)
                return output

            return await asyncio.gather(*map(one, prompts, plans))

        def check(output: Any, probe: Any, rows: Any) -> None:
            positions = output.scores.positions[probe.name]
            weight = torch.stack([torch.tensor(column.data) for column in probe.weight], 1).double()
            expected = rows.double()[positions] @ weight + torch.tensor(probe.bias).double()
            if probe.activation == "softmax":
                expected = expected.softmax(-1)
            torch.testing.assert_close(output.scores[probe.name].double(), expected, rtol=1e-3, atol=1e-3)
            assert len(positions) > 0

        def rows_of(output: Any, when: str = "before") -> Any:
            return output.captures["resid_post", LAYER, when].cpu()

        async def own_probes() -> None:
            """Each request has its own, also of other forms, beside requests without; three times: later steps replay recorded graphs."""
            capture = Capture("resid_post", layers=LAYER, positions="all")
            plans: list[Any] = []
            for i in range(24):
                probe = Probe("resid_post", layer=LAYER, weight=weights[i % 8], bias=i / 8, name="p", positions="all")
                many = Probe("resid_post", layer=LAYER, weight=classes, activation="softmax", name="q")
                plans.append([[probe, capture], [probe, many, capture], [many, capture], None][i % 4])
            for _ in range(3):
                outputs = await generated([PROMPTS[i % 3] for i in range(24)], plans)
                for output, plan in zip(outputs, plans, strict=True):
                    for probe in (plan or [])[:-1]:
                        check(output, probe, rows_of(output))
                    assert plan is not None or len(output.scores) == 0

        async def before_and_after_a_steer() -> None:
            plan = [
                Probe("resid_post", layer=LAYER, weight=weights[0], name="before"),
                Probe("resid_post", layer=LAYER, weight=weights[0], name="after", when="after"),
                Steer("resid_post", layers=LAYER, vector=8 * weights[1]),
                *(Capture("resid_post", layers=LAYER, positions="all", when=when) for when in ("before", "after")),
            ]
            for output in await generated(PROMPTS * 4, [plan] * 12):
                check(output, plan[0], rows_of(output))
                check(output, plan[1], rows_of(output, "after"))

        async def another_site() -> None:
            probe = Probe("mlp_out", layer=LAYER, weight=weights[2], name="p", positions="all")
            plan = [probe, Capture("mlp_out", layers=LAYER, positions="all")]
            for output in await generated(PROMPTS, [plan] * 3):
                check(output, probe, output.captures["mlp_out", LAYER].cpu())

        async def stops() -> None:
            """At the token with the highest score; the token behind it is never shown, and no other request changes."""
            probe = Probe("resid_post", layer=LAYER, weight=weights[3], name="p")
            whole = await generated(PROMPTS, [[probe]] * 3)
            plans: list[Any] = []
            for i in range(30):
                scores = whole[i % 3].scores["p"][:, 0]
                bound = float(scores.sort().values[-2:].mean()) if i % 2 else 1e9
                plans.append([Probe("resid_post", layer=LAYER, weight=weights[3], name="p", stop_above=bound)])
            for i, output in enumerate(await generated([PROMPTS[i % 3] for i in range(30)], plans)):
                ids, sample = list(whole[i % 3].outputs[0].token_ids), output.outputs[0]
                found = output.scores["p"][:, 0]
                above = (found > plans[i][0].stop_above).nonzero()
                count = int(above[0]) + 1 if len(above) else STEPS
                assert sample.stop_reason == ("probe:p" if len(above) else None), (i, sample.stop_reason)
                assert len(sample.token_ids) == count and len(found) == (count if len(above) else STEPS - 1)
                if arguments.exact:
                    assert list(sample.token_ids) == ids[:count] and (i % 2 == len(above)), i

        async def streamed() -> None:
            """Each output has the scores of all tokens before its last."""
            probe = Probe("resid_post", layer=LAYER, weight=weights[4], name="p", positions="all")
            async for output in model.generate(PROMPTS[0], plan=probe, **GREEDY):
                tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
                assert len(output.scores["p"]) >= tokens - 1

        async def gates() -> None:
            """Each request has a gate of its own, at its probe's site and at a later one. Other rows keep their bits."""
            plans: list[Any] = []
            for i in range(24):
                probe = Probe("resid_post", layer=LAYER, weight=weights[i % 8], name="p", positions="all")
                bound = {"above" if i % 2 else "below": float(i % 5) / 4}
                edits = [Steer("resid_post", layers=[LAYER, LAYER + 2], vector=weights[(i + 1) % 8] * 8), clamp]
                captures = [
                    Capture("resid_post", layers=[LAYER, LAYER + 2], positions="all", when=when)
                    for when in ("before", "after")
                ]
                plans.append([probe, When(probe, **bound, then=edits), *captures] if i % 6 else None)
            for _ in range(3):
                for i, output in enumerate(await generated([PROMPTS[i % 3] for i in range(24)], plans)):
                    if plans[i] is None:
                        continue
                    score, gate = output.scores["p"][:, 0], plans[i][1]
                    acts = score > gate.above if gate.above is not None else score < gate.below
                    for layer in (LAYER, LAYER + 2):
                        before, after = (
                            output.captures["resid_post", layer, when].cpu() for when in ("before", "after")
                        )
                        before, after = before[: len(acts)], after[: len(acts)]
                        wanted = before.double() + acts[:, None] * torch.tensor(gate.then[0].vector.data).double()
                        if layer == LAYER:
                            along = (wanted @ direction)[:, None]
                            wanted += acts[:, None] * (along.clamp(-0.5, 0.5) - along) * direction
                        assert torch.equal(before[~acts], after[~acts])
                        torch.testing.assert_close(
                            after.double(), wanted, rtol=2e-2, atol=2e-1 if not arguments.exact else 1e-2
                        )

        direction = (weights[5] / weights[5].norm()).double()
        clamp = Clamp("resid_post", layers=LAYER, direction=weights[5], low=-0.5, high=0.5)

        async def features() -> None:
            """An SAE that the workers hold: its top features, clamps of some, and a gate by another."""
            features = 4096
            config = {"architecture": "jumprelu", "d_in": width, "d_sae": features}
            encoder = torch.randn(width, features, generator=made) / 16
            arrays = {
                "W_enc": encoder, "W_dec": encoder.T.contiguous(), "b_enc": torch.zeros(features), "b_dec": torch.zeros(width),
                "threshold": torch.rand(features, generator=made),
            }  # fmt: skip
            sae = SAE(config, arrays, site="resid_post", layer=LAYER)
            capture = [Capture("resid_post", layers=LAYER, positions="all", when=when) for when in ("before", "after")]
            plans: list[Any] = [
                [sae.capture(top_k=1 + i % 16, name="f", positions="all"), sae.clamp([i, i + 1], high=0.25), *capture]
                for i in range(12)
            ]
            for output, plan in zip(await generated([PROMPTS[i % 3] for i in range(12)], plans), plans, strict=True):
                before, after = (rows_of(output, when).float() for when in ("before", "after"))
                acts, count = sae.encode(before), plan[0].classes
                top, indices = output.scores["f"], output.scores.indices["f"]
                torch.testing.assert_close(top, acts.topk(count).values, rtol=1e-2, atol=2e-2)
                torch.testing.assert_close(
                    acts.gather(1, indices.clamp(min=0)) * (indices >= 0), top, rtol=1e-2, atol=2e-2
                )
                one = plans.index(plan)
                change = (acts[:, one : one + 2].clamp(max=0.25) - acts[:, one : one + 2]) @ encoder.T[one : one + 2]
                torch.testing.assert_close(
                    after, before + change, rtol=2e-2, atol=2e-1 if not arguments.exact else 1e-2
                )

        checks = [gates, features, own_probes, before_and_after_a_steer, another_site, stops, streamed]
        loop = asyncio.get_running_loop()

        def blocking(check: Any) -> Any:
            return lambda: asyncio.run_coroutine_threadsafe(check(), loop).result(200)

        namespace = SimpleNamespace(**{f"check_{check.__name__}": blocking(check) for check in checks})
        failed = await asyncio.to_thread(run_checks, namespace, arguments.runner)
        gauges = await model.gauges()
        print("graphs:", [worker.get("off_graph_steps") for worker in gauges], flush=True)
        model.close()
        return failed

    return asyncio.run(all_checks())


if __name__ == "__main__":
    sys.exit(bool(main()))
