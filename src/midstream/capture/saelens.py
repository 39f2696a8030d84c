"""Writes captured rows as SAELens caches activations: a Hugging Face dataset in Arrow files, which its `ActivationsStore` reads.

A row of the dataset is a context: `[context_size, width]` under the name of each hook, and the tokens, int32 `[context_size]`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstream.capture.loading import Asked, Captures
from midstream.errors import CaptureError, MidstreamError
from midstream.plan import fields
from midstream.sites import hook_at

_FILE_BYTES = 500 << 20
_PART_BYTES = 16 << 20  # written at a time


def write_arrow(store: Captures, path: Path, asked: Asked, context_size: int) -> int:
    """Write a directory. Arguments and errors as of `Store.to_arrow`. Returns the number of contexts."""
    try:
        from datasets import Array2D, DatasetInfo, Features, Sequence, Value
        from datasets.arrow_writer import ArrowWriter
    except ImportError as error:
        raise MidstreamError("to_arrow needs the package datasets: pip install 'midstream[sae]'.") from error
    fields.integer("context_size", context_size, 1)
    hooks = {key: hook_at(*key[:2]) for key in asked.planes}
    counts = {name: store.count(name, asked.planes) for name in store}
    total = sum(count // context_size for count in counts.values())
    if not total:
        raise CaptureError(f"{store!r} has no request with {context_size} such rows.")
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise CaptureError(f"{path} is not empty. Give to_arrow another directory.")
    first = next(iter(_contexts(store, asked, context_size, counts)))
    features = Features(
        {hook: Array2D(shape=first[hook].shape, dtype=str(first[hook].dtype)) for hook in hooks.values()}
        | {"token_ids": Sequence(Value("int32"), length=context_size)}
    )
    size = sum(first[hook].nbytes for hook in hooks.values())
    in_file, in_part = max(1, _FILE_BYTES // size), max(1, _PART_BYTES // size)
    names = [f"data-{i:05d}-of-{-(-total // in_file):05d}.arrow" for i in range(-(-total // in_file))]
    contexts = _contexts(store, asked, context_size, counts)
    for i, name in enumerate(names):
        with ArrowWriter(features=features, path=str(path / name)) as writer:
            left = min(in_file, total - i * in_file)
            while left:
                part = [next(contexts) for _ in range(min(left, in_part))]
                writer.write_batch({column: np.stack([each[column] for each in part]) for column in features})
                left -= len(part)
            writer.finalize()
    DatasetInfo(features=features).write_to_directory(str(path))
    state: dict[str, Any] = {f"_format_{what}": None for what in ("columns", "type")}
    state |= {"_data_files": [{"filename": name} for name in names], "_fingerprint": uuid.uuid4().hex[:16]}
    state |= {"_format_kwargs": {}, "_output_all_columns": False, "_split": None}
    (path / "state.json").write_text(json.dumps(state, indent=2))
    return total


def _contexts(store: Captures, asked: Asked, size: int, counts: dict[str, int]) -> Iterator[dict[str, np.ndarray]]:
    """The columns of each context. The rows of a request that do not fill a context are left out."""
    dtypes: dict[str, str] = {}
    for name, count in counts.items():
        if count < size:
            continue
        capture = store[name]
        positions = np.array(capture.positions[asked.planes[0]])
        if positions[-1] >= len(capture.prompt_token_ids):
            raise CaptureError(f"{capture!r} has rows of generated tokens, whose ids the directory does not have.")
        ids = np.array(capture.prompt_token_ids, np.int32)[positions]
        rows = {hook_at(*key[:2]): _numbers(capture[key].flatten(1)) for key in asked.planes}
        if any(str(each.dtype) != dtypes.setdefault(hook, str(each.dtype)) for hook, each in rows.items()):
            raise CaptureError(f"{capture!r} has rows of another dtype than other requests.")
        for start in range(0, count - size + 1, size):
            part = slice(start, start + size)
            yield {"token_ids": ids[part]} | {hook: each[part] for hook, each in rows.items()}


def _numbers(rows: torch.Tensor) -> np.ndarray:
    """The rows as a numpy array. bfloat16 becomes float32, since Arrow has no bfloat16."""
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
