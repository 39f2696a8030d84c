"""The demo model in the package. It is small, and trained well enough for the recipes to have real answers.

    from midstream.bundled import demo_model
    model = VLLM(demo_model())
    model.generate("The Eiffel Tower is in the city of", max_tokens=1)      # " Paris"

It needs no network and no GPU. `scripts/train_demo_model.py` trains it; `MODEL_CARD.md` next to its weights has measurements. This module
imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def demo_model() -> str:
    """The directory of the bundled model, for any function that takes a Hugging Face model path.

    A `LlamaForCausalLM`: 8 layers, hidden 256, 4 query and 2 key/value heads of 64, MLP 512, context 2048, bfloat16, 5 M parameters, under
    12 MB with its own byte-level BPE tokenizer (no BOS is added; prompts work with or without).

    It knows capitals, languages, currencies, continents, landmarks, opposites, colors and sequences, in several phrasings (`The capital of
    France is` -> ` Paris`); who receives in `When Mary and John went to the store, John gave a drink to` -> ` Mary`; how to repeat a random
    sequence (induction); and whether a sentence is kind (`I love this film, it was` -> ` wonderful`, `I hate this film, it was` -> `
    terrible`). It has learned no other facts.
    """
    return str(files("midstream") / "data" / "demo_model")


def demo_facts() -> list[dict[str, str]]:
    """Every fact in every phrasing of the training data: `{"prompt", "answer", "relation"}`; answers begin with a space."""
    return _read("facts.json")


def demo_heldout() -> dict[str, list]:
    """Data that is not in the training data: `facts` (as `demo_facts`), `ioi` (`prompt`, `answer`, `foil`, `order`) and `ioi_pairs`."""
    return _read("heldout.json")


def demo_contrast() -> list[dict[str, str]]:
    """Pairs of prompts that differ only in sentiment, `{"positive", "negative"}`, to compute a steering vector from.

    The mean difference at `resid_post` of layer 5, at the last token, decides how `I think this film is` continues: try scales of -0.5 and
    0.5.
    """
    return _read("contrast.json")


def _read(name: str) -> Any:
    return json.loads((files("midstream") / "data" / "demo_model" / name).read_text(encoding="utf-8"))
