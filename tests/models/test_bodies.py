"""What the code of one trace may do, and what of it reaches the forward and its neighbours: nothing (rows F3, A3, F1).

Each misbehaving invoke has a neighbour in its batch, whose values have to be right, and a clean trace comes after it. Rows B1, D8, P5.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import re
import traceback

import pytest
import torch
from oracle import close
from test_errors import check_clean_trace

from midstream import Steer, save
from midstream.errors import (
    BarrierError,
    InterventionError,
    InterventionErrorGroup,
    MidstreamError,
    PromptError,
    ShapeError,
    TraceError,
    UnknownModuleError,
    UnknownSiteError,
)

PARIS = "The capital of France is"
ROME = "The capital of Italy is"
EIFFEL = "The Eiffel Tower is in the city of"


def beside(model, plain, misbehave, **params):
    """Run `misbehave(model, tracer)` in one invoke, with a neighbour that reads late."""
    with model.trace(max_tokens=2, temperature=0.0, **params) as tracer:
        with tracer.invoke(PARIS):
            found = [misbehave(model, tracer)].save()
        with tracer.invoke(EIFFEL):
            inner = model.model.layers[5].mlp.down_proj.output.save()
            hidden = model.layers_output[6].save()
            logits = model.logits.save()
    expected = plain.run(EIFFEL)
    inner = inner[0] if isinstance(inner, tuple) else inner  # vLLM's projections return their bias beside it
    close(inner.view(-1, inner.shape[-1]), expected.sites["mlp_out", 5])
    close(hidden, expected.sites["resid_post", 6])
    close(logits, expected.logits[-1:])
    return found[0]


# ------------------------------------------------------------------------------------------- errors on the forward's side


def skip_with_a_wrong_shape(model, tracer):
    model.model.layers[3].skip(torch.zeros(2, 3))


def cache_on_a_device_that_is_none(model, tracer):
    tracer.cache(device="nowhere")


def cache_as_a_dtype_that_is_none(model, tracer):
    tracer.cache(dtype="float32")


class Mute(Exception):
    def __str__(self):
        return 5  # type: ignore[return-value]


def an_error_without_words(model, tracer):
    raise Mute


def stop_iteration(model, tracer):
    next(iter([]))


def system_exit(model, tracer):
    raise SystemExit(3)


ERRORS = [
    (skip_with_a_wrong_shape, ShapeError, r"model\.model\.layers\[3\]\.output is .*\[2, 3\] was written"),
    (cache_on_a_device_that_is_none, InterventionError, "nowhere"),
    (cache_as_a_dtype_that_is_none, InterventionError, "dtype|to\\(\\)"),
    (an_error_without_words, InterventionError, "Mute: .its message cannot be read: TypeError"),
    (stop_iteration, InterventionError, "StopIteration"),
    (system_exit, InterventionError, "SystemExit: 3"),
]


@pytest.mark.parametrize(("bad", "error", "message"), ERRORS, ids=[bad.__name__ for bad, _, _ in ERRORS])
def test_an_error_is_its_own_traces_wherever_it_comes_up(model, plain, bad, error, message):
    with pytest.raises(MidstreamError, match=f"(?s){message}") as caught:
        beside(model, plain, bad)
    assert isinstance(caught.value, error)
    assert not isinstance(caught.value, (StopIteration, SystemExit))  # which would tell the interpreter something else
    check_clean_trace(model, plain)


def test_a_token_that_is_none_ends_its_own_trace(engine, plain):
    for token in (10**6, -1):
        with pytest.raises(ShapeError, match=rf"model\.samples was set to {token}; token ids are 0 to"):
            with engine.trace(max_tokens=3, temperature=0.0) as tracer:
                with tracer.invoke(PARIS):
                    model_samples = engine.samples
                    model_samples[:] = token
                with tracer.invoke(EIFFEL):
                    ids = list().save()
                    for _ in tracer.iter[:]:
                        ids.append(engine.samples.item())
        assert ids == plain.generate(EIFFEL, 3)
    check_clean_trace(engine, plain)


def test_ctrl_c_of_the_bodys_own_is_an_error_like_any_other(engine, plain):
    """Engine processes ignore the real one."""

    def interrupt(model, tracer):
        raise KeyboardInterrupt

    with pytest.raises(InterventionError, match="KeyboardInterrupt") as caught:
        beside(engine, plain, interrupt)
    assert not isinstance(caught.value, KeyboardInterrupt)
    check_clean_trace(engine, plain)


# ------------------------------------------------------------------------------------------------- calls of a body's own


def test_what_a_body_computes_by_itself_passes_no_point(model, plain):
    """Also by a method of a module, past the envoy's own call: neighbours wait at these very points."""

    def calls(m, tracer):
        return m.model.layers[5].mlp.forward(m.layers_output[2])

    by_itself = beside(model, plain, calls)
    expected = plain.model.model.layers[5].mlp(plain.run(PARIS).sites["resid_post", 2])
    close(by_itself, expected)
    check_clean_trace(model, plain)


def test_logits_that_a_body_computes_are_not_the_steps(engine, plain):
    def lens(m, tracer):
        return m.compute_logits(m.model.norm(m.layers_output[2]))

    logits = beside(engine, plain, lens)
    h = plain.model.model.norm(plain.run(PARIS).sites["resid_post", 2])
    close(logits, plain.model.lm_head(h))


def test_a_bodys_own_calls_have_no_plans_edits(engine, plain):
    """The plan of a request in the same step is about that request's rows, and not about what a trace calls a module with."""
    v = torch.full((256,), 3.0)
    with engine.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(EIFFEL, plan=Steer("mlp_out", layers=5, vector=v)):
            steered = engine.layers_output[5].save()
        with tracer.invoke(PARIS):
            own = engine.model.layers[5].mlp(engine.layers_output[2]).save()
    close(own, plain.model.model.layers[5].mlp(plain.run(PARIS).sites["resid_post", 2]))
    close(steered, plain.run(EIFFEL, {("mlp_out", 5): lambda h: h + v}).sites["resid_post", 5])


# ------------------------------------------------------------------------------------------------------- torch's own modes


def in_autocast(model, tracer):
    with torch.autocast("cpu", torch.bfloat16):
        h = model.layers_output[5]
        return (h @ h.T).dtype


def out_of_inference_mode(model, tracer):
    with torch.inference_mode(False):
        model.layers_output[5]
        return torch.is_inference_mode_enabled()


def with_another_default_device(model, tracer):
    with torch.device("meta"):
        model.layers_output[5]
        return torch.empty(1).device.type


@pytest.mark.parametrize(
    ("enter", "inside"),
    [(in_autocast, torch.bfloat16), (out_of_inference_mode, False), (with_another_default_device, "meta")],
)
def test_a_mode_holds_for_the_body_alone(model, plain, enter, inside):
    """It parks inside of the block, and the forward and its neighbours go on as if there were none."""
    assert beside(model, plain, enter) == inside
    check_clean_trace(model, plain)


def test_random_numbers_of_a_body_are_its_own(engine):
    """Seen failing on one rank, where a seed was the sampler's, and a neighbour had the same tokens in every run."""

    def sampled():
        with engine.trace(max_tokens=40, temperature=2.0, ignore_eos=True) as tracer:
            with tracer.invoke(PARIS):
                drawn = list().save()
                for _ in tracer.iter[:]:
                    torch.manual_seed(7)
                    drawn.append(torch.rand(3))
            with tracer.invoke(ROME):
                tokens = list().save()
                for _ in tracer.iter[:]:
                    tokens.append(int(engine.samples[0]))
        assert torch.equal(torch.stack(drawn), torch.rand(3, generator=torch.Generator().manual_seed(7)).expand(40, 3))
        return tuple(tokens)

    assert len({sampled() for _ in range(3)}) == 3


# -------------------------------------------------------------------------------------------------------------- barriers


def test_a_barrier_in_a_loop_holds_in_every_step(model):
    with model.trace(max_tokens=3, temperature=0.0) as tracer:
        barrier = tracer.barrier(2)
        seen, met = list().save(), [-1]
        with tracer.invoke(PARIS):
            for step in tracer.iter[:]:
                model.layers_output[2]
                met[0] = step
                barrier()
        with tracer.invoke(ROME):
            for _ in tracer.iter[:]:
                barrier()
                seen.append(met[0])
    assert seen == [0, 1, 2]


def test_a_second_arrival_without_the_other_is_an_error(model, plain):
    with pytest.raises(BarrierError):
        with model.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(PARIS):
                barrier()
                barrier()
            with tracer.invoke(ROME):
                barrier()
    check_clean_trace(model, plain)


def test_invokes_that_use_each_others_variables_have_one_sample_each(engine, plain):
    """Of several, one would silently get another one's value."""
    with pytest.raises(TraceError, match="so n > 1 is not possible"):
        with engine.trace(max_tokens=1, n=2, temperature=1.0, seed=0) as tracer:
            with tracer.invoke(PARIS):
                h = engine.layers_output[2]
            with tracer.invoke(ROME):
                engine.layers_output[3][-1] += h[-1]
    check_clean_trace(engine, plain)


def test_samples_that_do_not_fit_into_one_step_together_are_refused(engine, plain):
    """They would wait for free places that never come, all other requests behind them."""
    places = engine.vllm_config.scheduler_config.max_num_seqs
    with pytest.raises(PromptError, match=rf"{2 * places} prompts, counted once for each sample, .* do not fit"):
        with engine.trace(max_tokens=1, n=places, temperature=1.0, seed=0) as tracer:
            barrier = tracer.barrier(2 * places)
            with tracer.invoke(PARIS):
                barrier()
            with tracer.invoke(ROME):
                barrier()
    check_clean_trace(engine, plain)


def test_traces_beside_drafted_tokens_are_refused(engine, plain, monkeypatch):
    """They would see the drafts as the request's own tokens, and nobody would tell."""
    with monkeypatch.context() as drafting:
        drafting.setattr(engine.vllm_config, "speculative_config", object())
        with pytest.raises(TraceError, match="not supported with speculative decoding"):
            with engine.trace(PARIS, temperature=0.0):
                engine.logits.save()
    check_clean_trace(engine, plain)


# ----------------------------------------------------------------------------------------------------------- what comes back


def test_what_is_filled_after_a_function_has_returned_comes_back(model, plain):
    cache = model.run(lambda m, tracer: tracer.cache(["model.layers.3"]), PARIS, max_tokens=1, temperature=0.0)
    assert list(cache) == ["model.layers.3"]
    output = cache["model.layers.3"].output
    value = output[0] + output[1] if isinstance(output, tuple) and len(output) == 2 else output
    close(value[0] if value.ndim == 3 else value, plain.run(PARIS).sites["resid_post", 3])


def test_containers_of_any_kind_are_returned(model, plain):
    def by_layer(m):
        found = collections.defaultdict(list)
        for i in (1, 3):
            found[i].append(m.layers_output[i])
        return found

    found = model.run(by_layer, PARIS, temperature=0.0)
    assert type(found) is collections.defaultdict and found.default_factory is list
    for i in (1, 3):
        close(found[i][0], plain.run(PARIS).sites["resid_post", i])


class Asks:
    def __call__(self, m):
        early = save(m.layers_output[1])
        raise ValueError(len(early))


def asks(m, layer):
    early = save(m.layers_output[layer])
    raise ValueError(len(early))


@pytest.mark.parametrize("fn", [Asks(), functools.partial(asks, layer=1)], ids=["object", "partial"])
def test_saves_before_an_error_are_kept_whatever_was_called(model, plain, fn):
    with pytest.raises(ValueError) as caught:
        model.run(fn, PARIS, temperature=0.0)
    close(caught.value.saves["early"], plain.run(PARIS).sites["resid_post", 1])


class Stubborn(Exception):
    """Can be pickled, and not be read again."""

    def __init__(self, one, two):
        super().__init__(one)


def test_a_value_that_cannot_be_read_again_is_said(engine, plain):
    with pytest.raises(TraceError, match=r"The saved values of the trace could not be sent: .*rebuilding it failed"):
        with engine.trace(PARIS, temperature=0.0):
            stubborn = Stubborn(1, 2).save()  # noqa: F841
    check_clean_trace(engine, plain)


# ------------------------------------------------------------------------------------------------------ what users are told


@pytest.mark.parametrize("call", ["trace", "generate", "run"])
def test_a_trace_inside_of_a_trace_is_refused(model, plain, call):
    arguments = (lambda m: 1, PARIS) if call == "run" else (PARIS,)
    with pytest.raises(TraceError, match=rf"model\.{call} cannot be called inside of a trace"):
        model.run(lambda m: getattr(m, call)(*arguments), PARIS, temperature=0.0)
    check_clean_trace(model, plain)


def test_weights_that_the_engine_keeps_in_another_form_are_not_empty_without_a_word(engine, plain):
    def projected(m):
        z = m.attn_z[3].flatten(-2)
        return z, m.model.layers[3].self_attn.o_proj(z)

    z, out = engine.run(projected, PARIS, temperature=0.0)
    close(out[0] if isinstance(out, tuple) else out, plain.model.model.layers[3].self_attn.o_proj(z))
    try:
        weight = engine.run(lambda m: m.model.layers[3].self_attn.o_proj.weight, PARIS, temperature=0.0)
    except TraceError as error:
        assert "is empty here" in str(error)
    else:
        assert weight.numel()


def test_a_function_that_returns_a_module_is_told(engine):
    with pytest.raises(TraceError, match="The function's return value could not be sent"):
        engine.run(lambda m: m.model.layers[3], PARIS, temperature=0.0)


def test_the_error_that_several_have_is_caught_as_one(model):
    with pytest.raises(ValueError, match="2 requests failed alike, the first: ValueError: 5") as caught:
        model.run(lambda m: (_ for _ in ()).throw(ValueError(5)), [PARIS, ROME], temperature=0.0)
    assert isinstance(caught.value, InterventionErrorGroup) and len(caught.value.failures) == 2


def test_requests_that_fail_alike_print_one_traceback_with_a_count(model):
    """What differs is printed each, with how many failed so."""

    def fails(m):
        m.layers_output[1].norm()
        raise LookupError("own")

    def fails_by_length(m):
        raise LookupError("short" if len(m.layers_output[1]) < 6 else "long")

    with pytest.raises(LookupError) as caught:
        model.run(fails, [PARIS, EIFFEL] * 10, temperature=0.0)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("in the trace:") == 1 and 1 <= text.count('raise LookupError("own")') <= 2
    assert "20 requests failed alike, the first: LookupError: own" in text and "more exceptions" not in text
    assert set(caught.value.failures) == set(range(20)) and len(caught.value.outputs) == 20
    with pytest.raises(LookupError) as caught:
        model.run(fails_by_length, [PARIS, EIFFEL, PARIS, PARIS], temperature=0.0)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("in the trace:") == 2 and "4 requests failed, the first: LookupError: short" in text
    assert text.count("3 requests failed so.") == 1
    assert [str(caught.value.failures[i]).split()[1] for i in range(4)] == ["short", "long", "short", "short"]


def test_threads_take_turns(model, plain):
    prompts = [PARIS, ROME, EIFFEL] * 2
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda p: model.run(lambda m: m.layers_output[4], p, temperature=0.0), prompts))
    for prompt, value in zip(prompts, found, strict=True):
        close(value, plain.run(prompt).sites["resid_post", 4])


def test_heads_are_counted(model):
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == model.run(
        lambda m: (m.attn_z[0].shape[1], m.attn_z[0].shape[1] // 2, m.attn_z[0].shape[2]), PARIS, temperature=0.0
    )
    # And in a trace as outside of one.
    sizes = (model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size)
    assert sizes == model.run(lambda m: (m.num_heads, m.num_kv_heads, m.head_dim, m.vocab_size), PARIS)


@pytest.mark.parametrize("layer", [(3, -1), [2, 3], 3.0])
def test_what_is_no_layer_is_said(model, layer):
    given, right = (re.escape(f"model.layers_output[{each!r}]") for each in (layer, 3))
    with pytest.raises(UnknownSiteError, match=f"{given}: a layer is one number, {right}, or a slice"):
        model.run(lambda m: m.layers_output[layer], PARIS)
    assert model.run(lambda m: m.layers_output[torch.tensor(3)].shape[0], PARIS) == 5


def test_nearest_names_are_those_of_accessors_too(model):
    with pytest.raises(UnknownModuleError, match="did you mean layers_output"):
        model.layer_output
