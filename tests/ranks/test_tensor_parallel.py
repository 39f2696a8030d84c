"""Traces on two tensor-parallel ranks (requirements C10, C12): whole values of sharded modules, and bodies that are the same on both.

What is expected comes from plain transformers with torch hooks, where every module is whole.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines import alive
from forked import start_ranks
from limits import assert_flat
from oracle import Plain, close, differs
from seen_worker import SeenWorker

from midstream import VLLM
from midstream.errors import DivergedError, ShapeError

pytestmark = pytest.mark.engine

EIFFEL = "The Eiffel Tower is in the city of"
PARIS = "The capital of France is"
LAYER = 3


class OwnSeeds(SeenWorker):
    """An extension of the workers."""

    rank: int

    def use_own_seed(self) -> None:
        """From here on the generators of the ranks differ, as after something that only one rank does."""
        torch.manual_seed(self.rank)


@pytest.fixture(scope="module")
def tp2() -> Iterator[VLLM]:
    with start_ranks(tensor_parallel_size=2, worker_extension_cls="test_tensor_parallel.OwnSeeds") as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_left_on_ranks(tp2: VLLM) -> Iterator[None]:
    """C10: after every test both ranks are clean."""
    yield
    left = alive(tp2)
    assert not left, left


def _with_hooks(plain: Plain, prompt: str, changes: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> torch.Tensor:
    """Logits `[tokens, vocab]` of transformers with modules' outputs changed."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        for path, change in changes.items():
            module = plain.model.get_submodule(path)
            stack.callback(module.register_forward_hook(lambda m, a, out, change=change: change(out.clone())).remove)
        return plain.model(input_ids=torch.tensor([plain.ids(prompt)]), use_cache=False).logits[0]


def _outputs(plain: Plain, prompt: str, *paths: str) -> list[torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    _with_hooks(plain, prompt, {path: lambda out, path=path: seen.setdefault(path, out) for path in paths})
    return [seen[path][0] for path in paths]


def test_modules_values_are_whole(tp2: VLLM, plain: Plain) -> None:
    """Column, row, fused, embedding, attention, activation: every leaf is laid out as on one rank."""

    def read(model: Any) -> dict[str, Any]:
        layer = model.model.layers[LAYER]
        return {
            "embed": model.model.embed_tokens.output.clone(),
            "qkv": layer.self_attn.qkv_proj.output[0].clone(),
            "attn_input": [leaf.clone() for leaf in layer.self_attn.attn.inputs[0]],
            "attn": layer.self_attn.attn.output.clone(),
            "o_input": layer.self_attn.o_proj.input.clone(),
            "o": layer.self_attn.o_proj.output[0].clone(),
            "gate_up": layer.mlp.gate_up_proj.output[0].clone(),
            "act": layer.mlp.act_fn.output.clone(),
            "down_input": layer.mlp.down_proj.input.clone(),
            "down": layer.mlp.down_proj.output[0].clone(),
        }

    seen = tp2.run(read, EIFFEL, temperature=0.0)
    inner = f"model.layers.{LAYER}"
    names = [f"self_attn.{n}_proj" for n in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    q, k, v, o, gate, up, down = _outputs(plain, EIFFEL, *(f"{inner}.{name}" for name in names))
    expected = plain.run(EIFFEL)
    z, act = expected.sites["attn_z", LAYER].flatten(1), expected.sites["mlp_act", LAYER]
    close(seen["embed"], expected.sites["embed"])
    close(seen["qkv"], torch.cat([q, k, v], -1))
    close(seen["attn_input"][2], v)
    assert [leaf.shape for leaf in seen["attn_input"]] == [q.shape, k.shape, v.shape]
    for name, value in (("attn", z), ("o_input", z), ("o", o), ("act", act), ("down_input", act), ("down", down)):
        close(seen[name], value)
    close(seen["gate_up"], torch.cat([gate, up], -1))


def test_sites_are_whole(tp2: VLLM, plain: Plain) -> None:
    """attn_z and mlp_act at every layer, the residual stream, logits, probabilities and the logit lens."""

    def read(model: Any) -> Any:
        seen = {"embed": model.token_embeddings.clone()}
        lens = []
        for i in range(model.num_layers):
            for site in ("resid_pre", "attn_z", "attn_out", "mlp_act", "mlp_out", "resid_post"):
                seen[site, i] = getattr(model, site)[i].clone()
            lens.append(model.project_on_vocab(seen["resid_post", i][-1:]))
        return seen, lens, model.logits.clone(), model.next_token_probs.clone()

    seen, lens, logits, probs = tp2.run(read, EIFFEL, temperature=0.0)
    expected = plain.run(EIFFEL)
    for site, value in seen.items():
        close(value, expected.sites[site])
    close(lens[-1], expected.logits[-1:])
    close(logits, expected.logits[-1:])
    close(probs, expected.logits[-1:].softmax(-1))


def _negated_head(z: torch.Tensor) -> torch.Tensor:
    z[:, -1] *= -3
    return z


def _negated_neurons(act: torch.Tensor) -> torch.Tensor:
    act[:, ::3] *= -1
    return act


SITE_EDITS = {"attn_z": _negated_head, "mlp_act": _negated_neurons}


@pytest.mark.parametrize("site", SITE_EDITS)
@pytest.mark.parametrize("replace", [False, True], ids=["in place", "replaced"])
def test_what_is_written_to_a_site_is_what_the_model_goes_on_with(
    tp2: VLLM, plain: Plain, site: str, replace: bool
) -> None:
    edit = SITE_EDITS[site]

    def write(model: Any) -> Any:
        values = getattr(model, site)
        if replace:
            values[LAYER] = edit(values[LAYER].clone())
        else:
            edit(values[LAYER])
        return model.logits.clone()

    def on_plain(value: torch.Tensor) -> torch.Tensor:
        heads = value.unflatten(-1, (plain.heads, -1)) if site == "attn_z" else value
        return edit(heads).view(value.shape)

    expected = plain.run(EIFFEL, {(site, LAYER): on_plain}).logits[-1:]
    differs(expected, plain.run(EIFFEL).logits[-1:])
    close(tp2.run(write, EIFFEL, temperature=0.0), expected)


def test_writes_to_modules_are_cut(tp2: VLLM, plain: Plain) -> None:
    """Fused, row-parallel and replicated leaves: in place and by replacement, each against transformers' own module."""
    inner = f"model.layers.{LAYER}"
    heads_of_value = slice(-8, None)

    def change_fused(model: Any) -> Any:
        qkv = model.model.layers[LAYER].self_attn.qkv_proj.output[0]
        qkv[:, heads_of_value] *= -2  # the last value head's end
        return model.logits.clone()

    def replace_gate_up(model: Any) -> Any:
        layer = model.model.layers[LAYER].mlp.gate_up_proj
        value, bias = layer.output
        half = value.shape[-1] // 2
        layer.output = (torch.cat([value[:, :half], -value[:, half:]], -1), bias)
        return model.logits.clone()

    def change_row_input(model: Any) -> Any:
        model.model.layers[LAYER].mlp.down_proj.input[:, -5:] += 7
        return model.logits.clone()

    def change_embedding(model: Any) -> Any:
        model.model.embed_tokens.output[1] *= 2
        return model.logits.clone()

    def doubled(out: torch.Tensor) -> torch.Tensor:
        out[..., heads_of_value] *= -2
        return out

    def second(out: torch.Tensor) -> torch.Tensor:
        out[:, 1] *= 2
        return out

    def last_neurons(value: torch.Tensor) -> torch.Tensor:
        value[:, -5:] += 7
        return value

    expected = [
        _with_hooks(plain, EIFFEL, {f"{inner}.self_attn.v_proj": doubled}),
        _with_hooks(plain, EIFFEL, {f"{inner}.mlp.up_proj": torch.neg}),
        plain.run(EIFFEL, {("mlp_act", LAYER): last_neurons}).logits,
        _with_hooks(plain, EIFFEL, {"model.embed_tokens": second}),
    ]
    plainly = plain.run(EIFFEL).logits[-1:]
    for body, logits in zip([change_fused, replace_gate_up, change_row_input, change_embedding], expected, strict=True):
        differs(logits[-1:], plainly, by=1e-3)
        close(tp2.run(body, EIFFEL, temperature=0.0), logits[-1:])


def test_modules_are_applied_to_whole_values(tp2: VLLM, plain: Plain) -> None:
    """`module(value)` takes and gives what the module would on one rank."""

    def apply(model: Any) -> Any:
        layer = model.model.layers[LAYER]
        act = model.mlp_act[LAYER]
        return layer.mlp.down_proj(act)[0].clone(), layer.mlp.gate_up_proj(model.mlp_out[LAYER])[0].clone()

    down, gate_up = tp2.run(apply, EIFFEL, temperature=0.0)
    expected = plain.run(EIFFEL)
    mlp = plain.model.model.layers[LAYER].mlp
    close(down, expected.sites["mlp_out", LAYER])
    with torch.no_grad():
        out = expected.sites["mlp_out", LAYER]
        close(gate_up, torch.cat([mlp.gate_proj(out), mlp.up_proj(out)], -1))


def test_shapes_are_checked_against_the_whole(tp2: VLLM) -> None:
    def write(model: Any) -> None:
        act = model.mlp_act[LAYER]
        model.mlp_act[LAYER] = act[:, : act.shape[-1] // 2].clone()

    with pytest.raises(ShapeError):
        tp2.run(write, EIFFEL, temperature=0.0)


# ------------------------------------------------------------------------------------------------- the same on all ranks


def _first_rank() -> bool:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0


def _reads_on_one_rank(model: Any) -> Any:
    if _first_rank():
        model.attn_z[LAYER].clone()
    return model.logits.clone()


def _reads_on_the_other(model: Any) -> Any:
    if not _first_rank():
        model.attn_z[LAYER].clone()
    return model.logits.clone()


def _reads_elsewhere(model: Any) -> Any:
    return model.mlp_act[LAYER if _first_rank() else LAYER + 1].clone()


def _parks_elsewhere(model: Any) -> Any:
    return model.resid_post[LAYER if _first_rank() else LAYER + 1].clone()


def _writes_on_one_rank(model: Any) -> Any:
    act = model.mlp_act[LAYER]
    if _first_rank():
        act += 1
    return model.logits.clone()


def _fails_on_the_other(model: Any) -> Any:
    model.mlp_act[LAYER].clone()
    assert _first_rank()
    return model.attn_z[LAYER + 1].clone()


def _swallows(model: Any) -> Any:
    for layer in range(LAYER, LAYER + 3):
        with contextlib.suppress(DivergedError):
            if _first_rank():
                model.attn_z[layer].clone()
    return model.logits.clone()


def _by_process_id(model: Any) -> Any:
    return model.attn_z[random.Random(os.getpid()).randrange(6)].clone(), model.logits.clone()


DIVERGING = (
    _reads_on_one_rank,
    _reads_on_the_other,
    _reads_elsewhere,
    _parks_elsewhere,
    _writes_on_one_rank,
    _fails_on_the_other,
    _swallows,
)


@pytest.mark.parametrize("body", DIVERGING, ids=lambda body: body.__name__)
def test_a_body_that_diverges_is_told_and_the_engine_goes_on(tp2: VLLM, plain: Plain, body: Any) -> None:
    """DivergedError at the client within seconds; its neighbour in the batch, and the next trace, are right."""
    began = time.monotonic()
    with pytest.raises(DivergedError, match="tensor-parallel rank"), tp2.trace(temperature=0.0) as tracer:
        kept = list().save()
        with tracer.invoke(EIFFEL):
            body(tp2)
        with tracer.invoke(PARIS):
            kept.append(tp2.attn_z[LAYER].clone())
    assert time.monotonic() - began < 5
    close(kept[0], plain.run(PARIS).sites["attn_z", LAYER])
    close(tp2.run(lambda m: m.mlp_act[LAYER].clone(), PARIS, temperature=0.0), plain.run(PARIS).sites["mlp_act", LAYER])


def test_random_numbers_are_the_same_on_all_ranks(tp2: VLLM) -> None:
    """Whatever is drawn decides what is read, in several bodies and steps: no body diverges, and none is like another."""
    tp2.engine.collective_rpc("use_own_seed")
    with tp2.trace(max_tokens=4, temperature=0.0, ignore_eos=True) as tracer:
        drawn = list().save()
        for _ in range(2):
            with tracer.invoke(EIFFEL):
                for _ in tracer.iter[:]:
                    layer = int(torch.randint(0, 8, ()))
                    tp2.attn_z[layer] += torch.randn_like(tp2.attn_z[layer]) * 1e-3
                    drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 8


@pytest.mark.matrix  # test_pipeline.py has the same on two stages
def test_nothing_grows(tp2: VLLM) -> None:
    """Nearly 200 requests that read sharded sites whole."""

    def read(model: Any, tracer: Any) -> Any:
        total = 0.0
        for _ in tracer.iter[:]:
            for i in range(5):
                total += model.attn_z[i].sum().item() + model.mlp_act[i].sum().item()
        return total

    def window() -> list[dict[str, int]]:
        for _ in range(3):
            tp2.run(read, [EIFFEL * 6, PARIS * 8] * 8, max_tokens=2, temperature=0.0, ignore_eos=True)
        return tp2.engine.collective_rpc("process")

    window()  # what the allocators keep
    threads = threading.active_count()
    assert_flat(window, megabytes=10)  # the values of a window are 30 MB
    assert threading.active_count() <= threads
