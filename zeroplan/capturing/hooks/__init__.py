"""What is replaced in the libraries that a script uses, one file a library; each waits until its library is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def install(capture: Capture) -> None:
    """Attach every hook."""
    from zeroplan.capturing import cuda, kernels
    from zeroplan.capturing import engines as stand_ins
    from zeroplan.capturing.hooks import (
        engines,
        exits,
        native_files,
        pretrained,
        reporters,
        samples,
        torch_itself,
        transformers_models,
    )  # fmt: skip
    from zeroplan.capturing.hooks.imports import when_imported
    from zeroplan.capturing.kernels import flex_attention, trl_log_probabilities

    torch_itself.install(capture)
    stand_ins.install(capture)
    samples.install(capture)
    pretrained.install(capture)
    reporters.install(capture)
    kernels.install(capture)
    exits.install(capture)
    when_imported("torch.nn.attention.flex_attention", flex_attention.install)
    when_imported("transformers.modeling_utils", lambda module: transformers_models.install(capture, module))
    when_imported("accelerate.data_loader", engines.install_loader)
    when_imported("accelerate.utils.memory", lambda module: engines.install_batch_finder(capture, module))
    when_imported("transformers.trainer", lambda module: transformers_models.install_trainer(capture, module))
    when_imported("transformers.tokenization_utils_base", lambda module: native_files.install_tokenizers(capture, module))
    job = capture.job
    when_imported("pynvml", lambda module: cuda.install_nvml(job.card, job.gpus, capture.recorder, module))
    when_imported("numpy.lib._datasource", native_files.install_numpy)
    for name in ("sqlite3", "sqlite3.dbapi2"):
        when_imported(name, lambda module: native_files.install_sqlite(capture, module))
    when_imported("pyarrow", lambda module: native_files.install_arrow(capture, module))
    when_imported("pyarrow.parquet", lambda module: native_files.install_parquet(capture, module))
    when_imported("trl.trainer.utils", trl_log_probabilities.install)
    for name in ("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence"):
        when_imported(name, lambda module: engines.install_trl_kernels(capture, module))
    for name in ("trl.trainer.utils", "trl.trainer.distillation_trainer"):
        when_imported(name, engines.install_trl_trainer)
    when_imported("safetensors.torch", lambda module: torch_itself.install_safetensors(capture, module))
