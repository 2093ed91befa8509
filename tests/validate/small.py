"""A Llama small enough for runs that end before they are done, and a run in this process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE
from zeroplan.engines.registry import find_engine
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.validate.compare import compare
from zeroplan.validate.job import job_of
from zeroplan.validate.measured import measurement_of
from zeroplan.validate.planned import predict

if TYPE_CHECKING:
    from zeroplan.validate.results import Comparison

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 171,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1009,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def compared_here(config: dict[str, Any], **fields: Any) -> Comparison:
    """Plan a job of the included runtime, run it as one rank in this process, and compare the two."""
    from zeroplan.validate.rank.probe import RankDevice
    from zeroplan.validate.rank.run import run_job

    resolved = resolve(Ask(engine="zeroplan", ds_config=config, **fields))
    (case,) = resolved.cases
    planned = predict(resolved.engine, case, ExpandedTapes(resolved.engine))
    result = run_job(job_of(case, find_engine("zeroplan"), raw=config, steps=2), RankDevice.of("cpu", 0), lambda _: None)
    return compare(planned, measurement_of([result], device="cpu", ranks=1), 0.02)


def compared_on_ranks(ranks: int, *requests: Ask) -> list[Comparison]:
    """Plan runs on a CPU, run them one after another on the same ranks, and compare."""
    from zeroplan.validate.launch import TorchrunLaunch
    from zeroplan.validate.machine import find_machine
    from zeroplan.validate.measured import compare_ranks

    cluster = find_machine().cluster(ranks)
    planned, jobs = [], []
    for request in requests:
        resolved = resolve(request.replace(gpus=ranks, from_scratch=True))
        (case,) = (replace(case, cluster=cluster) for case in resolved.cases)
        engine, raw = resolved.engine.for_verify(None, device="cpu", own_module=False)
        planned.append(predict(engine, case, ExpandedTapes(engine)))
        jobs.append(job_of(case, engine, raw=raw, steps=2))
    launch = TorchrunLaunch(jobs, ranks, "cpu", lambda *_: None, timeout=PATIENCE)
    try:
        launch.start()
        found = launch.finish()
    finally:
        launch.close()
    return [
        compare_ranks(one, found[at], 0.02, device="cpu", ranks=ranks, failure=launch.failure) for at, one in enumerate(planned)
    ]
