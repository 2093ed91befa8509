"""Logs of real runs of ours, and the cause of each: ``python -m benchmarks.logs.make`` makes them on purpose.

`FIRST` were there while the patterns were written. `BLIND` came afterwards: the doctor of that day read each of them once and
was right on 61 of 74. docs/doctor.md tells what it missed.
"""

from __future__ import annotations

from pathlib import Path

from zeroplan.logs.diagnose import Cause

FOLDER = Path(__file__).parent / "real"

FIRST = {
    "cpu_refused": Cause.HOST_MEMORY,
    "fine_plain": Cause.NOTHING,
    "fine_trainer": Cause.NOTHING,
    "fp16_overflow": Cause.LOSS_SCALE,
    "key_error": Cause.OTHER_ERROR,
    "killed_plain": Cause.HOST_MEMORY,
    "killed_rank": Cause.HOST_MEMORY,
    "nan_plain": Cause.NOT_A_NUMBER,
    "nan_trainer": Cause.NOT_A_NUMBER,
    "oom_backward": Cause.GPU_MEMORY,
    "oom_driver": Cause.GPU_MEMORY,
    "oom_forward": Cause.GPU_MEMORY,
    "oom_fragmented": Cause.GPU_FRAGMENTATION,
    "oom_load": Cause.GPU_MEMORY,
    "oom_loss": Cause.GPU_MEMORY,
    "oom_save": Cause.GPU_MEMORY,
    "oom_step": Cause.GPU_MEMORY,
    "oom_trainer": Cause.GPU_MEMORY,
    "oom_two_ranks": Cause.GPU_MEMORY,
    "stuck_gloo": Cause.STUCK_COLLECTIVE,
}

BLIND = {
    "abort_trainer": Cause.CRASH,
    "batch_sizes": Cause.BATCH_SIZES,
    "disk_deepspeed": Cause.DISK,
    "disk_lightning": Cause.DISK,
    "disk_save": Cause.DISK,
    "disk_trainer": Cause.DISK,
    "error_lightning": Cause.OTHER_ERROR,
    "error_runtime": Cause.OTHER_ERROR,
    "fewer_batches": Cause.LOST_RANK,
    "file_limit": Cause.DISK,
    "fine_accelerate": Cause.NOTHING,
    "fine_cpu_trainer": Cause.NOTHING,
    "fine_deepspeed": Cause.NOTHING,
    "fine_lightning": Cause.NOTHING,
    "fine_retry": Cause.NOTHING,
    "fine_runtime": Cause.NOTHING,
    "fp16_refused": Cause.OTHER_ERROR,
    "h200_deepspeed_zero3": Cause.NOTHING,
    "h200_fsdp1": Cause.NOTHING,
    "h200_lightning_zero2": Cause.NOTHING,
    "h200_lightning_zero3": Cause.NOTHING,
    "h200_oom_00": Cause.GPU_MEMORY,
    "h200_oom_10": Cause.GPU_MEMORY,
    "h200_oom_12": Cause.GPU_MEMORY,
    "h200_trainer_fp16": Cause.NOTHING,
    "h200_trainer_zero2": Cause.NOTHING,
    "h200_trl_dpo_lora": Cause.NOTHING,
    "h200_trl_fsdp2": Cause.NOTHING,
    "h200_trl_reward": Cause.OTHER_ERROR,
    "h200_trl_sft": Cause.NOTHING,
    "h200_zero2_offload": Cause.NOTHING,
    "hang_ddp": Cause.STUCK_COLLECTIVE,
    "hang_join": Cause.STUCK_COLLECTIVE,
    "hang_monitored": Cause.STUCK_COLLECTIVE,
    "index_error": Cause.OTHER_ERROR,
    "interrupted": Cause.STOPPED,
    "key_error_accelerate": Cause.OTHER_ERROR,
    "killed_accelerate": Cause.HOST_MEMORY,
    "killed_deepspeed": Cause.HOST_MEMORY,
    "killed_spawn": Cause.HOST_MEMORY,
    "killed_torchrun": Cause.HOST_MEMORY,
    "killed_trainer": Cause.HOST_MEMORY,
    "killed_worker": Cause.HOST_MEMORY,
    "killed_worker_trainer": Cause.HOST_MEMORY,
    "nan_accelerate": Cause.NOT_A_NUMBER,
    "nan_anomaly": Cause.NOT_A_NUMBER,
    "nan_deepspeed": Cause.NOT_A_NUMBER,
    "nan_half": Cause.NOT_A_NUMBER,
    "nan_lightning": Cause.NOT_A_NUMBER,
    "nan_rate": Cause.NOT_A_NUMBER,
    "port_in_use": Cause.OTHER_ERROR,
    "refused_accelerate": Cause.HOST_MEMORY,
    "refused_deepspeed": Cause.HOST_MEMORY,
    "refused_lightning": Cause.HOST_MEMORY,
    "refused_list": Cause.HOST_MEMORY,
    "refused_load": Cause.HOST_MEMORY,
    "refused_numpy": Cause.HOST_MEMORY,
    "refused_offload": Cause.HOST_MEMORY,
    "refused_plain": Cause.HOST_MEMORY,
    "refused_runtime": Cause.HOST_MEMORY,
    "refused_threads": Cause.HOST_MEMORY,
    "refused_trainer": Cause.HOST_MEMORY,
    "resume_ranks": Cause.OTHER_ERROR,
    "scale_floor": Cause.LOSS_SCALE,
    "scale_plain": Cause.LOSS_SCALE,
    "scale_settles": Cause.NOTHING,
    "segfault": Cause.CRASH,
    "shape_error_trainer": Cause.OTHER_ERROR,
    "shm_worker": Cause.SHARED_MEMORY,
    "slow_memory": Cause.SLOWER,
    "slow_trainer": Cause.SLOWER,
    "terminated_launcher": Cause.STOPPED,
    "type_error_rank": Cause.OTHER_ERROR,
    "value_error_deepspeed": Cause.OTHER_ERROR,
}
#: The first run of a pair of ``python -m benchmarks.logs.advised``.
ADVISED = {"advised_states": Cause.HOST_MEMORY}
REAL = FIRST | BLIND | ADVISED

#: What is not found: an error that was caught looks like one that ended a rank, and oneDNN does not say that memory was short.
MISSED = frozenset({"fine_retry", "refused_runtime"})
