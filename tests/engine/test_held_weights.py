"""Row F8: large tensors of the caller's go to the workers once, and traces compute with what they are at the time. Row L3."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import alive, ask_workers, start
from torch import nn

from midstream import save
from midstream.errors import InterventionError, PlanError, TraceError

if TYPE_CHECKING:
    from oracle import Plain

    from midstream import VLLM

FRANCE, ITALY, LAYER = "The capital of France is", "The capital of Italy is", 3
WIDTH, FEATURES = 256, 512


class SAE(nn.Module):
    def __init__(self, seed: int, features: int = FEATURES) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.W_enc = nn.Parameter(torch.randn(WIDTH, features) / 16)
        self.W_dec = nn.Parameter(torch.randn(features, WIDTH) / 16)
        self.bias = nn.Parameter(torch.randn(features) / 16)

    def encode(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden @ self.W_enc + self.bias)

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.W_dec

    @property
    def large_bytes(self) -> int:
        return self.W_enc.nbytes + self.W_dec.nbytes


@pytest.fixture
def sae() -> SAE:
    return SAE(0)


def planned(sae: SAE, features: int = FEATURES) -> Any:
    """The same for plans."""
    from midstream import SAE as PlannedSAE

    weights = {"W_enc": sae.W_enc, "W_dec": sae.W_dec, "b_enc": sae.bias, "b_dec": torch.zeros(WIDTH)}
    config = {"architecture": "standard", "d_in": WIDTH, "d_sae": features}
    return PlannedSAE(config, weights, site="resid_post", layer=LAYER)


def decoded(model: VLLM, sae: SAE, prompt: str = FRANCE) -> torch.Tensor:
    with model.trace(prompt):
        found = sae.decode(sae.encode(model.layers_output[LAYER])).save()
    return found


def expected(plain: Plain, sae: SAE, prompt: str = FRANCE) -> torch.Tensor:
    with torch.no_grad():
        return sae.decode(sae.encode(plain.run(prompt).sites["resid_post", LAYER]))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-3, atol=1e-3)


def sent_bytes(model: VLLM) -> int:
    return model.connection.weights.sent_bytes


def held_bytes(model: VLLM) -> list[int]:
    return [worker["weight_bytes"] for worker in model.gauges()]


def test_weights_are_sent_once(engine: VLLM, plain: Plain, sae: SAE) -> None:
    """Seen failing with weights that are not noted as held."""
    before = sent_bytes(engine)
    for prompt in (FRANCE, ITALY, FRANCE):
        close(decoded(engine, sae, prompt), expected(plain, sae, prompt))
    with engine.trace() as tracer:
        with tracer.invoke(FRANCE):
            one = sae.encode(engine.layers_output[LAYER]).save()
        with tracer.invoke(ITALY):
            two = sae.encode(engine.layers_output[LAYER]).save()
    equal = SAE(0)
    close(decoded(engine, equal), expected(plain, sae))
    assert sent_bytes(engine) - before == sae.large_bytes
    assert one.shape == two.shape == (5, FEATURES)
    assert min(held_bytes(engine)) >= sae.large_bytes


def test_plans_send_the_matrices_of_an_sae_once(engine: VLLM, plain: Plain) -> None:
    """M4: whatever the number of requests, and what they ask for. Seen failing with constants carried by the plans."""
    sae = SAE(7)
    mine, rows = planned(sae), plain.run(FRANCE).sites["resid_post", LAYER]
    acts, before = sae.encode(rows).detach(), sent_bytes(engine)
    plans = [mine.capture(top_k=4, positions="all_prompt"), mine.capture(top_k=9, positions="all_prompt")]
    for _ in range(2):
        outputs = engine.generate([FRANCE] * 2, plan=[[plan] for plan in plans], max_tokens=1)
        for output, count in zip(outputs, (4, 9), strict=True):
            close(output.scores["sae"], acts.topk(count).values)
        engine.generate(FRANCE, plan=planned(sae).clamp(3, high=0.5, error_term=False), max_tokens=1)
    assert sent_bytes(engine) - before == sae.large_bytes


def test_an_sae_too_large_for_the_engine_is_refused(engine: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.connection.weights, "budget", 1 << 19)
    plan = planned(SAE(8, 1024), 1024).capture(top_k=4)
    with pytest.raises(
        PlanError,
        match=r"programs with 1,048,576 bytes of constants; allowed: up to 524,288, the engine's weight_bytes",
    ):
        engine.generate(FRANCE, plan=plan, max_tokens=1)


def test_a_change_on_the_client_is_used(engine: VLLM, plain: Plain, sae: SAE) -> None:
    decoded(engine, sae)
    with torch.no_grad():
        sae.W_enc += 0.01
    close(decoded(engine, sae), expected(plain, sae))
    sae.W_dec.data /= sae.W_dec.data.norm(dim=1, keepdim=True)  # as SAELens does; the tensor's version does not change
    close(decoded(engine, sae), expected(plain, sae))
    sae.W_dec.detach().numpy()[:] *= 2
    close(decoded(engine, sae), expected(plain, sae))


@pytest.mark.filterwarnings("ignore:.*changed in the engine")
def test_a_change_in_a_body_is_its_own(engine: VLLM, plain: Plain, sae: SAE) -> None:
    """Seen failing with the held weights themselves in bodies."""
    total = torch.zeros(5, 20_000)

    def changing(model: Any) -> Any:
        sae.W_enc.add_(1)
        sae.W_dec.data.zero_()
        hidden = model.layers_output[LAYER]
        total[:, :WIDTH] += hidden
        return save(total[:, :WIDTH].clone()), save(sae.encode(hidden))

    changed = SAE(0)
    with torch.no_grad():
        changed.W_enc += 1
    hidden = plain.run(FRANCE).sites["resid_post", LAYER]
    for _ in range(2):
        summed, features = engine.run(changing, FRANCE)
        close(summed, hidden)
        close(features, changed.encode(hidden))
    close(decoded(engine, sae), expected(plain, sae))
    assert not total.any()


def test_tensors_of_one_storage_share_it_in_a_body(engine: VLLM, plain: Plain) -> None:
    both = torch.randn(2 * WIDTH, WIDTH) / 16
    encoder, decoder = both[:WIDTH], both[WIDTH:]

    def body(model: Any) -> Any:
        both.mul_(2)
        return save(model.layers_output[LAYER] @ encoder @ decoder)

    before = sent_bytes(engine)
    close(engine.run(body, FRANCE), plain.run(FRANCE).sites["resid_post", LAYER] @ encoder @ decoder * 4)
    assert sent_bytes(engine) - before == both.nbytes


def test_an_error_in_a_body_leaves_the_weights(engine: VLLM, plain: Plain, sae: SAE) -> None:
    before = sent_bytes(engine)
    for _ in range(2):
        with pytest.raises(InterventionError, match="division"), engine.trace(FRANCE):
            sae.encode(engine.layers_output[LAYER]).sum() / (1 // 0)
        close(decoded(engine, sae), expected(plain, sae))
    assert sent_bytes(engine) - before in (0, sae.large_bytes)


# Budgets.


@pytest.fixture(scope="module")
def tight() -> Iterator[VLLM]:
    """An engine with room for two SAEs."""
    with start(enforce_eager=True, weight_bytes=2 * SAE(0).large_bytes) as model:
        yield model


@pytest.mark.engine
def test_results_are_right_whatever_was_dropped(tight: VLLM, plain: Plain) -> None:
    """Seen failing without `_held.pop`: with what was dropped still noted as held."""
    several = [SAE(seed) for seed in range(3)]
    budget = 2 * several[0].large_bytes
    for number in (0, 1, 2, 0, 0, 2, 1):
        close(decoded(tight, several[number]), expected(plain, several[number]))
        assert max(held_bytes(tight)) <= budget
    assert sent_bytes(tight) == 5 * several[0].large_bytes  # the second 0 in a row and the last 2 are there
    everything = SAE(9, features=3 * FEATURES)
    for _ in range(2):
        close(decoded(tight, everything), expected(plain, everything))
        assert max(held_bytes(tight)) <= budget
    assert not alive(tight)


@pytest.mark.engine
def test_a_worker_that_lacks_a_weight_says_so(tight: VLLM, sae: SAE) -> None:
    def by_code(model: Any) -> Any:
        hidden = model.layers_output[LAYER]
        return sae.decode(sae.encode(hidden)) if hidden.sum() < 1e9 else None

    tight.run(by_code, FRANCE)
    ask_workers(tight, "midstream_set_weights", (), {})
    with pytest.raises(TraceError, match="no longer has a tensor"):
        tight.run(by_code, FRANCE)
    assert not alive(tight)


@pytest.mark.engine
def test_async_traces_with_more_weights_than_fit(plain: Plain) -> None:
    """Some are cancelled. What was changed after a trace was made does not count."""
    several = [SAE(seed) for seed in range(4)]
    wanted = [expected(plain, sae) for sae in several]
    budget = 2 * several[0].large_bytes

    async def one(model: Any, number: int) -> None:
        sae = several[number % 4]
        with model.trace(FRANCE) as tracer:
            found = sae.decode(sae.encode(model.layers_output[LAYER])).save()  # noqa: F841
        task = asyncio.ensure_future(_awaited(tracer.backend))
        if number % 5 == 4:
            await asyncio.sleep(0.01 * (number % 3))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        close((await task).saves["found"], wanted[number % 4])

    async def main() -> None:
        model: Any = start(enforce_eager=True, mode="async", weight_bytes=budget)
        try:
            await model.start()
            await asyncio.gather(*(one(model, number) for number in range(24)))
            while any(worker["requests"] for worker in await model.gauges()):
                await asyncio.sleep(0.02)
            sae = several[0]
            with model.trace(FRANCE) as tracer:
                found = sae.decode(sae.encode(model.layers_output[LAYER])).save()  # noqa: F841
            with torch.no_grad():
                sae.W_enc.zero_()
            close((await tracer.backend).saves["found"], wanted[0])
            assert all(worker["weight_bytes"] <= budget for worker in await model.gauges())
            assert model.connection.weights.in_use == 0
        finally:
            model.close()

    asyncio.run(main())


async def _awaited(backend: Any) -> Any:
    return await backend


def test_a_large_gate_is_a_program_whose_numbers_are_sent_once(engine: VLLM, plain: Plain) -> None:
    """Two megabytes each way, for many requests, sync calls and steps; dropped and sent again when others take the room."""
    sae = SAE(7, 4096)

    def gate(model: Any, tracer: Any) -> Any:
        kept = []
        for _ in tracer.iter[:]:
            h = model.layers_output[LAYER]
            model.layers_output[LAYER] = h + sae.decode(sae.encode(h)) / 50
            kept.append((sae.encode(h).topk(4, dim=-1).values[-1], model.layers_output[LAYER + 2][-1].norm()))
        return kept

    def written(hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return hidden + sae.decode(sae.encode(hidden)) / 50

    greedy = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    before, sent = engine.gauges()[0]["traced_steps"], sent_bytes(engine)
    for _ in range(2):
        found = engine.run(gate, [FRANCE, ITALY, FRANCE], **greedy)
        assert engine.gauges()[0]["traced_steps"] == before, "code ran in the engine"
        # The encoder is in the program that writes and in the one whose results are kept.
        assert sent_bytes(engine) - sent == sae.large_bytes
    edits = {("resid_post", LAYER): written}
    for prompt, mine in zip([FRANCE, ITALY, FRANCE], found, strict=True):
        ids = plain.ids(prompt)
        ran = plain.run([*ids, *plain.generate(prompt, 3, edits)[:-1]], edits)
        later = ran.sites["resid_post", LAYER + 2][len(ids) - 1 :]
        close(torch.stack([norm for _, norm in mine]), later.norm(dim=-1))
        given = plain.run(prompt).sites["resid_post", LAYER]
        close(mine[0][0], sae.encode(given).topk(4, dim=-1).values[-1])
    assert not any(alive(engine))
