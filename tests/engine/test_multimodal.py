"""A multimodal model: its language model is placed beside its tower, and plans go with prompts that are more than text.

Against plain transformers with forward hooks. Sound, because what vLLM has for pictures does not import without torchvision. Rows D5, E11.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

pytest.importorskip("vllm")
from engines import ENGINE
from forked import forked
from safetensors.torch import load_file, save_file

from midstream import VLLM, Capture, Clamp, Patch, Steer, open_captures
from midstream.errors import CaptureError, PlanError, PromptError, UnknownSiteError

TEXT = "The Eiffel Tower is in the city of"
SPOKEN = "Listen: <|audio_bos|><|AUDIO|><|audio_eos|> The capital of France is"
SOUND = np.sin(np.arange(12_800) / 20).astype(np.float32)
LAYER, TOKENS = 1, 6
STEER = Steer("resid_post", layers=LAYER, vector=torch.linspace(-3, 3, 128))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    directory = tmp_path_factory.mktemp("qwen2_audio")
    text = {**tiny_models.ARCHITECTURES["qwen2"].options, "max_position_embeddings": 2048}
    tower = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    tokenizer = tiny_models.tokenizer.__wrapped__()  # the others' stays as it is
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", "num_mel_bins": 16, **tower},
        text_config={"model_type": "qwen2", "vocab_size": 448, **special, **text},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        **special,
    )
    model = Qwen2AudioForConditionalGeneration(config).float()
    tiny_models._randomise(model, 0.4)
    model.save_pretrained(directory)
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16), tokenizer).save_pretrained(directory)
    weights = directory / "model.safetensors"  # under the names of the checkpoints that there are, which vLLM reads
    named = {
        name.replace("language_model.model.model.", "language_model.model."): value
        for name, value in load_file(weights).items()
    }
    save_file(named, weights, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[VLLM]:
    with forked(), VLLM(str(path), **{**ENGINE, "max_model_len": 1024}, enforce_eager=True) as model:
        yield model


class Oracle:
    """The model on transformers, with one layer's output read, and changed where asked."""

    def __init__(self, path: Path) -> None:
        from transformers import Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor

        self.model = Qwen2AudioForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self.processor = Qwen2AudioProcessor.from_pretrained(path)

    @torch.no_grad()
    def run(self, prompt: str, edit: Callable[[torch.Tensor], torch.Tensor] | None = None) -> tuple[list[int], Any]:
        """The greedy tokens, and the hidden states `[tokens, hidden]` of the prompt behind the layer."""
        sound = {"audio": [SOUND], "sampling_rate": 16_000} if "AUDIO" in prompt else {}
        inputs = self.processor(text=prompt, return_tensors="pt", **sound)
        seen: list[torch.Tensor] = []

        def hook(module: Any, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            hidden = edit(hidden) if edit is not None else hidden
            seen.append(hidden[0])
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        (layer,) = (
            module
            for name, module in self.model.named_modules()
            if "language_model" in name and name.endswith(f".layers.{LAYER}")
        )
        handle = layer.register_forward_hook(hook)
        try:
            ids = self.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        finally:
            handle.remove()
        return ids[0, inputs["input_ids"].shape[1] :].tolist(), seen[0]


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


def generate(engine: VLLM, prompts: Any, plans: Any = None) -> Any:
    """By the engine itself, with a plan, or one for each prompt, in the sampling parameters."""
    from vllm import SamplingParams

    common = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    plans = plans if isinstance(plans, list) else [plans] * len(prompts)
    params = [SamplingParams(**common, extra_args={"midstream": p} if p is not None else None) for p in plans]
    return [list(output.outputs[0].token_ids) for output in engine.engine.generate(prompts, params, use_tqdm=False)]


def spoken() -> dict[str, Any]:
    return {"prompt": SPOKEN, "multi_modal_data": {"audio": [(SOUND, 16_000)]}}


def test_a_trace_of_text_is_the_language_models(engine: VLLM, oracle: Oracle) -> None:
    with engine.trace(TEXT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True) as tracer:
        hidden = engine.layers_output[LAYER].save()
    tokens, expected = oracle.run(TEXT)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert list(tracer.outputs[0].outputs[0].token_ids) == tokens
    with pytest.raises(UnknownSiteError, match="no site 'embed'"):  # vLLM makes them outside of the forward
        engine.run(lambda model: model.token_embeddings, TEXT, max_tokens=1)


def test_a_plan_without_positions_goes_with_a_prompt_of_text_and_sound(engine: VLLM, oracle: Oracle) -> None:
    """Beside the same prompt without it, and one of text."""
    vector = STEER.vector.data
    steered, plain = (oracle.run(SPOKEN, edit)[0] for edit in (lambda h: h + torch.tensor(vector), None))
    assert steered != plain
    assert generate(engine, [spoken(), spoken(), TEXT], [STEER, None, STEER]) == [
        steered,
        plain,
        oracle.run(TEXT, lambda h: h + torch.tensor(vector))[0],
    ]


def test_captures_of_a_prompt_of_text_and_sound_are_counted_with_the_sounds_places(
    engine: VLLM, oracle: Oracle, tmp_path: Path
) -> None:
    generate(engine, [spoken()], Capture("resid_post", layers=LAYER, positions="all_prompt", to=str(tmp_path)))
    _, expected = oracle.run(SPOKEN)
    deadline, found = time.monotonic() + 20, None
    while not found:  # consumers work beside the engine
        assert time.monotonic() < deadline
        with contextlib.suppress(CaptureError):
            found = open_captures(tmp_path)
    (capture,) = found.values()
    assert capture.positions["resid_post", LAYER] == list(range(len(expected)))
    torch.testing.assert_close(capture["resid_post", LAYER], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "plan",
    [
        Patch("resid_post", layer=LAYER, position=2, source="zeros"),
        Steer("resid_post", vector=torch.ones(128), positions=[0]),
        Clamp("resid_post", direction=torch.ones(128), positions=[0]),
        Capture("resid_post", positions=[1], to="somewhere"),
    ],
)
def test_positions_in_a_prompt_of_text_and_sound_are_refused(engine: VLLM, oracle: Oracle, plan: Any) -> None:
    """Under either carrier; the request behind it is as it would be alone."""
    with pytest.raises(PlanError, match="multimodal prompt"):
        engine.generate(spoken(), plan=plan, max_tokens=1)
    with pytest.raises(PlanError, match="multimodal prompt"):
        generate(engine, [spoken()], plan)
    assert generate(engine, [spoken()]) == [oracle.run(SPOKEN)[0]]


def test_prompts_that_are_more_than_text_are_sent_to_the_engine_itself(engine: VLLM) -> None:
    with pytest.raises(PromptError, match=r"Send a prompt with images, .* to `model\.engine\.generate\("):
        engine.generate(spoken(), plan=STEER, max_tokens=1)
    with (
        pytest.raises(PromptError, match=r"Send a prompt with images, .* to `model\.engine\.generate\("),
        engine.trace(spoken()),
    ):
        engine.logits.save()
