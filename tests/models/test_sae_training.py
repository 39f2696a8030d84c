"""SAELens trains from midstream's rows with its own trainer, and reads them with its own reader (row O2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Plain, close
from plan_cases import HIDDEN

from midstream import SAE, Capture
from midstream.bundled import demo_contrast, demo_facts
from midstream.capture.directory import Store
from midstream.errors import CaptureError

sae_lens = pytest.importorskip("sae_lens")
FEATURES, BATCH, STEPS = 128, 256, 300
PROMPTS = [fact["prompt"] for fact in demo_facts()[::6]] + [pair["positive"] for pair in demo_contrast()[::4]]


@pytest.fixture(scope="module")
def store(collecting: Any, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return collecting.collect(
        PROMPTS, plan=Capture("resid_post", layers=[2, 5], positions="all_prompt"), to=tmp_path_factory.mktemp("store")
    )


@pytest.fixture(scope="module")
def collecting() -> Iterator[Any]:
    from midstream import LanguageModel, demo_model

    yield LanguageModel(demo_model(), dtype=torch.float32)


def trained(batches: Any, steps: int = STEPS) -> Any:
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.saes.sae import SAEMetadata
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(0)
    metadata = SAEMetadata(hook_name="blocks.5.hook_resid_post")
    config = sae_lens.TopKTrainingSAEConfig(d_in=HIDDEN, d_sae=FEATURES, k=8, metadata=metadata)
    sae = sae_lens.TopKTrainingSAE(config)
    settings = SAETrainerConfig(steps * BATCH, BATCH, lr=3e-3, lr_end=3e-4, logger=LoggingConfig(log_to_wandb=False))
    return SAETrainer(settings, sae, batches).fit()


@pytest.mark.parametrize("source", ["directory", "model"])
def test_saelens_trains_an_sae_of_the_rows(collecting: Any, store: Store, tmp_path: Path, source: str) -> None:
    """A few hundred steps explain 90 % of the variance, and midstream's SAE computes the same."""
    if source == "directory":
        batches: Any = store.loader("blocks.5.hook_resid_post", batch_size=BATCH, workers=1)
    else:
        batches = collecting.activations(PROMPTS, "resid_post", 5, batch_size=BATCH, epochs=None)
    rows = torch.cat(list(store.loader("resid_post", 5, epochs=1)))
    steps = STEPS if source == "directory" else 40
    sae = trained(batches, steps)
    with torch.no_grad():
        errors = (sae.decode(sae.encode(rows)) - rows).square().sum() / (rows - rows.mean(0)).square().sum()
    assert errors < (0.1 if source == "directory" else 0.5), errors
    sae.save_inference_model(str(tmp_path))
    loaded = SAE.load(tmp_path)
    assert (loaded.site, loaded.layer) == ("resid_post", 5)
    close(loaded.encode(rows), sae.encode(rows).detach())


def test_saelens_reads_the_arrow_files(store: Store, plain: Plain, tmp_path: Path) -> None:
    """With `datasets`, and with the `ActivationsStore` of SAELens. The rows are those of plain transformers."""
    from datasets import load_from_disk

    size = 3
    count = store.to_arrow(tmp_path / "arrow", "resid_post", [2, 5], context_size=size)
    found = load_from_disk(str(tmp_path / "arrow"))
    assert found.column_names == ["blocks.2.hook_resid_post", "blocks.5.hook_resid_post", "token_ids"]
    ids = {name: store[name].prompt_token_ids for name in store}
    assert len(found) == count == sum(len(each) // size for each in ids.values())
    contexts = iter(found.with_format("numpy"))
    for each in list(ids.values())[:5]:
        sites = plain.run(each).sites
        for start in range(0, len(each) - size + 1, size):
            context = next(contexts)
            assert context["token_ids"].tolist() == each[start : start + size]
            for layer in (2, 5):
                expected = sites["resid_post", layer][start : start + size]
                close(torch.from_numpy(np.array(context[f"blocks.{layer}.hook_resid_post"])), expected)


def test_the_activations_store_of_saelens_serves_them(store: Store, tmp_path: Path) -> None:
    from sae_lens.training.activations_store import ActivationsStore
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    size = 4
    store.to_arrow(tmp_path, "resid_post", 5, context_size=size)
    config = HookedTransformerConfig(
        n_layers=1, d_model=8, n_ctx=size, d_head=4, n_heads=2, d_vocab=10, act_fn="relu", device="cpu"
    )
    reader = ActivationsStore(
        model=HookedTransformer(config),
        dataset=None,
        streaming=False,
        hook_name="blocks.5.hook_resid_post",
        hook_head_index=None,
        context_size=size,
        d_in=HIDDEN,
        n_batches_in_buffer=4,
        total_training_tokens=512,
        store_batch_size_prompts=4,
        train_batch_size_tokens=16,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(tmp_path),
    )
    batch = reader.next_batch()
    assert batch.shape[-1] == HIDDEN
    rows = torch.cat(list(store.loader("resid_post", 5, epochs=1)))
    distances = torch.cdist(batch.reshape(-1, HIDDEN), rows, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    assert len(batch.reshape(-1, HIDDEN)) == 16 and distances.max() < 1e-3  # each is one of the rows


def test_what_arrow_files_cannot_have_is_an_error(collecting: Any, store: Store, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no request with 500 such rows"):
        store.to_arrow(tmp_path / "a", "resid_post", 5, context_size=500)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(CaptureError, match="is not empty"):
        store.to_arrow(tmp_path / "full", "resid_post", 5, context_size=2)
    capture = Capture("resid_post", layers=5, positions="all_generated")
    generated = collecting.collect(PROMPTS[:2], plan=capture, to=tmp_path / "g", max_tokens=4)
    with pytest.raises(CaptureError, match="generated tokens"):
        generated.to_arrow(tmp_path / "b", "resid_post", 5, context_size=2)
