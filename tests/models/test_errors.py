"""Errors of traces (rows F3 and A3): each is one of midstream's own, says what to do, and costs nobody else anything.

After each error the neighbours in the same batch have their right values, and a clean trace on the same engine works.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from oracle import close

from midstream.errors import (
    BarrierError,
    InterventionError,
    InterventionErrorGroup,
    MidstreamError,
    NeverReachedError,
    OutOfOrderError,
    ParameterError,
    PromptError,
    ShapeError,
    SourceUnavailableError,
    TraceError,
    UnknownModuleError,
    UnknownSiteError,
)
from midstream.sites import ACCESSORS, LAYER_SITES

PARIS = "The capital of France is"
ROME = "The capital of Italy is"
EIFFEL = "The Eiffel Tower is in the city of"


def check_clean_trace(model, plain) -> None:
    """The engine goes on: a trace that reads and writes is right."""
    with model.trace(PARIS, max_tokens=2, temperature=0.0) as tracer:
        model.layers_output[4][:] *= 0.5
        logits = model.logits.save()
    close(logits, plain.run(PARIS, {("resid_post", 4): lambda h: h * 0.5}).logits[-1:])
    assert tracer.result is not None


def user_error(model, tracer):
    {}["missing"]


def out_of_order(model, tracer):
    model.layers_output[-3]
    model.layers_output[2]


def earlier_module(model, tracer):
    model.model.layers[5].mlp.input
    model.model.embed_tokens.output


def probabilities_too_late(model, tracer):
    model.attn_z[5]
    model.attention_probabilities[5]


def step_never_comes(model, tracer):
    tracer.next(5)


def unknown_module(model, tracer):
    model.model.layerz[2].output


def unknown_child(model, tracer):
    model.model.layers[2].mlp.down_projection.output


def unknown_value(model, tracer):
    model.model.layers[2].mlp.outptu


def unknown_accessor(model, tracer):
    model.layer_output[2]


def with_in_a_function(model, tracer):
    with tracer.iter[:]:
        model.logits


def no_such_layer(model, tracer):
    model.model.layers[99].output


def layer_out_of_range(model, tracer):
    model.layers_output[99]


def wrong_shape(model, tracer):
    model.layers_output[2] = torch.zeros(3, 7)


def not_a_tensor(model, tracer):
    model.layers_output[2] = "zeros"


def wrong_shape_of_a_module(model, tracer):
    model.model.layers[2].mlp.output = torch.zeros(3, 7)


def write_to_a_module(model, tracer):
    model.model.layers[2].mlp = torch.zeros(3)


def steer_out_of_range(model, tracer):
    model.steer([3, 12], torch.ones(256))


def unknown_source_call(model, tracer):
    model.model.layers[2].mlp.source.self_up_projection_0.output


ERRORS = [
    (user_error, (InterventionError, KeyError), "missing"),
    (out_of_order, OutOfOrderError, r"^model\.layers_output\[2\] of step 0 .* model\.layers_output\[-3\] of step 0"),
    (
        earlier_module,
        OutOfOrderError,
        r"^model\.model\.embed_tokens\.output .* model\.model\.layers\[5\]\.mlp\.input of",
    ),
    (
        probabilities_too_late,
        OutOfOrderError,
        r"^model\.attention_probabilities\[5\] of .* after model\.attn_z\[5\] of",
    ),
    (step_never_comes, NeverReachedError, "step 5 was never reached"),
    (unknown_module, UnknownModuleError, "no layerz; did you mean layers"),
    (unknown_child, UnknownModuleError, "down_projection; did you mean down_proj"),
    (unknown_value, UnknownModuleError, "no outptu; did you mean output"),
    (unknown_accessor, UnknownModuleError, "no layer_output; did you mean layers_output"),
    (with_in_a_function, TraceError, r"for step in tracer\.iter\[:\]:"),
    (no_such_layer, UnknownModuleError, r"has 8 modules"),
    (layer_out_of_range, UnknownSiteError, r"99"),
    (wrong_shape, ShapeError, r"\[5, 256\].*\[3, 7\]"),
    (not_a_tensor, ShapeError, r"\[5, 256\].*str"),
    (wrong_shape_of_a_module, ShapeError, r"model\.model\.layers\[2\]\.mlp\.output is .*5, 256\].*\[3, 7\]"),
    (write_to_a_module, UnknownModuleError, "write to its .output"),
    (steer_out_of_range, UnknownSiteError, r"\[12\] are out of range; the model has 8"),
    (unknown_source_call, UnknownModuleError, "self_up_projection_0; did you mean self_up_proj_0|no call"),
]


BAD = [
    ({"banana": 1}, ParameterError, "Unexpected keyword argument 'banana'"),
    ({"temperature": -1.0}, ParameterError, "temperature must be non-negative"),
    ({"n": 0}, ParameterError, "n must be at least 1"),
    ({"max_tokens": 0}, ParameterError, "max_tokens must be at least 1"),
    ({"logprobs": 1000}, ParameterError, "greater than max allowed: 20"),
    ({"answers": list(range(200))}, ParameterError, "greater than max allowed: 128"),
    ({"extra_args": 3}, ParameterError, "extra_args is 3; allowed: a dict"),
    ({"prompts": [1] * 600}, PromptError, "600 tokens; this model takes prompts of up to 511"),
    ({"prompts": [10**6]}, PromptError, "token id 1000000; this model's are 0 to"),
]


@pytest.mark.engine
@pytest.mark.parametrize(("bad", "error", "message"), BAD, ids=[str(*bad) for bad, _, _ in BAD])
def test_what_vllm_refuses_is_midstreams_error(engine, plain, bad, error, message):
    """Its own is no ValueError in all versions. Whoever is behind it in the queue is served."""
    with pytest.raises(error, match=message) as caught:
        engine.generate(**{"prompts": PARIS, "max_tokens": 1, **bad})
    assert isinstance(caught.value, ValueError)
    (output,) = engine.generate(PARIS, max_tokens=3, temperature=0.0)
    assert list(output.outputs[0].token_ids) == plain.generate(PARIS, 3)


@pytest.mark.parametrize(("bad", "error", "message"), ERRORS, ids=[bad.__name__ for bad, _, _ in ERRORS])
def test_an_error_ends_its_own_invoke_and_nothing_else(model, plain, bad, error, message):
    with pytest.raises(MidstreamError, match=f"(?s){message}") as caught:
        with model.trace(max_tokens=3, temperature=0.0) as tracer:
            with tracer.invoke(EIFFEL):
                before = model.layers_output[6].save()
                good = model.logits.save()
            with tracer.invoke(PARIS):
                early = model.layers_output[1].save()
                bad(model, tracer)
            with tracer.invoke(ROME):
                ids = list().save()
                for _ in tracer.iter[:]:
                    ids.append(model.samples.item())
    for kind in error if isinstance(error, tuple) else (error,):
        assert isinstance(caught.value, kind)
    close(before, plain.run(EIFFEL).sites["resid_post", 6])
    close(good, plain.run(EIFFEL).logits[-1:])
    assert ids == plain.generate(ROME, 3)
    close(early, plain.run(PARIS).sites["resid_post", 1])  # A3: what was saved before the error is kept
    assert torch.equal(caught.value.saves["early"], early)
    check_clean_trace(model, plain)


PER_LAYER = [*ACCESSORS, *LAYER_SITES, "attention_probabilities"]
PER_LAYER = [name for name in PER_LAYER if name not in ("token_embeddings", "router")]  # the model has no experts


@pytest.mark.parametrize("name", PER_LAYER)
def test_out_of_order_names_the_accessors_that_the_code_has_used(model, name):
    def too_late(model):
        model.token_embeddings
        getattr(model, name)[5]
        for each in (lambda: model.embed, lambda: getattr(model, name)[4]):
            try:
                each()
            except OutOfOrderError as error:
                told.append(str(error).partition(":")[0])
        return told

    told = []
    told = model.run(too_late, PARIS, temperature=0.0)
    assert told == [
        f"model.embed of step 0 was asked for after model.{name}[5] of step 0",
        f"model.{name}[4] of step 0 was asked for after model.{name}[5] of step 0",
    ]


def test_out_of_order_is_raised_within_a_second(model):
    """Nothing waits for a value that cannot come. The best of three, for a busy machine may be slow for once."""
    seconds = []
    for _ in range(3):
        begun = time.monotonic()
        with pytest.raises(OutOfOrderError):
            with model.trace(PARIS, temperature=0.0):
                model.layers_output[5]
                model.layers_output[2]
        seconds.append(time.monotonic() - begun)
    assert min(seconds) < 1


def test_a_users_error_shows_the_users_line(model, plain):
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(PARIS, temperature=0.0):
            model.layers_output[2]
            ratio = 1 / 0  # the line
            ratio.save()
    text = str(caught.value)
    assert isinstance(caught.value, InterventionError)
    assert "ratio = 1 / 0  # the line" in text and "test_errors.py" in text and "division by zero" in text
    assert "interleaver" not in text and "body.py" not in text
    check_clean_trace(model, plain)


def test_own_errors_show_the_users_line_too(model):
    with pytest.raises(OutOfOrderError) as caught:
        with model.trace(PARIS, temperature=0.0):
            model.layers_output[5]
            model.layers_output[2]  # too late
    assert "# too late" in "".join(getattr(caught.value, "__notes__", []))


def test_an_exception_class_of_the_users_own(model):
    class Custom(ValueError):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    with pytest.raises(ValueError, match="Custom: left and right") as caught:
        with model.trace(PARIS, temperature=0.0):
            raise Custom("left", "right")
    assert isinstance(caught.value, InterventionError)


def test_several_failing_invokes_each_have_their_error(model, plain):
    with pytest.raises(InterventionErrorGroup) as caught:
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(PARIS):
                first = model.layers_output[1].save()
                int("seven")
            with tracer.invoke(EIFFEL):
                good = model.logits.save()
            with tracer.invoke(ROME):
                second = model.layers_output[2].save()
                model.layers_output[0]
    one, two = caught.value.exceptions
    assert isinstance(one, ValueError) and 'int("seven")' in str(one) and torch.equal(one.saves["first"], first)
    assert isinstance(two, OutOfOrderError) and torch.equal(two.saves["second"], second)
    close(good, plain.run(EIFFEL).logits[-1:])
    assert caught.group_contains(ValueError) and caught.group_contains(OutOfOrderError)
    check_clean_trace(model, plain)


def test_an_error_in_a_later_step_keeps_what_came_before(model, plain):
    with pytest.raises(IndexError):
        with model.trace(max_tokens=5, temperature=0.0) as tracer:
            with tracer.invoke(PARIS):
                ids = list().save()
                for step in tracer.iter[:]:
                    ids.append(model.samples.item())
                    if step == 2:
                        ids[100]
            with tracer.invoke(EIFFEL):
                pass
    assert ids == plain.generate(PARIS, 3)
    other = tracer.outputs[1]
    tokens = list(other.outputs[0].token_ids) if hasattr(other, "outputs") else other.token_ids
    assert tokens == plain.generate(EIFFEL, 5)
    check_clean_trace(model, plain)


def test_an_error_in_a_standing_edit_is_raised_and_the_edit_can_be_cleared(model, plain):
    try:
        with model.edit("broken", inplace=True):
            model.layers_output[2] = torch.zeros(3, 7)
        with pytest.raises(ShapeError):
            with model.trace(PARIS, temperature=0.0):
                model.logits.save()
    finally:
        model.clear_edits("broken")
    with pytest.raises(TraceError, match="no edit 'broken'; there are: none"):
        model.clear_edits("broken")
    check_clean_trace(model, plain)


def test_a_barrier_that_not_all_reach(model, plain):
    with pytest.raises(BarrierError, match="at a barrier of 2: that many invokes have to reach it"):
        with model.trace(temperature=0.0) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(PARIS):
                barrier()
            with tracer.invoke(EIFFEL):
                good = model.logits.save()
    close(good, plain.run(EIFFEL).logits[-1:])
    check_clean_trace(model, plain)


@pytest.mark.engine
def test_a_module_that_is_never_called(engine, plain):
    """vLLM multiplies by the unembedding's weight and never calls the module."""
    with pytest.raises(NeverReachedError, match=r"lm_head\.output of step 0 .* is not called in this model"):
        with engine.trace(PARIS, temperature=0.0):
            engine.lm_head.output.save()
    check_clean_trace(engine, plain)


@pytest.mark.parametrize("prompt", ["", [], {"input_ids": []}, [[]], [[1, 2], []]], ids=repr)
def test_prompts_that_are_none(model, plain, prompt):
    with pytest.raises(PromptError):
        with model.trace(prompt, temperature=0.0):
            model.logits.save()
    with pytest.raises(PromptError):
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(PARIS):
                pass
            with tracer.invoke(prompt):
                pass
    check_clean_trace(model, plain)


@pytest.mark.engine
def test_a_prompt_longer_than_the_model_takes(engine, plain):
    with pytest.raises(PromptError, match=r"600 (input )?tokens"):
        with engine.trace([5] * 600, temperature=0.0):
            engine.logits.save()
    check_clean_trace(engine, plain)


def test_traces_that_are_written_wrongly(model, plain):
    with pytest.raises(TraceError, match="needs a prompt"):
        with model.trace():
            pass
    with pytest.raises(TraceError, match="no prompt"):
        with model.trace(PARIS) as tracer:
            tracer.invoke(ROME)
    with pytest.raises(TraceError, match=r"outside of the invokes"):
        with model.trace(temperature=0.0) as tracer:
            with tracer.invoke(PARIS):
                tracer.barrier(2)()
    with pytest.raises(TraceError, match="inside a trace"):
        from midstream import save

        save(3)
    check_clean_trace(model, plain)


@pytest.mark.engine
def test_sites_and_modules_outside_of_a_trace_say_how_to_reach_them(engine):
    with pytest.raises(TraceError, match="only in a trace"):
        engine.layers_output[2]
    with pytest.raises(TraceError, match="only in a trace"):
        engine.model.layers[2].mlp.output
    with pytest.raises(UnknownModuleError, match="did you mean layers"):
        engine.model.layerz


@pytest.mark.engine
def test_what_cannot_be_sent_to_the_engine_is_named(engine, plain):
    lock = threading.Lock()
    with pytest.raises(TraceError, match=r"cannot be sent to the engine.*lock"):
        with engine.trace(PARIS, temperature=0.0):
            lock.acquire()
    with pytest.raises(MidstreamError, match="banana"):
        with engine.trace(PARIS, banana=1):
            pass
    check_clean_trace(engine, plain)


def test_a_block_without_source_points_at_run(model, plain):
    """As at a prompt of Python: the code was never in a file. Nothing runs, and `model.run` does the same job."""
    names = {"model": model, "prompt": PARIS}
    code = compile("with model.trace(prompt, temperature=0.0):\n    h = model.logits.save()\n", "<string>", "exec")
    with pytest.raises(SourceUnavailableError, match=r"model\.run"):
        exec(code, names)
    exec("def fn(m):\n    return m.layers_output[2], m.logits\n", names)
    hidden, logits = model.run(names["fn"], PARIS, temperature=0.0)
    close(hidden, plain.run(PARIS).sites["resid_post", 2])
    close(logits, plain.run(PARIS).logits[-1:])


_OUT_OF_RANGE = """
import sys, torch
from midstream import LanguageModel, demo_model

model = LanguageModel(demo_model())
for edge in (lambda: model.logits[5000], lambda: model.samples[:, 3], lambda: model.next_token_probs @ torch.ones(3, 3)):
    try:
        with model.trace("The capital of France is"):
            x = edge().save()
    except (IndexError, RuntimeError) as error:
        print(type(error).__name__)
"""


def test_an_error_of_torchs_behind_the_layers_is_an_error_and_not_the_end_of_the_process(tmp_path) -> None:
    """torch walks up the C stack for it. Seen killed by a segmentation fault with `body._at_stack_end` calling what it is given."""
    script = tmp_path / "script.py"
    script.write_text(_OUT_OF_RANGE)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    errors = ["InterventionIndexError", "InterventionIndexError", "InterventionRuntimeError"]
    assert (ran.returncode, ran.stdout.split()) == (0, errors), ran.stderr[-2000:]
