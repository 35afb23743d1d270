"""From what a caller has (names, arrays, lists) to `RequestArrays`, checked before sending.

With a schema every name, width and dtype is checked and the features are put in the model's
order.  Without one the mapping's own order is taken as the model's, and only what can be
known is checked: that all parts have the same number of samples and that ids match lengths.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import UserError
from tessera.serving.client.arrays import (
    Array,
    Bags,
    BagsLike,
    GroupArrays,
    RequestArrays,
    Shared,
    SharedArrays,
)
from tessera.serving.package.schema import InputSchema

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def assemble(
    dense: Array | Sequence[Sequence[float]] | None,
    sparse: Mapping[str, BagsLike],
    *,
    shared: Shared | None = None,
    schema: InputSchema | None = None,
) -> RequestArrays:
    """Check the parts of a request and lay them out as they travel.

    Args:
        dense: ``[B, F]`` floats (NaN where a value is missing), or None if the model has none.
        sparse: the bags of each feature that is not in ``shared``.
        shared: ``id_list`` features given once per user.
        schema: the model's inputs; None takes the order of ``sparse`` as it is, features with
            weights forming the ``id_score_list`` group.

    Raises:
        UserError: a name, size or dtype that the model cannot take; nothing was sent.
    """
    if not isinstance(sparse, Mapping):
        raise UserError(
            f"sparse is a {type(sparse).__name__}; give a dictionary of each feature's bags by its name"
        )
    bags = {name: _to_bags(name, given) for name, given in sparse.items()}
    shared_bags = (
        {} if shared is None else {name: _to_bags(name, g) for name, g in shared.features.items()}
    )
    _check_shared_names(bags, shared_bags)
    dense_array = None if dense is None else _dense_array(dense)
    if schema is None:
        id_list = [name for name, bag in bags.items() if bag.weights is None]
        id_score_list = [name for name, bag in bags.items() if bag.weights is not None]
    else:
        _check_against_schema(schema, dense_array, bags, shared_bags)
        id_list = [f.name for f in schema.group("id_list") if f.name not in shared_bags]
        id_score_list = [f.name for f in schema.group("id_score_list")]

    row_index = None if shared is None else _row_index(shared.row_index)
    batch_size = _batch_size(dense_array, bags, row_index)
    shared_arrays = None
    if row_index is not None:
        shared_arrays = _shared_arrays(shared_bags, row_index)
    return RequestArrays(
        batch_size=batch_size,
        dense=dense_array,
        id_list=_join({name: bags[name] for name in id_list}),
        id_score_list=_join({name: bags[name] for name in id_score_list}),
        shared=shared_arrays,
    )


def nearest(name: str, known: Collection[str]) -> str:
    """The end of an error message about an unknown ``name``: the nearest known one, or all."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = ", ".join(sorted(known)[:8]) or "none"
    return f"the model has {shown}{', ...' if len(known) > 8 else ''}"


def _parse_bags(name: str, given: BagsLike) -> Bags:
    if isinstance(given, Bags):
        return given
    if isinstance(given, tuple):
        if len(given) not in (2, 3):
            raise UserError(
                f"feature {name!r}: a tuple of {len(given)} parts;"
                " give (lengths, values) or (lengths, values, weights)"
            )
        return Bags(*(np.asarray(part) for part in given))
    if isinstance(given, np.ndarray):
        if given.ndim not in (1, 2):
            raise UserError(
                f"feature {name!r}: an array of shape {given.shape};"
                " give [B] (one id each), [B, k] (k ids each) or (lengths, values)"
            )
        per_sample = 1 if given.ndim == 1 else given.shape[1]
        return Bags(np.full(given.shape[0], per_sample, dtype=np.int32), given.reshape(-1))
    try:
        return Bags.from_lists(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"feature {name!r}: not one list of integer ids per sample ({error});"
            " a single pair of arrays goes into a tuple (lengths, values)"
        ) from error


def _to_bags(name: str, given: BagsLike) -> Bags:
    """Read any accepted form of one feature; `_join` checks the lengths, of all at once.

    Returns:
        Bags with lengths ``[B]`` and values ``[N]`` of int32 or int64, float32 weights or None.
    """
    bags = _parse_bags(name, given)
    values = _integers(name, "values", bags.values)
    weights = None
    if bags.weights is not None:
        weights = np.asarray(bags.weights)
        if weights.dtype.kind not in "fiu" or weights.ndim != 1:
            raise UserError(
                f"feature {name!r}: weights are {weights.dtype} of shape {weights.shape};"
                " give one float per id"
            )
        if weights.size != values.size:
            raise UserError(
                f"feature {name!r}: {weights.size} weights for {values.size} values;"
                " give one float per id"
            )
        weights = weights.astype(np.float32, copy=False)
    return Bags(_integers(name, "lengths", bags.lengths), values, weights)


def _integers(name: str, part: str, given: Array) -> Array:
    array = np.asarray(given)
    if array.ndim != 1:
        raise UserError(f"feature {name!r}: {part} have shape {array.shape}; they must be flat")
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "i" and size in (4, 8):
        return array
    if array.size == 0 and kind == "f":  # numpy's dtype for an empty list
        return array.astype(np.int64)
    if kind not in "iu":
        raise UserError(f"feature {name!r}: {part} are {array.dtype}; they must be 64-bit integers")
    if kind == "u" and array.size and int(array.max()) > _INT64_MAX:
        raise UserError(
            f"feature {name!r}: {part} hold {int(array.max())}, which does not fit in int64;"
            " if these are 64-bit hashes, send the same bits with .view(numpy.int64)"
        )
    return array.astype(np.int64)


def _dense_array(dense: Any) -> Array:
    try:
        array = np.asarray(dense)
    except ValueError as error:
        raise UserError(f"dense: rows of different widths ({error})") from error
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise UserError(
            f"dense: {array.dtype} of shape {array.shape}; give floats of shape [samples, features]"
        )
    return array.astype(np.float32, copy=False)


def _row_index(row_index: Array) -> Array:
    index = np.asarray(row_index)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise UserError(
            f"shared row_index: {index.dtype} of shape {index.shape}; give one integer per sample"
        )
    return index


def _check_shared_names(bags: Mapping[str, Bags], shared: Mapping[str, Bags]) -> None:
    for name, bag in shared.items():
        if name in bags:
            raise UserError(
                f"feature {name!r} is given both per sample and in shared; give it once"
            )
        if bag.weights is not None:
            raise UserError(f"feature {name!r}: a shared feature cannot have weights")


def _check_against_schema(
    schema: InputSchema,
    dense: Array | None,
    bags: Mapping[str, Bags],
    shared: Mapping[str, Bags],
) -> None:
    _check_dense(schema, dense)
    groups = {feature.name: feature.group for feature in schema.features}
    for name in (*bags, *shared):
        if name not in groups:
            raise UserError(f"feature {name!r} is not in the model; {nearest(name, groups)}")
    for name, group in groups.items():
        if name not in bags and name not in shared:
            raise UserError(
                f"feature {name!r} is missing; a feature without ids is sent as empty bags"
            )
        if name in shared and group != "id_list":
            raise UserError(f"feature {name!r} has weights in the model and cannot be shared")
        if name in bags and (bags[name].weights is not None) != (group == "id_score_list"):
            raise UserError(
                f"feature {name!r} belongs to the model's {group} group and"
                f" {'needs' if group == 'id_score_list' else 'takes no'} weights"
            )


def _check_dense(schema: InputSchema, dense: Array | None) -> None:
    names = schema.dense_features
    width = 0 if dense is None else dense.shape[1]
    if width != len(names):
        raise UserError(f"dense: {width} columns; the model has {len(names)} dense features")
    if dense is not None and schema.dense_missing == "refuse" and bool(np.isnan(dense).any()):
        row, column = np.argwhere(np.isnan(dense))[0]
        raise UserError(
            f"dense: sample {row} has no value for {names[column]!r};"
            " this model does not take missing values"
        )


def _batch_size(dense: Array | None, bags: Mapping[str, Bags], row_index: Array | None) -> int:
    sizes = {f"feature {name!r}": bag.lengths.size for name, bag in bags.items()}
    if dense is not None:
        sizes["dense"] = dense.shape[0]
    if row_index is not None:
        sizes["shared row_index"] = row_index.size
    if not sizes:
        raise UserError("the request is empty: it has neither dense nor sparse features")
    first, batch_size = next(iter(sizes.items()))
    for part, size in sizes.items():
        if size != batch_size:
            raise UserError(f"{part} has {size} samples but {first} has {batch_size}")
    if batch_size == 0:
        raise UserError("the request has 0 samples; send at least 1")
    return batch_size


def _shared_arrays(bags: Mapping[str, Bags], row_index: Array) -> SharedArrays:
    rows = {name: bag.lengths.size for name, bag in bags.items()}
    if not rows:
        raise UserError("shared: no features; leave shared out")
    first, num_rows = next(iter(rows.items()))
    for name, size in rows.items():
        if size != num_rows:
            raise UserError(f"shared feature {name!r} has {size} rows but {first!r} has {num_rows}")
    if row_index.size and not 0 <= int(row_index.min()) <= int(row_index.max()) < num_rows:
        raise UserError(
            f"shared row_index: holds {int(row_index.min())} to {int(row_index.max())};"
            f" the shared features have rows 0 to {num_rows - 1}"
        )
    group = _join(bags)
    assert group is not None
    return SharedArrays(tuple(bags), group, row_index.astype(np.int32, copy=False))


def _join(bags: Mapping[str, Bags]) -> GroupArrays | None:
    """One group, feature-major; its bags have the same number of rows.  None if there are none.

    Lengths are checked here, once for the group: numpy calls cost more than what they do.
    """
    if not bags:
        return None
    lengths = np.concatenate([bag.lengths for bag in bags.values()]).reshape(len(bags), -1)
    _check_lengths(lengths, bags)
    weights = [bag.weights for bag in bags.values() if bag.weights is not None]
    return GroupArrays(
        lengths=lengths.astype(np.int32, copy=False),
        values=np.concatenate([bag.values for bag in bags.values()]),
        weights=np.concatenate(weights) if weights else None,
    )


def _check_lengths(lengths: Array, bags: Mapping[str, Bags]) -> None:
    names = list(bags)
    for wrong, bound in ((lengths < 0, "negative"), (lengths > _INT32_MAX, "so long")):
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise UserError(
                f"feature {names[row]!r}: lengths hold {lengths[row, column]}; none may be {bound}"
            )
    sizes = [bag.values.size for bag in bags.values()]
    totals = lengths.sum(axis=1, dtype=np.int64).tolist()
    for name, size, total in zip(names, sizes, totals, strict=True):
        if size != total:
            raise UserError(f"feature {name!r}: lengths sum to {total} but there are {size} values")
    if sum(sizes) > _INT32_MAX:
        raise UserError(f"{sum(sizes)} ids; one request holds at most {_INT32_MAX}")
