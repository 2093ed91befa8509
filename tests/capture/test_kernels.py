"""Stand-ins for packages of kernels: what their rules allocate, counted by hand from each package's source."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import zeroplan
from zeroplan.core.sizes import MIB

torch = pytest.importorskip("torch")
KIB = 1 << 10


def gpu(*shape: int, dtype: Any = None, grad: bool = True) -> Any:
    return torch.empty(shape, dtype=dtype or torch.bfloat16, device="cuda", requires_grad=grad)


def test_flash_attention_keeps_a_number_a_row() -> None:
    with zeroplan.capture("H100") as plan:
        from flash_attn import flash_attn_func

        q, k, v = (gpu(2, 1024, 8, 64) for _ in range(3))
        out = flash_attn_func(q, k, v, causal=True)
        held = torch.cuda.memory_allocated()
    assert "flash_attn" not in sys.modules
    assert out.shape == (2, 1024, 8, 64)
    assert held == plan.peak_allocated == 4 * 2 * MIB + 4 * 2 * 8 * 1024 + 512  # with the generator's state
    assert [one.key for one in plan.plan.unmodelled] == ["steps"]


def test_packed_rows_take_128_more_a_sample() -> None:
    with zeroplan.capture("H100") as plan:
        from flash_attn import flash_attn_varlen_func

        q, k, v = gpu(2048, 8, 64), gpu(2048, 2, 64), gpu(2048, 2, 64)
        begins = torch.tensor([0, 1024, 2048], dtype=torch.int32, device="cuda")
        out = flash_attn_varlen_func(q, k, v, begins, begins, 1024, 1024)
        before = torch.cuda.memory_allocated()
        out.backward(torch.empty_like(out))
    wide = 2048 + 2 * 128
    inside = 2 * MIB + 2 * MIB // 2 + 4 * 8 * wide + 4 * 8 * wide * 64 + 2 * 2 * MIB  # gradients, sums, whole gradients of keys
    assert plan.peak_allocated == before + 2 * MIB + inside
    note = next(one for one in plan.plan.unmodelled if one.key == "kernels of flash_attn")
    assert "no GPU has measured" in note.says
    assert "Not in the figures: kernels of flash_attn" in str(plan.fits("80G"))


def test_the_third_sums_shared_keys_in_fp32() -> None:
    with zeroplan.capture("H100") as plan:
        from flash_attn_interface import flash_attn_func

        q, k, v = gpu(1, 1000, 8, 128), gpu(1, 1000, 2, 128), gpu(1, 1000, 2, 128)
        out = flash_attn_func(q, k, v, causal=True)
        before = torch.cuda.memory_allocated()
        out.backward(torch.empty_like(out))
    rows = 1024  # whole blocks of 64 queries, and of 128 keys
    sums = 2 * 4 * 8 * rows + 4 * 8 * rows * 128 + 2 * 4 * 2 * rows * 128 + 512
    grads = 2 * 1000 * 128 * (8 + 2 + 2)
    assert plan.peak_allocated == before + 2 * 1000 * 8 * 128 + grads + sums


def test_xformers_runs_flash_or_cutlass_or_stops() -> None:
    with zeroplan.capture("H100") as plan:
        import xformers.ops as xops

        q = gpu(2, 256, 4, 64)
        assert xops.memory_efficient_attention(q, q, q, attn_bias=xops.LowerTriangularMask()).shape == q.shape
        wide = gpu(2, 256, 4, 64, dtype=torch.float32)
        assert xops.memory_efficient_attention(wide, wide, wide).shape == q.shape
        xops.SwiGLU(64, 64)
    assert plan.plan.capture is not None
    assert "no rule knows what xformers.ops.SwiGLU allocates" in str(plan.plan.capture.stopped)


def test_bitsandbytes_states_and_overrides() -> None:
    with zeroplan.capture("H100"):
        import bitsandbytes as bnb

        large, small, kept = (torch.nn.Parameter(gpu(n, grad=False)) for n in (1 << 20, 1024, 1 << 20))
        bnb.optim.GlobalOptimManager.get_instance().override_config(kept, "optim_bits", 32)
        before = torch.cuda.memory_allocated()
        optimizer = bnb.optim.AdamW8bit([large, small, kept])
        for one in (large, small, kept):
            one.grad = torch.empty_like(one)
        grads = torch.cuda.memory_allocated()
        optimizer.step()
        states = torch.cuda.memory_allocated() - grads
        paged = bnb.optim.PagedAdamW32bit([large])
        paged.step()
        assert torch.cuda.memory_allocated() - grads == states
    assert grads - before == 2 * 2 * MIB + 2 * KIB
    assert states == 2 * (MIB + 4 * 4 * KIB) + 2 * 4 * KIB + 2 * 4 * MIB + 2 * KIB  # 8 bits and scales, small, whole, two codes


@pytest.mark.parametrize(("nested", "scales"), [(True, 16 * KIB + 512 + 256 + 1024), (False, 64 * KIB)])
def test_a_weight_in_4_bits(nested: bool, scales: int) -> None:
    with zeroplan.capture("H100") as plan:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(1024, 1024, bias=False, compute_dtype=torch.bfloat16, compress_statistics=nested).cuda()
        held = torch.cuda.memory_allocated()
        x = gpu(16, 1024)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
    assert 0 <= held - (MIB // 2 + scales + 64) < 4 * 512  # each of its tensors in whole 512s
    assert plan.plan.capture is not None
    assert plan.plan.capture.stopped is None


def test_a_model_of_transformers_in_4_bits_under_lora() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    with zeroplan.capture("H100") as plan:
        config = transformers.LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=512, max_position_embeddings=128,
        )  # fmt: skip
        four = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        model = transformers.LlamaForCausalLM.from_pretrained(
            "nowhere", config=config, dtype=torch.bfloat16, quantization_config=four, attn_implementation="flash_attention_2"
        )
        model = peft.prepare_model_for_kbit_training(model)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        kinds = {type(one).__name__ for one in model.modules()}
        tokens = torch.zeros((2, 64), dtype=torch.long, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(input_ids=tokens, labels=tokens).loss.backward()
        graded = [name for name, one in model.named_parameters() if one.grad is not None]
    assert plan.plan.capture is not None
    assert plan.plan.capture.stopped is None
    assert "Linear4bit" in kinds
    assert graded
    assert all("lora_" in name for name in graded)


def test_apex_norms_and_adam() -> None:
    with zeroplan.capture("H100"):
        from apex.normalization import FusedRMSNorm, MixedFusedLayerNorm
        from apex.optimizers import FusedAdam

        x = gpu(64, 1024)
        assert MixedFusedLayerNorm(1024).cuda()(x).dtype is torch.float32
        norm = FusedRMSNorm(1024).cuda()
        before = torch.cuda.memory_allocated()
        out = norm(x)
        assert torch.cuda.memory_allocated() - before == 64 * 1024 * 2 + 512
        out.sum().backward()
        grads = torch.cuda.memory_allocated()
        optimizer = FusedAdam(norm.parameters())
        optimizer.step()
        states = torch.cuda.memory_allocated() - grads
    assert states == 2 * 4 * KIB


def test_torchao_and_grouped_products() -> None:
    with zeroplan.capture("H100"):
        import grouped_gemm as gg
        from torchao.float8 import convert_to_float8_training
        from torchao.optim import AdamW8bit

        model = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))).to("cuda", torch.bfloat16)
        model(gpu(32, 64)).sum().backward()
        grads = torch.cuda.memory_allocated()
        optimizer = AdamW8bit(model.parameters())
        optimizer.step()
        states = torch.cuda.memory_allocated() - grads
        rows, matrices = gpu(32, 64), gpu(4, 64, 128)
        out = gg.ops.gmm(rows, matrices, torch.tensor([8, 8, 8, 8]))
        out.sum().backward()
    assert states == 2 * (4 * KIB + 512 + KIB)
    assert out.shape == (32, 128)
    assert matrices.grad.shape == matrices.shape


def test_compiled_flex_attention_makes_no_scores() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def near(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < 200)

    there = create_block_mask(near, 2, None, 512, 512, device="cpu")
    with zeroplan.capture("H100") as plan:
        from torch.nn.attention.flex_attention import flex_attention

        mask = create_block_mask(near, 2, None, 512, 512, device="cuda")
        q = gpu(1, 2048, 4, 64).transpose(1, 2)
        out = torch.compile(flex_attention)(q, q, q, block_mask=mask)
        assert out.stride() == q.stride()
        out.sum().backward()
    assert [one.key for one in plan.plan.unmodelled] == ["steps"]  # a GPU has measured it
    assert mask.kv_indices.shape == there.kv_indices.shape
    assert mask.q_num_blocks.shape == there.q_num_blocks.shape
    assert plan.peak_allocated < 8 * MIB  # scores would be 32


def test_attention_runs_by_the_kernels_that_the_script_allows() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    peaks = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        with zeroplan.capture("H100") as plan:
            q = gpu(1, 4, 2048, 64)
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        peaks.append(plan.peak_allocated)
    assert peaks[0] < 12 * MIB > peaks[1]
    assert peaks[2] > 64 * MIB  # scores of fp32


def test_ligers_loss_and_norms_by_hand() -> None:
    with zeroplan.capture("H100") as plan:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerRMSNorm

        weight, hidden = (
            gpu(4096, 512),
            LigerRMSNorm(512, in_place=False).to("cuda", torch.bfloat16)(gpu(1024, 512, grad=False)),
        )
        begun = torch.cuda.memory_allocated()
        loss = LigerFusedLinearCrossEntropyLoss()(weight, hidden, torch.zeros(1024, dtype=torch.long, device="cuda"))
        held = torch.cuda.memory_allocated()
    assert held - begun == 4 * MIB + MIB + 512, loss  # both gradients, and the loss; no logits
    assert not [one for one in plan.plan.unmodelled if one.key.startswith("kernels")]


@pytest.mark.parametrize("how", ["class", "instance", "trainer"])
def test_ligers_kernels_take_a_models_whole_logits_away(how: str) -> None:
    transformers = pytest.importorskip("transformers")
    words, rows = 32_000, 2 * 256
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=words,
    )

    def peak(liger: bool) -> int:
        with zeroplan.capture("H100", steps=1) as plan:
            if liger and how == "class":
                from liger_kernel.transformers import apply_liger_kernel_to_llama

                apply_liger_kernel_to_llama(rms_norm=False)
            model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
            if liger and how == "instance":
                import liger_kernel.transformers

                liger_kernel.transformers.apply_liger_kernel_to_llama(model=model)
            if liger and how == "trainer":
                transformers.integrations.liger.apply_liger_kernel(model, None)
            ids = torch.zeros(2, 256, dtype=torch.long, device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
        return plan.peak_allocated

    plain = torch.nn.functional.cross_entropy
    assert peak(False) - peak(True) > 2 * 4 * words * rows  # fp32 logits and their gradient
    assert torch.nn.functional.cross_entropy is plain


def test_a_family_of_ligers_without_a_rule_stops_by_its_name() -> None:
    with zeroplan.capture("H100") as plan:
        from liger_kernel.transformers import apply_liger_kernel_to_mixtral

        apply_liger_kernel_to_mixtral(model=type("Mixtral", (), {"config": type("C", (), {"model_type": "mixtral"})})())
    assert plan.plan.capture is not None
    assert "Liger's kernels for mixtral" in str(plan.plan.capture.stopped)


def test_a_softmax_of_a_slice_copies_it() -> None:
    peaks = []
    for whole in (True, False):
        with zeroplan.capture("H100") as plan:
            logits = gpu(4, 1024, 1024, dtype=torch.float32, grad=False)
            (logits if whole else logits[:, 1:]).log_softmax(-1)
        peaks.append(plan.peak_allocated)
    assert peaks == [2 * 16 * MIB, 3 * 16 * MIB]  # a rest under 1 MiB stays with its block


def test_trls_log_probabilities_keep_no_softmax() -> None:
    from zeroplan.capturing.kernels import trl_log_probabilities

    older, module = SimpleNamespace(), SimpleNamespace(_supports_trl_loss_kernel=None, is_triton_available=lambda: False)
    for one in (older, module):
        trl_log_probabilities.install(one)
    assert not vars(older)
    assert module.is_triton_available()
    with zeroplan.capture("H100") as plan:
        logits = gpu(4, 1025, 1024, dtype=torch.float32)
        index = torch.empty(4, 1024, dtype=torch.int64, device="cuda")
        chosen, _ = module._fused_logprob_entropy(logits[:, :-1], index)
        held = torch.cuda.memory_allocated()
        chosen.sum().backward()
    assert held < 17 * MIB
    assert 3 * 16 * MIB < plan.peak_allocated < 3.2 * 16 * MIB  # logits, the slice's gradient, and that of all


def test_trls_chunked_losses_go_over_the_answers_rows_by_kernels_that_allocate_nothing() -> None:
    """On a GPU ``_use_triton`` is true where rows are chosen (``trainer/utils.py``), and tiles are folded by Triton."""
    from zeroplan.capturing.hooks.engines import install_trl_kernels, install_trl_trainer

    said: list[str] = []
    capture: Any = SimpleNamespace(leave_out=lambda key, *_: said.append(key))
    kernels, trainer = (
        SimpleNamespace(_use_triton=lambda _: False, _addmm_fp32=None),
        SimpleNamespace(_use_triton=lambda _: False),
    )
    install_trl_kernels(capture, kernels)
    assert said == ["triton"]
    kernels._addmm_fp32, kernels._stats_tile = (lambda *_: None), (lambda *_: 1)
    install_trl_kernels(capture, kernels)
    install_trl_trainer(trainer)
    assert (kernels._use_triton(None), kernels._stats_tile(1), trainer._use_triton(None), said) == (
        False,
        None,
        True,
        ["triton"],
    )


def test_a_launch_of_triton_allocates_nothing_and_tuning_clears_a_cache() -> None:
    with zeroplan.capture("H100") as plan:
        import triton
        import triton.language as tl

        @triton.jit  # type: ignore[untyped-decorator]
        def plain(x: Any, n: Any, size: tl.constexpr) -> None:
            tl.store(x, tl.program_id(0))

        tuned = triton.autotune(configs=[triton.Config({"size": 64}), triton.Config({"size": 128})], key=["n"])(plain)
        x = gpu(1 << 20, grad=False)
        plain[(triton.cdiv(1 << 20, 64),)](x, 1 << 20, size=triton.next_power_of_2(33))
        assert torch.cuda.max_memory_allocated() == 2 * MIB
        tuned[(1,)](x, 1 << 20)
        tuned[(1,)](x, 1 << 20)
    assert "triton" not in sys.modules
    assert plan.peak_allocated == 258 * MIB
    assert "kernels of triton" in {one.key for one in plan.plan.unmodelled}
