"""A checkpoint folder of the strategy as one file that ``LightningModule.load_from_checkpoint`` loads without the runtime.

``python -m zeroplan_runtime.integrations.lightning.consolidate FOLDER OUTPUT.ckpt``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.whole import WholeCheckpoint
from zeroplan_runtime.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zeroplan_runtime.integrations.lightning.checkpoints import TAG, decode


def consolidate(folder: str | Path, output: str | Path) -> None:
    """Writes the masters in fp32, the buffers and what Lightning saved to one file; the optimizer's states are left out.

    Needs neither ranks nor a GPU.

    Raises:
        BadInput: when the folder holds no checkpoint of the strategy, or it is damaged.
    """
    rest = decode(WholeCheckpoint(folder, TAG).typed("client_state"), Path(folder))
    state = get_fp32_state_dict_from_zero_checkpoint(folder, TAG)
    torch.save({**rest, "state_dict": state}, output)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what ModelCheckpoint or trainer.save_checkpoint() wrote")
    parser.add_argument("output", help="the file")
    given = parser.parse_args(arguments)
    try:
        consolidate(given.folder, given.output)
    except BadInput as fault:
        parser.exit(fault.exit_code, f"{fault}\n")


if __name__ == "__main__":
    main()
