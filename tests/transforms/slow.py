"""Transforms as plain loops over rows and columns: what the modules must agree with.

A batch is a list of rows; a row is ``(dense values, {feature: list of ids})``.
"""

import math
from bisect import bisect_right

import numpy as np
import torch

MASK = 2**64 - 1


def fmix(value):
    value &= MASK
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = ((value ^ (value >> 33)) * multiplier) & MASK
    return value ^ (value >> 33)


def signed(value):
    value &= MASK
    return value - 2**64 if value >= 2**63 else value


def joined(ids):
    """The 64-bit key of several ids."""
    key = fmix(ids[0])
    for one in ids[1:]:
        key = fmix(key ^ (one & MASK))
    return signed(key)


def f32(value):
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def log1p(value):
    return math.nan if math.isnan(value) else f32(math.copysign(math.log1p(abs(value)), value))


def clip(value, low, high):
    return value if math.isnan(value) else min(max(value, f32(low)), f32(high))


def missing(value, fill):
    return f32(fill) if math.isnan(value) else value


def log_odds(value, total, added):
    rest, some = total - value + added, value + added
    if math.isnan(rest) or math.isnan(some) or rest == 0:
        return math.nan
    odds = some / rest
    return f32(math.log(odds)) if odds > 0 else math.nan


def bucket(value, bounds):
    return bisect_right(bounds, value)


def bounds_of(values, buckets):
    known = sorted(value for value in values if not math.isnan(value))
    return [known[k * len(known) // buckets] for k in range(1, buckets)]


def vocabulary(bags, min_count, max_size):
    counts = {}
    for bag in bags:
        for one in bag:
            counts[one] = counts.get(one, 0) + 1
    order = sorted((-count, one) for one, count in counts.items() if count >= min_count)
    kept = sorted(one for _, one in order[:max_size])
    return {one: place + 1 for place, one in enumerate(kept)}


def fold_of(row, folds):
    return fmix(row) % folds


def statistic(rows, key, label, smoothing, *, own_row=None, folds=5):
    """Mean and count of ``rows`` = [(row number, key or None, label)] as one row is shown them."""
    prior = sum(y for _, _, y in rows) / len(rows)
    others = [
        y
        for number, other, y in rows
        if other == key
        and key is not None
        and (own_row is None or fold_of(number, folds) != fold_of(own_row, folds))
    ]
    weight = len(others) + smoothing
    mean = (sum(others) + smoothing * prior) / weight if weight > 0 else prior
    count = len(others) * (folds / (folds - 1) if own_row is not None else 1)
    return mean, math.log1p(count), label


def same_bits(left, right):
    """Whether two float tensors hold the same values, NaN like NaN."""
    return torch.equal(torch.nan_to_num(left, nan=1234.5), torch.nan_to_num(right, nan=1234.5))
