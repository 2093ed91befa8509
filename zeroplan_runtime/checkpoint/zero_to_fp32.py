"""A checkpoint's parameters in fp32, as one state dict: DeepSpeed's ``zero_to_fp32`` for checkpoints of this runtime.

``python -m zeroplan_runtime.checkpoint.zero_to_fp32 CHECKPOINTS OUTPUT [--tag TAG] [--safe-serialization]``
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.agreement import as_line
from zeroplan_runtime.checkpoint.atomic_files import write_durably
from zeroplan_runtime.checkpoint.whole import WholeCheckpoint


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Reads the state dict of the model, fp32, into host memory: masters, frozen parameters and persistent buffers.

    Args:
        checkpoint_dir: the folder of all checkpoints.
        tag: the checkpoint's name; by default the one in the file ``latest``.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: has no effect.

    Raises:
        BadInput: when there is no checkpoint, or it is damaged.
    """
    checkpoint = WholeCheckpoint(checkpoint_dir, tag)
    found = {name: checkpoint.read("buffer", name) for name in checkpoint.names("buffer")}
    found = {name: buffer.float() if buffer.is_floating_point() else buffer for name, buffer in found.items()}
    found |= {name: checkpoint.read("master", name) for name in checkpoint.names("master")}
    if not exclude_frozen_parameters:
        found |= {name: checkpoint.read("param", name).float() for name in checkpoint.names("param")}
    found |= {name: found[first] for name, first in checkpoint.tied.items() if first in found}
    return found


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes :func:`get_fp32_state_dict_from_zero_checkpoint` to files that transformers loads.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: the checkpoint.
        output_dir: the folder of the files; it is created.
        max_shard_size: the most bytes of one file, such as ``5GB``.
        safe_serialization: write safetensors instead of ``pytorch_model.bin``.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    tied = WholeCheckpoint(checkpoint_dir, tag).tied
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    if safe_serialization:  # safetensors holds no shared memory: a tied parameter goes by its first name
        state = {name: tensor for name, tensor in state.items() if name not in tied}
    index_file = folder / f"{stem}.{suffix}.index.json"
    index_file.unlink(missing_ok=True)  # a kill leaves no index of other files than those that are there
    plan = split_torch_state_dict_into_shards(
        state, filename_pattern=f"{stem}{{suffix}}.{suffix}", max_shard_size=max_shard_size
    )
    for file, names in plan.filename_to_tensors.items():
        part = {name: state[name].contiguous() for name in names}
        writing = folder / f".{file}.writing"
        if safe_serialization:
            from safetensors.torch import save_file

            save_file(part, writing, metadata={"format": "pt"})
        else:
            torch.save(part, writing)
        os.replace(writing, folder / file)
    if plan.is_sharded:
        (folder / f"{stem}.{suffix}").unlink(missing_ok=True)  # of before, which transformers would prefer
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_durably(index_file, json.dumps(index, indent=1).encode())


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None) -> nn.Module:
    """Loads a checkpoint's fp32 values into `model`, which is moved to the host; the model is under no engine."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint() was given")
    parser.add_argument("output_dir", help="where the files go")
    parser.add_argument("-t", "--tag", default=None, help="the checkpoint's name; the latest by default")
    parser.add_argument("--max_shard_size", default="5GB", help="the most bytes of one file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    given = parser.parse_args(arguments)
    from safetensors import SafetensorError

    try:
        convert_zero_checkpoint_to_fp32_state_dict(**vars(given))
    except (BadInput, OSError, RuntimeError, SafetensorError) as fault:
        line = as_line(fault, given.output_dir)
        parser.exit(line.exit_code, f"{line}\n")


if __name__ == "__main__":
    main()
