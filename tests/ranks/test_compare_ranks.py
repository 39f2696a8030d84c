"""Architectures whose values ranks share in ways of their own, on several ranks against transformers (rows B5, C1, C8, C12, D7).

`scripts/supported_models.py` measures all architectures so, and `gpu/check_architectures.py` these on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_models
from compare_runs import ENGINE, disagreements
from forked import forked
from ranks import SIZES

pytestmark = pytest.mark.engine

CASES = [
    ("tp2", "falcon"),  # attention's and the MLP's summands are added before the one all-reduce
    ("tp2", "falcon_two_norms"),
    ("tp2", "qwen2_moe"),  # summands of experts, and of one that all tokens share
    ("pp2", "llama_transformers"),  # transformers' forward calls what stands for the layers of other stages
    ("pp2tp2", "mixtral"),
    ("pp2tp2", "cohere"),  # a later stage is handed zeros in a dummy run, of which any sum is the same
]


@pytest.fixture(autouse=True)
def transformers_as_it_was() -> Iterator[None]:
    yield
    tiny_models.restore_transformers()


# `unit/test_full_tensors.py` has the sums of falcon and of experts, and cohere the ranks of mixtral and the stages.
REPEATED = {"falcon", "falcon_two_norms", "mixtral", "qwen2_moe", "llama_transformers"}


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, id=f"{name}-{size}", marks=pytest.mark.matrix if name in REPEATED else [])
        for size, name in CASES
    ],
)
def test_accessors_edits_and_plans_agree(size: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """C1, C8, C12, D7: each as on transformers; what is written to a site is what is read there."""
    architecture = tiny_models.ARCHITECTURES[name]
    engine = {**ENGINE, **SIZES[size], **architecture.engine, "gpu_memory_utilization": 0.1}
    with forked():
        path = tiny_models.build(name, tmp_path_factory.getbasetemp())
        assert disagreements(path, architecture.rtol, **engine) == {}
