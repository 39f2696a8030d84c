"""The memory that a sparse autoencoder takes in a server's front end (M6, P2), as the system counts it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream import SAE
from midstream.errors import PlanError
from midstream.plan.program import HELD_BYTES
from midstream.plan.values import ModelFacts, Plan, check
from midstream.runtime.request import packed

WIDTH, FEATURES = 256, 1 << 14  # 32 MiB


def memory(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the system does not let this process reset its peak")


def written(kind: str, features: int = FEATURES) -> bytearray:
    torch.manual_seed(0)
    config: dict[str, Any] = {"architecture": "standard", "d_in": WIDTH, "d_sae": features}
    if kind == "topk":
        config |= {"architecture": "topk", "k": 8, "rescale_acts_by_decoder_norm": True}
    weights = {"W_enc": torch.randn(WIDTH, features), "W_dec": torch.randn(features, WIDTH)}
    weights |= {"b_enc": torch.zeros(features), "b_dec": torch.zeros(WIDTH)}
    return bytearray(SAE(config, weights, site="resid_post", layer=0).written())


@pytest.mark.parametrize("kind", ["standard", "topk"])
def test_an_sae_takes_the_memory_that_it_counts_and_gives_it_back(kind: str) -> None:
    """At rest and at its peak."""
    SAE.read(written(kind)).held  # what is loaded once
    data = written(kind)
    gc.collect()
    before = memory("VmRSS")
    forget_peak()
    sae = SAE.read(data)
    assert sae.held
    at_peak, at_rest = memory("VmHWM") - before, memory("VmRSS") - before
    slack = 4 << 20
    assert at_rest <= sae.nbytes + slack
    assert at_peak <= 1.8 * sae.nbytes + slack  # one matrix more, while it becomes a constant
    each = (*sae._constants.values(), *sae._weights.values())
    gone: list[Any] = [
        weakref.ref(one) for one in each if one.nbytes >= HELD_BYTES
    ]  # plans have the small ones in them
    del each
    plan = Plan((sae.capture(top_k=4), sae.ablate([1, 2], error_term=False)))
    check(plan, ModelFacts(1, {("resid_post", 0): WIDTH}, "float32"), 3, 1, vectors={}, runs={})
    assert len(packed(plan.held[0])) < 1 << 20
    del sae, plan
    gc.collect()
    assert len(gone) == 4 and not any(ref() is not None for ref in gone)


def test_an_sae_is_read_from_read_only_memory_and_outlives_it() -> None:
    data = written("standard", 512)
    one, other = SAE.read(bytes(data)), SAE.read(data)
    data[:] = bytes(len(data))
    rows = torch.randn(3, WIDTH)
    assert torch.equal(one.encode(rows), other.encode(rows)) and one.written() == other.written()


def test_files_that_lie_about_their_tensors_are_refused() -> None:
    """Sizes and places that do not fit the file."""
    weights = {"W_enc": torch.ones(4, 8), "W_dec": torch.ones(8, 4), "b_enc": torch.zeros(8), "b_dec": torch.zeros(4)}
    config = {"architecture": "standard", "d_in": 4, "d_sae": 8}
    data = SAE(config, weights, site="resid_post", layer=0).written()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode()
    begins = [at for at in range(len(header)) if header.startswith('"data_offsets":[', at)]
    assert begins
    for at in begins:
        end = header.index("]", at)
        for offsets in ("[0,99999999999]", "[-8,8]", "[8,0]", "[4,8]", '["a",8]', "[0]", "{}", "[1e400,8]"):
            changed = (header[:at] + '"data_offsets":' + offsets + header[end + 1 :]).encode()
            with pytest.raises(PlanError):
                SAE.read(len(changed).to_bytes(8, "little") + changed + data[8 + size :])
