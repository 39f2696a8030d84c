"""Plans on transformers alone: architectures, dtypes, batches, recorded runs, and what is refused (rows D4, D8, E5, E9, E11, F2).

What plans do to the bundled model is in `test_plans.py`, on both backends. Expected values come from plain transformers with
torch hooks, and closed forms. Rows B6, D1, D5, F3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from oracle import Plain, close, differs
from plan_cases import EIFFEL, FRANCE, GREEDY, HIDDEN, ITALY, LAYERS, everything, generated_with, tokens, vector
from transformers import AutoModelForCausalLM

from midstream import Capture, Clamp, LanguageModel, Patch, Plan, Span, Steer, demo_model, open_captures
from midstream.errors import MidstreamError, ParameterError, PlanError, PromptError, UnknownSiteError
from midstream.plan.compile import compile_plan
from midstream.runtime.points import PointHooks, points_of
from midstream.runtime.tables import RowProfiles
from midstream.runtime.torch_tables import TorchTables

# -------------------------------------------------------------------------------------------------------- architectures

# Of each architecture: the modules that attention and the MLP are, whose outputs are added to the stream as they come.
MODULES = {
    "gpt2": ("transformer.h.{}", "attn", "mlp"),  # learned positions
    "gpt_neox": ("gpt_neox.layers.{}", "attention", "mlp"),  # attention and MLP side by side
    "olmo2": ("model.layers.{}", "post_attention_layernorm", "post_feedforward_layernorm"),  # norms behind them
    "mixtral": ("model.layers.{}", "self_attn", "mlp"),
}
IDS = [5, 17, 33, 60, 91, 120, 44]
WIDTH = 128


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[LanguageModel, Any]]]:
    """A tiny model as midstream has it, and the same weights in plain transformers."""
    directory, made = tmp_path_factory.mktemp("tiny"), {}

    def make(name: str) -> tuple[LanguageModel, Any]:
        if name not in made:
            path = str(tiny_models.build(name, directory))
            made[name] = LanguageModel(path, dtype=torch.float32), AutoModelForCausalLM.from_pretrained(path).eval()
        return made[name]

    yield make


@torch.no_grad()
def hooked(model: Any, ids: list[int], edits: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What every edited module and every block gives, after the edit; and the logits. By torch alone."""
    seen: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for path, edit in edits.items():

            def after(_: Any, __: Any, output: Any, path: str = path, edit: Any = edit) -> Any:
                value = output[0] if isinstance(output, tuple) else output
                seen[path] = edit(value[0])
                return (seen[path][None], *output[1:]) if isinstance(output, tuple) else seen[path][None]

            stack.callback(model.get_submodule(path).register_forward_hook(after).remove)
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return seen, logits


def kept(h: torch.Tensor) -> torch.Tensor:
    return h.clone()


@pytest.mark.parametrize("name", MODULES)
def test_plans_on_other_architectures(tiny: Any, name: str) -> None:
    model, plain = tiny(name)
    block, attn, mlp = MODULES[name]
    v, w, d = vector(1, 4.0, WIDTH), vector(2, 4.0, WIDTH), vector(3, 1.0, WIDTH)
    plan = [
        Steer("resid_post", layers=1, vector=v, scale=0.5),
        Steer("attn_out", layers=2, vector=w, phase="decode"),
        Patch("mlp_out", layer=0, position=[0, -1], source=w, alpha=0.5),
        Clamp("resid_post", layers=2, direction=d),
        everything(when="after"),
        Capture("mlp_out", layers=0, positions="all", when="after"),
    ]
    output = model.generate([IDS], plan=plan, max_tokens=4, **GREEDY)[0]

    def edits(prompt: int) -> dict[str, Any]:
        def patched(h: torch.Tensor) -> torch.Tensor:
            h = h.clone()
            h[[0, prompt - 1]] = 0.5 * h[[0, prompt - 1]] + 0.5 * w
            return h

        def steered(h: torch.Tensor) -> torch.Tensor:
            return torch.cat([h[:prompt], h[prompt:] + w])

        return {
            **{block.format(i): kept for i in range(4)},
            block.format(1): lambda h: h + 0.5 * v,
            block.format(2): lambda h: h - torch.outer(h @ d, d),
            f"{block.format(2)}.{attn}": steered,
            f"{block.format(0)}.{mlp}": patched,
        }

    ids = list(IDS)
    for _ in range(4):
        ids.append(int(hooked(plain, ids, edits(len(IDS)))[1][-1].argmax()))
    assert output.token_ids == ids[len(IDS) :]
    seen, _ = hooked(plain, ids[:-1], edits(len(IDS)))
    unedited, _ = hooked(plain, ids[:-1], {block.format(i): kept for i in range(4)})
    for layer in range(4):
        close(output.captures["resid_post", layer], seen[block.format(layer)])
        differs(output.captures["resid_post", layer], unedited[block.format(layer)])
    close(output.captures["mlp_out", 0], seen[f"{block.format(0)}.{mlp}"])


@pytest.mark.parametrize("order", [["resid_mid", "mlp_in"], ["mlp_in", "resid_mid"]], ids=" then ".join)
def test_sites_in_one_tensor_are_edited_in_the_order_of_the_forward(tiny: Any, order: list[str]) -> None:
    """Here the value after attention goes into the MLP as it is. A request with one of the two sites may come before one with the other."""
    model, plain = tiny("olmo2")
    v = vector(1, 4.0, WIDTH)
    plan = Plan.of([Steer("resid_mid", layers=1, vector=v), Capture("mlp_in", layers=1)])
    tables = TorchTables(points_of(model.arch), torch.device("cpu"), torch.float32)
    hooks = PointHooks(model.module, model.arch, (), tables, torch.float32)
    widths, layers = model.arch.widths, model.arch.num_layers
    compiled = compile_plan(
        plan, len(IDS), layers, width=lambda *point: widths[point], vector=None, run=None, dtype="float32"
    )
    for site in order:
        hooks.need([(site, 1)])
    rows, hooks.on = torch.empty(1, WIDTH), True
    place = np.array([0] * (len(IDS) - 1) + [rows.data_ptr()])
    tables.begin_step(RowProfiles(tables.load(compiled).ids[compiled.prompt]), place)
    with torch.no_grad():
        model.module(input_ids=torch.tensor([IDS]), use_cache=False)
    hooks.release([(site, 1) for site in order])
    assert not len(hooks)
    seen = []
    module = plain.get_submodule(model.arch.binding("resid_mid", 1).path)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    plain(input_ids=torch.tensor([IDS]), use_cache=False)
    handle.remove()
    close(rows[0], seen[0].reshape(-1, WIDTH)[-1] + v)


def test_a_site_that_the_architecture_lacks_is_named_with_those_it_has(tiny: Any) -> None:
    model, _ = tiny("gpt_neox")
    with pytest.raises(PlanError, match=r"resid_mid.*resid_pre, attn_in, attn_q, attn_k, attn_v, attn_z"):
        model.generate([IDS], plan=Steer("resid_mid", vector=vector(1, 4.0, WIDTH)), max_tokens=1)
    with pytest.raises(UnknownSiteError):
        model.run(lambda m: m.resid_mid[1], IDS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_is_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    model = LanguageModel(demo_model(), dtype=dtype)
    a, b, d = vector(1), vector(2), vector(3)
    steers = [Steer("resid_post", layers=3, vector=v, scale=0.37) for v in (a, b)]
    both = [Capture("resid_post", layers=3, positions="all_prompt", when=when) for when in ("before", "after")]
    plan = [*steers, Clamp("resid_post", layers=3, direction=d), *both]
    captures = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)[0].captures
    h = captures["resid_post", 3].float() + (0.37 * a + 0.37 * b)
    unit = d / d.norm()
    expected = (h - (h * unit).sum(-1, keepdim=True) * unit).to(dtype)
    assert captures["resid_post", 3, "after"].dtype == dtype
    assert (captures["resid_post", 3, "after"] == expected).float().mean() > 0.999  # the dot product's last bit apart
    close(captures["resid_post", 3, "after"], expected, 1e-2)


# -------------------------------------------------------------------------------------------------------------- batches


def test_plans_of_padded_invokes_are_by_position_and_stay_with_their_invoke(hf: LanguageModel, plain: Plain) -> None:
    """Prompts of 5, 8 and 1 tokens, one left-padded batch that is decoded together."""
    v = vector(1)
    plans = [
        [Steer("resid_post", layers=2, vector=v, phase="decode"), everything()],
        [Patch("resid_post", layer=4, position=0, source=v), everything(when="after")],
        [Capture("resid_mid", layers=3, positions="all")],
    ]
    prompts = [FRANCE, EIFFEL, "Paris"]
    with hf.trace(max_tokens=4, **GREEDY) as tracer:
        for i in range(3):
            with tracer.invoke(prompts[i], plan=plans[i]):
                pass
    first, second, third = tracer.outputs
    edits = {("resid_post", 2): lambda h: torch.cat([h[:5], h[5:] + v])}
    ids, ran = generated_with(plain, edits, 4)
    assert first.token_ids == ids
    close(first.captures["resid_post", 7], ran.sites["resid_post", 7])
    edits = {("resid_post", 4): lambda h: torch.cat([v[None], h[1:]])}
    ids, ran = generated_with(plain, edits, 4, EIFFEL)
    assert second.token_ids == ids
    close(second.captures["resid_post", 7], ran.sites["resid_post", 7])
    ids, ran = generated_with(plain, None, 4, "Paris")
    assert third.token_ids == ids
    close(third.captures["resid_mid", 3], ran.sites["resid_mid", 3])


def test_a_plan_and_gradients(hf: LanguageModel, plain: Plain) -> None:
    """The gradient is that of the steered model."""
    v = vector(1)
    with hf.trace(FRANCE, plan=Steer("resid_post", layers=3, vector=v), temperature=0.0):
        hidden = hf.layers_output[1]
        loss = hf.logits[0, 7]
        with loss.backward():
            gradient = hidden.grad.save()
    held: list[torch.Tensor] = []

    def hold(_: Any, __: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        value.retain_grad()
        held.append(value)

    def steer(_: Any, __: Any, output: Any) -> Any:
        return (output[0] + v, *output[1:]) if isinstance(output, tuple) else output + v

    layers = plain.model.model.layers
    with ExitStack() as stack:
        stack.callback(layers[1].register_forward_hook(hold).remove)
        stack.callback(layers[3].register_forward_hook(steer).remove)
        plain.model(input_ids=torch.tensor([plain.ids(FRANCE)]), use_cache=False).logits[0, -1, 7].backward()
    plain.model.zero_grad(set_to_none=True)
    close(gradient, held[0].grad[0])


def test_nothing_is_left_on_the_model(hf: LanguageModel) -> None:
    def hooks() -> int:
        return sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in m.__dict__) for m in hf.module.modules()
        )

    before = hooks()
    with hf.trace(FRANCE, plan=[Steer("resid_post", vector=vector()), everything()]):
        hf.layers_output[3].save()
    with pytest.raises(MidstreamError), hf.trace(FRANCE, plan=[Steer("resid_post", vector=vector()), everything()]):
        hf.layers_output[3].save()
        raise ValueError("mine")
    hf.generate([FRANCE, EIFFEL], plan=everything(), max_tokens=2)
    assert hooks() == before


# --------------------------------------------------------------------------------------------- recorded runs (row E5)


@pytest.fixture
def small() -> LanguageModel:
    """Room for two runs of all layers of a 5-token prompt."""
    return LanguageModel(demo_model(), dtype=torch.float32, record_bytes=2 * 5 * LAYERS * HIDDEN * 4)


def test_runs_are_listed_with_their_bytes_and_deleted(small: LanguageModel) -> None:
    run = small.record(FRANCE, sites=["resid_post"], layers=[1, 2], positions=[0, -1], name="one")
    assert list(small.runs) == ["one"] and small.runs["one"] == run and len(small.runs) == 1
    assert run.layers == (1, 2) and run.positions == (0, 4)
    (info,) = small.runs.listing()
    assert (info.name, info.bytes, info.leases, info.positions) == ("one", 2 * 2 * HIDDEN * 4, 0, (0, 4))
    del small.runs["one"]
    assert "one" not in small.runs and not small.runs.listing()
    with pytest.raises(KeyError, match="one"):
        del small.runs["one"]
    with pytest.raises(PlanError, match="'one'"):
        small.generate(FRANCE, plan=Patch("resid_post", layer=1, position=0, source=run), max_tokens=1)


def test_the_least_recently_used_run_makes_room(small: LanguageModel) -> None:
    first, second = (small.record(prompt, sites="resid_post") for prompt in (FRANCE, ITALY))
    assert [first.name, second.name] == ["run-1", "run-2"]
    small.generate(FRANCE, plan=Patch("resid_post", layer=1, position=0, source=first), max_tokens=1)
    third = small.record(ITALY, sites="resid_post")
    assert set(small.runs) == {first.name, third.name}
    with pytest.raises(PlanError, match="run-2"):
        small.generate(FRANCE, plan=Patch("resid_post", layer=1, position=0, source=second), max_tokens=1)
    with pytest.raises(PlanError, match="record_bytes"):
        small.record(EIFFEL + EIFFEL, sites=["resid_post"])
    assert third.name in small.runs


def test_a_name_that_is_used_again_is_the_new_run(small: LanguageModel) -> None:
    old = small.record(FRANCE, sites="resid_post", layers=2, name="it")
    new = small.record(ITALY, sites="resid_post", layers=2, name="it")
    assert small.runs["it"] == new != old and len(small.runs) == 1
    with pytest.raises(PlanError, match="another of that name"):
        small.generate(FRANCE, plan=Patch("resid_post", layer=2, position=0, source=old), max_tokens=1)


def test_a_run_has_the_models_own_plan_on(small: LanguageModel, plain: Plain) -> None:
    v = vector(1)
    small.plan = [Steer("resid_post", layers=[1, 2], vector=v), Capture("resid_pre", layers=1)]
    run = small.record(FRANCE, sites=["resid_post"], layers=[2])
    small.plan = None
    plan = [
        Patch("resid_post", layer=2, position=[3], source=run),
        Capture("resid_post", layers=2, positions=3, when="after"),
    ]
    row = small.generate(ITALY, plan=plan, max_tokens=1)[0].captures["resid_post", 2]
    edits = {("resid_post", layer): lambda h: h + v for layer in (1, 2)}
    close(row[0], plain.run(FRANCE, edits).sites["resid_post", 2][3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": []}, "sites is empty"),
        ({"sites": iter([])}, "sites is empty"),
        ({"sites": ["resid_posts"]}, "Capture.site"),
        ({"sites": "resid_post", "layers": [8]}, "0 to 7"),
        ({"sites": "resid_post", "positions": "all"}, "'all_prompt', 'last_prompt'"),
        ({"sites": "resid_post", "positions": 5}, "from -5 to 4"),
    ],
)
def test_what_cannot_be_recorded_is_said(hf: LanguageModel, options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        hf.record(FRANCE, **options)
    assert not hf.runs


def test_a_run_lacks_what_was_not_recorded(hf: LanguageModel) -> None:
    run = hf.record(FRANCE, sites="resid_post", layers=[2], positions=[1, 2])
    for patch, message in [
        (Patch("resid_post", layer=3, position=1, source=run), "layer 3"),
        (Patch("mlp_out", layer=2, position=1, source=run), "mlp_out"),
        (Patch("resid_post", layer=2, position=0, source=run), "allowed: 1 to 2"),
        (Patch("mlp_act", layer=2, position=1, source=run, source_site="resid_post"), "width"),
    ]:
        with pytest.raises(PlanError, match=message):
            hf.generate(EIFFEL, plan=patch, max_tokens=1)
    hf.runs.delete(run.name)


# --------------------------------------------------------------------------------------------- what is refused (D8, E11)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Steer("resid_post", layers=[3, 8], vector=vector()), "Steer.layers is 8; allowed: 0 to 7"),
        (Steer("resid_post", vector=[1.0, 2.0]), "Steer.vector is of width 2; allowed: 256"),
        (Steer("mlp_act", vector=vector()), "Steer.vector is of width 256"),
        (Steer("resid_post", vector="thruth"), "'thruth'"),
        (Clamp("resid_post", direction="none such"), "'none such'"),
        (Patch("resid_post", layer=2, position=5, source="zeros"), "Patch.position is 5; allowed: from -5 to 4"),
        (Patch("resid_post", layer=2, position=[4, -1], source="zeros"), "twice"),
        (Capture("resid_post", positions=[0, 9]), "Capture.positions is 9"),
        (Capture("resid_post", positions=Span("Spain")), "Spain"),
        (Capture("resid_post", positions=Span("a", 9)), "occurrence"),
        ([Steer("resid_post", vector=vector()), None], "mixes"),
        ([[Steer("resid_post", vector=vector())]] * 3, "3 plans were given for 2 prompts"),
        (7, "the plan is 7"),
        ([["steer"]] * 2, r"plan\[0\]"),
    ],
)
def test_what_cannot_be_done_to_one_prompt_is_said_before_any_runs(hf: LanguageModel, plan: Any, message: str) -> None:
    forwards = []
    handle = hf.module.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(PlanError, match=message) as caught:
            hf.generate([EIFFEL + " France", FRANCE], plan=plan, max_tokens=2)
    finally:
        handle.remove()
    assert not forwards and isinstance(caught.value, ValueError)


def test_a_vector_that_is_none_is_refused_when_it_is_registered(hf: LanguageModel, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for bad in (torch.full((4,), float("nan")), torch.zeros(2, 2), "text", [float("inf")]):
        with pytest.raises(PlanError, match="vectors"):
            hf.vectors["bad"] = bad
    save_file({"fine": torch.ones(4), "matrix": torch.ones(2, 2)}, tmp_path / "v.safetensors")
    with pytest.raises(PlanError, match="matrix"):
        hf.vectors.load(tmp_path / "v.safetensors")
    with pytest.raises(PlanError, match="zeros"):
        hf.vectors["zeros"] = vector()
    assert not hf.vectors
    hf.vectors["truth"] = vector()
    try:
        with pytest.raises(KeyError, match="'truth'"):
            hf.vectors["thruth"]
        with pytest.raises(PlanError, match="did you mean 'truth'"):
            hf.generate(FRANCE, plan=Steer("resid_post", vector="thruth"), max_tokens=1)
    finally:
        del hf.vectors["truth"]


def test_spans_in_prompts_of_token_ids(hf: LanguageModel, plain: Plain) -> None:
    """The text is looked up, if the tokenizer would have made these ids of it; else that is an error."""
    capture = Capture("resid_post", layers=1, positions=Span("France"))
    output = hf.generate([plain.ids(FRANCE)], plan=capture, max_tokens=1)[0]
    assert output.captures.positions["resid_post", 1] == [3]
    odd = [plain.token(" "), *plain.ids("France")] if len(plain.ids(" ")) == 1 else [5, 5, 5]
    if plain.ids(plain.decode(odd)) != odd:
        with pytest.raises(PlanError, match="text"):
            hf.generate([odd], plan=capture, max_tokens=1)


def test_a_plan_may_come_in_any_form_that_plans_have(hf: LanguageModel, plain: Plain) -> None:

    steer = Steer("resid_post", layers=5, vector=vector(1, 300.0))
    expected = plain.generate(FRANCE, 4, {("resid_post", 5): lambda h: h + vector(1, 300.0)})
    plan = Plan((steer,))
    for given in (steer, [steer], plan, plan.to_wire(), plan.to_json(), [[steer]], [plan], (steer,)):
        assert tokens(hf.generate(FRANCE, plan=given, max_tokens=4, **GREEDY)[0]) == expected


def test_one_edit_for_each_prompt_in_a_flat_list_is_warned_of(hf: LanguageModel, caplog: Any) -> None:
    """All prompts get all of them."""
    steers = [Steer("resid_post", layers=5, vector=vector(1), scale=scale) for scale in (100.0, 200.0)]
    two = [Clamp("resid_post", layers=5, direction=vector(seed)) for seed in (1, 2)]
    other = Steer("resid_post", layers=5, vector=vector(2))
    for quiet in (
        [[each] for each in steers],
        [*steers, steers[0]],
        [steers[0], Capture("resid_post")],
        two,
        [steers[0], other],
    ):
        hf.generate([FRANCE] * 2, plan=quiet, max_tokens=1)
    assert "plan=[[each] for each in plan]" not in caplog.text
    hf.generate([FRANCE] * 2, plan=steers, max_tokens=1)
    assert "each of the 2 prompts gets the sum of all 2 Steers" in caplog.text


@dataclass(frozen=True)
class Equal:
    """Two of them are equal and not the same."""

    def __call__(self, request_id: str, *rows: Any) -> None:
        SEEN.append((id(self), request_id))


@dataclass
class Collect:
    """As users write a collector: it cannot be hashed."""

    rows: list[torch.Tensor]

    def __call__(self, request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        self.rows.append(tensor)


SEEN: list[tuple[int, str]] = []


def test_functions_that_are_equal_get_each_its_own_rows(hf: LanguageModel) -> None:
    """Seen failing: the plans were equal, so that one function got the rows of both."""
    one, other = Equal(), Equal()
    plans = [Capture("resid_post", layers=3, to=to) for to in (one, other)]
    outputs = hf.generate([FRANCE, FRANCE], plan=[[plan] for plan in plans], max_tokens=1)
    assert sorted(SEEN) == sorted((id(to), output.request_id) for to, output in zip((one, other), outputs, strict=True))


def test_each_function_gets_the_captures_that_name_it(hf: LanguageModel) -> None:
    """Seen failing: plans that named the same functions in the same order, shared out otherwise, were taken for one."""
    got: dict[str, list[tuple[str, int]]] = {name: [] for name in "abc"}

    def into(name: str) -> Callable[..., None]:
        return lambda request_id, site, layer, positions, tensor: got[name].append((request_id, layer))

    a, b, c = (into(name) for name in "abc")
    plans = [
        [Capture("resid_post", layers=1, to=a), Capture("resid_post", layers=2, to=(b, c))],
        [Capture("resid_post", layers=1, to=(a, b)), Capture("resid_post", layers=2, to=c)],
    ]
    one, other = (output.request_id for output in hf.generate([FRANCE, ITALY], plan=plans, max_tokens=1))
    assert {name: sorted(calls) for name, calls in got.items()} == {
        "a": sorted([(one, 1), (other, 1)]),
        "b": sorted([(one, 2), (other, 1)]),
        "c": sorted([(one, 2), (other, 2)]),
    }


def test_a_function_that_cannot_be_hashed(hf: LanguageModel, plain: Plain) -> None:
    collect = Collect([])
    hf.generate(FRANCE, plan=Capture("resid_post", layers=3, to=collect), max_tokens=1)
    close(collect.rows[0], plain.run(FRANCE).sites["resid_post", 3][-1:])


def test_what_a_function_does_to_its_rows_is_its_own_affair(hf: LanguageModel, plain: Plain, tmp_path: Path) -> None:
    """Seen failing: the output's rows and those on the disk were zeros."""

    def clear(request_id: str, site: str, layer: int, positions: list[int], tensor: torch.Tensor) -> None:
        tensor.zero_()

    (output,) = hf.generate(FRANCE, plan=Capture("resid_post", layers=3, to=(clear, tmp_path, None)), max_tokens=1)
    expected = plain.run(FRANCE).sites["resid_post", 3][-1:]
    close(output.captures["resid_post", 3], expected)
    close(open_captures(tmp_path)[output.request_id]["resid_post", 3], expected)


def test_run_has_nowhere_to_put_captures(hf: LanguageModel, tmp_path: Path) -> None:
    """Seen dropped in silence: `run` gives what its function returns."""
    for plan in (Capture("resid_post"), Capture("resid_post", to=(tmp_path, None))):
        with pytest.raises(PlanError, match=r"run returns what its function returns, without captures\. Allowed"):
            hf.run(lambda model: 1, FRANCE, plan=plan)
    assert hf.run(lambda model: 1, FRANCE, plan=Capture("resid_post", to=tmp_path)) == 1
    assert len(open_captures(tmp_path)) == 1


def test_prompts_may_come_from_a_generator(hf: LanguageModel) -> None:
    """Seen failing: the first one was lost."""
    prompts = [FRANCE, ITALY, EIFFEL]
    outputs = hf.generate((prompt for prompt in prompts), max_tokens=1)
    assert [output.prompt_token_ids for output in outputs] == [hf.tokenizer(prompt)["input_ids"] for prompt in prompts]
    with pytest.raises(PromptError, match="list of chat messages; 3 was given"):
        hf.generate(3)


def test_what_vllm_refuses_is_refused_in_words(hf: LanguageModel) -> None:
    for ids, text in (([5, 10**6], "token id 1000000; this model's are 0 to"), ([5, -1], "the prompt has -1")):
        with pytest.raises(PromptError, match=text):
            hf.generate(ids, max_tokens=1)
    with pytest.raises(ParameterError, match="max_tokens is 0; allowed: at least 1"):
        hf.generate(FRANCE, max_tokens=0)
    with pytest.raises(ParameterError, match="by name, as in max_tokens=3"):
        hf.generate(FRANCE, sampling_params={"max_tokens": 1})


def test_a_captured_row_is_a_vector(hf: LanguageModel) -> None:
    """`[1, hidden]`, as captures have it; and a number may be a tensor."""
    (output,) = hf.generate(FRANCE, plan=Capture("resid_post", layers=3, positions="all_prompt"), max_tokens=1)
    rows = output.captures["resid_post", 3]
    scaled = Steer("resid_post", vector=rows[:1].float(), scale=torch.tensor(2.0))
    assert scaled == Steer("resid_post", vector=rows[0].float(), scale=2.0)
    with pytest.raises(PlanError, match=r"of shape \[5, 256\]; allowed: shape \[hidden\], such as x\[0\] or x.mean"):
        Steer("resid_post", vector=rows.float())
