"""Plans on engines of two pipeline stages and of two tensor-parallel ranks (rows D7, E10, E12).

What is expected comes from plain transformers with torch hooks (`oracle.py`), which know nothing of ranks. Steps take 64 tokens, so that
longer prompts come in pieces. Row D8.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import alive
from forked import start_ranks
from oracle import Plain, close, differs
from plan_cases import (
    EIFFEL,
    FRANCE,
    GREEDY,
    ITALY,
    LAYERS,
    after_rows,
    everything,
    tokens,
    toward_rome,
    vector,
)

from midstream import VLLM, Capture, Clamp, Patch, Plan, Probe, Steer, When, open_captures
from midstream.capture.directory import StoredCapture
from midstream.errors import PlanError

pytestmark = pytest.mark.engine

RANKS = {"pp2": {"pipeline_parallel_size": 2}, "tp2": {"tensor_parallel_size": 2}}
SITES = ["resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "attn_z", "mlp_in", "mlp_act", "mlp_out"]


@pytest.fixture(scope="module", params=RANKS)
def ranked(request: pytest.FixtureRequest) -> Iterator[VLLM]:
    with start_ranks(**RANKS[request.param], max_num_batched_tokens=64) as model:
        yield model


@pytest.fixture
def model(ranked: VLLM) -> Iterator[VLLM]:
    """The engine, on whose ranks nothing is left afterwards."""
    yield ranked
    left = alive(ranked, 20.0)
    assert not left, left


def check(output: Any, plain: Plain, prompt: str | list[int], edits: Any, count: int) -> None:
    """The tokens, and everything captured after its edits, are the oracle's."""
    ids = plain.generate(prompt, count, edits)
    assert tokens(output) == ids
    sites = plain.run(plain.ids(prompt) + ids[:-1], edits).sites
    assert list(output.captures) == [("resid_post", layer) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        close(output.captures["resid_post", layer], sites["resid_post", layer])


AFTER = everything(when="after")


def test_edits_at_layers_of_both_stages(model: VLLM, plain: Plain) -> None:
    """Each kind of edit in one batch, beside a request that has none."""
    v, w, d = vector(1), vector(2), toward_rome(plain, 3)
    d = d / d.norm()
    plans = [
        [Steer("resid_post", layers=[1, 6], vector=v), AFTER],
        [Steer("resid_post", vector=w, scale=0.2, phase="decode"), AFTER],
        [Steer("mlp_out", layers=[2, 5], vector=w, scale=0.1, norm_match=True), AFTER],
        [Clamp("resid_post", layers=[2, 5], direction=d, low=-1.0, high=1.0), AFTER],
        [Patch("resid_post", layer=1, position=[1, -1], source=v, alpha=0.5), Patch("mlp_out", layer=6, position=2, source="zeros"), AFTER],
        [AFTER],
    ]  # fmt: skip

    def clamped(h: torch.Tensor) -> torch.Tensor:
        along = h @ d
        return h + (along.clamp(-1.0, 1.0) - along)[:, None] * d

    edits: list[dict[Any, Callable[[torch.Tensor], torch.Tensor]]] = [
        {("resid_post", layer): lambda h: h + v for layer in (1, 6)},
        {("resid_post", layer): after_rows(slice(5, None), lambda h: h + 0.2 * w) for layer in range(LAYERS)},
        {("mlp_out", layer): lambda h: h + 0.1 * h.norm(dim=-1, keepdim=True) * w / w.norm() for layer in (2, 5)},
        {("resid_post", layer): clamped for layer in (2, 5)},
        {("resid_post", 1): after_rows([1, 4], lambda h: 0.5 * h + 0.5 * v), ("mlp_out", 6): after_rows([2], torch.zeros_like)},
        {},
    ]  # fmt: skip
    outputs = model.generate([FRANCE] * len(plans), plan=plans, max_tokens=5, **GREEDY)
    for output, each in zip(outputs, edits, strict=True):
        check(output, plain, FRANCE, each, 5)
    differs(outputs[0].captures["resid_post", 7], outputs[5].captures["resid_post", 7])


def test_every_site_of_every_layer_is_captured_whole_and_in_order(model: VLLM, plain: Plain) -> None:
    """Each stage sends its layers; what is spread over tensor-parallel ranks comes together."""
    (output,) = model.generate(EIFFEL, plan=[Capture(site, positions="all_prompt") for site in SITES], max_tokens=2)
    sites = plain.run(EIFFEL).sites
    assert list(output.captures) == [(site, layer) for site in SITES for layer in range(LAYERS)]
    for key, rows in output.captures.items():
        close(rows, sites[key].flatten(1))


@pytest.mark.parametrize("site", ["attn_z", "mlp_act"])
def test_sites_that_ranks_have_parts_of_are_edited_whole(model: VLLM, plain: Plain, site: str) -> None:
    """Norms and directions are those of all heads together."""
    v = vector(3, 20.0, plain.run(FRANCE).sites[site, 2].flatten(1).shape[1])
    plan = [
        Steer(site, layers=2, vector=v, norm_match=True, scale=0.5),
        Clamp(site, layers=5, direction=v, low=0.5, high=0.5),
        Patch(site, layer=6, position=2, source=v, mask=torch.arange(v.numel()) % 3 == 0),
        AFTER,
        Capture(site, layers=[2, 6], positions="all_prompt", when="after"),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=4, **GREEDY)
    unit, mask = v / v.norm(), torch.arange(v.numel()) % 3 == 0
    edits = {
        (site, 2): lambda h: h + 0.5 * h.norm(dim=-1, keepdim=True) * unit,
        (site, 5): lambda h: h + (0.5 - h @ unit)[:, None] * unit,
        (site, 6): after_rows([2], lambda h: torch.where(mask, v, h)),
    }
    ids = plain.generate(FRANCE, 4, edits)
    assert tokens(output) == ids
    sites = plain.run(plain.ids(FRANCE) + ids[:-1], edits).sites
    for layer in range(LAYERS):
        close(output.captures["resid_post", layer], sites["resid_post", layer])
    for layer in (2, 6):
        close(output.captures[site, layer], sites[site, layer].flatten(1)[:5])


def test_a_prompt_in_pieces_with_samples(model: VLLM, plain: Plain) -> None:
    """200 tokens make four steps; each sample has rows of its own. (No seed: vLLM 0.32 cannot seed a prompt in pieces on a CPU.)"""
    prompt = (plain.ids(EIFFEL) * 25)[:200]
    v = vector(4)
    plan = [
        Patch("resid_post", layer=5, position=150, source=v),
        Capture("resid_post", layers=[1, 6], positions=[3, 100, 199], when="after"),
        Capture("resid_post", layers=[1, 6], positions="all_generated", when="after"),
    ]
    (output,) = model.generate([prompt], plan=plan, n=2, max_tokens=4, temperature=1.5, ignore_eos=True)
    for sample, captures in zip(output.outputs, output.captures, strict=True):
        ids = prompt + list(sample.token_ids)[:-1]
        sites = plain.run(ids, {("resid_post", 5): after_rows([150], lambda h: v)}).sites
        for layer in (1, 6):
            rows = captures.positions["resid_post", layer]
            assert rows == [3, 100, 199, 200, 201, 202]
            close(captures["resid_post", layer], sites["resid_post", layer][rows], 1e-3)


# -------------------------------------------------------------------------------------------------------- recorded runs


def test_recorded_runs_are_sources_at_every_layer(model: VLLM, plain: Plain) -> None:
    """On the stage of the patch, and on another one, upstream and downstream; a second time as well, when nothing is compiled."""
    run = model.record(ITALY, sites=["resid_post", "mlp_out"], name="italy")
    source = plain.run(ITALY).sites
    (info,) = model.runs.listing()
    assert (info.name, info.bytes, info.leases) == ("italy", 2 * LAYERS * 5 * 256 * 4, 0)
    assert info.layers == run.layers == tuple(range(LAYERS)) and info.positions == (0, 1, 2, 3, 4)
    plans = [
        [Patch("resid_post", layer=3, position=3, source=run)],
        [Patch("resid_post", layer=6, position=[1, 2], source=run, alpha=0.5)],
        [Patch("resid_post", layer=1, position=[0, 3], source=run, source_layer=6, source_position=[4, 1])],
        [
            Patch("resid_post", layer=5, position=[1, 2], source=run, source_site="mlp_out", source_layer=2, source_position=-1, alpha=0.5),
            Patch("mlp_out", layer=2, position=4, source=run, source_site="resid_post", source_layer=7, source_position=0),
        ],
    ]  # fmt: skip
    edits: list[dict[Any, Any]] = [
        {("resid_post", 3): after_rows([3], lambda h: source["resid_post", 3][3])},
        {("resid_post", 6): after_rows([1, 2], lambda h: 0.5 * h + 0.5 * source["resid_post", 6][[1, 2]])},
        {("resid_post", 1): after_rows([0, 3], lambda h: source["resid_post", 6][[4, 1]])},
        {
            ("resid_post", 5): after_rows([1, 2], lambda h: 0.5 * h + 0.5 * source["mlp_out", 2][4]),
            ("mlp_out", 2): after_rows([4], lambda h: source["resid_post", 7][0]),
        },
    ]
    for _ in range(2):
        outputs = model.generate([FRANCE] * 4, plan=[[*plan, AFTER] for plan in plans], max_tokens=3, **GREEDY)
        for output, each in zip(outputs, edits, strict=True):
            check(output, plain, FRANCE, each, 3)
    assert tokens(outputs[0])[0] == plain.token(" Rome")
    model.runs.delete("italy")
    assert not model.runs.listing()
    with pytest.raises(PlanError, match="italy"):
        model.generate(FRANCE, plan=plans[2], max_tokens=1)


# ----------------------------------------------------------------------------------------------- past the client's wrapper


def submit(model: VLLM, prompts: list[str], plans: list[Any], **params: Any) -> list[Any]:
    """As a user of plain vLLM does: nobody at the client waits for rows."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0.0, ignore_eos=True, **params, extra_args={"midstream": p} if p else None)
        for p in plans
    ]
    return model.engine.generate(prompts, sampling, use_tqdm=False)


def stored(directory: Path, count: int) -> list[StoredCapture]:
    """What the ranks have written once there are so many requests, in their order."""
    deadline = time.monotonic() + 60
    while True:
        if directory.exists() and any(directory.glob("index-*")) and len(found := open_captures(directory)) >= count:
            assert len(found) == count and not found.failed
            return [found[name] for name in sorted(found, key=lambda name: int(name.partition("-")[0]))]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_plan_for_every_request_writes_to_a_directory(
    model: VLLM, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From all stages, as one; captures of which one stage has nothing are complete as well."""
    watch = Plan.of([
        Capture("resid_post", layers=[2, 6], positions="all", to=tmp_path / "all"),
        Capture("resid_post", layers=[5], positions="last_prompt", to=tmp_path / "late"),
    ])  # fmt: skip
    monkeypatch.setitem(model.vllm_config.additional_config["midstream"], "plan", watch.to_json())
    v = toward_rome(plain)
    steer = Steer("resid_post", layers=5, vector=v)
    outputs = submit(model, [FRANCE, EIFFEL, FRANCE], [None, None, Plan.of(steer)], max_tokens=4)
    everywhere, late = stored(tmp_path / "all", 3), stored(tmp_path / "late", 3)
    edits: list[Any] = [{}, {}, {("resid_post", 5): lambda h: h + v}]
    for output, capture, last, prompt, each in zip(
        outputs, everywhere, late, [FRANCE, EIFFEL, FRANCE], edits, strict=True
    ):
        ids = plain.ids(prompt)
        sites = plain.run(ids + tokens(output)[:-1], each).sites
        assert capture.prompt_token_ids == last.prompt_token_ids == ids
        assert list(capture) == [("resid_post", 2), ("resid_post", 6)] and list(last) == [("resid_post", 5)]
        for layer in (2, 6):
            assert capture.positions["resid_post", layer] == list(range(len(ids) + 3))
            close(capture["resid_post", layer], sites["resid_post", layer])
        before = plain.run(ids).sites["resid_post", 5][-1:]  # before the steer of that layer
        close(last["resid_post", 5], before)
    assert tokens(outputs[2])[0] == plain.token(" Rome")


def test_the_clients_directory_has_all_stages_rows_in_one_place(model: VLLM, plain: Plain, tmp_path: Path) -> None:
    plan = [Capture("resid_post", layers=[6, 1], positions="all_prompt", to=(tmp_path, None))]
    outputs = model.generate([FRANCE, EIFFEL], plan=plan, max_tokens=1)
    found = open_captures(tmp_path)
    assert len(found) == 2 and len(list(tmp_path.glob("index-*"))) == 1
    for output, prompt in zip(outputs, (FRANCE, EIFFEL), strict=True):
        capture = found[output.request_id]
        assert list(capture) == list(output.captures) == [("resid_post", 1), ("resid_post", 6)]
        for key, rows in output.captures.items():
            assert torch.equal(capture[key], rows)
            close(rows, plain.run(prompt).sites[key])


def probe_at(layer: int, **options: Any) -> Probe:
    return Probe("resid_post", layer=layer, weight=vector(norm=1.0), name=f"p{layer}", positions="all", **options)


def test_probes_at_layers_of_every_stage_score_every_token_once(model: VLLM, plain: Plain) -> None:
    """Prompts in chunks, samples, and requests whose probes lie on one stage alone. Rows M1, M2."""
    long = plain.ids(" ".join([FRANCE, EIFFEL, ITALY] * 8))[:90]
    plans = [[probe_at(1), probe_at(6)], [probe_at(1)], [probe_at(6)], None, [probe_at(6), probe_at(1)]]
    outputs = model.generate([FRANCE, EIFFEL, ITALY, FRANCE, long], plan=plans, max_tokens=6, **GREEDY)
    for output, plan, prompt in zip(outputs, plans, [FRANCE, EIFFEL, ITALY, FRANCE, long], strict=True):
        ids = plain.generate(prompt, 6)
        assert tokens(output) == ids and set(output.scores) == {probe.name for probe in plan or ()}
        sites = plain.run((plain.ids(prompt) if isinstance(prompt, str) else prompt) + ids[:-1]).sites
        for probe in plan or ():
            expected = sites["resid_post", probe.layer] @ vector(norm=1.0)
            assert output.scores.positions[probe.name] == list(range(len(expected)))
            close(output.scores[probe.name][:, 0], expected)


@pytest.mark.parametrize("layer", [1, 6])
def test_a_probe_of_either_stage_ends_its_request_on_all(model: VLLM, plain: Plain, layer: int) -> None:
    """No stage sends a captured row of a later token. A neighbour goes on."""
    ids = plain.generate(FRANCE, 12)
    start = len(plain.ids(FRANCE))
    scores = (plain.run(plain.ids(FRANCE) + ids).sites["resid_post", layer] @ vector(norm=1.0)).tolist()
    at = max(range(start + 2, start + 10), key=scores.__getitem__)
    threshold = (scores[at] + max(scores[start:at])) / 2
    end = next(i for i in range(start, len(scores)) if scores[i] > threshold)
    probe = dataclasses.replace(probe_at(layer, stop_above=threshold), positions="all_generated")
    other = probe_at(7 - layer)
    plans = [[probe, other, Capture("resid_post", layers=[0, 7], positions="all")], [other]]
    stopped, neighbour = model.generate([FRANCE, ITALY], plan=plans, max_tokens=20, **GREEDY)
    assert stopped.outputs[0].stop_reason == f"probe:p{layer}" and tokens(stopped) == ids[: end + 1 - start]
    assert stopped.scores.positions == {f"p{layer}": [*range(start, end + 1)], other.name: [*range(end + 1)]}
    sites = plain.run(plain.ids(FRANCE) + ids[: end + 1 - start]).sites
    for key, rows in stopped.captures.items():
        close(rows, sites[key])
    assert tokens(neighbour) == plain.generate(ITALY, 20) and len(neighbour.scores[other.name]) == 19 + len(
        plain.ids(ITALY)
    )
    (empty,) = model.generate(FRANCE, plan=probe_at(layer, stop_above=min(scores[:start]) - 1), max_tokens=5, **GREEDY)
    assert empty.outputs[0].stop_reason == f"probe:p{layer}" and not tokens(empty)
    assert len(empty.scores[f"p{layer}"]) == 1


@pytest.mark.parametrize("layer", [1, 6])
def test_a_directory_has_no_row_behind_a_probes_stop(
    model: VLLM, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """Also in the middle of a prompt that was computed in one step, and whichever stage writes."""
    scores = (plain.run(FRANCE).sites["resid_post", layer] @ vector(norm=1.0)).tolist()
    threshold = sorted(scores[1:-1])[-1] / 2 + sorted(scores[1:-1])[-2] / 2
    end = 1 + scores[1:].index(max(scores[1:-1]))
    probe = dataclasses.replace(probe_at(layer, stop_above=threshold), positions=[1, 2, 3])
    capture = Capture("resid_post", layers=[2, 6], positions="all", to=tmp_path)
    monkeypatch.setitem(model.vllm_config.additional_config["midstream"], "plan", Plan.of([capture, probe]).to_json())
    output, _ = submit(model, [FRANCE, ITALY], [None, None], max_tokens=4)
    assert output.outputs[0].stop_reason == f"probe:p{layer}"
    first, second = stored(tmp_path, 2)
    assert [first.positions["resid_post", each] for each in (2, 6)] == [list(range(end + 1))] * 2
    assert second.positions["resid_post", 2] == second.positions["resid_post", 6]


@pytest.mark.parametrize("layer", [1, 6])
def test_gates_on_either_stage(model: VLLM, plain: Plain, layer: int) -> None:
    """A gate's probe and its edits lie on one stage, which may be any."""
    v, w = toward_rome(plain), vector(norm=1.0)
    scores = plain.run(FRANCE).sites["resid_post", layer] @ w
    above = float(scores.sort().values[1:3].mean())  # between two tokens

    def edit(h: torch.Tensor) -> torch.Tensor:
        return h + v * (h @ w > above).unsqueeze(-1)

    gate = When(probe_at(layer), above=above, then=Steer("resid_post", layers=layer, vector=v))
    (output,) = model.generate(FRANCE, plan=[gate, probe_at(layer), AFTER], max_tokens=4, **GREEDY)
    check(output, plain, FRANCE, {("resid_post", layer): edit}, 4)
    close(output.scores[f"p{layer}"][:5, 0], scores)


def test_a_gate_whose_probe_lies_on_another_stage_is_refused(model: VLLM) -> None:
    if model.vllm_config.parallel_config.pipeline_parallel_size == 1:
        return
    gate = When(probe_at(1), above=0.0, then=Steer("resid_post", layers=6, vector=vector()))
    with pytest.raises(PlanError, match="the pipeline stage of layer 6"):
        model.generate(FRANCE, plan=gate, max_tokens=1)


def test_what_only_the_workers_know_ends_the_request_and_no_other(model: VLLM, plain: Plain) -> None:
    """All ranks refuse it, whichever of them has the layer; the last stage's word reaches the scheduler."""
    plans = [
        Plan.of(Steer("resid_post", layers=1, vector="nobody")),
        None,
        Plan.of(Steer("mlp_act", layers=6, vector=[1.0] * 3)),
    ]
    bad, good, wide = submit(model, [FRANCE, ITALY, FRANCE], plans, max_tokens=3)
    assert (bad.outputs[0].finish_reason, wide.outputs[0].finish_reason) == ("error", "error")
    assert "'nobody'" in bad.outputs[0].stop_reason
    assert "Steer.vector is of width 3" in wide.outputs[0].stop_reason
    assert tokens(good) == plain.generate(ITALY, 3)
    for plan, message in (
        (Steer("resid_post", layers=[1, 8], vector=vector()), "Steer.layers is 8; allowed: 0 to 7"),
        (Steer("resid_post", layers=6, vector=vector(width=3)), "Steer.vector is of width 3; allowed: 256"),
        (Patch("resid_post", layer=6, position=5, source="zeros"), "Patch.position is 5; allowed: from -5 to 4"),
    ):
        with pytest.raises(PlanError, match=message):
            model.generate(FRANCE, plan=plan, max_tokens=1)
