"""Habits of nnsight's and transformers' users: what works, and messages that say what to write (rows J, P4); on both backends. Row P5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import close

import midstream
from midstream import LanguageModel, demo_model
from midstream.errors import PromptError, TraceError, UnknownModuleError

PARIS = "The capital of France is"


def test_embeddings_are_written_in_a_trace(model: Any, plain: Any) -> None:
    ids = plain.ids(PARIS)
    embeds = plain.model.get_input_embeddings()(torch.tensor(ids)).detach()
    for given in (embeds, embeds[None]):
        with pytest.raises(
            PromptError, match=r"write the embeddings in a trace: `model\.token_embeddings\[:\] = embeds`"
        ):
            with model.trace(inputs_embeds=given):
                model.logits.save()
    with model.trace([1] * len(ids), temperature=0.0, max_tokens=1):
        model.token_embeddings[:] = embeds
        logits = model.logits.save()
    close(logits, plain.run(PARIS).logits[-1:])


def test_a_modules_output_that_is_a_tuple_says_what_to_read(model: Any) -> None:
    with pytest.raises(AttributeError, match=r"`model\.layers_output\[3\]` is one tensor on every model"):
        with model.trace(PARIS):
            (model.layers_output[2], 1).norm()


def test_the_head_says_how_to_decode(model: Any, plain: Any) -> None:
    hidden = plain.run(PARIS).sites["resid_post", 3]
    expected = plain.model.lm_head(plain.model.model.norm(hidden)).detach()
    if not isinstance(model, LanguageModel):
        with pytest.raises(RuntimeError, match=r"project_on_vocab\(h\)"):
            with model.trace(PARIS):
                model.lm_head(model.model.norm(model.layers_output[3])).save()
    with model.trace(PARIS):
        one = model.project_on_vocab(model.layers_output[3]).save()
    with model.trace(PARIS):
        other = (model.model.norm(model.layers_output[3]) @ model.lm_head.weight.T).save()
    close(one, expected)
    close(other[:, : expected.shape[-1]], expected)


def test_the_tree_is_walked_as_modules_are(model: Any) -> None:
    layer = model.model.layers[3]
    assert layer.path == "model.layers.3" and model.dispatched is True
    assert model.get("model.layers.3.mlp").path == model.model.get("layers.3.mlp").path == "model.layers.3.mlp"
    names = [name for name, _ in layer.named_modules()]
    assert names[0] == "" and {"mlp", "self_attn", "mlp.down_proj"} <= set(names)
    assert {"mlp", "self_attn"} <= {name for name, _ in layer.named_children()}
    assert len(list(layer.modules())) == len(names) and len(list(layer.children())) < len(names)
    with pytest.raises(UnknownModuleError, match=r"is the tracer's here"):
        model.iter
    assert not hasattr(model, "iter")
    with model.trace(PARIS):
        path = [model.model.layers[3].path].save()
        hidden = model.get("model.layers.3.mlp").output.save()
        same = model.mlps_output[3].save()
    assert path == ["model.layers.3"] and torch.equal(hidden.reshape(same.shape), same)


def test_a_source_within_a_source_is_printed_outside_of_a_trace(model: Any) -> None:
    source = model.model.layers[3].self_attn.source
    if isinstance(model, LanguageModel):  # transformers' own forward
        inner = source.apply_rotary_pos_emb_0.source
        assert "rotate_half_0" in str(inner) and "rotate_half_0" in dir(inner)
        assert "once the forward has called it" in str(source.attention_interface_1.source)  # a variable of the forward
    else:
        inner = model.model.source.get_pp_group_0
        assert "return _PP" in str(inner.source) and "get_pp_group()" in repr(inner)
        with pytest.raises(TraceError, match=r"source\.get_pp_group_0\.output exists only in a trace"):
            _ = inner.output
    with pytest.raises(TraceError, match=r"calls the module model\.layers\.3\.self_attn\.o_proj: read model\."):
        str(source.self_o_proj_0.source)
    with pytest.raises(TraceError, match=r"source\.attn_output_0 is an assignment and calls nothing"):
        str(source.attn_output_0.source)


def test_an_unknown_call_in_a_source_lists_those_that_are_there(model: Any) -> None:
    with pytest.raises(UnknownModuleError, match=r"has no call nosuch\. It has .*self_mlp"):
        with model.trace(PARIS):
            model.model.layers[3].source.nosuch.output.save()


def test_a_rename_that_names_nothing_warns(model: Any) -> None:
    with pytest.warns(UserWarning, match=r"no module of this model is called 'transformer\.h'.*model\.layers\.\*\.mlp"):
        LanguageModel(demo_model(), rename={"transformer.h": "blocks"})
    if not isinstance(model, LanguageModel):
        described = {**model.description, "rename": {"transformer.h": ["blocks"]}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(model.__dict__, "aliases", None)
            del model.__dict__["aliases"]
            patch.setattr(type(model), "description", described)
            with pytest.warns(UserWarning, match=r"no module of this model is called 'transformer\.h'"):
                model.aliases
            del model.__dict__["aliases"]


@pytest.mark.parametrize("count", [2, 3])
def test_a_loop_over_more_steps_than_there_are_ends_with_the_request(model: Any, plain: Any, count: int) -> None:
    """Code behind it runs, and has no step to read from."""

    def body(m: Any, tracer: Any) -> Any:
        seen: list[Any] = []
        for step in tracer.iter[:8]:
            seen.append((step, m.logits.argmax(-1)))
        return [*seen, "behind"]

    def reads_on(m: Any, tracer: Any) -> Any:
        for _ in tracer.iter[:8]:
            m.logits.norm()
        return m.logits

    *seen, last = model.run(body, PARIS, max_tokens=count, temperature=0.0)
    assert last == "behind" and [step for step, _ in seen] == list(range(count))
    assert [int(token) for _, token in seen] == plain.generate(PARIS, count)
    with pytest.raises(Exception, match="was never reached: the request ended before it"):
        model.run(reads_on, PARIS, max_tokens=count, temperature=0.0)


def test_nnsights_class_for_any_module_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'NNsight': .*LanguageModel\(module, tokenizer=tokenizer\)"):
        midstream.NNsight
