"""Slow, obvious versions of lookups and updates, in plain loops over nested lists."""

import torch


def pooled_reference(weight, bags, *, mean=False, weights=None):
    """``[B, D]``: each bag's rows, weighted, added up and, for a mean, divided by their number."""
    out = []
    for index, bag in enumerate(bags):
        total = torch.zeros(weight.size(1))
        for place, row in enumerate(bag):
            factor = 1.0 if weights is None else weights[index][place]
            total = total + factor * weight[row]
        out.append(total / len(bag) if mean and bag else total)
    return torch.stack(out) if out else torch.zeros(0, weight.size(1))


def row_gradients(weight, bags, grad, *, mean=False, weights=None):
    """Gradient ``[rows, D]`` of a pooled lookup, and the set of rows that the bags touch."""
    result = torch.zeros_like(weight)
    touched = set()
    for index, bag in enumerate(bags):
        for place, row in enumerate(bag):
            factor = 1.0 if weights is None else weights[index][place]
            result[row] += factor * grad[index] / (len(bag) if mean else 1)
            touched.add(row)
    return result, touched


def update_reference(kind, weight, state, gradient, touched, *, lr, eps, weight_decay=0.0):
    """One step of exact SGD, Adagrad or row-wise Adagrad on the touched rows, in place."""
    for row in touched:
        g = gradient[row]
        weight[row] -= lr * weight_decay * weight[row]
        if kind == "exact_sgd":
            weight[row] -= lr * g
        elif kind == "exact_adagrad":
            state[row] += g * g
            weight[row] -= lr * g / (state[row].sqrt() + eps)
        else:
            state[row] += (g * g).mean()
            weight[row] -= lr * g / (state[row].sqrt() + eps)
