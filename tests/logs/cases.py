"""Logs of runs that failed or crawled, as torch, launchers, trainers and the kernel write them, each with its cause.

The forms of the messages are those of the programs' sources (see :mod:`zeroplan.logs.patterns`); the numbers are made up.
Logs of real runs stand beside this module in ``real/``.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.logs.diagnose import Cause


@dataclass(frozen=True)
class LogCase:
    """A log, its cause, and the phase that its traceback and the rank that its prefix shows."""

    name: str
    cause: Cause
    text: str
    phase: str | None = None
    rank: int | None = None


_TORCH = "/venv/lib/python3.11/site-packages/torch"
_HF = "/venv/lib/python3.11/site-packages/transformers"
_DS = "/venv/lib/python3.11/site-packages/deepspeed"


def _traceback(*frames: str, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "train.py", line 40, in <module>']
    for frame in frames:
        path, function = frame.rsplit(":", 1)
        lines += [f'  File "{path}", line 12, in {function}', "    step()"]
    return "\n".join(prefix + line for line in lines) + "\n"


_FORWARD = _traceback(f"{_TORCH}/nn/modules/module.py:_call_impl", f"{_HF}/models/llama/modeling_llama.py:forward")
_BACKWARD = _traceback(f"{_TORCH}/_tensor.py:backward", f"{_TORCH}/autograd/__init__.py:backward")
_STEP = _traceback(
    f"{_TORCH}/optim/optimizer.py:wrapper", f"{_TORCH}/optim/adamw.py:step", f"{_TORCH}/optim/adam.py:_init_group"
)

#: torch's message since 2.2; 2.1 says "capacty".
_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU {gpu} has a total capacity of 79.15 GiB of "
    "which {free} is free. {more}Including non-PyTorch memory, this process has {used} memory in use. Of the allocated memory "
    "75.85 GiB is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def _oom(
    tried: str = "2.00 GiB",
    free: str = "1.26 GiB",
    used: str = "77.88 GiB",
    cached: str = "400.00 MiB",
    more: str = "",
    gpu: int = 0,
) -> str:
    return _OOM.format(tried=tried, free=free, used=used, cached=cached, more=more, gpu=gpu)


_OLD = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total capacity; 13.46 GiB "
    "already allocated; 9.75 MiB free; 13.63 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try "
    "setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
_STEPS = "".join(f" {i}%|#| {i}/100 [00:0{i % 10}<01:00,  1.{i % 3}0s/it]\n" for i in range(1, 40))
_SLOWER = "".join(f" {i}/100 [00:01<01:00,  {1.0 + i / 20:.2f}s/it]\n" for i in range(1, 60))
_NAN = "".join(f"{{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.{i}}}\n" for i in range(5))
_SETTLES = "".join(
    f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2**k}, reducing to {2 ** (k - 1)}\n"
    for k in (16, 15, 14)
)
_OVERFLOWS = "".join(
    f"[2024-01-01 00:00:00] [INFO] [loss_scaler.py:190] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {i}\n"
    for i in range(30)
)
_DONE = "{'train_runtime': 12.3, 'train_samples_per_second': 8.1, 'train_loss': 2.3, 'epoch': 1.0}\n"
_SIGTERM = "W0101 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 11 closing signal SIGTERM\n"

CASES = (
    LogCase("oom 2.0 forward", Cause.GPU_MEMORY, _FORWARD + _OLD, "the forward"),
    LogCase(
        "oom 1.x runtime error",
        Cause.GPU_MEMORY,
        _BACKWARD
        + "RuntimeError: CUDA out of memory. Tried to allocate 1.20 GiB (GPU 3; 31.75 GiB total capacity; 29.30 GiB already "
        "allocated; 731.75 MiB free; 29.90 GiB reserved in total by PyTorch)",
        "the backward",
    ),
    LogCase("oom 2.1 capacty", Cause.GPU_MEMORY, _BACKWARD + _oom().replace("capacity", "capacty"), "the backward"),
    LogCase("oom step", Cause.GPU_MEMORY, _STEP + _oom(gpu=2), "the optimizer step"),
    LogCase(
        "oom loss",
        Cause.GPU_MEMORY,
        _traceback(f"{_HF}/models/llama/modeling_llama.py:forward", f"{_HF}/loss/loss_utils.py:ForCausalLMLoss") + _oom(),
        "the loss",
    ),
    LogCase(
        "oom init",
        Cause.GPU_MEMORY,
        _traceback(f"{_DS}/__init__.py:initialize", f"{_DS}/runtime/engine.py:__init__") + _oom(),
        "initialisation",
    ),
    LogCase(
        "oom load",
        Cause.GPU_MEMORY,
        _traceback(f"{_HF}/modeling_utils.py:from_pretrained", f"{_HF}/modeling_utils.py:_load_pretrained_model") + _oom(),
        "loading the model",
    ),
    LogCase(
        "oom eval",
        Cause.GPU_MEMORY,
        _traceback(f"{_HF}/trainer.py:evaluate", f"{_HF}/trainer.py:evaluation_loop") + _oom(),
        "evaluation",
    ),
    LogCase(
        "oom save",
        Cause.GPU_MEMORY,
        _traceback(f"{_DS}/runtime/engine.py:save_checkpoint", f"{_DS}/runtime/engine.py:_zero3_consolidated_16bit_state_dict")
        + _oom(),
        "saving a checkpoint",
    ),
    LogCase(
        "oom allowed fraction",
        Cause.GPU_MEMORY,
        _BACKWARD + _oom(free="70.00 GiB", used="8.00 GiB", more="8.00 GiB allowed; "),
        "the backward",
    ),
    LogCase("oom fragmented", Cause.GPU_FRAGMENTATION, _FORWARD + _oom(cached="9.21 GiB"), "the forward"),
    LogCase("oom shared, by sum", Cause.GPU_SHARED, _FORWARD + _oom(used="40.00 GiB"), "the forward"),
    LogCase(
        "oom shared, by process",
        Cause.GPU_SHARED,
        _FORWARD + _oom(used="37.00 GiB", more="Process 4242 has 39.39 GiB memory in use. "),
        "the forward",
    ),
    LogCase(
        "oom of rank 5, the others wait",
        Cause.GPU_MEMORY,
        "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600000 ms\n"
        + _traceback(f"{_TORCH}/_tensor.py:backward", prefix="[rank5]: ")
        + "[rank5]: "
        + _oom(gpu=5)
        + "\n"
        + _SIGTERM,
        "the backward",
        5,
    ),
    LogCase(
        "oom behind a KeyError of another rank's clean-up",
        Cause.GPU_MEMORY,
        _BACKWARD + _oom() + "\nDuring handling of the above exception, another exception occurred:\n\nKeyError: 'loss'\n",
        "the backward",
    ),
    LogCase("oom hip", Cause.GPU_MEMORY, _FORWARD + _oom().replace("CUDA", "HIP"), "the forward"),
    LogCase(
        "driver oom",
        Cause.GPU_MEMORY,
        _FORWARD + "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be",
        "the forward",
    ),
    LogCase(
        "cublas",
        Cause.GPU_MEMORY,
        _FORWARD + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    LogCase("nccl oom", Cause.GPU_MEMORY, "node:11:22 [0] include/alloc.h:103 NCCL WARN Cuda failure 2 'out of memory'\n"),
    LogCase(
        "oom in colour",
        Cause.GPU_MEMORY,
        "\x1b[31mtorch.OutOfMemoryError\x1b[0m: \x1b[1mCUDA out of memory.\x1b[0m Tried to allocate 2.00 GiB.",
    ),
    LogCase(
        "kernel killed",
        Cause.HOST_MEMORY,
        "[123.4] Out of memory: Killed process 991 (python) total-vm:99kB, anon-rss:131072kB, file-rss:0kB",
    ),
    LogCase(
        "cgroup", Cause.HOST_MEMORY, "[9.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=991,uid=0"
    ),
    LogCase(
        "slurm",
        Cause.HOST_MEMORY,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.",
    ),
    LogCase(
        "deepspeed -9",
        Cause.HOST_MEMORY,
        "[INFO] [launch.py:319:sigkill_handler] Killing subprocess 91\n[ERROR] [launch.py:325] ['python', 'train.py'] "
        "exits with return code = -9\n",
    ),
    LogCase(
        "torchrun -9",
        Cause.HOST_MEMORY,
        _SIGTERM
        + "torch.distributed.elastic.multiprocessing.api: failed (exitcode: -9) local_rank: 0 (pid: 91) of binary: python\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "  traceback : Signal 9 (SIGKILL) received by PID 91\n",
    ),
    LogCase("shell", Cause.HOST_MEMORY, "run.sh: line 3:   991 Killed                  python train.py\n"),
    LogCase(
        "cpu allocator",
        Cause.HOST_MEMORY,
        _traceback(f"{_HF}/modeling_utils.py:from_pretrained")
        + "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 469762048 bytes. Error code 12 (Cannot allocate memory)",
        "loading the model",
    ),
    LogCase(
        "numpy",
        Cause.HOST_MEMORY,
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape (100000, 100000)",
    ),
    LogCase("docker exit", Cause.HOST_MEMORY, "container exited, reason: OOMKilled, exit code: 137\n"),
    LogCase(
        "shm",
        Cause.SHARED_MEMORY,
        "RuntimeError: DataLoader worker (pid 91) is killed by signal: Bus error. "
        "It is possible that dataloader's workers are out of shared memory.",
    ),
    LogCase(
        "disk",
        Cause.DISK,
        _traceback(f"{_TORCH}/serialization.py:save") + "OSError: [Errno 28] No space left on device: 'out/global_step5'",
    ),
    LogCase("pinned", Cause.PINNED_MEMORY, "RuntimeError: pin_memory: CUDA error: cudaHostAlloc failed, out of memory\n"),
    LogCase(
        "scale floor",
        Cause.LOSS_SCALE,
        _SETTLES + "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n",
    ),
    LogCase("overflows for ever", Cause.LOSS_SCALE, _OVERFLOWS),
    LogCase("nan, trainer", Cause.NOT_A_NUMBER, _NAN + _DONE),
    LogCase(
        "nan, lightning",
        Cause.NOT_A_NUMBER,
        "".join(f"Epoch 0:  {i}%|  | {i}/99 [00:0{i}<00:40, 2.0it/s, v_num=0, train_loss=nan.0]\n" for i in range(6)),
    ),
    LogCase(
        "batch sizes",
        Cause.BATCH_SIZES,
        "AssertionError: Check batch related parameters. train_batch_size is not equal "
        "to micro_batch_per_gpu * gradient_acc_step * world_size 32 != 4 * 1 * 4\n",
    ),
    LogCase(
        "nccl timeout",
        Cause.STUCK_COLLECTIVE,
        "[rank3]:[E101 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800037 milliseconds before timing out.\n",
        rank=3,
    ),
    LogCase(
        "gloo",
        Cause.LOST_RANK,
        "W0101 [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31337\n",
    ),
    LogCase("key error", Cause.OTHER_ERROR, _traceback("/home/u/data.py:collate") + "KeyError: 'input_ids'\n"),
    LogCase(
        "index error, and SIGTERM to the rest",
        Cause.OTHER_ERROR,
        _traceback("/home/u/data.py:collate", prefix="[rank1]: ") + "[rank1]: IndexError: list index out of range\n" + _SIGTERM,
        rank=1,
    ),
    LogCase(
        "cache flushes",
        Cause.MEMORY_PRESSURE,
        "[WARNING] [stage3.py:1991:step] 4 pytorch allocator cache flushes since last step. "
        "this happens when there is high memory pressure\n" + _DONE,
    ),
    LogCase("slower and slower", Cause.SLOWER, _SLOWER),
    LogCase("fine, trainer", Cause.NOTHING, _STEPS + _SETTLES + _DONE),
    LogCase("fine, lightning", Cause.NOTHING, "`Trainer.fit` stopped: `max_steps=10` reached.\n"),
    LogCase(
        "fine, words that sound bad",
        Cause.NOTHING,
        "loss: 0.31, info: nanometer data, killed 3 stale caches before start\nerror_rate: 0.01\n" + _DONE,
    ),
    LogCase("empty", Cause.NOTHING, ""),
)
