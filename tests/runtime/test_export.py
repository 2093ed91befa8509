"""Whole models as safetensors that transformers loads; LoRA adapters by peft."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput

pytestmark = pytest.mark.torch
transformers = pytest.importorskip("transformers")
STEPS = 4


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(number: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(100 * number + rank))


def fine_tune(engine: zeroplan_runtime.Engine, rank: int) -> list[float]:
    losses = []
    for number in range(STEPS):
        batch = tokens(number, rank)
        losses.append(engine.backward(engine(input_ids=batch, labels=batch).loss).item())
        engine.step()
    return losses


def export(group: dist.ProcessGroup, folder: str, tied: bool, stage: int, file_bytes: int) -> Any:
    from zeroplan_runtime.checkpoint.export import save_16bit_model

    config = ds_config(stage, "bf16")
    engine, *_ = zeroplan_runtime.initialize(model=llama(tied), config=config, group=group, device="cpu")
    losses = fine_tune(engine, dist.get_rank(group))
    save_16bit_model(engine, folder, file_bytes=file_bytes)
    with torch.no_grad():
        logits = engine.eval()(input_ids=tokens(50, 0)).logits
    return losses, logits


@pytest.mark.parametrize(("tied", "stage", "file_bytes"), [(True, 3, 10**9), (False, 3, 20_000), (False, 1, 10**9)])
def test_transformers_loads_what_was_exported(pool: RankPool, tmp_path: Path, tied: bool, stage: int, file_bytes: int) -> None:
    (losses, logits), _ = pool.run(2, export, str(tmp_path), tied, stage, file_bytes)
    assert losses[-1] != losses[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        again = loaded.eval()(input_ids=tokens(50, 0)).logits
    assert (again == logits).all()
    names = sorted(p.name for p in tmp_path.glob("*.safetensors*"))
    if file_bytes == 10**9:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(names[:-1])
        assert len(names) > 2


def full_disk(group: dist.ProcessGroup, folder: str, stage: int, name: str) -> tuple[str, list[float]]:
    """What every rank is told when the first one's disk is full, and how training goes on."""
    from unittest import mock

    from zeroplan_runtime.checkpoint.export import save_16bit_model

    engine, *_ = zeroplan_runtime.initialize(model=llama(False), config=ds_config(stage), group=group, device="cpu")
    fault = OSError(errno.ENOSPC, "No space left on device", folder)
    try:
        writer = "safetensors.torch.save_file" if name.endswith(".safetensors") else "torch.save"
        with mock.patch(writer, side_effect=fault):
            save_16bit_model(engine, folder, name, file_bytes=20_000)
    except BadInput as said:
        return str(said), fine_tune(engine, dist.get_rank(group))
    return "", []


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_full_disk_is_one_line_on_every_rank(pool: RankPool, tmp_path: Path, name: str) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_bytes(b"of before")
    for said, losses in pool.run(2, full_disk, str(tmp_path / "new"), 3, name):
        assert "No space left on device" in said
        assert "\n" not in said
        assert len(losses) == STEPS
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "new").iterdir()] == [(name, b"of before")]


def test_an_export_takes_the_place_of_one_in_another_number_of_files(pool: RankPool, tmp_path: Path) -> None:
    for file_bytes in (10**9, 20_000, 10**9):
        pool.run(1, export, str(tmp_path), False, 0, file_bytes)
        names = {path.name for path in tmp_path.glob("*.safetensors*")}
        assert ("model.safetensors" in names) is (file_bytes == 10**9)
        assert ("model.safetensors.index.json" in names) is (file_bytes != 10**9)


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False))


def train_lora(group: dist.ProcessGroup, stage: int, checkpointing: bool) -> Any:
    model = lora(llama(True))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, *_ = zeroplan_runtime.initialize(model=model, config=ds_config(stage), group=group, device="cpu")
    losses = fine_tune(engine.train(), dist.get_rank(group))
    rows = {(row["buffer"]): row["bytes"] for row in engine.arena.measurement() if row["unit"].endswith("layers.1")}
    return losses, rows, engine.module_state_dict()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_equals_plain_torch(pool: RankPool, checkpointing: bool) -> None:
    plain = lora(llama(True))
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    expected = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            batch = tokens(number, rank)
            loss = plain(input_ids=batch, labels=batch).loss
            (loss / 2).backward()
            if rank == 0:
                expected.append(loss.item())
        optimizer.step()
    for stage in (0, 1, 2, 3):
        losses, rows, params = pool.run(2, train_lora, stage, checkpointing)[0]
        assert losses == pytest.approx(expected, abs=2e-6), stage
        for name, p in plain.state_dict().items():
            torch.testing.assert_close(params[name], p, rtol=0, atol=2e-5)
        assert rows["optim.exp_avg"] < rows["param.frozen"] / 2  # states for the adapters alone
