"""The optimizers in fp64, written from the papers' equations and independently of the package."""

from __future__ import annotations

import itertools
import math

import torch


def adam(p, g, m, v, *, lr, step, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True):
    """Kingma & Ba 2015, algorithm 1 (its bias-corrected moments spelt out); decoupled: Loshchilov & Hutter 2019."""
    if not decoupled:
        g = g + weight_decay * p
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
    decay = lr * weight_decay * p if decoupled else 0.0
    return p - decay - lr * m_hat / (v_hat.sqrt() + eps), m, v


def lion(p, g, m, *, lr, betas=(0.9, 0.99), weight_decay=0.0):
    """Chen et al. 2023, algorithm 2."""
    update = torch.sign(betas[0] * m + (1 - betas[0]) * g)
    return p - lr * (update + weight_decay * p), betas[1] * m + (1 - betas[1]) * g


def sgd(p, g, b, *, lr, step, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0):
    """torch.optim.SGD's documented algorithm."""
    g = g + weight_decay * p
    if b is not None:
        b = g if step == 1 else momentum * b + (1 - dampening) * g
        g = g + momentum * b if nesterov else b
    return p - lr * g, b


def lamb(p, g, m, v, bounds, *, lr, step, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, trust=(0.01, 10.0)):
    """You et al. 2020, algorithm 2, with DeepSpeed's place of the bias correction and its clamp of the trust ratio."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    u = m / (v.sqrt() + eps) + weight_decay * p
    p = p.clone()
    for begin, end in itertools.pairwise(bounds):
        weight, update = p[begin:end].norm().item(), u[begin:end].norm().item()
        ratio = min(max(weight / update, trust[0]), trust[1]) if weight and update else 1.0
        p[begin:end] -= lr * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step) * ratio * u[begin:end]
    return p, m, v
