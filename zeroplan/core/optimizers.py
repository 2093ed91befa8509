"""The optimizer table: one row an optimizer, and the only place where an optimizer's name means anything.

Planner, readers of config files, engines and the included runtime all read a row, so a new optimizer is a new row
(docs/extending.md). The classes of a row are in :mod:`zeroplan.core.optimizer_row`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.optimizer_row import (
    SCALED_BLOCK,
    SCALED_BLOCK_4BIT,
    DeepSpeedType,
    Domain,
    Optimizer,
    RuntimeKernel,
    State,
    TorchClass,
)

_EXP_AVG, _EXP_AVG_SQ = State(Buffer.OPTIM_EXP_AVG, 1), State(Buffer.OPTIM_EXP_AVG_SQ, 1)
_ADAM = (_EXP_AVG, _EXP_AVG_SQ)
_ADAM_LIKE = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_ADAM_DEFAULTS = {**_ADAM_LIKE, "bias_correction": True}
_MAXIMIZE = {"maximize": False}  # which all of torch's own have
_TORCHS_ADAM = {**_ADAM_DEFAULTS, **_MAXIMIZE, "amsgrad": False}
_ADAM_KERNEL = RuntimeKernel("adamw", _TORCHS_ADAM, decoupled="adamw")
_AMSGRAD = (*_ADAM, State(Buffer.OPTIM_MAX_EXP_AVG_SQ, 1))
_AMSGRAD_KERNEL = RuntimeKernel("amsgrad", _TORCHS_ADAM, decoupled="adamw", temporaries=2)
_SGD_KERNEL = RuntimeKernel(
    "sgd", {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, **_MAXIMIZE}
)
_SQUARE_AVG = State(Buffer.OPTIM_EXP_AVG_SQ, 1, key="square_avg")
_GRAD_AVG = State(Buffer.OPTIM_EXP_AVG, 1, key="grad_avg")
_MOMENTUM = State(Buffer.OPTIM_MOMENTUM, 1, key="momentum_buffer")
_TORCHS_FLAGS = ("foreach", "maximize", "capturable", "differentiable", "fused")
#: Of DeepSpeed's FusedAdam and DeepSpeedCPUAdam, of torch's Adam, and what DeepSpeed's engine takes out before it makes one.
_TAKEN_BY_ADAM = (
    *("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "set_grad_none"),
    *("torch_adam", "adam_w_mode", "fp32_optimizer_states"),
    *_TORCHS_FLAGS,
)
#: The first DeepSpeed without runtime/fp16/onebit.
_ONE_BIT_UNTIL = (0, 19, 7)
_RMSPROP_KERNEL = RuntimeKernel(
    "rmsprop",
    {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False, **_MAXIMIZE},
    temporaries=2,
)

_ROWS = (
    Optimizer(
        "adamw",
        _ADAM,
        "Loshchilov & Hutter 2019, algorithm 2",
        aliases=(
            "fusedadam",
            "deepspeedcpuadam",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_torch_xla",
            "adamw_torch_npu_fused",
            "adamw_apex_fused",
            "adamw_hf",
            "paged_adamw",
            "paged_adamw_32bit",
            "pagedadamw",
            "pagedadamw32bit",
            "optimi_adamw",
        ),
        deepspeed=(
            DeepSpeedType("AdamW", own=True, fused=True, adam=True, torch_adam=True, tested=True, takes=_TAKEN_BY_ADAM),
            DeepSpeedType("MuAdam", own=True),
            DeepSpeedType("MuAdamW", own=True),
        ),
        torch=TorchClass("AdamW", fused=True),
        runtime=_ADAM_KERNEL,
        eight_bit="adamw8bit",
        variants={"amsgrad": "adamw_amsgrad"},
    ),
    Optimizer(
        "adam",
        _ADAM,
        "Kingma & Ba 2015, algorithm 1",
        # DeepSpeed's Adam decays weights as AdamW does, unless adam_w_mode is false.
        deepspeed=(
            DeepSpeedType(
                "Adam", own=True, becomes="adamw", fused=True, adam=True, torch_adam=True, tested=True, takes=_TAKEN_BY_ADAM
            ),
        ),
        torch=TorchClass("Adam", fused=True),
        runtime=_ADAM_KERNEL,
        variants={"amsgrad": "adam_amsgrad"},
    ),
    Optimizer(
        "adamw_amsgrad",
        _AMSGRAD,
        "Reddi et al. 2018, algorithm 2; torch/optim/adamw.py",
        torch=TorchClass("AdamW", fused=True, params={"amsgrad": True}),
        runtime=_AMSGRAD_KERNEL,
    ),
    Optimizer(
        "adam_amsgrad",
        _AMSGRAD,
        "Reddi et al. 2018, algorithm 2; torch/optim/adam.py",
        torch=TorchClass("Adam", fused=True, params={"amsgrad": True}),
        runtime=_AMSGRAD_KERNEL,
    ),
    Optimizer(
        "adamw8bit",
        (  # bitsandbytes keeps one fp32 scale for every 256 elements of each 8-bit state
            State(Buffer.OPTIM_EXP_AVG, numerator=1),
            State(Buffer.OPTIM_EXP_AVG_SQ, numerator=1),
            State(Buffer.OPTIM_SCALE, numerator=8, denominator=SCALED_BLOCK),
        ),
        "Dettmers et al. 2022, section 2; bitsandbytes blocksize 256",
        aliases=("adam8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "pagedadamw8bit", "8bit-adam"),
        runtime=RuntimeKernel("adamw8bit", _ADAM_DEFAULTS, bits=8, block=SCALED_BLOCK, type="AdamW8bit"),
        least_8bit=4096,
        optim="adamw_bnb_8bit",
    ),
    Optimizer(
        "adamw4bit",
        (  # two elements a byte; one fp32 scale for every 128 elements of each state
            State(Buffer.OPTIM_EXP_AVG, numerator=1, denominator=2),
            State(Buffer.OPTIM_EXP_AVG_SQ, numerator=1, denominator=2),
            State(Buffer.OPTIM_SCALE, numerator=8, denominator=SCALED_BLOCK_4BIT),
        ),
        "Li et al. 2023, section 4",
        aliases=("adamw_4bit",),
        runtime=RuntimeKernel("adamw4bit", _ADAM_DEFAULTS, bits=4, block=SCALED_BLOCK_4BIT, type="AdamW4bit"),
    ),
    Optimizer(
        "lamb",
        _ADAM,
        "You et al. 2020, algorithm 2",
        aliases=("fusedlamb",),
        deepspeed=(
            DeepSpeedType(
                "Lamb",
                own=True,
                fused=True,
                dynamic_scale=True,
                takes=(
                    *("lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_grad_norm"),
                    *("max_coeff", "min_coeff", "amsgrad"),
                ),
            ),
        ),
        runtime=RuntimeKernel(
            "lamb",
            {**_ADAM_DEFAULTS, "min_coeff": 0.01, "max_coeff": 10.0},
            kernel_names={"min_coeff": "min_trust", "max_coeff": "max_trust"},
            takes_norms=True,
        ),
    ),
    Optimizer(
        "onebitadam",
        (*_ADAM, State(Buffer.OPTIM_ERROR_FEEDBACK, 1)),
        "Tang et al. 2021, algorithm 1",
        aliases=("1bitadam", "1-bit-adam"),
        deepspeed=(DeepSpeedType("OneBitAdam", until=_ONE_BIT_UNTIL),),
        runtime=RuntimeKernel(
            "adamw", {**_ADAM_DEFAULTS, "freeze_step": 100_000}, exchange=("freeze_step",), type="OneBitAdam"
        ),
    ),
    Optimizer(
        "zerooneadam",
        (*_ADAM, State(Buffer.OPTIM_ERROR_FEEDBACK, 1), State(Buffer.OPTIM_MOMENTUM, 1, key="momentum_accumulator")),
        "Lu et al. 2022, algorithm 1",
        aliases=("01adam", "0/1-adam", "zero-one-adam"),
        deepspeed=(DeepSpeedType("ZeroOneAdam", until=_ONE_BIT_UNTIL),),
        runtime=RuntimeKernel(
            "adamw",
            {
                **_ADAM_DEFAULTS,
                "var_freeze_step": 100_000,
                "var_update_scaler": 16,
                "local_step_scaler": 32_678,
                "local_step_clipper": 1,
            },
            exchange=("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
            type="ZeroOneAdam",
            leaves_out=(Buffer.OPTIM_MOMENTUM,),
        ),
    ),
    Optimizer(
        "onebitlamb",
        # A second moment that stays, and a fresh one that tells how far it is off.
        (*_ADAM, State(Buffer.OPTIM_EXP_AVG_SQ_FRESH, 1), State(Buffer.OPTIM_ERROR_FEEDBACK, 1)),
        "Li et al. 2021, algorithm 1",
        aliases=("1bitlamb", "1-bit-lamb"),
        deepspeed=(DeepSpeedType("OneBitLamb", until=_ONE_BIT_UNTIL),),
        runtime=RuntimeKernel(
            "onebit_lamb",
            {
                **_ADAM_DEFAULTS,
                "freeze_step": 100_000,
                "min_coeff": 0.01,
                "max_coeff": 10.0,
                "coeff_beta": 0.9,
                "factor_max": 4.0,
                "factor_min": 0.5,
                "factor_threshold": 0.1,
            },
            kernel_names={"min_coeff": "min_trust", "max_coeff": "max_trust"},
            temporaries=2,
            takes_norms=True,
            coefficients=2,
            exchange=("freeze_step",),
            type="OneBitLamb",
        ),
    ),
    Optimizer(
        "lion",
        (_EXP_AVG,),
        "Chen et al. 2023, algorithm 2",
        aliases=("fusedlion", "deepspeedcpulion", "lion_32bit", "paged_lion_32bit", "lion_pytorch"),
        deepspeed=(
            DeepSpeedType(
                "Lion",
                own=True,
                fused=True,
                tested=True,
                host_states=(Buffer.OPTIM_EXP_AVG_SQ,),  # never read; ops/lion/cpu_lion.py
                takes=("lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"),
            ),
        ),
        runtime=RuntimeKernel("lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
    ),
    Optimizer(
        "adagrad",
        (State(Buffer.OPTIM_SUM, 1),),
        "Duchi et al. 2011",
        deepspeed=(DeepSpeedType("Adagrad", own=True, tested=True),),
        torch=TorchClass("Adagrad", states_when_built=True, foreach_lists=2),
        runtime=RuntimeKernel(
            "adagrad",
            {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, **_MAXIMIZE},
            temporaries=2,
        ),
    ),
    Optimizer(
        "adafactor",
        (State(Buffer.OPTIM_FACTORED, 1, key="variance", factored=True),),
        "Shazeer & Stern 2018, algorithm 4; torch/optim/_adafactor.py",
        deepspeed=(DeepSpeedType("Adafactor"),),
        torch=TorchClass("Adafactor"),
    ),
    Optimizer(
        "adafactor_transformers",
        (State(Buffer.OPTIM_FACTORED, 1, factored=True, element=4),),
        "Shazeer & Stern 2018, algorithm 4; transformers/optimization.py, with the arguments that the Trainer gives it",
        steps_one_by_one=True,
        optim="adafactor",
    ),
    Optimizer(
        "muon",
        (
            State(Buffer.OPTIM_MOMENTUM, 1, domain=Domain.MATRIX, key="momentum_buffer"),
            State(Buffer.OPTIM_EXP_AVG, 1, domain=Domain.REST),
            State(Buffer.OPTIM_EXP_AVG_SQ, 1, domain=Domain.REST),
        ),
        "Jordan et al. 2024; embeddings, head and vectors are left to Adam",
        deepspeed=(DeepSpeedType("Muon", own=True, torch_adam=True, tested=True, splits=True),),
        torch=TorchClass("Muon", counts_steps=False, foreach_lists=0),
        rest="adamw",
    ),
    Optimizer(
        "nadam",
        _ADAM,
        "Dozat 2016; torch/optim/nadam.py",
        deepspeed=(DeepSpeedType("NAdam"),),
        torch=TorchClass("NAdam", decay_lists=1),
        runtime=RuntimeKernel(
            "nadam",
            {**_ADAM_LIKE, "lr": 2e-3, "momentum_decay": 4e-3, "decoupled_weight_decay": False, **_MAXIMIZE},
            carried="mu_product",
            temporaries=2,
        ),
    ),
    Optimizer(
        "radam",
        _ADAM,
        "Liu et al. 2020; torch/optim/radam.py",
        deepspeed=(DeepSpeedType("RAdam"),),
        torch=TorchClass("RAdam"),
        runtime=RuntimeKernel("radam", {**_ADAM_LIKE, "decoupled_weight_decay": False, **_MAXIMIZE}, temporaries=2),
    ),
    Optimizer(
        "adamax",
        (_EXP_AVG, State(Buffer.OPTIM_EXP_AVG_SQ, 1, key="exp_inf")),
        "Kingma & Ba 2015, algorithm 2; torch/optim/adamax.py",
        deepspeed=(DeepSpeedType("Adamax"),),
        torch=TorchClass("Adamax"),
        runtime=RuntimeKernel("adamax", {**_ADAM_LIKE, "lr": 2e-3, **_MAXIMIZE}, temporaries=2),
    ),
    Optimizer(
        "rmsprop",
        (_SQUARE_AVG,),
        "Hinton 2012, lecture 6e; torch/optim/rmsprop.py",
        deepspeed=(DeepSpeedType("RMSprop"),),
        torch=TorchClass("RMSprop", decay_lists=1),
        runtime=_RMSPROP_KERNEL,
        variants={"momentum": "rmsprop_momentum", "centered": "rmsprop_centered"},
    ),
    Optimizer(
        "rmsprop_momentum",
        (_SQUARE_AVG, _MOMENTUM),
        "torch/optim/rmsprop.py",
        deepspeed=(DeepSpeedType("RMSprop", params={"momentum": 0.9}),),
        torch=TorchClass("RMSprop", decay_lists=1, params={"momentum": 0.9}),
        runtime=_RMSPROP_KERNEL,
        variants={"centered": "rmsprop_centered_momentum"},
    ),
    Optimizer(
        "rmsprop_centered",
        (_SQUARE_AVG, _GRAD_AVG),
        "Graves 2013, equations 38 to 45; torch/optim/rmsprop.py",
        deepspeed=(DeepSpeedType("RMSprop", params={"centered": True}),),
        torch=TorchClass("RMSprop", decay_lists=1, params={"centered": True}),
        runtime=_RMSPROP_KERNEL,
        variants={"momentum": "rmsprop_centered_momentum"},
    ),
    Optimizer(
        "rmsprop_centered_momentum",
        (_SQUARE_AVG, _MOMENTUM, _GRAD_AVG),
        "Graves 2013, equations 38 to 45; torch/optim/rmsprop.py",
        deepspeed=(DeepSpeedType("RMSprop", params={"momentum": 0.9, "centered": True}),),
        torch=TorchClass("RMSprop", decay_lists=1, params={"momentum": 0.9, "centered": True}),
        runtime=_RMSPROP_KERNEL,
    ),
    Optimizer(
        "adadelta",
        (_SQUARE_AVG, State(Buffer.OPTIM_SUM, 1, key="acc_delta")),
        "Zeiler 2012; torch/optim/adadelta.py",
        deepspeed=(DeepSpeedType("Adadelta"),),
        torch=TorchClass("Adadelta", foreach_lists=2, decay_lists=1),
        runtime=RuntimeKernel(
            "adadelta", {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, **_MAXIMIZE}, temporaries=2
        ),
    ),
    Optimizer(
        "asgd",
        (State(Buffer.OPTIM_AVERAGE, 1, key="ax"),),
        "Polyak & Juditsky 1992; torch/optim/asgd.py",
        deepspeed=(DeepSpeedType("ASGD"),),
        torch=TorchClass("ASGD"),
        runtime=RuntimeKernel(
            "asgd",
            {"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0, **_MAXIMIZE},
            carried="eta",
            temporaries=2,
        ),
    ),
    Optimizer(
        "rprop",
        (State(Buffer.OPTIM_PREVIOUS_GRAD, 1, key="prev"), State(Buffer.OPTIM_STEP_SIZE, 1)),
        "Riedmiller & Braun 1993; torch/optim/rprop.py",
        deepspeed=(DeepSpeedType("Rprop"),),
        torch=TorchClass("Rprop", selects=True),
        runtime=RuntimeKernel(
            "rprop", {"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), **_MAXIMIZE}, temporaries=2
        ),
    ),
    Optimizer(
        "sgd",
        (),
        "Robbins & Monro 1951",
        deepspeed=(DeepSpeedType("SGD"), DeepSpeedType("MuSGD", own=True)),
        torch=TorchClass("SGD", fused=True, counts_steps=False, foreach_lists=0, decay_lists=1),
        runtime=_SGD_KERNEL,
        variants={"momentum": "sgd_momentum"},
    ),
    Optimizer(
        "sgd_momentum",
        (_MOMENTUM,),
        "Polyak 1964",
        aliases=("sgdm",),
        deepspeed=(DeepSpeedType("SGD", params={"momentum": 0.9}),),
        torch=TorchClass(
            "SGD",
            fused=True,
            counts_steps=False,
            foreach_lists=0,
            decay_lists=1,
            clones_gradients=True,
            params={"momentum": 0.9},
        ),
        runtime=_SGD_KERNEL,
    ),
)

#: The rows by name, in the order in which they are shown.
OPTIMIZERS: dict[str, Optimizer] = {row.name: row for row in _ROWS}

_BY_NAME = {name: row for row in _ROWS for name in (row.name, *row.aliases)}


def find_optimizer(name: str, *, where: str = "--optimizer") -> Optimizer:
    """Return the optimizer's row by its name, in any case, or by one of its other names.

    Raises:
        BadInput: for a name that is not modelled, with the reason; for an unknown one, with the nearest names.
    """
    key = name.strip().lower()
    found = _BY_NAME.get(key)
    if found is None:
        from zeroplan.core.unmodelled_optimizers import unmodelled_optimizer

        if other := unmodelled_optimizer(key):
            raise BadInput(f"{key!r} is not modelled: {other.why}", where=where, remedy=f"use one of {', '.join(OPTIMIZERS)}")
        near = did_you_mean(key, OPTIMIZERS)
        raise BadInput(f"unknown optimizer {name[:60]!r}", where=where, remedy=near or f"use one of {', '.join(OPTIMIZERS)}")
    return found


def known_optimizer(name: str) -> str:
    """The row's name for any of an optimizer's names; the name itself, in lower case, where no row has it."""
    found = _BY_NAME.get(name.strip().lower())
    return name.strip().lower() if found is None else found.name


def _types() -> Iterable[tuple[Optimizer, DeepSpeedType]]:
    return ((row, one) for row in _ROWS for one in row.deepspeed)


#: Names of ``optimizer.type`` that DeepSpeed matches itself, in lower case.
DEEPSPEED_OPTIMIZERS = frozenset(one.type.lower() for _, one in _types() if one.own)


def torch_optimizers() -> frozenset[str]:
    """The classes of ``torch.optim``, which DeepSpeed takes by their exact names."""
    from zeroplan.core.unmodelled_optimizers import UNMODELLED

    modelled = (row.torch.name for row in _ROWS if row.torch is not None)
    return frozenset([*modelled, *(group.torch for group in UNMODELLED if group.torch)])


def torch_row(name: str) -> Optimizer | None:
    """The first row of a class of ``torch.optim``; None where no row has it."""
    return next((row for row in _ROWS if row.torch is not None and row.torch.name == name), None)


def why_no_kernel(name: str) -> str:
    """Why the included runtime cannot step a class of ``torch.optim``, as one clause."""
    from zeroplan.core.unmodelled_optimizers import UNMODELLED

    whole = "its update of one element depends on others of the same tensor, of which a rank has a part"
    return next((group.why for group in UNMODELLED if group.torch == name), whole)


def deepspeed_type(type_: str) -> DeepSpeedType | None:
    """Return the optimizer that DeepSpeed builds for a value of ``optimizer.type``; None where no row has it."""
    return next((one for _, one in _types() if one.matches(type_)), None)


def variant_of(row: Optimizer, hyper: Mapping[str, Any]) -> Optimizer:
    """The row that holds for `row` with these hyperparameters, some of which add states."""
    for key, name in row.variants.items():
        if hyper.get(key):
            return variant_of(OPTIMIZERS[name], hyper)
    return row


def optimizer_of_type(type_: str, hyper: Mapping[str, Any] | None = None) -> Optimizer | None:
    """The row that a value of ``optimizer.type`` means with these ``optimizer.params``.

    None where no row has it.
    """
    for row, one in _types():
        if one.matches(type_):
            return variant_of(OPTIMIZERS[one.becomes or row.name], hyper or {})
    return None


def runtime_type(name: str) -> str:
    """The value of ``optimizer.type`` that only the included runtime takes for a row; empty for any other row."""
    kernel = find_optimizer(name).runtime
    return "" if kernel is None else kernel.type


#: A row without states, for a run that steps nothing.
STATELESS = "sgd"
#: What the included runtime can step, by the ``optimizer.type`` of a ds_config in lower case.
RUNTIME_OPTIMIZERS: dict[str, Optimizer] = {}
for _row in _ROWS:
    if _row.runtime is not None:
        for _type in (_row.runtime.type, "" if _row.written is None else _row.written.type):
            if _type:
                RUNTIME_OPTIMIZERS.setdefault(_type.lower(), _row)
#: The names of all rows that the included runtime can step, in alphabetical order.
RUNTIME_NAMES = tuple(sorted(row.name for row in _ROWS if row.runtime is not None))
