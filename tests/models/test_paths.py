"""Path patching and edge attribution (row N8) against TransformerLens, and against plain transformers with hooks.

TransformerLens patches the receivers' queries, keys and values, as Wang et al. 2022 do, and has separate inputs of heads and MLPs, whose
gradients edge attribution takes. midstream uses neither.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models
import torch

from midstream import LanguageModel, Steer
from midstream.errors import ParameterError, PlanError, PromptError
from midstream.sweeps.cells import align
from midstream.sweeps.results import SweepResult

CLEAN, CORRUPT = "The capital of France is", "The capital of Italy is"
PAIR = (CLEAN, CORRUPT, " Paris", " Rome")
CLOSE = {"rtol": 1e-3, "atol": 2e-3}


# ------------------------------------------------------------------------------------------- a tiny GPT-2 in TransformerLens

IDS = {"clean": [5, 9, 31, 7, 12, 40, 3], "corrupt": [5, 9, 18, 7, 12, 22, 3]}
ANSWER, FOIL = 11, 29


class Lens:
    """A HookedTransformer with the weights of a GPT-2 of transformers, as they are, and its runs of both prompts."""

    def __init__(self, module):
        from transformer_lens import HookedTransformer, HookedTransformerConfig
        from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

        config = module.config
        self.cfg = HookedTransformerConfig(
            n_layers=config.n_layer,
            d_model=config.n_embd,
            d_head=config.n_embd // config.n_head,
            n_heads=config.n_head,
            d_vocab=config.vocab_size,
            n_ctx=config.n_positions,
            act_fn="gelu_new",
            eps=config.layer_norm_epsilon,
            normalization_type="LN",
            device="cpu",
        )
        self.model = HookedTransformer(self.cfg)
        weights = convert_gpt2_weights(module, self.cfg)
        self.model.load_state_dict(weights, strict=False)
        self.caches = {name: self.cache(ids)[1] for name, ids in IDS.items()}

    def metric(self, logits):
        return logits[0, -1, ANSWER] - logits[0, -1, FOIL]

    @torch.no_grad()
    def cache(self, ids):
        logits, cache = self.model.run_with_cache(torch.tensor([ids]))
        return self.metric(logits).item(), cache

    @torch.no_grad()
    def path(self, layer, head, receivers, freeze_mlps, positions=slice(None)):
        """The metric of the clean prompt, with the sender's change on its way to the receivers alone."""
        clean, corrupt = self.caches["clean"], self.caches["corrupt"]
        seen = {}

        def sender(z, hook):
            z[:, positions, head] = corrupt[hook.name][:, positions, head]
            return z

        def frozen(value, hook):
            return clean[hook.name]

        def see(value, hook):
            seen[hook.name] = value.clone()

        hooks = [(f"blocks.{layer}.attn.hook_z", sender)]
        hooks += [(f"blocks.{later}.attn.hook_z", frozen) for later in range(layer + 1, self.cfg.n_layers)]
        if freeze_mlps:
            hooks += [(f"blocks.{later}.hook_mlp_out", frozen) for later in range(layer, self.cfg.n_layers)]
        names = [f"blocks.{at}.attn.hook_{part}" for at, _ in receivers or () for part in "qkv"]
        hooks += [(name, see) for name in names]
        logits = self.model.run_with_hooks(torch.tensor([IDS["clean"]]), fwd_hooks=hooks)
        if receivers is None:
            return self.metric(logits).item()

        def receive(value, hook):
            for at, its_head in receivers:
                if hook.name.startswith(f"blocks.{at}."):
                    value[:, :, its_head] = seen[hook.name][:, :, its_head]
            return value

        hooks = [(name, receive) for name in dict.fromkeys(names)]
        return self.metric(self.model.run_with_hooks(torch.tensor([IDS["clean"]]), fwd_hooks=hooks)).item()

    def edges(self):
        """`[senders, receivers]` of all pairs of nodes, in the order of the forward pass."""
        for switch in ("set_use_attn_in", "set_use_hook_mlp_in", "set_use_attn_result"):
            getattr(self.model, switch)(True)
        layers, heads = range(self.cfg.n_layers), range(self.cfg.n_heads)
        last = f"blocks.{layers[-1]}.hook_resid_post"
        values, gradients = {name: self.cache(ids)[1] for name, ids in IDS.items()}, {}
        inputs = [f"blocks.{layer}.hook_{part}_in" for layer in layers for part in ("attn", "mlp")]

        def keep(gradient, hook):
            gradients[hook.name] = gradient.clone()

        with self.model.hooks(bwd_hooks=[(name, keep) for name in [*inputs, last]]), torch.enable_grad():
            self.metric(self.model(torch.tensor([IDS["clean"]]))).backward()
        changes = {name: values["corrupt"][name] - values["clean"][name] for name in values["clean"]}
        senders, receivers = [changes["blocks.0.hook_resid_pre"][0]], []
        for layer in layers:
            senders += [changes[f"blocks.{layer}.attn.hook_result"][0, :, head] for head in heads]
            senders.append(changes[f"blocks.{layer}.hook_mlp_out"][0])
            receivers += [gradients[f"blocks.{layer}.hook_attn_in"][0, :, head] for head in heads]
            receivers.append(gradients[f"blocks.{layer}.hook_mlp_in"][0])
        receivers.append(gradients[last][0])
        return torch.einsum("sth,rth->sr", torch.stack(senders), torch.stack(receivers)).numpy()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The model as midstream has it, and as TransformerLens has it."""
    model = LanguageModel(str(tiny_models.build("gpt2", tmp_path_factory.getbasetemp())), dtype=torch.float32)
    return SimpleNamespace(model=model, lens=Lens(model.module))


def given():
    return IDS["clean"], IDS["corrupt"], ANSWER, FOIL


def test_transformer_lens_computes_the_same_logits(gpt2):
    with torch.no_grad():
        expected = gpt2.lens.model(torch.tensor([IDS["clean"]]))
        torch.testing.assert_close(
            gpt2.model.module(torch.tensor([IDS["clean"]])).logits, expected, rtol=1e-3, atol=1e-3
        )


RECEIVERS = {"logits": None, "a head": [(2, 1)], "heads of two layers": [(1, 3), (2, 0), (2, 2)]}


@pytest.mark.parametrize("freeze_mlps", [False, True])
@pytest.mark.parametrize("case", RECEIVERS)
def test_path_patching_equals_transformer_lens(gpt2, case, freeze_mlps):
    receivers, cfg = RECEIVERS[case], gpt2.lens.cfg
    end = cfg.n_layers if receivers is None else max(layer for layer, _ in receivers)
    result = gpt2.model.path_patching(*given(), receivers=receivers or "logits", freeze_mlps=freeze_mlps)
    expected = [
        [gpt2.lens.path(layer, head, receivers, freeze_mlps) for head in range(cfg.n_heads)] for layer in range(end)
    ]
    assert result.values["attn_z"].shape == (end, cfg.n_heads, 1) and not result.void
    np.testing.assert_allclose(result.values["attn_z"][..., 0], expected, **CLOSE)
    assert result.baseline == pytest.approx(gpt2.lens.cache(IDS["clean"])[0], abs=1e-3)
    effects = np.abs(np.array(expected) - result.baseline)
    assert effects.max() > 0.05  # far from the tolerance
    assert not list(gpt2.model.runs)


def test_edge_attribution_equals_transformer_lens(gpt2):
    result, cfg = gpt2.model.edge_attribution(*given()), gpt2.lens.cfg
    nodes = [
        name for layer in range(cfg.n_layers) for name in (*(f"a{layer}.h{h}" for h in range(cfg.n_heads)), f"m{layer}")
    ]
    assert result.senders == ["input", *nodes] and result.receivers == [*nodes, "logits"]
    expected = gpt2.lens.edges()
    is_edge = ~np.isnan(result.scores)
    assert np.abs(expected[is_edge]).max() > 0.1
    np.testing.assert_allclose(result.scores[is_edge], expected[is_edge], rtol=1e-3, atol=1e-3)
    assert result.clean[0] == pytest.approx(gpt2.lens.cache(IDS["clean"])[0], abs=1e-3)
    assert result.corrupt[0] == pytest.approx(gpt2.lens.cache(IDS["corrupt"])[0], abs=1e-3)


def test_there_is_an_edge_from_each_node_to_all_later_ones(gpt2):
    """The heads of one layer are side by side, and before its MLP."""
    result = gpt2.model.edge_attribution(*given())
    at = {"input": (-1, 0), "logits": (99, 0)}
    at |= {name: (int(name[1:].split(".")[0]), name[0] == "m") for name in result.senders[1:]}
    for s, sender in enumerate(result.senders):
        for r, receiver in enumerate(result.receivers):
            assert np.isnan(result.scores[s, r]) == (at[sender] >= at[receiver]), (sender, receiver)
    frame, best = result.to_dataframe(), result.best(3)
    assert len(frame) == (~np.isnan(result.scores)).sum() and list(frame.columns) == ["sender", "receiver", "score"]
    assert [*frame.itertuples(index=False, name=None)][:3] == [tuple(edge) for edge in best]
    assert abs(best[0].score) == np.nanmax(np.abs(result.scores))


# --------------------------------------------------------------------------- the bundled model, on both backends, with hooks

HEADS, D = 4, 64


def diff(plain, logits):
    return float(logits[-1, plain.token(" Paris")] - logits[-1, plain.token(" Rome")])


class Paths:
    """Patches along paths with hooks of torch: the heads of `base` from a run of `other`."""

    def __init__(self, plain, base, other):
        self.plain, self.base, self.own = plain, plain.ids(base), plain.run(base).sites
        self.other = plain.run(other).sites
        self.way = [(p, q) for p, q in enumerate(align(self.base, plain.ids(other))) if q is not None]
        self.layers = len(plain.model.model.layers)

    def cell(self, layer, head, receivers=None, freeze_mlps=False, positions=None):
        def send(h):
            for at, source in self.way:
                if positions is None or at in positions:
                    h[at, head * D : (head + 1) * D] = self.other["attn_z", layer][source, head]
            return h

        seen = {}

        def frozen(site, at, h):
            seen[site, at] = h.clone()
            own = self.own[site, at]
            return own.flatten(1) if site == "attn_z" else own

        edits = {("attn_z", layer): send}
        for later in range(layer + 1, self.layers):
            edits["attn_z", later] = lambda h, at=later: frozen("attn_z", at, h)
        for later in range(layer, self.layers) if freeze_mlps else ():
            edits["mlp_out", later] = lambda h, at=later: frozen("mlp_out", at, h)
        ran = self.plain.run(self.base, edits)
        if receivers is None:
            return diff(self.plain, ran.logits)

        def receive(at, h):
            for layer, head in receivers:
                if layer == at:
                    h[:, head * D : (head + 1) * D] = seen["attn_z", at][:, head * D : (head + 1) * D]
            return h

        edits = {("attn_z", at): (lambda h, at=at: receive(at, h)) for at, _ in receivers}
        return diff(self.plain, self.plain.run(self.base, edits).logits)


def test_path_patching_equals_transformers_with_hooks(model, plain):
    """To the logits, and by way of heads of two layers, in both directions."""
    receivers = [(4, 1), (-3, 3)]
    for direction, base, other in (("noising", CLEAN, CORRUPT), ("denoising", CORRUPT, CLEAN)):
        oracle = Paths(plain, base, other)
        for layers, options in (
            ([0, 4, 5, 7], {}),
            ([4, 5], {"freeze_mlps": True}),
            ([0, 3], {"receivers": receivers}),
        ):
            result = model.path_patching(*PAIR, layers=layers, direction=direction, **options)
            assert result.outline.paths.frozen == ["attn_z", "mlp_out"][: 1 + options.get("freeze_mlps", False)]
            if "receivers" in options:
                assert result.outline.paths.receivers == [(4, 1), (5, 3)]
                options = {"receivers": [(4, 1), (5, 3)]}
            expected = [[oracle.cell(layer, head, **options) for head in range(HEADS)] for layer in layers]
            np.testing.assert_allclose(result.values["attn_z"][..., 0], expected, **CLOSE)
            assert not result.void and len(result.noise) == 8
    assert not [name for name in model.runs if name.startswith("sweep-")]


def test_positions_and_prompts_of_other_lengths(model, plain):
    """The sender is patched at the chosen positions alone, and where both prompts have a counterpart."""
    longer = "The capital of the country Italy is"
    oracle = Paths(plain, CLEAN, longer)
    result = model.path_patching(CLEAN, longer, " Paris", " Rome", layers=[4, 5], heads=[1, 3], positions=[1, -1])
    expected = [[[oracle.cell(layer, head, positions=[p]) for p in (1, 4)] for head in (1, 3)] for layer in (4, 5)]
    np.testing.assert_allclose(result.values["attn_z"], expected, **CLOSE)
    result = model.path_patching(CLEAN, longer, " Paris", " Rome", layers=0, heads=1, receivers=(5, 3))
    assert len(oracle.way) < len(oracle.base)
    assert result.values["attn_z"].item() == pytest.approx(oracle.cell(0, 1, [(5, 3)]), abs=2e-3)


def test_the_direct_path_is_what_the_head_writes(hf, plain):
    """A closed form: with the MLPs frozen, the head's change times its output weights, added to the last residual stream."""
    clean, corrupt = plain.run(CLEAN).sites, plain.run(CORRUPT).sites
    result = hf.path_patching(*PAIR, freeze_mlps=True)
    for layer in range(8):
        for head in range(HEADS):
            weight = plain.model.model.layers[layer].self_attn.o_proj.weight[:, head * D : (head + 1) * D]
            change = (corrupt["attn_z", layer] - clean["attn_z", layer])[-1, head] @ weight.T
            with torch.no_grad():
                logits = plain.model.lm_head(plain.model.model.norm(clean["resid_post", 7][-1:] + change))
            assert result.values["attn_z"][layer, head, 0] == pytest.approx(diff(plain, logits), abs=2e-3)


def test_edges_into_the_logits_add_up_to_the_change_of_the_stream(hf, plain):
    """A closed form: what all senders add is the last residual stream."""
    norm, head = plain.model.model.norm, plain.model.lm_head
    clean, corrupt = (plain.run(prompt).sites["resid_post", 7][-1] for prompt in (CLEAN, CORRUPT))
    at = clean.clone().requires_grad_()
    metric = head(norm(at)) @ (
        torch.eye(head.out_features)[plain.token(" Paris")] - torch.eye(head.out_features)[plain.token(" Rome")]
    )
    (gradient,) = torch.autograd.grad(metric, at)
    with torch.no_grad():  # a caller's setting
        result = hf.edge_attribution(*PAIR)
    assert np.nansum(result.scores[:, -1]) == pytest.approx(float((corrupt - clean) @ gradient), rel=1e-3)
    assert result.clean[0] == pytest.approx(diff(plain, plain.run(CLEAN).logits), abs=1e-3)


def test_several_pairs_and_metrics_of_edges(hf):
    others = ("The capital of Spain is", "The capital of Japan is", " Madrid", " Tokyo")
    both = hf.edge_attribution(*map(list, zip(PAIR, others, strict=True)))
    one, two = hf.edge_attribution(*PAIR), hf.edge_attribution(*others)
    np.testing.assert_allclose(both.by_pair, np.stack([one.by_pair[0], two.by_pair[0]]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(both.scores, (one.scores + two.scores) / 2, rtol=1e-4, atol=1e-5)
    answer = hf.edge_attribution(CLEAN, CORRUPT, " Paris", metric="logprob").scores
    foil = hf.edge_attribution(CLEAN, CORRUPT, " Rome", metric="logprob").scores
    np.testing.assert_allclose(answer - foil, one.scores, rtol=1e-3, atol=1e-3)


def test_edges_of_an_answer_that_lacks_its_space_are_warned_of(hf):
    with pytest.warns(
        UserWarning, match=r"foil is 'Rome'\. After the corrupt prompt of pair 1 the token ' Rome' is more than"
    ) as caught:
        hf.edge_attribution([CLEAN] * 2, [CORRUPT] * 2, " Paris", [" Rome", "Rome"])
    assert len([each for each in caught if each.category is UserWarning]) == 1


def test_frozen_weights_have_edges(plain, hf):
    """Gradients flow if no weight takes one, and none is left on the weights."""
    model = LanguageModel(plain.model, plain.tokenizer)
    hf.module.zero_grad()  # of other tests
    plain.model.requires_grad_(False)
    try:
        scores = model.edge_attribution(*PAIR).scores
    finally:
        plain.model.requires_grad_(True)
    np.testing.assert_allclose(scores, hf.edge_attribution(*PAIR).scores, rtol=1e-3, atol=1e-4)
    assert all(weight.grad is None for weight in hf.module.parameters())


def test_results_say_which_paths_they_are_of(hf, tmp_path):
    result = hf.path_patching(*PAIR, layers=[4], receivers=[(5, 3)], freeze_mlps=True)
    result.save(tmp_path / "paths.npz")
    again = SweepResult.load(tmp_path / "paths.npz")
    assert again.outline.paths == result.outline.paths and again.outline.paths.receivers == [(5, 3)]
    assert again.outline.paths.frozen == ["attn_z", "mlp_out"]
    assert again.plot().get_title() == "direct paths to 5.3"
    assert hf.sweep(*PAIR, layers=[4]).outline.paths is None
    hf.edge_attribution(*PAIR).plot(path=tmp_path / "edges.png")
    assert (tmp_path / "edges.png").stat().st_size > 5000


def test_runs_of_receivers_take_little_room(hf, monkeypatch):
    """Few are recorded at a time. A cell whose run is dropped in between is void, with the reason, and never the baseline."""
    expected = hf.path_patching(*PAIR, receivers=(5, 3))
    row = 5 * 256 * 4  # bytes of attn_z at one layer
    model = LanguageModel(hf.module, hf.tokenizer, record_bytes=14 * row)  # 10 for the runs of the two prompts
    monkeypatch.setattr("midstream.sweeps.paths.GROUP_BYTES", 2 * row)
    values = model.path_patching(*PAIR, receivers=(5, 3))
    np.testing.assert_allclose(values.values["attn_z"], expected.values["attn_z"], **CLOSE)
    monkeypatch.undo()
    result = model.path_patching(*PAIR, receivers=(5, 3))
    assert len(result.void) > 10 and result.count + len(result.void) == 20
    assert all("not there any more" in cell.void or "budget" in cell.void for cell in result.void)
    is_there = ~np.isnan(result.values["attn_z"])
    np.testing.assert_allclose(result.values["attn_z"][is_there], expected.values["attn_z"][is_there], **CLOSE)
    assert not list(model.runs)


# ------------------------------------------------------------------------------------------------------------------ refusals

REFUSED = {
    "queries": ({"receivers": (5, 3, "q")}, ParameterError, "queries, keys and values cannot be receivers.*Give \\(5, 3\\)"),
    "a word": ({"receivers": "heads"}, ParameterError, "receivers is 'heads'. Allowed: \"logits\", or heads"),
    "no receiver": ({"receivers": []}, ParameterError, "receivers is \\[\\]"),
    "a layer of receivers": ({"receivers": (8, 0)}, ParameterError, "receivers has layer 8, and this model has no heads"),
    "a head of receivers": ({"receivers": (5, 4)}, ParameterError, "receivers has head 4 of layer 5. Allowed: 0 to 3"),
    "nothing before them": ({"receivers": (0, 1)}, ParameterError, "no head lies before them"),
    "a sender behind": ({"receivers": (5, 1), "layers": [2, 5]}, PlanError, "layers has 5. Only heads of layers before 5"),
    "freeze": ({"freeze_mlps": 1}, ParameterError, "freeze_mlps is 1. Allowed: True, False"),
    "a metric": ({"metric": "accuracy"}, ParameterError, "metric is 'accuracy'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_path_patching_refuses_by_name(hf, case):
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        hf.path_patching(*PAIR, **options)
    assert not list(hf.runs)


def test_a_layer_without_heads_cannot_be_frozen(hf, monkeypatch):
    """Otherwise the sender would have its effect through that layer, too."""
    facts = hf.facts
    widths, dims = (
        {at: n for at, n in each.items() if at != ("attn_z", 4)} for each in (facts.widths, facts.head_dims)
    )
    monkeypatch.setattr(LanguageModel, "facts", type(facts)(facts.num_layers, widths, facts.dtype, head_dims=dims))
    with pytest.raises(
        PlanError, match=r"layer 4, which has no attn_z, so they cannot be frozen\. Only senders after layer 4"
    ):
        hf.path_patching(*PAIR)
    assert hf.path_patching(*PAIR, layers=[5, 6], heads=0).count == 2
    assert hf.path_patching(*PAIR, layers=2, heads=0, receivers=(3, 0)).count == 1


EDGES_REFUSED = {
    "lengths": ((CLEAN, "The capital of the country Italy is", " Paris", " Rome"), {}, PromptError, "the same number of tokens"),
    "pairs": (([CLEAN, CLEAN], CORRUPT, " Paris", " Rome"), {}, PromptError, "corrupt has 1 prompts, and clean has 2"),
    "no corrupt prompt": ((CLEAN, None, " Paris", " Rome"), {}, PromptError, "corrupt is None. Give a prompt"),
    "no clean prompt": ((None, CORRUPT, " Paris", " Rome"), {}, PromptError, "clean is None. Give a prompt"),
    "no foil": (PAIR[:3], {}, PromptError, "foil is None"),
    "the same": ((*PAIR[:3], " Paris"), {}, PromptError, "the same token as the answer"),
    "a metric": (PAIR, {"metric": "recovered"}, ParameterError, "metric is 'recovered'. Allowed: 'logit_diff', 'logprob'"),
}  # fmt: skip


@pytest.mark.parametrize("case", EDGES_REFUSED)
def test_edge_attribution_refuses_by_name(hf, case):
    args, options, error, message = EDGES_REFUSED[case]
    with pytest.raises(error, match=message):
        hf.edge_attribution(*args, **options)


@pytest.mark.parametrize(
    ("name", "message"), [("gemma2", "changes the output of its attention"), ("gpt_neox", "needs the site resid_mid")]
)
def test_models_whose_stream_is_another_sum_have_no_edges(tmp_path_factory, name, message):
    """Gemma 2 has a norm between a head and the stream; in GPT-NeoX attention and MLP run side by side."""
    model = LanguageModel(str(tiny_models.build(name, tmp_path_factory.getbasetemp())), dtype=torch.float32)
    with pytest.raises(ParameterError, match=message):
        model.edge_attribution(*given())
    assert model.path_patching(*given(), heads=0).count == model.num_layers  # which needs no sum


def test_edges_of_a_model_with_a_plan_are_refused(hf):
    view = hf._view()
    view.plan = {"interventions": []}
    assert view.edge_attribution(*PAIR)
    view.plan = Steer("resid_post", layers=3, vector=[1.0] * 256)
    with pytest.raises(ParameterError, match="without a plan and edits"):
        view.edge_attribution(*PAIR)


@pytest.mark.engine
def test_an_engine_has_no_gradients(engine):
    with pytest.raises(
        ParameterError, match=r"vLLM computes none. Call it on LanguageModel\(name\), or use path_patching here"
    ):
        engine.edge_attribution(*PAIR)
