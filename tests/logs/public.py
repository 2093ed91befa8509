"""What public issue threads show of runs that failed: the lines that tell, shortened, with made-up names and numbers.

Each names the threads whose kind it is. None of these texts was there when the patterns were first written.
"""

from __future__ import annotations

from tests.logs.cases import LogCase
from zeroplan.logs.diagnose import Cause

_LAUNCH = "torch.distributed.elastic.multiprocessing.api"
_STEP = "{'loss': 1.45, 'grad_norm': 2.1, 'learning_rate': 4e-06, 'epoch': 0.6}\n"
_ENDED = "{'train_runtime': 61.2, 'train_samples_per_second': 12.1, 'train_loss': 1.2, 'epoch': 1.0}\n"
_ASSERT = "../aten/src/ATen/native/cuda/Indexing.cu:1284: indexSelectLargeIndex: block: [134,0,0], thread: [{},0,0] Assertion "
_ASSERT += "`srcIndex < srcSelectDimSize` failed.\n"
_WATCHDOG = (
    "[rank1]:[E513 ProcessGroupNCCL.cpp:563] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, "
    "OpType=BROADCAST, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800211 milliseconds before timing out.\n"
)

PUBLIC = (
    LogCase(  # CVMI-Lab/Point-UV-Diffusion#5, NVIDIA/Megatron-LM#1880
        "crash, torchrun",
        Cause.CRASH,
        _STEP + f"ERROR:{_LAUNCH}:failed (exitcode: -11) local_rank: 0 (pid: 2977) of binary: /env/bin/python\n"
        "train.py FAILED\n  rank      : 0 (local_rank: 0)\n  exitcode  : -11 (pid: 2977)\n  error_file: <N/A>\n"
        "  traceback : Signal 11 (SIGSEGV) received by PID 2977\n",
    ),
    LogCase(  # pytorch/pytorch#61839, #29889
        "crash, torch.distributed.launch",
        Cause.CRASH,
        "subprocess.CalledProcessError: Command '['/conda/bin/python3', '-u', 'train.py', '--local_rank=7']' died with "
        "<Signals.SIGSEGV: 11>.\n",
    ),
    LogCase(  # NVlabs/nvdiffrecmc#21
        "crash, and the others forced to end by 9",
        Cause.CRASH,
        f"WARNING:{_LAUNCH}:Sending process 5527 closing signal SIGTERM\n"
        f"WARNING:{_LAUNCH}:Unable to shutdown process 5527 via 15, forcefully exiting via 9\n"
        f"ERROR:{_LAUNCH}:failed (exitcode: -11) local_rank: 1 (pid: 5528) of binary: /opt/conda/bin/python3.8\n",
    ),
    LogCase(
        "crash, faulthandler",
        Cause.CRASH,
        _STEP
        + 'Fatal Python error: Segmentation fault\n\nThread 0x7f01 (most recent call first):\n  File "train.py", line 3 in f\n',
    ),
    LogCase(  # huggingface/trl#1995
        "device-side assert after a progress bar",
        Cause.DEVICE_ASSERT,
        "  6%|6         | 89/1398 [1:32:11<25:28:13, 70.05s/it]" + _ASSERT.format(0) + _ASSERT.format(1),
    ),
    LogCase(  # EleutherAI/lm-evaluation-harness#2293, tloen/alpaca-lora#275
        "device-side assert, with torch's own error",
        Cause.DEVICE_ASSERT,
        _ASSERT.format(116)
        + "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.\n",
    ),
    LogCase(  # ZettaAI/zetta_utils#671
        "slurm's time limit",
        Cause.STOPPED,
        _STEP + "srun: Job step aborted: Waiting up to 47 seconds for job step to finish.\n"
        "slurmstepd: error: *** JOB 494583 ON node7 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
        "slurmstepd: error: *** STEP 494583.0 ON node7 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\n",
    ),
    LogCase(  # ascii-supply-networks/dagster-slurm#72
        "scancel kills the rest",
        Cause.STOPPED,
        "srun: forcing job termination\n"
        "slurmstepd: error: *** STEP 22051979.1 ON lrdn1786 CANCELLED AT 2025-10-23T14:31:08 ***\n"
        "srun: error: lrdn1786: task 0: Killed\n",
    ),
    LogCase(  # facebookincubator/submitit#1708
        "preempted",
        Cause.STOPPED,
        "submitit WARNING (2022-08-12 02:06:11,453) - Caught signal SIGUSR2 on node3: this job is preempted.\n"
        "slurmstepd: error: *** JOB 608 ON node3 CANCELLED AT 2022-08-12T02:06:12 DUE TO JOB REQUEUE ***\n"
        "slurmstepd: error: Failed to send MESSAGE_TASK_EXIT: Connection refused\n",
    ),
    LogCase(
        "interrupted by hand",
        Cause.STOPPED,
        _STEP + '^CTraceback (most recent call last):\n  File "train.py", line 9, in <module>\nKeyboardInterrupt\n',
    ),
    LogCase(  # mittagessen/kraken#266
        "a data loader's worker is killed",
        Cause.HOST_MEMORY,
        "RuntimeError: DataLoader worker (pid 22048) is killed by signal: Killed. \n",
    ),
    LogCase(
        "ray's monitor of the host",
        Cause.HOST_MEMORY,
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.3, ID: ab) where the task was running was 61.20GB / 62.80GB (0.97)\n",
    ),
    LogCase(
        "a pod is evicted for memory",
        Cause.HOST_MEMORY,
        "Status: Failed\nReason: Evicted\nMessage: The node was low on resource: memory. Container train was using 61Gi.\n",
    ),
    LogCase(  # NVIDIA/nccl#1235, #962
        "NCCL finds no GPU memory, its peers see it go",
        Cause.GPU_MEMORY,
        "ng30:3063025:3066048 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer ng30-ib<51159>\n"
        "ng30:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
        "ng30:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes\n"
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1296, internal error, NCCL version 2.18.1\n",
    ),
    LogCase(  # openxla/xla#7201 has NCCL's text
        "NCCL's last error is of memory",
        Cause.GPU_MEMORY,
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO "
        "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'\n",
    ),
    LogCase(
        "triton has no memory",
        Cause.GPU_MEMORY,
        "RuntimeError: Triton Error [CUDA]: out of memory\n",
    ),
    LogCase(  # QwenLM/Qwen#120, OpenBMB/CPM-Bee#73
        "cuBLAS gets no workspace",
        Cause.GPU_MEMORY,
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`\n",
    ),
    LogCase(  # NVIDIA/nccl-tests#166
        "NCCL's segments do not fit /dev/shm",
        Cause.SHARED_MEMORY,
        "node:9621:9685 [0] misc/shmutils.cc:112 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-zTYolS "
        "(size 5967872)\nRuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)\n",
    ),
    LogCase(
        "SIGBUS",
        Cause.SHARED_MEMORY,
        "  exitcode  : -7 (pid: 812)\n  error_file: <N/A>\n  traceback : Signal 7 (SIGBUS) received by PID 812\n",
    ),
    LogCase(  # NVIDIA/nccl#1284
        "a timeout, and a nonsense size after it",
        Cause.STUCK_COLLECTIVE,
        _WATCHDOG + "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.\n",
    ),
    LogCase(
        "a timeout aborts the process",
        Cause.STUCK_COLLECTIVE,
        _WATCHDOG + "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"ERROR:{_LAUNCH}:failed (exitcode: -6) local_rank: 1 (pid: 77) of binary: /env/bin/python\n"
        "  traceback : Signal 6 (SIGABRT) received by PID 77\n",
        rank=1,
    ),
    LogCase(
        "the address is in use",  # meta-pytorch/torchtune#1025, #392
        Cause.OTHER_ERROR,
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. The server "
        "socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n",
    ),
    LogCase(  # wilicc/gpu-burn#1, rwth-i6/returnn#1486
        "the GPU is gone",
        Cause.HARDWARE,
        _STEP + "[74889.644138] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n"
        "RuntimeError: CUDA error: unspecified launch failure\n",
    ),
    LogCase(
        "ECC",
        Cause.HARDWARE,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
    ),
    LogCase(  # bigscience-workshop/Megatron-DeepSpeed#396
        "nan, Megatron",
        Cause.NOT_A_NUMBER,
        "".join(
            f" iteration     {5426 + i}/  250000 | elapsed time per iteration (ms): 4247.9 | loss scale: 1.0 | grad norm: nan "
            "| number of skipped iterations:   0 | number of nan iterations:   0 | TFLOPs: 78.46 |\n"
            for i in range(5)
        ),
    ),
    LogCase(  # hiyouga/LlamaFactory#5627
        "nan, loss 0",
        Cause.NOT_A_NUMBER,
        _STEP + "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4.5e-06, 'epoch': 0.66}\n" * 4,
    ),
    LogCase(  # deepspeedai/DeepSpeed#5347, modelscope/ms-swift#1062
        "loss 0 and a gradient of the clipping's norm",
        Cause.NOT_A_NUMBER,
        _STEP + "{'loss': 0.0, 'grad_norm': 1.4142135623730951, 'learning_rate': 4.5e-06, 'epoch': 0.66}\n" * 8,
    ),
    LogCase(
        "safetensors finds the disk full",
        Cause.DISK,
        'safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No '
        'space left on device" })\n',
    ),
    LogCase(
        "a logger loses its server, and the run ends well",
        Cause.NOTHING,
        _STEP
        + "Traceback (most recent call last):\nrequests.exceptions.ConnectionError: HTTPSConnectionPool(host='api', port=443)\n"
        "wandb: Network error (ConnectionError), entering retry loop.\n" + _STEP * 3 + _ENDED,
    ),
    LogCase(
        "a kernel that the card has not",
        Cause.OTHER_ERROR,
        "RuntimeError: CUDA error: no kernel image is available for execution on the device\n",
    ),
)
