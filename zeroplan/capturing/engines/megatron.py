"""Megatron-LM's own training (``megatron.training``): its arguments as it resolved them, and the model that its setup builds.

Its setup runs as it is on the rank of the capture: arguments are validated, process groups are made, model, gradient buffers
and optimizer are built, and a batch is drawn. The training loop is not entered: its schedule over the model that the arguments
describe is the planner's, and the resolved arguments are read as those of a launch script are. What setup built must agree:
another number of parameters, or a batch of another shape, leaves the verdict open.

Layers of TransformerEngine have the parameters of Megatron's local ones, by which the model is built where it is not installed.

Source: Megatron-LM core_v0.16.1 and of August 2026, ``megatron/training/arguments.py``, ``initialize.py``, ``training.py``,
``megatron/core/models/gpt/gpt_layer_specs.py``.
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zeroplan.capturing.ending import EndedError
from zeroplan.capturing.hooks.imports import when_imported
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import user_line
from zeroplan.interop.programs.megatron_lm import MegatronLm, known_words

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture

_ENGINE = "transformer_engine"
#: The release of TransformerEngine that is planned, which the arguments' checks ask for.
_ENGINE_VERSION = "2.9.0"
#: Arguments that choose kernels and change no parameter, as they are where none of theirs is installed.
_WITHOUT_ENGINE = {
    "transformer_impl": "local", "no_persist_layer_norm": True, "fp8": None, "fp4": None, "recompute_granularity": None,
    "recompute_method": None, "recompute_num_layers": None,
    **dict.fromkeys((
        "apply_rope_fusion", "gradient_accumulation_fusion", "tp_comm_overlap", "fp8_param_gather", "moe_permute_fusion",
        "moe_router_fusion", "moe_grouped_gemm", "cross_entropy_loss_fusion", "delay_wgrad_compute", "apply_layernorm_1p",
        "layernorm_zero_centered_gamma", "use_precision_aware_optimizer",
    ), False),
}  # fmt: skip
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: What works where a script sets Megatron's core up in a way of its own: no stand-in knows its parts.
MEGATRON = (
    "a setup of Megatron's core by the script itself is not captured: zeroplan estimate plans its model, --engine megatron"
)


class MegatronSetup:
    """What one script tells Megatron.

    Args:
        capture: the capture.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.parser: Any = None

    def install(self) -> None:
        """Wait for Megatron's modules."""
        when_imported("megatron.core.utils", self._engine_version)
        when_imported("megatron.training.arguments", self._arguments)
        when_imported("megatron.training.global_vars", self._tokenizer)
        when_imported("megatron.training.training", self._training)
        for name in ("megatron.initialize", "megatron.core.parallel_state"):
            when_imported(name, self._refuse)
        for name, function in (("core.datasets.utils", "compile_helpers"), ("legacy.fused_kernels", "load")):
            when_imported(f"megatron.{name}", partial(_without, function))

    def _engine_version(self, module: Any) -> None:
        if importlib.util.find_spec(_ENGINE) is None and hasattr(module, "get_te_version"):
            version = module.PkgVersion(_ENGINE_VERSION)
            module.get_te_version = lambda: version

    def _refuse(self, module: Any) -> None:
        """Stop an older Megatron, or a script that uses ``megatron.core`` alone, where it sets up."""

        def guarded(own: Any) -> Any:
            def starts(*given: Any, **named: Any) -> Any:
                if self.capture.resolved is None:
                    raise StoppedError(MEGATRON, user_line())
                return own(*given, **named)

            return starts

        for name in ("initialize_megatron", "initialize_model_parallel"):
            if hasattr(module, name):
                setattr(module, name, guarded(getattr(module, name)))

    def _arguments(self, module: Any) -> None:
        own_parser, own = module.add_megatron_arguments, module.validate_args

        def add_megatron_arguments(parser: argparse.ArgumentParser) -> Any:
            self.parser = own_parser(parser)
            return self.parser

        def validate_args(args: Any, *given: Any, **named: Any) -> Any:
            parsed = dict(vars(args))
            found = own(args, *given, **named)
            args = args if found is None else found
            words = said_by(self.parser, parsed, vars(args))
            self.capture.resolved = {"engine": "megatron", "line": str(user_line() or ""), "arguments": words, "said": {}}
            if importlib.util.find_spec(_ENGINE) is None:  # from here on, for the model that is built
                for name, value in _WITHOUT_ENGINE.items():
                    if hasattr(args, name):
                        setattr(args, name, value)
            return found

        module.add_megatron_arguments, module.validate_args = add_megatron_arguments, validate_args

    def _tokenizer(self, module: Any) -> None:
        """Let a tokenizer that is missing have the words that are planned."""
        own = module.build_tokenizer

        def build_tokenizer(args: Any, *given: Any, **named: Any) -> Any:
            try:
                found = own(args, *given, **named)
                self.capture.resolved["arguments"]["padded_vocab_size"] = args.padded_vocab_size
                return found
            except StoppedError:
                raise
            except Exception as error:  # each kind of tokenizer misses its files in its own way
                words = known_words(self.capture.resolved["arguments"])
                says = f"the tokenizer cannot be made ({type(error).__name__}): {words:,} words are counted"
                self.capture.invented["tokenizer"] = says
                whole = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
                args.padded_vocab_size = -(-words // whole) * whole
                return SimpleNamespace(vocab_size=words, eod=0, eos=0, bos=0, pad=0, unique_identifiers={})

        module.build_tokenizer = build_tokenizer

    def _training(self, module: Any) -> None:
        own_setup, own_data = module.setup_model_and_optimizer, module.build_train_valid_test_data_iterators

        def setup_model_and_optimizer(*given: Any, **named: Any) -> Any:
            found = own_setup(*given, **named)
            chunks = found[0]
            count = sum(p.numel() for chunk in chunks for p in chunk.parameters())
            self.capture.resolved |= {"built": count, "pp_rank": self._pipeline_rank()}
            return found

        def build_train_valid_test_data_iterators(*given: Any, **named: Any) -> Any:
            try:
                self._batch(own_data(*given, **named)[0])
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                self.capture.invented["data"] = f"the data are not read ({why}): each sample is of the arguments' length"
            raise EndedError(None)

        module.setup_model_and_optimizer = setup_model_and_optimizer
        module.build_train_valid_test_data_iterators = build_train_valid_test_data_iterators

    def _pipeline_rank(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_pipeline_model_parallel_rank())

    def _batch(self, iterator: Any) -> None:
        """Draw one, which is of the arguments' shape or leaves the verdict open."""
        if iterator is None:  # another rank of its group draws
            return
        iterator = iterator[0] if isinstance(iterator, list) else iterator
        tokens = next(iterator)["tokens"]
        said = self.capture.resolved["arguments"]
        wanted = [said.get("micro_batch_size"), said.get("seq_length")]
        if list(tokens.shape) == wanted:
            self.capture.workload["batches"] = f"a batch that was drawn has {wanted[0]} × {wanted[1]} tokens"
        else:
            says = f"a batch that was drawn has {' × '.join(map(str, tokens.shape))} tokens, the arguments say {wanted}"
            self.capture.resolved["differs"] = says


def _without(function: str, module: Any) -> None:
    """Let a function that compiles something do nothing."""
    setattr(module, function, lambda *_: None)


def said_by(parser: argparse.ArgumentParser, parsed: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command line that says what a run's arguments are: each option that the script gives, as Megatron resolved it,
    and each that the reader asks for, whatever the default. What Megatron derives besides follows from these.

    Args:
        parser: Megatron's, with the script's own arguments.
        parsed, resolved: the arguments before and behind their validation.
    """
    found: dict[str, Any] = {}
    for action in parser._actions:
        if not action.option_strings or action.dest not in resolved:
            continue
        name = action.option_strings[0].lstrip("-").replace("-", "_")
        value = resolved[action.dest]
        if isinstance(action, argparse._StoreFalseAction):  # --no-… says that what is on by default is off
            if not value and action.default:
                found[name] = True
        elif value is not None and (parsed.get(action.dest) != action.default or MegatronLm.reads(name)):
            found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Return a value as a command line has it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)
