"""The tables' optimizers once more, a row at a time in float64, from their papers' formulas."""

import math

import torch

STATES = {
    "exact_sgd": "",
    "exact_adagrad": "m",
    "exact_row_wise_adagrad": "r",
    "adam": "mm",
    "partial_row_wise_adam": "mr",
    "lamb": "mm",
    "partial_row_wise_lamb": "mr",
    "lars_sgd": "m",
    "lion": "m",
}
"""Per optimizer its states: m one number per weight, r one per row."""


def new_states(kind, rows, cols):
    return [
        torch.zeros(rows, cols if letter == "m" else 1, dtype=torch.float64)
        for letter in STATES[kind]
    ]


def update_row(kind, w, g, states, *, step, lr, eps=1e-8, weight_decay=0.0, l2=False, **more):
    """One step on one row; ``w``, ``g`` ``[D]`` float64, states ``[D]`` or ``[1]``; in place."""
    beta1 = more.get("beta1", 0.9)
    beta2 = more.get("beta2", 0.99 if kind == "lion" else 0.999)
    if l2:
        g, weight_decay = g + weight_decay * w, 0.0
    before = w.clone()
    if kind == "exact_sgd":
        w -= lr * (g + weight_decay * before)
    elif kind == "exact_adagrad":
        states[0] += g**2
        w -= lr * (g / (states[0] ** 0.5 + eps) + weight_decay * before)
    elif kind == "exact_row_wise_adagrad":
        states[0] += sum(x**2 for x in g.tolist()) / len(g)
        w -= lr * (g / (math.sqrt(float(states[0])) + eps) + weight_decay * before)
    elif kind == "lars_sgd":
        norms = float(before.norm()), float(g.norm())
        below = norms[1] + weight_decay * norms[0]
        rate = lr * more.get("eta", 0.001) * norms[0] / below if below else 0.0
        states[0][:] = more.get("momentum", 0.9) * states[0] + rate * (g + weight_decay * before)
        w -= states[0]
    elif kind == "lion":
        way = torch.sign(beta1 * states[0] + (1 - beta1) * g)
        states[0][:] = beta2 * states[0] + (1 - beta2) * g
        w -= lr * (way + weight_decay * before)
    else:
        states[0][:] = beta1 * states[0] + (1 - beta1) * g
        square = (g**2).mean() if kind.startswith("partial") else g**2
        states[1][:] = beta2 * states[1] + (1 - beta2) * square
        way = states[0] / (1 - beta1**step)
        way = way / ((states[1] / (1 - beta2**step)) ** 0.5 + eps) + weight_decay * before
        if "lamb" in kind:
            way = way * (before.norm() / way.norm() if float(way.norm()) else 0.0)
        w -= lr * way
