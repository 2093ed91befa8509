"""Optimizer updates, gradient norms and casts of flat buffers, and a cross entropy: by CUDA kernels, CPU routines or torch.

Public: :func:`adamw`, :func:`adamw_blockwise`, :func:`lamb`, :func:`lion`, :func:`sgd`, :func:`grad_norm`, :func:`squares`,
:func:`global_norm`, :func:`cast`, :func:`sign_pack`, :func:`sign_average`, :func:`sign_unpack`, :func:`frozen_adam`,
:data:`UPDATES`, :data:`CARRIED`, :func:`cross_entropy`, :func:`cross_entropy_grad`, :func:`backend_report`.
"""

from zeroplan_runtime.kernels.backends import backend_report
from zeroplan_runtime.kernels.block_quantisation import BlockFormat, Map, block_format, decode, encode, map_words
from zeroplan_runtime.kernels.elementwise import CARRIED
from zeroplan_runtime.kernels.functional import adamw, adamw_blockwise, cast, global_norm, grad_norm, lamb, lion, sgd, squares
from zeroplan_runtime.kernels.loss import cross_entropy, cross_entropy_grad
from zeroplan_runtime.kernels.one_bit import frozen_adam, sign_average, sign_pack, sign_unpack
from zeroplan_runtime.kernels.one_bit_lamb import FactorLimits, frozen_lamb
from zeroplan_runtime.kernels.optimizers import UPDATES
from zeroplan_runtime.kernels.segments import SegmentWorkspace, TensorSegments, make_segments
from zeroplan_runtime.kernels.update import FACTOR, NORM, ORDER, SKIP, SQUARES

__all__ = [
    "CARRIED",
    "FACTOR",
    "NORM",
    "ORDER",
    "SKIP",
    "SQUARES",
    "UPDATES",
    "BlockFormat",
    "FactorLimits",
    "Map",
    "SegmentWorkspace",
    "TensorSegments",
    "adamw",
    "adamw_blockwise",
    "backend_report",
    "block_format",
    "cast",
    "cross_entropy",
    "cross_entropy_grad",
    "decode",
    "encode",
    "frozen_adam",
    "frozen_lamb",
    "global_norm",
    "grad_norm",
    "lamb",
    "lion",
    "make_segments",
    "map_words",
    "sgd",
    "sign_average",
    "sign_pack",
    "sign_unpack",
    "squares",
]
