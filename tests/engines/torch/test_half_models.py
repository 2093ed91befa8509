"""16-bit models under DDP and FSDP2: what the ranks keep is what torch and peft keep, dtype by dtype."""

from __future__ import annotations

import math

import pytest

from tests.workloads import flat_workload
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.workload import DType, Precision
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.ddp.engine import Ddp
from zeroplan.engines.fsdp2.engine import Fsdp2
from zeroplan.ledger.line import evaluate
from zeroplan.models.load import load_model
from zeroplan.models.lora import with_lora

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
RANK = 4


def state_lines(engine: Ddp | Fsdp2, precision: Precision, rank: int | None) -> dict[Buffer, int]:
    """Bytes of each standing buffer by the engine's ledger, on one rank."""
    spec = load_model(dict(CONFIG))
    workload = flat_workload(seq_len=16, dtype=DType.BF16, precision=precision, lora_rank=rank)
    if rank is not None:
        spec = with_lora(spec, rank)
    case = Case(spec, workload, Cluster.of(gpus=1), ZeroConfig.of(engine.default().stage))
    ledger, facts = engine.ledger(case)
    found: dict[Buffer, int] = {}
    for item in evaluate(ledger, facts):
        if item.state:
            found[item.buffer] = found.get(item.buffer, 0) + int(item.bytes)
    return found


@pytest.mark.torch
@pytest.mark.parametrize("lora", [None, RANK])
def test_ddp_keeps_what_torch_and_peft_keep(lora: int | None) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if lora is not None:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long)).loss
    loss.backward()
    optimizer.step()

    def nbytes(tensors: list[object]) -> int:
        return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)  # type: ignore[attr-defined]

    kept = state_lines(Ddp(), Precision.HALF_AUTOCAST, lora)
    assert kept[Buffer.PARAM_FULL] == nbytes(list(model.parameters()))
    assert kept[Buffer.GRAD_FULL] == nbytes([parameter.grad for parameter in trained])
    assert kept[Buffer.OPTIM_EXP_AVG] == nbytes([optimizer.state[parameter]["exp_avg"] for parameter in trained])


def test_fsdp2_shards_frozen_weights_in_their_own_dtype() -> None:
    whole = state_lines(Fsdp2(), Precision.MIXED, RANK)[Buffer.PARAM_SHARD]
    spec = load_model(dict(CONFIG))
    kept = state_lines(Fsdp2(), Precision.HALF_AUTOCAST, RANK)
    assert whole - kept[Buffer.PARAM_SHARD] == 2 * spec.params  # fp32 adapters stay, the base is halved
    full = state_lines(Fsdp2(), Precision.PURE, None)
    assert full[Buffer.PARAM_SHARD] == 2 * spec.params == full[Buffer.OPTIM_EXP_AVG]
