"""How kernels come to be: sources that compile everywhere, the cubin cache, the choice of a backend, the threads."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.patience import PATIENCE
from zeroplan.core.one_bit import message_words
from zeroplan_runtime.kernels import (
    backends,
    cuda_backend,
    float8,
    functional,
    layer_cuda,
    loss,
    make_segments,
    native_backend,
    nvrtc,
    one_bit,
    torch_backend,
)
from zeroplan_runtime.kernels.block_quantisation import block_format
from zeroplan_runtime.kernels.philox import Dropout

ARCHITECTURES = (75, 80, 90, 100)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("file", sorted(path.name for path in nvrtc.sources().glob("*.cu")))
def test_sources_compile_for_every_architecture(file, tmp_path):
    """And without a warning."""
    command = ["nvcc", "-std=c++17", "-fmad=false", "-Werror", "all-warnings", "--threads", "2", "-fatbin"]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    command += ["-DZP_GRAD=zp::bf16", "-DZP_OUT=zp::fp16", "-DZP_VEC=8"]
    target = tmp_path / "out.fatbin"
    done = subprocess.run(
        [*command, "-o", str(target), str(nvrtc.sources() / file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 0


class Compiler:
    """Stands in for NVRTC: counts calls, gives different code for different input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls = 0
        self.lock = threading.Lock()
        monkeypatch.setenv(nvrtc.ENVIRONMENT, str(folder))
        monkeypatch.setattr(nvrtc, "compile_source", self)
        monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
        monkeypatch.setattr(nvrtc, "core", lambda: torch)
        monkeypatch.setattr(nvrtc, "_load", self.load)

    def __call__(self, file, macros, arch) -> bytes:
        with self.lock:
            self.calls += 1
        return f"good {file} {macros} {arch}".encode()

    def load(self, code: bytes, name: str) -> str:
        if not code.startswith(b"good"):
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        return f"{name} of {code.decode()}"


MACROS = (("ZP_GRAD", "float"),)


def test_a_kernel_is_compiled_once(monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch, tmp_path / "not" / "there yet")
    made = {nvrtc.kernel("adam.cu", "zp_adam", MACROS, "sm_90") for _ in range(3)}
    assert made == {f"zp_adam of good adam.cu {MACROS} sm_90"}
    assert compiler.calls == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_all_that_decides_the_code_is_in_its_name(monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch, tmp_path)
    wanted = itertools.product(("adam.cu", "lion.cu"), (MACROS, (("ZP_GRAD", "zp::bf16"),)), ("sm_80", "sm_90"))
    made = [nvrtc.kernel(file, "k", macros, arch) for file, macros, arch in wanted]
    assert len(set(made)) == compiler.calls == 8
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 1))
    nvrtc.kernel("adam.cu", "k", MACROS, "sm_90")
    assert compiler.calls == 9
    copy = tmp_path / "sources"
    shutil.copytree(nvrtc.sources(), copy)
    monkeypatch.setattr(nvrtc, "sources", lambda: copy)
    nvrtc.kernel("adam.cu", "k", MACROS, "sm_90")
    assert compiler.calls == 9
    with (copy / "common.cuh").open("a") as file:
        file.write("// changed\n")
    nvrtc.kernel("adam.cu", "k", MACROS, "sm_90")
    assert compiler.calls == 10


def test_a_damaged_file_is_replaced(monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch, tmp_path)
    want = nvrtc.kernel("adam.cu", "k", MACROS, "sm_90")
    (kept,) = tmp_path.glob("*.cubin")
    kept.write_bytes(b"torn")
    assert nvrtc.kernel("adam.cu", "k", MACROS, "sm_90") == want
    assert compiler.calls == 2
    assert kept.read_bytes().startswith(b"good")


@pytest.mark.parametrize("folder", ["", "a file/below"])
def test_without_a_place_to_write_kernels_still_compile(monkeypatch, tmp_path, folder):
    (tmp_path / "a file").write_text("")
    compiler = Compiler(monkeypatch, tmp_path)
    monkeypatch.setenv(nvrtc.ENVIRONMENT, folder and str(tmp_path / folder))
    assert nvrtc.kernel("adam.cu", "k", MACROS, "sm_90").startswith("k of good")
    assert compiler.calls == 1


def test_ranks_that_start_together_compile_once(monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch, tmp_path)
    ranks = [threading.Thread(target=nvrtc.kernel, args=("adam.cu", "k", MACROS, "sm_90")) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert compiler.calls == 1


def test_head_is_where_all_tensors_align():
    room = torch.zeros(64)
    halves = torch.zeros(64, dtype=torch.bfloat16)
    first, half = (-room.data_ptr() % 64) // 4, (-halves.data_ptr() % 64) // 2
    assert cuda_backend._head(4, room[first:], halves[half:]) == 0
    assert cuda_backend._head(4, room[first + 1 :], halves[half + 1 :]) == 3
    assert cuda_backend._head(8, room[first + 5 :], halves[half + 5 :]) == 3
    assert cuda_backend._head(4, room[first + 1 : first + 11], halves[half + 2 : half + 12]) == 10  # never together
    assert cuda_backend._head(4, room[first + 1 : first + 3]) == 2
    assert cuda_backend._head(4, room[:0]) == 0


def test_environment_keeps_to_torch(monkeypatch):
    monkeypatch.setenv(backends.ENVIRONMENT, "torch")
    assert functional.backend(torch.device("cpu")) is torch_backend
    assert backends.backend_report()[0] == {"device": "cpu", "backend": "torch", "reason": "ZEROPLAN_KERNELS=torch"}


def test_report_says_what_is_in_use(monkeypatch):
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    (cpu, *_gpus) = backends.backend_report()
    if native_backend.library() is None:
        assert cpu["backend"] == "torch"
        assert "libzeroplan_cpu" in cpu["reason"]
    else:
        assert cpu["backend"] == "native"
        assert native_backend.instructions() in cpu["reason"]


def test_without_the_library_torch_serves(monkeypatch):
    monkeypatch.delenv(backends.ENVIRONMENT, raising=False)
    monkeypatch.setattr(native_backend, "library", lambda: None)
    assert backends.backend(torch.device("cpu")) is torch_backend


@pytest.mark.gpu
def test_the_kernels_are_in_use_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    row = backends.backend_report()[1]
    assert row["backend"] == "cuda", row["reason"]
    assert "NVRTC" in row["reason"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_threads_survive_a_fork(fresh_python):
    """The child has none of its parent's threads, and must not wait for them."""
    if native_backend.library() is None:
        pytest.skip("libzeroplan_cpu is not built")
    code = """
import ctypes, os
from zeroplan.core.plumbing.native import library
sum_of_squares = library().zeroplan_sum_of_squares
sum_of_squares.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int]
sum_of_squares.restype = ctypes.c_double
n = 1 << 20
values = (ctypes.c_float * n)(*([1.0] * n))
assert sum_of_squares(values, 0, n, 4) == n
child = os.fork()
if child == 0:
    os._exit(0 if sum_of_squares(values, 0, n, 4) == n else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = fresh_python(code)
    assert done.stdout.strip() == "0", done.stderr


class Recorder:
    """Stands in for cuda.core where there is no GPU: keeps what would be launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[str, int, tuple[object, ...]]] = []
        monkeypatch.setattr(nvrtc, "core", lambda: self)
        monkeypatch.setattr(cuda_backend, "_kernel", lambda _device, _file, name, *_rest: name)
        monkeypatch.setattr(cuda_backend, "_launch_config", lambda blocks, threads: blocks * threads)
        monkeypatch.setattr(cuda_backend, "_stream", lambda handle: handle)
        monkeypatch.setattr(cuda_backend, "_multiprocessors", lambda _device: 4)
        monkeypatch.setattr(cuda_backend, "_index", lambda _device: 0)
        monkeypatch.setattr(
            cuda_backend, "_workspace", lambda _device: torch.zeros(cuda_backend.WORKSPACE_BYTES, dtype=torch.uint8)
        )
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=7))
        monkeypatch.setattr(functional, "backend", lambda _device: cuda_backend)
        monkeypatch.setattr(loss, "backend", lambda _device: cuda_backend)
        monkeypatch.setattr(float8, "backend", lambda _device: cuda_backend)
        monkeypatch.setattr(one_bit, "backend", lambda _device: cuda_backend)

    def launch(self, _stream, threads, kernel, *arguments) -> None:
        self.launches.append((kernel, threads, arguments))


def test_arguments_are_those_of_the_sources(monkeypatch):
    """Each launch passes as many arguments as its kernel declares, of their sizes, and covers the buffer."""
    recorder = Recorder(monkeypatch)
    n = 5000
    p, m, v = torch.ones(n), torch.ones(n), torch.ones(n)
    g, out, scalars = torch.ones(n).bfloat16(), torch.ones(n).bfloat16(), torch.zeros(16)
    functional.adamw(p, g, m, v, lr=0.1, step=1, param_out=out, scalars=scalars)
    codes, scales = torch.zeros(4864, dtype=torch.uint8), torch.zeros(38)
    functional.adamw_blockwise(
        p[:4864], g[:4864], codes, codes, scales, block_format(8, 256), lr=0.1, step=1, param_out=out[:4864], scalars=scalars
    )
    functional.lion(p, g, m, lr=0.1, param_out=out)
    functional.sgd(p, g, None, lr=0.1)
    functional.lamb(p, g, m, v, make_segments([0, 17, n], "cpu"), lr=0.1, step=1, param_out=out)
    functional.grad_norm([g, m], scalars, max_norm=1.0)
    functional.cast(p, out)
    labels = torch.zeros(4, dtype=torch.int64)
    lse, _ = loss.cross_entropy(g.view(4, -1), labels)
    loss.cross_entropy_grad(g.view(4, -1), labels, lse, scalars[:1])
    float8.widen_messages(torch.zeros(2, 48, dtype=torch.uint8), out[:64])
    float8.turned(torch.zeros(80, 32, dtype=torch.float8_e5m2))
    flat, messages = torch.ones(2 * 64 * 200), torch.zeros(2 * message_words(64 * 200))
    one_bit.sign_pack(flat, flat.bfloat16(), flat, messages, ranks=2, beta1=0.9, scalars=scalars)
    one_bit.sign_average(messages, flat[: 64 * 200], messages[: message_words(64 * 200)], ranks=2)
    one_bit.sign_unpack(messages, flat, ranks=2)
    one_bit.frozen_adam(p, m, v, lr=0.1, step=2, second_step=1, param_out=out)
    rows, column, rstd = torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16(), torch.ones(4)
    dropout, partial = Dropout(0.1, torch.tensor([7])), torch.zeros(2, 3 * 64)
    layer_cuda.drop(rows, dropout, rows)
    layer_cuda.add_norm(rows, column, rows, dropout, (column, column, 1e-5), rows, (rows, rstd, rstd))
    layer_cuda.norm_backward(rows, None, rows, None, rstd, (column, None), dropout, (rows, None), (column, column), partial)
    layer_cuda.add_backward(rows, dropout, rows, (column,), partial)
    layer_cuda.bias_gelu(rows, column, "tanh", rows)
    layer_cuda.bias_gelu_backward(rows, rows, column, "none", column, partial)
    declared = {}
    for path in nvrtc.sources().glob("*.cu"):
        for name, parameters in re.findall(r"__global__[^{;]*?(zp_\w+)\(([^)]*)\)", path.read_text(), re.S):
            declared[name] = [p.split() for p in parameters.split(",")]
    launched = [name for name, _, _ in recorder.launches]
    assert set(launched) == set(declared)
    sizes = {"float": ctypes.c_float, "double": ctypes.c_double, "int": ctypes.c_int, "unsigned": ctypes.c_uint32}
    for name, threads, arguments in recorder.launches:
        assert len(arguments) == len(declared[name]), name
        for words, argument in zip(declared[name], arguments, strict=True):
            pointer = any("*" in word for word in words)
            want = int if pointer or "long" in words else sizes[words[0]]
            assert type(argument) is want, f"{name}: {words} is given {argument!r}"
        if name in ("zp_adam", "zp_lion", "zp_sgd", "zp_cast", "zp_frozen_adam"):
            assert threads * cuda_backend.KERNEL_CONFIGS[name[3:]].vector * cuda_backend.KERNEL_CONFIGS[name[3:]].unroll >= n
        if name == "zp_widen_float8":  # 32 elements of each of two ranks, 16 a thread
            assert threads == 2 * 256
        if name == "zp_turn_float8":  # two tiles of 64 × 64
            assert threads == 2 * 256
        if name.startswith("zp_sign"):  # a thread block of 1024 for each scale of each chunk
            assert threads == 1024 * 2 * (1 if name == "zp_sign_average" else 2)
