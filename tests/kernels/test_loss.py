"""Cross entropy: against fp64, a hand case, torch's own, odd vocabularies and ignored labels, on every backend."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tests.kernels.targets import TARGETS
from zeroplan_runtime.kernels import cuda_backend, torch_backend
from zeroplan_runtime.kernels import loss as kernels_loss
from zeroplan_runtime.techniques import fused_loss as loss_module
from zeroplan_runtime.techniques.fused_loss import causal_lm_loss

DEVICES = ["torch", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("torch-cuda", marks=pytest.mark.gpu)]
#: The gradient is rounded once to the logits' 8, 11 or 24 bits: half a unit in the last place, and half of fp16's smallest.
ROUNDING = {torch.bfloat16: (2**-8, 0.0), torch.float16: (2**-11, 2**-25), torch.float32: (2**-24, 0.0)}


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    path, kind, _ = TARGETS[request.param]
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(kernels_loss, "backend", lambda _: path)
    assert path in (torch_backend, cuda_backend)
    return torch.device(kind)


def reference(logits: torch.Tensor, labels: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and gradient in fp64, of the logits as they are."""
    wide = logits.detach().double().requires_grad_()
    losses = functional.cross_entropy(wide, labels, reduction="none")
    (losses.sum() * scale).backward()
    assert wide.grad is not None
    return losses.detach(), wide.grad


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(5, 1), (3, 7), (64, 1000), (7, 50257), (9, 32768), (1, 151936)])
def test_against_fp64(device: torch.device, dtype: torch.dtype, rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 6).to(device, dtype)
    labels = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    labels[::3] = -100
    scale = 1024.0 / rows  # gradients of 16-bit floats would vanish without
    given = logits.clone()
    losses, grad = reference(logits, labels, scale)
    lse, got = kernels_loss.cross_entropy(logits, labels)
    found = kernels_loss.cross_entropy_grad(logits, labels, lse, torch.tensor(scale, device=device))
    assert (got.double() - losses).abs().max() <= 4e-6 * max(1.0, float(losses.max()))
    assert found.dtype is dtype
    assert torch.equal(logits, given)  # users read them after the backward
    # The softmax errs by the fp32 error of logit - lse; the subtraction of one at the label leaves that absolute error.
    relative, smallest = ROUNDING[dtype]
    bound = (relative + 4e-6) * grad.abs() + 4e-9 * scale + smallest
    assert ((found.double() - grad).abs() <= bound).all()
    assert not found[::3].any()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_by_hand(device: torch.device) -> None:
    """Logits 0 and ln 3 have probabilities 1/4 and 3/4."""
    logits = torch.tensor([[0.0, math.log(3.0)]], device=device)
    lse, losses = kernels_loss.cross_entropy(logits, torch.tensor([0], device=device))
    grad = kernels_loss.cross_entropy_grad(logits, torch.tensor([0], device=device), lse, torch.tensor(2.0, device=device))
    assert lse.item() == pytest.approx(math.log(4.0), rel=1e-6)
    assert losses.item() == pytest.approx(math.log(4.0), rel=1e-6)
    assert grad.flatten().tolist() == pytest.approx([-1.5, 1.5], rel=1e-6)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_large_and_infinite_logits(device: torch.device) -> None:
    """The largest logit is subtracted before the exponential; a masked class (minus infinity) has no gradient."""
    logits = torch.tensor([[3.0e4, 3.0e4 - 1, -math.inf, -3.0e4]], device=device)
    labels = torch.tensor([1], device=device)
    lse, losses = kernels_loss.cross_entropy(logits, labels)
    grad = kernels_loss.cross_entropy_grad(logits, labels, lse, torch.tensor(1.0, device=device))
    assert losses.item() == pytest.approx(1.0 + math.log1p(math.exp(-1.0)), abs=4e-3)  # an ulp of 3e4 in fp32
    assert grad[0, 2].item() == 0.0
    assert torch.isfinite(grad).all()


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        kernels_loss.cross_entropy(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("items", [None, 7, torch.tensor(9)])
def test_equals_transformers(items: torch.Tensor | int | None) -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 33, requires_grad=True)
    labels = torch.randint(0, 33, (2, 9))
    labels[0, 4:] = -100
    ours, theirs = (f(logits, labels, 33, num_items_in_batch=items) for f in (causal_lm_loss, loss_utils.ForCausalLMLoss))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], torch.autograd.grad(theirs, logits)[0])


def test_nothing_to_predict_is_nan_as_in_torch() -> None:
    logits, labels = torch.zeros(1, 3, 5), torch.full((1, 3), -100)
    assert math.isnan(causal_lm_loss(logits, labels, 5).item())


def test_attached_to_causal_models_alone_and_undone() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    causal = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**small, num_key_value_heads=1))
    masked = transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**small))
    tokens = torch.arange(12).view(2, 6)
    before = causal(input_ids=tokens, labels=tokens).loss
    detach, nothing = loss_module.attach_fused_loss(causal), loss_module.attach_fused_loss(masked)
    assert causal.loss_function is causal_lm_loss
    assert "_loss_function" not in vars(masked)
    assert causal(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(before.item(), rel=1e-6)
    detach()
    nothing()
    assert causal.loss_function is not causal_lm_loss
