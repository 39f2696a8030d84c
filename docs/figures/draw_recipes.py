"""Draws the figures of the recipes, by running the recipes' code on transformers: `python docs/figures/draw_recipes.py`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from midstream import LanguageModel, demo_model

RECIPES = (
    "factual-recall",
    "indirect-object",
    "heads",
    "path-patching",
    "coarse-to-fine",
    "token-scores",
    "induction-heads",
)
FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Run each recipe in this folder, so that the figures that it writes stay here."""
    os.chdir(FOLDER)
    model = LanguageModel(demo_model(), dtype=torch.float32)
    for recipe in RECIPES:
        text = (FOLDER.parent / "recipes" / f"{recipe}.md").read_text(encoding="utf-8")
        names: dict[str, Any] = {"model": model, "hf": model}
        for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(compile(code, f"{recipe}.md", "exec"), names)


if __name__ == "__main__":
    main()
