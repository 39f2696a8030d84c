"""Architectures whose values ranks share in ways of their own, on several ranks against transformers (rows B5, C1, C8, C12).

`scripts/supported_models.py` measures all architectures so; here are those that have been wrong before, and one of each other kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from compare_runs import ENGINE, PROMPTS, set_and_read
from forked import forked
from ranks import SIZES

from midstream import VLLM, LanguageModel, compare

pytestmark = pytest.mark.engine

CASES = [
    ("tp2", "falcon"),  # attention's and the MLP's summands are added before the one all-reduce
    ("tp2", "falcon_two_norms"),
    ("tp2", "qwen2_moe"),  # summands of experts, and of one that all tokens share
    ("pp2", "llama_transformers"),  # transformers' forward calls what stands for the layers of other stages
    ("pp2tp2", "qwen3_transformers"),
    ("pp2tp2", "mixtral"),
    ("pp2tp2", "cohere"),  # a later stage is handed zeros in a dummy run, of which any sum is the same
]


@pytest.fixture(autouse=True)
def transformers_as_it_was() -> Iterator[None]:
    yield
    tiny_models.restore_transformers()


@pytest.mark.parametrize(("size", "name"), CASES, ids=[f"{name}-{size}" for size, name in CASES])
def test_accessors_and_edits_agree(size: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """C1, C8, C12: every accessor and edit as on transformers; what is written to a site is what is read there."""
    architecture = tiny_models.ARCHITECTURES[name]
    path = str(tiny_models.build(name, tmp_path_factory.getbasetemp()))
    layers = range(tiny_models.LAYERS)
    reference = compare.collect(LanguageModel(path, dtype=torch.float32, attn_implementation="eager"), PROMPTS, layers)
    sizes: dict[str, Any] = {**ENGINE, **SIZES[size], **architecture.engine, "gpu_memory_utilization": 0.1}
    with forked(), VLLM(path, **sizes) as model:
        found = compare.differences(compare.collect(model, PROMPTS, layers), reference)
        written = {site: set_and_read(model, site) for site in model.description["sites"]}
    assert {entry: (d.note, d.reason) for entry, d in found.items() if d.note not in ("", "lacking")} == {}
    apart = {entry: (d.value, d.where) for entry, d in found.items() if (d.value or 0) > architecture.rtol}
    assert apart == {}
    assert sum(d.note == "lacking" for d in found.values()) <= 2
    for site, pairs in written.items():
        for value, given in pairs:
            torch.testing.assert_close(value, given, atol=1e-5, rtol=1e-5, msg=site)
