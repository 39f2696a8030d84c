"""What edits compute (issue 3, D1, E1, E9; design.md section 5), against closed forms in float64.

Legend: T tokens, H hidden.
"""

import numpy as np
import pytest
import torch
from applied import apply
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import examples

from midstream.plan.ops.edit import Op

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def closed_form(x_TH: torch.Tensor, ops, bank) -> np.ndarray:
    """float64 `[T, H]`, unrounded."""
    h = x_TH.double().numpy()
    vectors = [vector.double().numpy() for vector in bank]
    for op in (op for op in ops if op.kind == "patch"):
        weight = op.a * (vectors[op.mask] if op.mask >= 0 else np.ones(h.shape[1]))
        h = np.where(weight == 1, vectors[op.vector], (1 - weight) * h + weight * vectors[op.vector])
    norms = np.sqrt((h**2).sum(1, keepdims=True))
    h = h + sum(op.a * vectors[op.vector] for op in ops if op.kind == "steer" and not op.b)
    h = h + sum(op.a * norms * vectors[op.vector] for op in ops if op.kind == "steer" and op.b)
    for op in (op for op in ops if op.kind == "clamp"):
        along = h @ vectors[op.vector]
        h = h + op.c * (np.clip(along, op.a, op.b) - along)[:, None] * vectors[op.vector]
    return h


def spacing(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The distance of neighbouring numbers of the dtype, there."""
    info = torch.finfo(dtype)
    return np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(values), info.tiny))), info.tiny) * info.eps


def values(seed, rows, width, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, width)) * scale).float()


@st.composite
def cases(draw):
    """A value, ops in the order of a profile, and their bank."""
    width, rows = draw(st.integers(1, 70)), draw(st.integers(0, 5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    bank, ops = [], []

    def add(vector):
        bank.append(torch.from_numpy(np.asarray(vector)).float())
        return len(bank) - 1

    alphas = st.sampled_from([1.0, 0.5, 0.1, 1 / 3])
    for _ in range(draw(st.integers(0, 2))):
        mask = draw(st.sampled_from([None, "bits", "parts"]))
        weights = generator.integers(0, 2, width) if mask == "bits" else generator.random(width)
        ops.append(Op("patch", add(generator.normal(size=width)), -1 if mask is None else add(weights), draw(alphas)))
    for _ in range(draw(st.integers(0, 3))):
        vector, matched = generator.normal(size=width), draw(st.booleans())
        scale = draw(st.floats(-4, 4, width=32))
        ops.append(
            Op(
                "steer",
                add(vector / np.linalg.norm(vector) if matched else vector),
                a=scale,
                b=float(matched),
            )
        )
    for _ in range(draw(st.integers(0, 2))):
        vector = generator.normal(size=width)
        low, high = draw(st.sampled_from([(0.0, 0.0), (-0.5, 0.5), (-np.inf, 0.1), (0.2, np.inf)]))
        ops.append(Op("clamp", add(vector / np.linalg.norm(vector)), a=low, b=high, c=draw(alphas)))
    captures = draw(st.booleans())
    ops = [Op("capture"), *ops, Op("capture", offset=width)] if captures else ops
    x = torch.from_numpy(generator.normal(size=(rows, width))).float()
    return x.to(draw(st.sampled_from(DTYPES))), ops, bank


@given(cases())
@settings(max_examples=examples(300), deadline=None)
def test_edits_are_their_closed_forms(case):
    """Rounded to the model's dtype once: within half a step of it, and what float32 loses on the way."""
    x_TH, ops, bank = case
    kept = x_TH.clone()
    found = apply(x_TH, ops, bank)
    assert found.dtype == x_TH.dtype and found.shape == x_TH.shape
    assert torch.equal(x_TH, kept), "the value given is left as it is"
    wanted = closed_form(x_TH, ops, bank)
    sizes = (
        np.abs(wanted).max(initial=1)
        + np.abs(kept.double().numpy()).max(initial=1)
        + sum(abs(op.a) for op in ops if "steer" in op.kind)
    )
    float32_loss = 2e-6 * sizes * np.sqrt(x_TH.shape[1])
    allowed = 0.501 * spacing(wanted, x_TH.dtype) * (x_TH.dtype != torch.float32) + float32_loss
    assert (np.abs(found.double().numpy() - wanted) <= allowed).all()


@given(cases())
@settings(max_examples=examples(100), deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(case):
    """D2: batches change from step to step, results may not."""
    x_TH, ops, bank = case
    whole = apply(x_TH, ops, bank)
    for i in range(len(x_TH)):
        assert torch.equal(apply(x_TH[i : i + 1], ops, bank)[0], whole[i])
    assert torch.equal(apply(x_TH.repeat(7, 1), ops, bank), whole.repeat(7, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patch_is_exact_at_its_ends(dtype):
    """E1: at alpha 1 the source, bit for bit, whatever was there; where alpha times mask is 0, what was there."""
    x_TH = values(0, 3, 6).to(dtype)
    x_TH[0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    source = values(1, 1, 6)[0].to(dtype).float()
    assert torch.equal(apply(x_TH, [Op("patch", 0, a=1.0)], [source]), source.to(dtype).expand(3, 6))
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    found = apply(x_TH, [Op("patch", 0, 1, a=1.0)], [source, mask])
    bits = {torch.float32: torch.int32}.get(dtype, torch.int16)
    assert torch.equal(found.view(bits), torch.where(mask == 1, source.to(dtype), x_TH).view(bits))
    wild = torch.tensor([float("inf"), 1.0, float("inf"), 1.0, 1.0, float("nan")])
    found = apply(values(2, 1, 6).to(dtype), [Op("patch", 0, 1, a=1.0)], [wild, mask])
    assert found[0, 0] == float("inf") and torch.isfinite(found[0, 1:]).all(), "0 times infinity is not asked for"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_patch_with_itself_changes_no_bit(dtype):
    """E1: self-patch. At alpha between 0 and 1 too, since (1-a)h + ah rounds back to h in 16 bits; at 1 in every dtype."""
    x_TH = values(3, 1, 512).to(dtype)
    for alpha in (1.0, *((0.5, 0.1, 1 / 3) if dtype != torch.float32 else ())):
        assert torch.equal(apply(x_TH, [Op("patch", 0, a=alpha)], [x_TH[0].float()]), x_TH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_that_nothing_changes_keep_their_bits(dtype):
    """D2: minus zero stays, and a row without ops is the very tensor."""
    x_TH = values(4, 2, 4).to(dtype)
    x_TH[0] = torch.tensor([-0.0, 0.0, -0.0, 5.0])
    steer = torch.tensor([0.0, 0.0, 1.0, 0.0])
    found = apply(x_TH, [Op("steer", 0, a=2.0)], [steer])
    assert torch.signbit(found[0]).tolist() == [True, False, False, False]
    assert found[0].tolist() == [0, 0, 2, 5]
    for ops in ([], [Op("capture"), Op("capture", offset=4)]):
        assert apply(x_TH, ops, []).data_ptr() == x_TH.data_ptr()


def test_steers_add_up_in_float32_before_they_are_rounded():
    """D1: 64 steers of a quarter of a bfloat16 step each; rounded one by one, all would vanish."""
    x_TH = torch.ones(1, 8, dtype=torch.bfloat16)
    step = 2.0**-7
    found = apply(x_TH, [Op("steer", 0, a=0.25)] * 64, [torch.full((8,), step)])
    assert found.tolist() == [[1 + 16 * step] * 8]


def test_patches_then_steers_then_clamps():
    """design.md section 5, by numbers that no other order gives."""
    x_TH = torch.tensor([[100.0, 7.0]])
    bank = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])]
    patch, clamp = Op("patch", 0, a=1.0), Op("clamp", 3, a=0.0, b=10.0, c=1.0)
    norm, steer = Op("steer", 1, a=2.0, b=1.0), Op("steer", 2, a=6.0)
    for steers in ([norm, steer], [steer, norm]):  # ||(3, 4)|| = 5 either way: the norm is taken before any steer
        assert apply(x_TH, [patch, *steers, clamp], bank).tolist() == [[10.0, 10.0]]
        assert apply(x_TH, [patch, *steers], bank).tolist() == [[13.0, 10.0]]


def test_patches_and_clamps_keep_their_order():
    x_TH = torch.tensor([[0.0, 0.0]])
    one, two = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])
    assert apply(x_TH, [Op("patch", 0, a=1.0), Op("patch", 1, a=0.5)], [one, two]).tolist() == [[1.5, 1.5]]
    assert apply(x_TH, [Op("patch", 1, a=0.5), Op("patch", 0, a=1.0)], [one, two]).tolist() == [[1.0, 1.0]]
    east, diagonal = torch.tensor([1.0, 0.0]), torch.tensor([0.6, 0.8])
    x_TH, clamps = torch.tensor([[5.0, 0.0]]), [Op("clamp", 0, c=1.0), Op("clamp", 1, a=1.0, b=1.0, c=1.0)]
    torch.testing.assert_close(apply(x_TH, clamps, [east, diagonal]), torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(apply(x_TH, clamps[::-1], [east, diagonal]), torch.tensor([[0.0, -1.6]]))


@given(st.integers(0, 2**32), st.floats(-2, 2), st.floats(0, 3), st.sampled_from([0.25, 1.0]))
@settings(max_examples=examples(100), deadline=None)
def test_clamp_moves_the_part_along_the_direction_alone(seed, low, length, strength):
    """Ablation is low = high = 0 (Arditi et al. 2024)."""
    generator = np.random.default_rng(seed)
    direction = generator.normal(size=16)
    direction /= np.linalg.norm(direction)
    x_TH = torch.from_numpy(generator.normal(size=(4, 16))).float()
    found = apply(x_TH, [Op("clamp", 0, a=low, b=low + length, c=strength)], [torch.from_numpy(direction).float()])
    before, after = x_TH.double().numpy() @ direction, found.double().numpy() @ direction
    np.testing.assert_allclose(after, before + strength * (np.clip(before, low, low + length) - before), atol=1e-5)
    across = (found - x_TH).double().numpy() - np.outer(after - before, direction)
    np.testing.assert_allclose(across, 0, atol=1e-5)


def test_alpha_moves_evenly_between_the_ends():
    x_TH, source = torch.tensor([[1.0, -1.0]]), torch.tensor([3.0, 3.0])
    for alpha in np.linspace(0, 1, 9)[1:]:
        found = apply(x_TH, [Op("patch", 0, a=alpha)], [source])
        torch.testing.assert_close(found, torch.tensor([[1 + 2 * alpha, -1 + 4 * alpha]], dtype=torch.float32))
