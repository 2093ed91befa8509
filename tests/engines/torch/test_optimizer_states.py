"""States that are neither whole nor of one width: Adafactor's factors and the 8-bit states of bitsandbytes."""

from __future__ import annotations

import pytest

from tests.workloads import with_flat
from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.optimizer_row import Domain
from zeroplan.core.workload import Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.ddp.engine import Ddp
from zeroplan.engines.ddp.rank import DdpRank
from zeroplan.engines.torch_step import optimizer_step
from zeroplan.models.load import load_model
from zeroplan.simulate.recorder import Recorder, simulate

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 72,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
HIDDEN, TABLE = 72, 256 * 72


def rank_of(**options: object) -> DdpRank:
    workload = with_flat(Workload.of(seq_len=16, precision=Precision.HALF_AUTOCAST), **options)  # type: ignore[arg-type]
    spec = load_model(dict(CONFIG))
    return Ddp().rank(Case(spec, workload, Cluster.of(gpus=1), ZeroConfig.of(0)), spec.parameters)


def states(rank: DdpRank, name: str) -> list[tuple[Buffer, int]]:
    return rank.states(Domain.ALL, rank.parameters.names.index(name))


@pytest.mark.torch
def test_adafactor_keeps_rows_and_columns_as_transformers_does() -> None:
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    rank = rank_of(optimizer="adafactor_transformers")
    shapes = rank.parameters.shapes
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = optimization.Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for p, parameter in enumerate(parameters):
        kept = [t.numel() * t.element_size() for t in optimizer.state[parameter].values() if getattr(t, "ndim", 0)]
        assert [nbytes for _, nbytes in rank.states(Domain.ALL, p)] == kept


@pytest.mark.parametrize("precision, copies", [(Precision.HALF_AUTOCAST, 4), (Precision.AUTOCAST, 2)])
def test_adafactor_steps_in_fp32_with_whole_temporaries_of_one_parameter(precision: Precision, copies: int) -> None:
    """Of the table, the largest and the first: two squares, and in 16 bits the gradient and the parameter in fp32."""
    rank = rank_of(optimizer="adafactor_transformers", precision=precision)
    recorder = Recorder()
    optimizer_step(recorder, rank, applied=True, first=True)
    recorder.mark("step")
    (mark,) = simulate(recorder).marks
    small = sum(nbytes for name in rank.parameters.names for _, nbytes in states(rank, name))
    assert copies * 4 * TABLE <= mark.peak <= copies * 4 * TABLE + small + 512 * 4 * len(rank.parameters)
    assert mark.allocated < small + 512 * 4 * len(rank.parameters)


def test_bitsandbytes_keeps_small_parameters_in_fp32_and_embeddings_where_they_are_registered() -> None:
    registered, plain = rank_of(optimizer="adamw8bit", whole_embedding_states=True), rank_of(optimizer="adamw8bit")
    norm, table, projection = "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
    whole = [(Buffer.OPTIM_EXP_AVG, 4 * TABLE), (Buffer.OPTIM_EXP_AVG_SQ, 4 * TABLE)]
    assert states(registered, table) == whole
    assert states(plain, table) == [
        (Buffer.OPTIM_EXP_AVG, TABLE),
        (Buffer.OPTIM_EXP_AVG_SQ, TABLE),
        *[(Buffer.OPTIM_SCALE, 4 * TABLE // 256)] * 2,
    ]
    for rank in (registered, plain):
        assert states(rank, norm) == [(Buffer.OPTIM_EXP_AVG, 4 * HIDDEN), (Buffer.OPTIM_EXP_AVG_SQ, 4 * HIDDEN)]
        assert (Buffer.OPTIM_EXP_AVG, 128 * HIDDEN) in states(rank, projection)
