"""Megatron-LM's own training: its setup runs, and its resolved arguments are planned as those of a launch script are.

The package here has Megatron's names, and as much behind them as its setup shows of itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroplan import estimate
from zeroplan.capturing.answer import CapturedRun, answer
from zeroplan.capturing.kept import keep, kept_run
from zeroplan.capturing.result import Captured, as_data, of_data
from zeroplan.capturing.run import capture_command
from zeroplan.core.cluster import Cluster
from zeroplan.run.ask import Ask

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_ranks")

FILES = {
    "megatron/__init__.py": "",
    "megatron/core/__init__.py": "",
    "megatron/core/utils.py": """
class PkgVersion(tuple):
    def __new__(cls, text):
        return tuple(map(int, text.split(".")))
def get_te_version():
    return None
""",
    "megatron/core/parallel_state.py": """
def initialize_model_parallel(*_, **__):
    pass
def get_pipeline_model_parallel_rank():
    return 0
""",
    "megatron/training/__init__.py": "from megatron.training.training import pretrain\n",
    "megatron/training/arguments.py": """
import enum, os, torch
from megatron.core.utils import get_te_version
class Backend(enum.Enum):
    auto, flash = 1, 2
def add_megatron_arguments(parser):
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings",
                 "micro-batch-size", "global-batch-size", "vocab-size", "ffn-hidden-size", "kv-channels", "encoder-num-layers"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-query-groups", type=int, default=1)
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--main-grads-dtype", default="fp32")
    parser.add_argument("--attention-backend", type=lambda word: Backend[word], default=Backend.auto)
    parser.add_argument("--no-masked-softmax-fusion", action="store_false", dest="masked_softmax_fusion")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    for name in ("bf16", "swiglu", "group-query-attention", "use-distributed-optimizer", "untie-embeddings-and-output-weights"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser
def validate_args(args, defaults):
    assert get_te_version() >= (2, 9, 0)
    assert int(os.environ["WORLD_SIZE"]) % args.tensor_model_parallel_size == 0, "world size"
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    args.encoder_num_layers, args.main_grads_dtype = args.num_layers, torch.float32
    args.make_vocab_size_divisible_by = 128
""",
    "megatron/training/global_vars.py": """
from types import SimpleNamespace
def build_tokenizer(args):
    if args.tokenizer_type != "NullTokenizer":
        raise FileNotFoundError("no vocabulary")
    whole = 128 * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // whole) * whole
    return SimpleNamespace(vocab_size=args.vocab_size)
""",
    "megatron/training/training.py": """
import argparse, torch
from megatron.core import parallel_state
from megatron.training import arguments, global_vars
def setup_model_and_optimizer(built):
    return [torch.nn.Linear(1, built, bias=False, device="cuda")], None, None
def build_train_valid_test_data_iterators(rows):
    if not rows:
        raise FileNotFoundError("data.idx")
    return iter([{"tokens": torch.zeros(rows, 64, dtype=torch.long)}]), None, None
def pretrain(built, rows):
    args = arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args()
    arguments.validate_args(args, {})
    torch.distributed.init_process_group("nccl")
    torch.distributed.new_group([0, 1], backend="gloo")
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    torch.cuda.default_generators[0].set_state(torch.cuda.random.get_rng_state(device="cuda"))
    assert global_vars.build_tokenizer(args).vocab_size and args.transformer_impl == "local"
    setup_model_and_optimizer(built)
    build_train_valid_test_data_iterators(rows)
    raise AssertionError("the loop is entered")
""",
}
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --bf16 "
    "--vocab-size 500 --micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2 --use-distributed-optimizer "
    "--disable-bias-linear --no-masked-softmax-fusion --attention-backend flash"
)
#: Parameters of a tensor-parallel rank of that model: the words and positions, two layers, the last norm.
BUILT = 512 // 2 * 64 + 64 * 64 + 2 * (4 * 64 * 64 // 2 + 2 * 4 * 64 * 64 // 2 + 4 * 64) + 2 * 64


def captured_run(tmp_path: Path, built: int = BUILT, rows: int = 2, words: str = "") -> tuple[Captured, CapturedRun]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(f"from megatron.training import pretrain\npretrain({built}, {rows})\n")
    command = ["torchrun", "--nproc_per_node", "8", str(script), *(words or f"{MODEL} --tokenizer-type NullTokenizer").split()]
    captured, cluster = capture_command(command, Cluster.of(gpu="H100"))
    captured = of_data(json.loads(json.dumps(as_data(captured))), "a file")
    return captured, answer(captured, cluster)


def left_out(run: CapturedRun) -> dict[str, str]:
    return {one.key: one.says for one in run.report.plans[0].unmodelled}


def test_the_resolved_arguments_are_planned_as_a_launch_script(tmp_path: Path) -> None:
    captured, run = captured_run(tmp_path)
    assert captured.stopped is None, captured.stopped
    assert (captured.way, captured.engine["built"]) == ("engine", BUILT)
    said = captured.engine["arguments"]
    assert said["attention_backend"] == "flash"
    assert said["padded_vocab_size"] == 512
    assert said["disable_bias_linear"] is said["no_masked_softmax_fusion"] is True
    assert "main_grads_dtype" not in said
    assert "encoder_num_layers" not in said
    plan = run.report.plans[0]
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} --padded-vocab-size 512\n")
    read = estimate(files=[str(tmp_path / "run.sh")], gpu="H100")[0]
    assert plan.gpu.peak_allocated == read.gpu.peak_allocated
    assert [one.key for one in plan.unmodelled] == [one.key for one in read.unmodelled]
    assert run.report.workload["batches"] == "a batch that was drawn has 2 × 64 tokens"
    keep(run, captured, str(tmp_path / "capture.json"))
    kept = kept_run(Ask(files=(str(tmp_path / "capture.json"),)))
    assert kept is not None
    assert kept.report.plans[0].gpu == plan.gpu


@pytest.mark.parametrize(("built", "rows", "key", "says"), [
    (BUILT + 8, 2, "model", f"setup builds {BUILT + 8:,} parameters on this rank, the arguments describe {BUILT:,}"),
    (BUILT, 3, "batch", "a batch that was drawn has 3 × 64 tokens, the arguments say [2, 64]"),
])  # fmt: skip
def test_what_setup_makes_of_another_shape_leaves_the_verdict_open(
    tmp_path: Path, built: int, rows: int, key: str, says: str
) -> None:
    _, run = captured_run(tmp_path, built, rows)
    assert left_out(run)[key] == says
    assert run.report.plans[0].fits is None


def test_data_and_a_tokenizer_that_are_missing_are_said(tmp_path: Path) -> None:
    captured, run = captured_run(tmp_path, rows=0, words=f"{MODEL} --tokenizer-type HuggingFaceTokenizer")
    assert captured.stopped is None, captured.stopped
    assert "padded_vocab_size" not in captured.engine["arguments"]
    assert any("500 words are counted" in note for note in captured.notes)
    assert any("the data are not read (FileNotFoundError: data.idx)" in note for note in captured.notes)
    assert "model" not in left_out(run)


def test_arguments_that_megatron_refuses_stop_there(tmp_path: Path) -> None:
    captured, run = captured_run(tmp_path, words=MODEL.replace("parallel-size 2", "parallel-size 3"))
    assert captured.stopped is not None
    assert "world size" in captured.stopped.why
    assert run.report.plans[0].fits is None


def test_a_script_that_sets_up_the_core_itself_stops_by_name(tmp_path: Path) -> None:
    captured_run(tmp_path)
    (tmp_path / "own.py").write_text("from megatron.core import parallel_state\nparallel_state.initialize_model_parallel(2)\n")
    captured, _ = capture_command(["torchrun", "--nproc_per_node", "8", str(tmp_path / "own.py")], Cluster.of(gpu="H100"))
    assert captured.stopped is not None
    assert captured.stopped.line == 2
    assert "--engine megatron" in captured.stopped.why
