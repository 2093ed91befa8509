"""The versions that ``verify`` plans: those of the packages that it runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.versions import parse_version, version_text
from zeroplan.engines.registry import find_engine
from zeroplan.run.ask import Ask
from zeroplan.techniques.older_transformers import OlderTransformersTechnique
from zeroplan.validate.machine import VerifyMachine


def at_installed(request: Ask) -> Ask:
    """Return the request with the version of the engine's package that is installed here, by which it is then planned.

    Raises:
        BadInput: another version is asked for, or the package is not installed.
    """
    _require_installed("transformers", request[OlderTransformersTechnique.transformers_version], "--transformers-version")
    package, where = find_engine(request.engine).package, "--deepspeed-version"
    if not package:
        return request
    asked = request.deepspeed_version
    if asked is not None:
        from zeroplan.interop.deepspeed_version import asked_version

        asked, _ = asked_version(asked)
    return request.replace(deepspeed_version=_require_installed(package, asked, where))


def _require_installed(package: str, asked: str | None, where: str) -> str | None:
    """Return the installed version of a package; None where the package is missing and no version is asked for.

    Raises:
        BadInput: another version is asked for.
    """
    try:
        here = version_text(parse_version(version(package), where))
    except PackageNotFoundError:
        here = None  # whoever imports it says so
    if asked is not None and here != version_text(parse_version(asked, where)):
        what = f"{package} {here} is installed here and would run" if here else f"{package} is not installed here"
        raise BadInput(what, where=where, remedy=f"leave it out, or install {package} {asked}")
    return here


#: On GPUs: every stage of this shape that the machine holds.
GPU_MODEL = "meta-llama/Llama-3.2-1B"
GPU_WORKLOAD = {"micro_batch": 1, "seq_len": 1024}

#: On a CPU: a Llama of 10 M parameters, of an odd width and vocabulary. Heads and lengths are such that CUDA's attention, for
#: which the plan is made, pads nothing, so that a CPU's tensors can be held against it.
CPU_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "Llama, 10 M parameters",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 717,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4997,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CPU_WORKLOAD = {"micro_batch": 2, "seq_len": 128}


def builtin_request(machine: VerifyMachine) -> dict[str, Any]:
    """Return the request's fields for this machine."""
    if machine.device == "cuda":
        return {"model": GPU_MODEL, **GPU_WORKLOAD}
    return {"model": dict(CPU_MODEL), **CPU_WORKLOAD}
