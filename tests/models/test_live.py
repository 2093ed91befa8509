"""Live modules: units and kinds as the descriptions give them, ties, frozen parameters, and emptied or lazy parameters."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models.reference import assert_same_rows, build_on_meta, rows_of_module, rows_of_spec
from tests.models.test_families import VARIANTS, _with_depth
from zeroplan.core.errors import BadInput
from zeroplan.models.facts import largest_module_params
from zeroplan.models.live import _PARTS, spec_from_module
from zeroplan.models.load import load_model
from zeroplan.models.spec import ModelSpec

pytestmark = pytest.mark.torch


def _kinds(spec: ModelSpec) -> list[tuple[str, str]]:
    return [
        (f"{prefix}.{tensor.name}", tensor.kind) for unit in spec.units for prefix in unit.names() for tensor in unit.tensors
    ]


def _deepspeeds_largest_layer(module: Any) -> int:
    """What DeepSpeed's estimator passes on as the largest layer."""
    return max(sum(p.numel() for p in child.parameters(recurse=False)) for child in module.modules())


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items())[:80])
def test_a_module_says_what_its_description_says(config: dict[str, Any]) -> None:
    config = _with_depth(config)
    described = load_model(config)
    module = build_on_meta(config, described.auto_class)
    live = load_model(module)
    assert live.source == "module"
    assert live.model_type == described.model_type
    assert live.auto_class == described.auto_class
    assert_same_rows(rows_of_spec(live), rows_of_module(module))
    assert _kinds(live) == _kinds(described)
    assert [u.count for u in live.units if u.block] == [u.count for u in described.units if u.block]
    assert largest_module_params(live) == largest_module_params(described) == _deepspeeds_largest_layer(module)


def test_plain_module_with_ties_and_frozen_parts() -> None:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.table = nn.Embedding(100, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(8, 100, bias=False)
            self.head.weight = self.table.weight
            self.table.weight.requires_grad_(False)
            self.register_buffer("steps", torch.zeros(1000))

    spec = load_model(Model())
    assert spec.params == 1 + 800 + 3 * (256 + 32 + 256)
    assert spec.frozen == 800
    assert [(unit.name, unit.count) for unit in spec.units] == [("", 1), ("table", 1), ("blocks.{}", 3), ("head", 1)]
    assert spec.units[-1].tensors[0].tied_to == "table.weight"
    assert largest_module_params(spec) == 800
    assert [name for name, _ in spec.tensors()] == [name for name, _ in Model().named_parameters()]


def test_parameters_that_zero_init_has_emptied() -> None:
    """DeepSpeed's zero.Init leaves ``ds_shape`` beside an empty tensor."""
    import torch
    from torch import nn

    module = nn.Linear(16, 4)
    for parameter in module.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    assert load_model(module).params == 16 * 4 + 4


def test_four_bit_weights_count_whole() -> None:
    import torch
    from torch import nn

    module = nn.Linear(16, 4, bias=False)
    module.weight = nn.Parameter(torch.empty(32, 1, dtype=torch.uint8), requires_grad=False)
    module.weight.quant_state = SimpleNamespace(shape=(4, 16))  # type: ignore[attr-defined]
    assert load_model(module).params == 64


def test_lazy_and_empty_modules_are_bad_input() -> None:
    from torch import nn

    with pytest.raises(BadInput, match="has no shape yet; run a lazy module once"):
        load_model(nn.LazyLinear(4))
    with pytest.raises(BadInput, match="has no parameters"):
        load_model(nn.ReLU())


def test_blocks_tied_across_each_other_stay_apart() -> None:
    """ALBERT shares one block's weights among all; each copy's tie names its owner."""
    from torch import nn

    shared = nn.Linear(4, 4)
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleList([shared, nn.Linear(4, 4)]) for _ in range(3)])})
    spec = load_model(module)
    assert spec.params == 20 + 3 * 20
    assert_same_rows(rows_of_spec(spec), rows_of_module(module))


def test_name_given_wins() -> None:
    from torch import nn

    assert spec_from_module(nn.Linear(1, 1)).name == "Linear"
    assert spec_from_module(nn.Linear(1, 1), name="mine").name == "mine"


def test_unknown_architecture_goes_through_the_meta_device() -> None:
    config = {
        "model_type": "gpt_neo",
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "hidden_size": 64,
        "num_heads": 4,
    }
    spec = load_model(config)
    assert spec.auto_class == "AutoModelForCausalLM"
    assert spec.source == "config"
    assert_same_rows(rows_of_spec(spec), rows_of_module(build_on_meta(config, spec.auto_class)))


def test_variant_outside_the_description_goes_through_the_meta_device() -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "add_cross_attention": True}
    spec = load_model(config)
    assert any("crossattention" in name for name, _ in spec.tensors())
    assert_same_rows(rows_of_spec(spec), rows_of_module(build_on_meta(config, "AutoModelForCausalLM")))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "never_heard_of"}, "unknown to zeroplan and to transformers"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "config.Mine"}}, "brings its own code; give --trust-remote-code"),
        ({"model_type": "gpt_neo", "num_layers": 10**9}, "'num_layers' is out of range"),
        ({"model_type": "gpt_neo", "num_layers": float("nan")}, "'num_layers' is out of range"),
        ({"model_type": "gpt_neo", "hidden_size": "wide"}, "transformers cannot build"),
        ({"model_type": "gpt_neo", "hidden_size": -5}, "transformers cannot build"),
    ],
)
def test_unknown_architectures_are_bad_input(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_model(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroplan.models.from_config._transformers_installed", lambda: False)
    with pytest.raises(BadInput, match=r"'lama'.*did you mean 'llama'\? or pip install 'zeroplan\[torch\]'"):
        load_model({"model_type": "lama"})


def test_flan_t5_loads_with_an_untied_head(tmp_path: Path) -> None:
    """transformers 5 ties T5's head when it builds one, and leaves it untied when a checkpoint holds both matrices."""
    import torch
    from safetensors.torch import save_file
    from transformers import T5Config, T5ForConditionalGeneration

    values = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(**values, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    built = T5ForConditionalGeneration(config)
    weights = {name: tensor.clone() for name, tensor in built.state_dict().items() if "embed_tokens" not in name}
    weights["lm_head.weight"] = torch.randn(32, 8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    published = {**config.to_dict(), "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(published))
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert sum(p.numel() for p in loaded.parameters()) == load_model(tmp_path).params
    assert sum(p.numel() for p in built.parameters()) == load_model(tmp_path).params - 32 * 8


_REMOTE_CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class TinyConfig(PretrainedConfig):
    model_type = "tiny_remote"

class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(2))
        self.post_init()
"""


def test_code_of_a_folder_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tiny.py").write_text(_REMOTE_CODE)
    auto_map = {"AutoConfig": "tiny.TinyConfig", "AutoModelForCausalLM": "tiny.TinyForCausalLM"}
    config = {"model_type": "tiny_remote", "architectures": ["TinyForCausalLM"], "auto_map": auto_map, "width": 6}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="brings its own code; give --trust-remote-code"):
        load_model(folder)
    assert not (tmp_path / "modules").exists()
    spec = load_model(folder, trust_remote_code=True)
    assert [(unit.name, unit.count) for unit in spec.units] == [("layers.{}", 2)]
    assert spec.params == 2 * (36 + 6)


@pytest.mark.parametrize(("place", "name"), list(_PARTS))
def test_one_ranks_part_of_a_model_is_refused(place: str, name: str) -> None:
    """A count of this rank's experts, or of its stage's layers, would be taken for the whole model's."""
    from torch import nn

    layer: Any = type(name, (nn.Linear,), {"__module__": place})
    for module, said in (
        (nn.Sequential(nn.Linear(2, 2), layer(4, 4)), "1 is of"),
        (type("Mine", (layer,), {})(4, 4), "Mine is of"),
    ):
        with pytest.raises(BadInput, match=said):
            spec_from_module(module)


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")
def test_the_layers_that_show_a_part_are_deepspeeds() -> None:
    assert all(isinstance(getattr(import_module(place), name), type) for place, name in _PARTS)
