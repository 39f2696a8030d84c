"""Row A5: prefix caching and chunked prefill stay on, and a trace has every token of its prompt in one step.

What is expected comes from plain transformers with torch hooks, and for bit equality from the same engine with an empty
prefix cache. Row F3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import start
from oracle import close, differs

from midstream import Capture
from midstream.engine import launch
from midstream.errors import PromptError

if TYPE_CHECKING:
    from midstream import VLLM

pytestmark = pytest.mark.engine

FACTS = "The capital of France is Paris. The capital of Italy is Rome. The Eiffel Tower is in the city of"


def tokens(plain, count: int, shift: int = 0) -> list[int]:
    """A prompt of `count` tokens of the model's own kind of text."""
    ids = plain.ids(FACTS) * (count // 8 + 1)
    return ids[shift : shift + count]


def long_prompt(engine: VLLM, plain, shift: int = 0) -> list[int]:
    """Two full KV blocks and a bit: what the prefix cache can hold of a prompt."""
    block = engine.engine.llm_engine.vllm_config.cache_config.block_size
    return tokens(plain, 2 * block + 9, shift)


def serve(engine: VLLM, prompt: list[int]) -> Any:
    """The prompt as any user's request."""
    (output,) = engine.generate(prompt, max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=5)
    return output


def served_values(output: Any) -> list[tuple[int, dict[int, float]]]:
    """Tokens and log-probabilities to the last bit."""
    completion = output.outputs[0]
    tables = [{token: entry.logprob for token, entry in table.items()} for table in completion.logprobs]
    return list(zip(completion.token_ids, tables, strict=True))


# ------------------------------------------------------------------------------------------------------ prefix cache


def test_a_trace_sees_every_token_of_a_prompt_that_was_just_served(engine, plain):
    """Either of `skip_reading_prefix_cache` and the salt does it.

    Seen failing with both taken away: whole blocks come from the cache.
    """
    prompt = long_prompt(engine, plain)
    serve(engine, prompt)
    again = serve(engine, prompt)
    assert again.num_cached_tokens >= len(prompt) - 9  # prefix caching is on for others
    with engine.trace(prompt, temperature=0.0) as tracer:
        hidden = engine.layers_output[3].save()
        logits = engine.logits.save()
    expected = plain.run(prompt)
    assert tracer.result.num_cached_tokens == 0
    close(hidden, expected.sites["resid_post", 3])
    close(logits, expected.logits[-1:])
    assert serve(engine, prompt).num_cached_tokens == again.num_cached_tokens  # and still is


def test_edited_kv_is_never_served_to_another_request(engine, plain):
    """An unedited rerun after an edited one equals the result of a fresh cache, bit for bit.

    Seen failing with `engine_prompt` leaving the salt away: the rerun takes edited blocks from the cache.
    """
    prompt = long_prompt(engine, plain, shift=3)
    engine.engine.reset_prefix_cache()
    fresh = serve(engine, prompt)
    engine.engine.reset_prefix_cache()
    with engine.trace(prompt, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        for _ in tracer.iter[:]:
            engine.layers_output[1][:] *= -1.0
    rerun = serve(engine, prompt)
    assert fresh.num_cached_tokens == rerun.num_cached_tokens == 0
    assert served_values(rerun) == served_values(fresh)
    assert list(fresh.outputs[0].token_ids) == plain.generate(prompt, 3)
    assert list(tracer.result.outputs[0].token_ids) != plain.generate(prompt, 3)  # the edit had an effect to leak

    with engine.trace(prompt, temperature=0.0):  # nor to another trace
        logits = engine.logits.save()
    close(logits, plain.run(prompt).logits[-1:])


def test_of_two_traces_of_one_prompt_in_a_batch_only_one_is_edited(engine, plain):
    """Requests of one batch share prefix blocks too, as soon as they are full."""
    prompt = tokens(plain, 140, shift=5)
    with engine.trace(max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        with tracer.invoke(prompt):
            for _ in tracer.iter[:]:
                engine.layers_output[1][:] *= -1.0
        with tracer.invoke(prompt):
            hidden = engine.layers_output[6].save()
            logits = engine.logits.save()
    close(hidden, plain.run(prompt).sites["resid_post", 6])
    close(logits, plain.run(prompt).logits[-1:])
    assert list(tracer.outputs[1].outputs[0].token_ids) == plain.generate(prompt, 3)
    assert list(tracer.outputs[0].outputs[0].token_ids) != plain.generate(prompt, 3)


# ---------------------------------------------------------------------------------------------------- chunked prefill


BUDGET = 64


@pytest.fixture(scope="module")
def chunked() -> Iterator[VLLM]:
    """An engine whose steps take 64 tokens: longer prompts come in chunks."""
    with start(enforce_eager=True, max_num_batched_tokens=BUDGET, enable_chunked_prefill=True) as model:
        yield model


def halve_and_read(model):
    """The traced requests' code: what a split prompt would show only a part of."""
    embedded = model.token_embeddings
    model.layers_output[4][:] *= 0.5
    return embedded, model.layers_output[6], model.logits


def run_beside(model: VLLM, untraced: list[list[int]], traced: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """Untraced and traced requests by turns in one queue: outputs of the former, values of the latter."""
    submit, step, names, ended = launch.submit, launch.step, [], {}

    def submit_with_others(llm: Any, prompts: list[Any], params: list[Any], adapters: list[Any]) -> list[str]:
        own = launch.sampling_params({"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}, None)
        queue = [({"prompt_token_ids": ids}, own) for ids in untraced]
        for place, request in enumerate(zip(prompts, params, strict=True)):
            queue.insert(2 * place + 1, request)
        submitted = submit(llm, [prompt for prompt, _ in queue], [one for _, one in queue], [None] * len(queue))
        names.extend(name for name, (_, one) in zip(submitted, queue, strict=True) if one is own)
        return [name for name, (_, one) in zip(submitted, queue, strict=True) if one is not own]

    def step_and_keep(llm: Any) -> list[Any]:
        outputs = step(llm)
        ended.update((output.request_id, output) for output in outputs)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "submit", submit_with_others)
        patch.setattr(launch, "step", step_and_keep)
        values = model.run(halve_and_read, traced, max_tokens=3, temperature=0.0)
        while not ended.keys() >= set(names):
            launch.step(model.engine)
    return [ended[name] for name in names], values


def test_others_are_chunked_while_a_traced_prompt_is_never_split(chunked, plain):
    """150-token prompts of others need three steps; the 40-token traced ones come whole, and each has its step.

    Seen failing with vLLM's own `schedule` in place of the trace rules: a traced prompt has 38 rows of its 40.
    """
    untraced = [tokens(plain, 150, shift) for shift in (0, 1)]
    traced = [tokens(plain, 40, shift) for shift in range(5)]
    outputs, values = run_beside(chunked, untraced, traced)
    for prompt, output in zip(untraced, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == plain.generate(prompt, 3)
    assert len(values) == 5
    for prompt, (embedded, hidden, logits) in zip(traced, values, strict=True):
        expected = plain.run(prompt, {("resid_post", 4): lambda h: h * 0.5})
        close(embedded, expected.sites["embed"])
        close(hidden, expected.sites["resid_post", 6])
        close(logits, expected.logits[-1:])
        differs(logits, plain.run(prompt).logits[-1:])


def test_seeded_requests_draw_the_same_tokens_whether_their_prompts_are_split_or_not(chunked, engine, plain):
    """vLLM's CPU build ended on the first of them: it turns the request's generator back by an offset, which generators on the CPU lack.

    Beside others, without and with a plan, so that prompts are split at many places.
    """
    prompts = [tokens(plain, 150 + shift, shift) for shift in range(5)]
    drawn = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": 7}
    plan = [Capture("resid_post", layers=4, positions="all_prompt")]
    outputs = chunked.generate(prompts, plan=[None, plan, None, None, plan], **drawn)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [list(engine.generate(prompt, **drawn)[0].outputs[0].token_ids) for prompt in prompts]
    assert len(set(map(tuple, found))) > 1
    close(outputs[1].captures["resid_post", 4], plain.run(prompts[1]).sites["resid_post", 4])
    samples = [model.generate(prompts[0], n=3, **drawn)[0].outputs for model in (chunked, engine)]
    split, whole = ([list(sample.token_ids) for sample in each] for each in samples)
    assert split == whole


def test_traced_prompts_up_to_the_budget(chunked, plain):
    exact = tokens(plain, BUDGET, 2)
    with chunked.trace(exact, temperature=0.0):
        hidden = chunked.layers_output[5].save()
    close(hidden, plain.run(exact).sites["resid_post", 5])


def test_a_traced_prompt_over_the_budget_is_refused_and_untraced_ones_are_not(chunked, plain):
    over = tokens(plain, BUDGET + 1, 2)
    with pytest.raises(PromptError, match=r"65 tokens; a step takes 64.*plan=Capture.*larger max_num_batched_tokens"):
        with chunked.trace(over, temperature=0.0):
            chunked.logits.save()
    with pytest.raises(PromptError, match="computed in one step"):
        with chunked.trace(temperature=0.0) as tracer:
            with tracer.invoke("Paris"):
                pass
            with tracer.invoke(over):
                pass
    (output,) = chunked.generate(over, max_tokens=3, temperature=0.0, ignore_eos=True)
    assert list(output.outputs[0].token_ids) == plain.generate(over, 3)
    with chunked.trace(over[:10], temperature=0.0):
        logits = chunked.logits.save()
    close(logits, plain.run(over[:10]).logits[-1:])


def test_numbers_for_each_position_of_a_prompt_in_chunks(chunked, plain):
    """A plan changes each position by its own numbers, in whichever chunk it is. A step has 64 tokens, so it splits the second prompt."""
    before, prompts = chunked.gauges()[0]["traced_steps"], [tokens(plain, 60 - 9 * i, i) for i in range(4)]
    factors, mask = torch.linspace(0.5, 1.5, BUDGET), torch.arange(BUDGET) % 3 == 0

    def body(model):
        h = model.layers_output[3]
        h *= factors[: len(h), None]
        g = model.layers_output[5]
        model.layers_output[5] = torch.where(mask[: len(g), None], g.tanh(), g)
        return model.layers_output[6][-1]

    for prompt, found in zip(prompts, chunked.run(body, prompts, max_tokens=1, temperature=0.0), strict=True):
        count = len(prompt)
        scaled = ("resid_post", 3), lambda h, count=count: h * factors[:count, None]
        chosen = ("resid_post", 5), lambda h, count=count: torch.where(mask[:count, None], h.tanh(), h)
        close(found, plain.run(prompt, dict([scaled, chosen])).sites["resid_post", 6][-1])
    assert chunked.gauges()[0]["traced_steps"] == before


def test_invokes_that_wait_for_each_other_have_to_fit_into_one_step(chunked, plain):
    first, second = tokens(plain, 40, 0), tokens(plain, 40, 1)
    with pytest.raises(PromptError, match="together do not fit"):
        with chunked.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(first):
                barrier()
            with tracer.invoke(second):
                barrier()
    with chunked.trace(temperature=0.0) as tracer:  # those that do not wait need not be in one step
        rows = dict().save()
        with tracer.invoke(first):
            rows[0] = chunked.layers_output[2].clone()
        with tracer.invoke(second):
            rows[1] = chunked.layers_output[2].clone()
    close(rows[0], plain.run(first).sites["resid_post", 2])
    close(rows[1], plain.run(second).sites["resid_post", 2])
    assert isinstance(rows[0], torch.Tensor)
