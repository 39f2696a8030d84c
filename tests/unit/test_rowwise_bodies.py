"""Bodies as programs (issue 36: 4; L3): what the recorder and the pass make of a body gives what the body gives on plain tensors, for any
number of tokens, in the model's dtype. A single token's recording gives the same program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import model

from midstream.lowering.linear import change_of
from midstream.lowering.row_programs import NotRowwise, programs_of
from midstream.plan.running import run
from midstream.trace.code import FunctionProgram
from midstream.trace.record import record

H = 16
MODELS = {dtype: model(width=H, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
GENERATOR = torch.Generator().manual_seed(0)
V, BIAS = torch.randn(H, generator=GENERATOR), torch.randn(3 * H, generator=GENERATOR)
SQUARE = torch.randn(H, H, generator=GENERATOR) / 4
UP, DOWN = torch.randn(H, 3 * H, generator=GENERATOR) / 4, torch.randn(3 * H, H, generator=GENERATOR) / 7
COLUMNS = torch.tensor([1, -2, 5])
BODIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {}


def body(function: Any) -> Any:
    """A body that takes the value of a layer, and returns the new one or changes it."""
    BODIES[function.__name__] = function
    return function


def refused(reason: str) -> Any:
    def note(function: Any) -> Any:
        REFUSED[function.__name__] = function, reason
        return function

    return note


@body
def halved(h):
    h *= 0.5
    return h


@body
def twice_and_a_vector(h):
    return h * 2 + V.to(h)


@body
def tanh(h):
    return torch.tanh(h)


@body
def activations(h):
    return F.gelu(h) + F.silu(h) * F.relu(h) - F.softplus(h) + h.sigmoid()


@body
def sae_gate(h):
    return F.relu(h @ UP.to(h) + BIAS.to(h)) @ DOWN.to(h)


@body
def sae_top_k_in_float32(h):
    acts = F.relu((h.float() - V) @ UP + BIAS)
    best = acts.topk(4, -1)
    return (torch.zeros_like(acts).scatter_(-1, best.indices, best.values) @ DOWN + V).to(h.dtype)


@body
def where_a_probe_fires(h):
    score = (h @ V.to(h))[:, None]
    return torch.where(score > 0.3, h * 2, h)


@body
def one_column(h):
    h[:, 7] = 0
    return h


@body
def some_columns(h):
    h[:, COLUMNS] *= 2
    h[..., 4:8] = V[:4].to(h)
    h[:, -3:] = h[:, :3]
    h[:, ::5] += 1
    return h


@body
def masked_columns(h):
    chosen = torch.zeros(H, dtype=torch.bool)
    chosen[3:9] = True
    h[:, chosen] = 0
    return h.masked_fill(~chosen, 1.0)


@body
def layer_norm(h):
    return F.layer_norm(h, (H,), V.to(h))


@body
def rms_norm(h):
    return F.rms_norm(h, (H,), V.to(h))


@body
def top_k_mask(h):
    best = h.abs().topk(3, dim=-1)
    return h * torch.zeros_like(h).scatter_(-1, best.indices, 1.0)


@body
def unit_norm(h):
    return h / h.norm(dim=-1, keepdim=True)


@body
def normalized_and_clipped(h):
    return F.normalize(h, dim=-1) * h.norm(dim=-1, keepdim=True).clamp(max=3)


@body
def cosine(h):
    return h * F.cosine_similarity(h, V.to(h)[None], dim=-1)[:, None]


@body
def small_ones_dropped(h):
    return h.masked_fill(h.abs() < h.abs().mean(-1, keepdim=True), 0.0)


@body
def einsum(h):
    return torch.einsum("th,hk->tk", h, SQUARE.to(h)) - torch.einsum("th,h->t", h, V.to(h))[:, None] * V.to(h)


@body
def last_token(h):
    h[-1] = torch.tanh(h[-1] @ SQUARE.to(h))
    return h


@body
def last_token_standardized(h):
    x = h[-1]
    h[-1] = (x - x.mean()) / x.std()
    return h


@body
def last_token_twice(h):
    h[-1] -= torch.dot(h[-1], V.to(h)) * V.to(h)
    h[-1] = torch.relu(h[-1])
    return h


@body
def standard_deviation_in_place(h):
    h.clamp_(-1, 1)
    h.mul_(h.std(-1, keepdim=True)).add_(h.var(-1, keepdim=True))
    return h


@body
def linear(h):
    return F.linear(F.softplus(h), SQUARE.to(h), V.to(h))


@body
def heads_times_a_matrix(h):
    return (h.view(-1, 4, H // 4) @ SQUARE[: H // 4, : H // 4].to(h)).flatten(1)


@body
def a_head_zeroed(h):
    z = h.view(-1, 4, H // 4)
    z[:, 2] = 0
    z[:, 3] *= 2
    z[:, :2, ::2] += 1
    return h


@body
def parts_swapped(h):
    h = torch.cat([h[:, : H // 2], -h[:, H // 2 :]], -1)
    first, second = h.chunk(2, -1)
    return torch.stack([second, first], 1).flatten(1)


@body
def softmax_of_scores(h):
    h += F.softmax(h @ SQUARE[:, :4].to(h), -1) @ SQUARE[:4].to(h)
    return h


@body
def transposed_within_the_row(h):
    return h.view(-1, 4, 4).transpose(1, 2).reshape(-1, H)


@body
def replaced(h):
    h[:] = V.to(h)
    return h


@body
def replaced_by_a_vector(h):
    return V.to(h) * 3


@body
def with_a_batch_axis(h):
    x = h[None] * 2 + V.to(h)
    x = x / x.norm(dim=-1, keepdim=True)
    return (x @ SQUARE.to(h)).squeeze(0)


@body
def ones_for_each_token(h):
    return h * torch.ones(h.shape[0], 1, dtype=h.dtype)


@body
def sorted_numbers(h):
    return h.sort(-1).values


@body
def without_its_largest(h):
    return h.scatter(1, h.argmax(-1, keepdim=True), 0.0) - h.gather(1, h.topk(3, -1).indices).mean(1, keepdim=True)


@body
def other_dtypes(h):
    return (h.round(decimals=1).double() * 2).half().to(h.dtype)


@body
def powers(h):
    return h**2 * h.sign() + 2**h - (1 - h) + torch.lerp(h, V.to(h).expand_as(h), 0.3)


@body
def clipped_norm(h):
    norm = h.norm(dim=-1, keepdim=True)
    h.copy_(torch.where(norm > 3, h * (3 / norm), h))
    return h


@body
def all_tokens_after_the_last(h):
    h[-1] += V.to(h)
    h *= 0.5
    return torch.tanh(h) + 1


@body
def a_copy_whose_last_token_is_replaced(h):
    kept = h.clone()
    kept[-1] = 0
    return h.copy_(kept)


@body
def two_tokens_by_indices(h):
    h[[-1]] = V.to(h)
    h[[0]] = 2 * V.to(h)
    return h


@body
def all_tokens_replaced_after_the_last(h):
    h[-1] = h[-1].tanh()
    h[:] = h[:] * 0 + V.to(h)
    return h


@body
def rows_of_which_one_is_replaced(h):
    x = h[-1:].clone()
    x[0] *= 2
    h[-1:] = x
    return h


@body
def every_second_token(h):
    h[::2] += V.to(h)
    h[1::2] = h[1::2].tanh()
    return h


@body
def rows_that_overlap(h):
    h[::2] += V.to(h)
    h[-1] *= 2
    h[::3] = h[::3].tanh()
    h[0, 2:5] = 1
    return h


@body
def rows_of_a_decoder(h):
    best = (h @ UP.to(h)).topk(4, -1)
    return (best.values[..., None] * DOWN.to(h)[best.indices]).sum(-2)


@refused("mean.dim .*axis of the rows")
def mean_of_tokens(h):
    return h - h.mean(0)


@refused("axis of the rows")
def shifted(h):
    return h.roll(1, 0)


@refused("moves the axis of the tokens")
def attention(h):
    return h @ h.T @ h


@refused("different tokens together")
def times_the_last(h):
    return h * h[-1]


@refused("other numbers for each of 1100 tokens; a plan: up to 1024")
def more_tokens_than_programs(h):
    return h.tanh() * torch.arange(1.0, h.shape[0] + 1)[:, None].to(h)


@refused("numbers of its own for each row")
def a_matrix_for_each_token(h):
    return torch.addmm(torch.ones(len(h), H).to(h).cumsum(0), h, SQUARE.to(h))


@refused("other tokens")
def first_to_last(h):
    h[-1] = h[0].tanh()
    return h


def written(function: Any, dtype: torch.dtype, tokens: int, site: str = "layers_output") -> Any:
    def run_on(m: Any) -> None:
        values = getattr(m, site)
        h = values[2]
        new = function(h)
        if new is not h:
            values[2] = new

    made = record(FunctionProgram(run_on), MODELS[dtype], tokens, 1)
    assert made.reason is None, made.reason
    (write,) = made.steps[0].writes
    return write


def applied(programs: Any, x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    for rows, (program, _) in programs.at(len(x)):
        result[rows] = run(program, x[rows])
    return result


@pytest.mark.parametrize("dtype", MODELS, ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_a_body_as_a_program_gives_what_the_body_gives(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    function, made = BODIES[name], {}
    for tokens in (5, 1, H):
        made[tokens] = programs_of(written(function, dtype, tokens))
        for length in (tokens, 7):  # a recording of any length is right for any
            x = torch.randn(length, H).to(dtype)
            exact = dtype == torch.float32
            torch.testing.assert_close(
                applied(made[tokens], x),
                function(x.clone()).expand(length, H),
                rtol=1e-4 if exact else 2e-2,
                atol=1e-5 if exact else 2e-2,
            )
    last = [
        next(each.program for rows, each in programs.at(tokens) if tokens - 1 in rows)
        for tokens, programs in made.items()
    ]
    if name not in (
        "einsum",
        "rows_that_overlap",
        "every_second_token",
        "rows_of_which_one_is_replaced",
        "two_tokens_by_indices",
    ):
        # Equal, so that one edit is for the prompt and for generated tokens.
        assert last[0] == last[1] == last[2]


POSITIONS = torch.arange(20.0)
CHOSEN = POSITIONS % 3 != 1


def a_factor(h):
    return h * (0.5 + POSITIONS[: len(h), None]).to(h)


def a_factor_in_place_and_a_function(h):
    h *= (0.5 + POSITIONS[: len(h), None]).to(h)
    return torch.tanh(h / 4)


def a_whole_number(h):
    return h * torch.arange(len(h))[:, None]


def a_mask(h):
    h[CHOSEN[: len(h)]] += V.to(h)
    return h


def a_mask_that_chooses(h):
    return torch.where(CHOSEN[: len(h), None], h.tanh(), h - V.to(h))


def a_mask_that_multiplies(h):
    return h + CHOSEN[: len(h), None] * V.to(h)


def a_mask_that_fills(h):
    return h.masked_fill(CHOSEN[: len(h), None], 0.25)


def a_table(h):
    return torch.lerp(h, torch.arange(20.0 * H).view(20, H)[: len(h)].to(h) / 64, 0.3) + h.abs()


def a_table_at_some_rows(h):
    h[1::2] = h[1::2].relu() + POSITIONS[: len(h) // 2, None].to(h)
    return h


def a_factor_of_scores(h):
    return h + ((h @ V.to(h)).tanh() * POSITIONS[: len(h)].to(h))[:, None]


def some_of_what_has_a_factor(h):
    h[1:3] = (h.tanh() * POSITIONS[: len(h), None].to(h))[1:3]
    return h


def two_factors_with_equal_first_numbers(h):
    one, other = POSITIONS[: len(h), None].to(h), (POSITIONS[: len(h), None] // 2).to(h)
    return (h * one).tanh() * other


BY_POSITION = (
    a_factor, a_factor_in_place_and_a_function, a_whole_number, a_mask, a_mask_that_chooses, a_mask_that_multiplies, a_mask_that_fills,
    a_table, a_table_at_some_rows, a_factor_of_scores, some_of_what_has_a_factor, two_factors_with_equal_first_numbers,
)  # fmt: skip


@pytest.mark.parametrize("dtype", MODELS, ids=str)
@pytest.mark.parametrize("function", BY_POSITION)
def test_a_body_with_numbers_for_each_token_is_a_program_for_each(function: Any, dtype: torch.dtype) -> None:
    """Tokens with equal numbers share a program."""
    torch.manual_seed(4)
    for tokens in (5, 1, 2, 18):
        made, x = programs_of(written(function, dtype, tokens)), torch.randn(tokens, H).to(dtype)
        exact = dtype == torch.float32
        wanted = function(x.clone())
        torch.testing.assert_close(applied(made, x), wanted, rtol=1e-4 if exact else 2e-2, atol=1e-5 if exact else 2e-2)
        assert "mask" not in function.__name__ or len(made.at(tokens)) <= 2


def each_token_and_a_number(h):
    return h * 2 + torch.arange(1.0, len(h) + 1)[:, None].to(h)


def each_token_replaced(h):
    h[:] = torch.arange(len(h) * H).reshape(len(h), H).to(h)
    return h


def projected_out(h):
    unit = (V / V.norm()).to(h)
    return h - (h @ unit)[:, None] * unit + 0.25 * V.to(h)


def projected_out_by_a_sum(h):
    return h - ((h * V.to(h)).sum(-1, keepdim=True) / 8 + 1) @ V.to(h)[None]


def every_second_and_the_last(h):
    h[::2] += V.to(h)
    h[-1] -= V.to(h) / 2
    return h


def one_of_the_tokens_own_numbers(h):
    h[-1] = each_token_and_a_number(h)[-1]
    return h


def the_first_projected_out(h):
    h[0] -= (h[0] * V.to(h)).sum() * V.to(h) / 16
    return h


LINEAR = (
    a_mask,
    a_mask_that_multiplies,
    replaced,
    replaced_by_a_vector,
    each_token_replaced,
    the_first_projected_out,
    projected_out_by_a_sum,
    a_copy_whose_last_token_is_replaced,
)


@pytest.mark.parametrize("function", LINEAR)
def test_the_change_of_a_linear_body_is_what_the_body_gives(function: Any) -> None:
    torch.manual_seed(4)
    for tokens in (5, 1):
        x = torch.randn(tokens, H)
        new = x.double()
        for places, made in programs_of(written(function, torch.float32, tokens)).at(tokens):
            change = change_of(made.program)
            old = x[places].double()
            added = sum(((old @ w)[:, None] * u for u, w in change.outers), torch.zeros_like(old))
            new[places] = change.scale * old + added + (0 if change.constant is None else change.constant)
        torch.testing.assert_close(new.float(), function(x.clone()).expand(tokens, H), rtol=1e-5, atol=1e-5)


def rounded(h):
    return h.half().to(h) + V.to(h)


def one_number_of_a_vector(h):
    return (h[:, None, :] + V.to(h)[:, None])[:, 3]


def rounded_to_whole_numbers(h):
    return (h + 12582912.0) - 12582912.0


def swallowed(h):
    h += 1e8
    h -= 1e8
    return h


def gone_and_back(h):
    return h * 1e-30 * 1e-30 * 1e30 * 1e30


def swallowed_along_a_direction(h):
    along = (h @ V.to(h) + 1e7) - 1e7
    return h - along[:, None] * V.to(h)


def infinite_and_back(h):
    along = (h @ V.to(h)) * 1e30 * 1e30 / 1e30 / 1e30
    return h - along[:, None] * V.to(h)


ROUNDED = (rounded_to_whole_numbers, swallowed, gone_and_back, swallowed_along_a_direction, infinite_and_back)
NOT_LINEAR = (
    *ROUNDED,
    tanh,
    sae_gate,
    some_columns,
    powers,
    layer_norm,
    rounded,
    one_number_of_a_vector,
    a_factor,
    every_second_and_the_last,
    one_of_the_tokens_own_numbers,
    halved,
    twice_and_a_vector,
    each_token_and_a_number,
    projected_out,
    ones_for_each_token,
)


@pytest.mark.parametrize("function", NOT_LINEAR)
def test_another_body_has_no_linear_change(function: Any) -> None:
    made = programs_of(written(function, torch.float32, 5)).at(5)
    assert any(change_of(each.program) is None for _, each in made)


@pytest.mark.parametrize("function", ROUNDED)
def test_steps_are_not_folded_across_a_rounding(function: Any) -> None:
    """Folded, each of these changes nothing, or something else."""
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(4))
    found, wanted = applied(programs_of(written(function, torch.float32, 5)), x), function(x.clone())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert not torch.allclose(wanted, x)


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_is_refused_with_the_line(name: str) -> None:
    function, reason = REFUSED[name]
    with pytest.raises(NotRowwise, match=reason) as error:
        length = 1100 if name == "more_tokens_than_programs" else 5
        programs_of(written(function, torch.float32, length)).at(length)
    first = function.__code__.co_firstlineno
    assert length == 1100 or first <= error.value.line <= first + 4  # 1100: the line of the write


def test_heads_are_an_axis_of_their_own() -> None:
    made = programs_of(written(lambda z: z * z.norm(dim=-1, keepdim=True), torch.float32, 5, "attentions_output"))
    ((_, found),) = made.at(5)
    assert found.program.width == H


def of_two_layers(change: Callable[..., Any], tokens: int = 5, **places: Any) -> Any:
    """The write of a body that reads `early` at one point, then `late` at another, and makes of them a new value for the latter."""
    early, late = places.get("early", ("layers_output", 1)), places.get("late", ("layers_output", 2))

    def body(m: Any) -> None:
        first = getattr(m, early[0])[early[1]]
        second = getattr(m, late[0])[late[1]]
        getattr(m, late[0])[late[1]] = change(first, second)

    (write,) = record(FunctionProgram(body), MODELS[torch.float32], tokens, 1).steps[0].writes
    return write


def added_in_place(early, late):
    late += 0.5 * early
    return late


def scaled_by_a_norm(early, late):
    return late * early.norm(dim=-1, keepdim=True)


def chosen_by_another(early, late):
    return torch.where((early @ V > 0)[:, None], late, early)


def at_the_last_row(early, late):
    late[-1] = early[-1] * 2
    return late


def another_in_place(early, late):
    early *= 3
    return early


@pytest.mark.parametrize(
    "function", [added_in_place, scaled_by_a_norm, chosen_by_another, at_the_last_row, another_in_place]
)
def test_a_value_of_an_earlier_layer_is_a_further_input(function: Any) -> None:
    torch.manual_seed(4)
    for tokens in (5, 1, H):
        found = programs_of(of_two_layers(function, tokens))
        for length in (tokens, 7):
            early, late = torch.randn(length, H), torch.randn(length, H)
            new = late.clone()
            for places, (program, inputs) in found.at(length):
                assert inputs in ((), (("resid_post", 1),)) and program.inputs == (H,) * len(inputs)
                new[places] = run(program, late, *[early] * len(inputs))[places]
            torch.testing.assert_close(new, function(early.clone(), late.clone()), rtol=1e-4, atol=1e-5)
    assert found.at(7)[-1][1].inputs


def test_what_uses_a_site_that_comes_too_late_is_refused() -> None:
    """Attention and MLP run side by side in some models. The other way round a body is not even recorded."""
    write = of_two_layers(added_in_place, early=("attentions_output", 2), late=("mlps_input", 2))
    with pytest.raises(NotRowwise, match="it uses attn_out of layer 2, too"):
        programs_of(write).at(5)
    ((_, made),) = programs_of(of_two_layers(added_in_place, early=("layers_input", 2), late=("mlps_input", 2))).at(5)
    assert made.inputs == (("resid_pre", 2),)


def test_what_uses_a_value_of_another_stage_or_step_or_other_tokens_is_refused() -> None:
    with pytest.raises(NotRowwise, match="it uses resid_post of layer 1, too"):
        programs_of(of_two_layers(added_in_place), lambda one, other: False).at(5)
    with pytest.raises(NotRowwise, match="different tokens together"):
        programs_of(of_two_layers(lambda early, late: late + early[-1])).at(5)

    def from_the_prompt(m: Any, tracer: Any) -> None:
        for step in tracer.iter[:]:
            early = m.layers_output[1]
            if step == 0:
                first = early[-1:]
            else:
                m.layers_output[2] += first.tanh()

    made = record(FunctionProgram(from_the_prompt), MODELS[torch.float32], 5, 3)
    with pytest.raises(NotRowwise, match="it uses resid_post of layer 1, too"):
        programs_of(made.steps[1].writes[0]).at(1)


def test_a_module_of_the_model_is_refused() -> None:
    def normed(m: Any) -> None:
        m.layers_output[2] = m.model.norm(m.layers_output[2]).tanh()

    made = record(FunctionProgram(normed), MODELS[torch.float32], 5, 1)
    with pytest.raises(NotRowwise, match=r"it calls model\.norm"):
        programs_of(made.steps[0].writes[0]).at(5)
