"""The operators ``torch.ops.tessera.*``: loading, shapes for tracing, and one door for Python.

Shapes: ``F`` features, ``B`` samples, ``N`` ids, ``D`` dimension, ``T = F`` vectors per sample.

``lookup(weights, plan, indices, lengths, width, ...) -> [B, width]``
    Pools the rows of every bag of every feature in one pass.
``lookup_out(weights, plan, indices, lengths, out, ...) -> ()``
    The same into the caller's ``out`` [B, width]; columns that no feature writes stay as they are.
``lookup_shared(weights, plan, indices, lengths, sample_rows, out, ...) -> ()``
    For bags that several samples share, as candidates share a user: ``lengths`` describe ``U`` bags
    a feature, each is looked up once, and row ``b`` of ``out`` [B, width] gets the vectors of bags
    number ``sample_rows[b]``.  Other columns stay as they are.
``lookup_partly_shared(weights, plan, indices, lengths, shared, sample_rows, width, ...)``
    ``[B, width]`` float32 of features of which some are shared: ``shared`` says which, those have
    ``U`` bags each and the others ``B``, and ``lengths`` has them feature by feature.  CPU only.
``lookup_rows(weights, plan, indices, lengths, width, ...) -> [N, width]``
    The row of each id, without pooling; every feature is ``width`` wide.
``dot_interaction(dense [B, D], sparse [B, F * D], upper) -> [B, D + F (F + 1) / 2]``
    DLRM's interaction, float32: the dense vector, then the dot product of every pair of the
    ``F + 1`` vectors: ``(1,0), (2,0), (2,1), ...``, or ``(0,1), (0,2), ...`` with ``upper``.
``lookup_dot_interaction(weights, plan, indices, lengths, dense, ...)``
    Both, float32; feature ``f``'s vector is number ``f + 1``, whatever its ``out_column``.  On the
    CPU, and on a GPU for bags of about one id with ``launch``, pooled vectors never reach memory.
``linear(input [B, K], weights [P, K, W], bias [P * W], outputs, relu) -> [B, outputs]``
    A dense layer, float32, of weights that `tessera.kernels.linear.pack_linear` laid out; a row's
    bits do not depend on the others.  CPU only.
``linear_bf16(input [B, K], weights [G, C, 16, 32], bias [G * 16], outputs, relu) -> [B, outputs]``
    The same with bfloat16 weights of `tessera.kernels.linear.pack_linear_bf16`; the input is rounded
    to bfloat16, sums, bias and output are float32.  A row's bits depend neither on the others
    nor, on x86, on the instruction set.  CPU only.
``cross_layer(x0 [B, N], x [B, N], v [B, K], weight [N, K], bias [N]) -> [B, N]``
    ``x0 * (v weight' + bias) + x``, all bfloat16.  Products are summed in float32 and the result is
    rounded once; on GPUs that are not of compute capability 9.0, or where K is over 512 or not a
    multiple of 64 or N not one of 32, the layer's output is rounded as well.
``linear_fp8(input [B, K], weight [N, K], bias [N] or None, scales [8], relu, dtype) -> [B, N]``
    ``scales[0] * scales[4] * input weight' + bias`` of float8_e4m3fn numbers, with a ReLU where it is
    wanted, as float8_e4m3fn (the default) or bfloat16.  The bias is bfloat16; on GPUs of compute
    capability below 8.9, or where K or N is not a multiple of 16, the product is rounded to it as well.
``cross_layer_fp8(x0 [B, N], x [B, N], v [B, K], weight [N, K], bias [N], scales [8]) -> [B, N]``
    ``x0 * (scales[0] * v weight' + bias) + scales[4] * x`` of float8_e4m3fn numbers but for the bfloat16
    bias.  On GPUs that are not of compute capability 9.0, or where K is over 512 or not a multiple of
    128 or N not one of 64, the layer's output is rounded to bfloat16.
``linear_thin(input [B, K], weight [N, K], bias [N], relu, dtype, scale) -> [B, N]``
    A dense layer of fewer than 16 inputs or outputs, computed in float32 from a float32 or bfloat16
    input; float32 (the default), bfloat16, or float8_e4m3fn of the result times ``scale``.
``dot_interaction_bf16(dense [B, D], sparse [B, F * D]) -> [B, D + F (F + 1) / 2]``
    DLRM's interaction of contiguous bfloat16 vectors, in the order of `dot_interaction` without ``upper``, for training:
    ``F`` is 1 to 31, ``D`` a multiple of 8 up to 4,096.  Products are summed in float32 and rounded once.
``dot_interaction_bf16_backward(grad, dense, sparse) -> (dense's, sparse's)``
    Its gradients, from that of its result; each is summed in float32 and rounded once.
``relu_backward_bf16(grad [B, N], output [B, N]) -> ([B, N], [N])``
    ``grad`` where ``output``, which a ReLU gave, is not 0, bfloat16, and its float32 sum over the rows; ``N`` is a
    multiple of 8.  No graph of a package calls these three.
``rows_of_ids(ids [N], offsets [F * B + 1], rows [F], rules [F], outside [F]) -> [N]``
    The rows of a batch's ids, feature by feature, int64: ``rules`` and ``outside`` hold an `IdRule` and an `OutOfRange` of
    `tessera.kernels.plan` for each feature; of `OutOfRange.ZERO` it gives -1.  ``ids`` and ``offsets`` are int32 or int64.
    No graph of a package calls it, nor the next one.
``unpack_rows(words [B, W], present, first, features, count) -> ([F * B], [F * B + 1], [count])``
    Lengths, offsets and int64 ids, feature by feature, of rows of int32 words: bit ``f`` of a row's word ``present`` says
    whether the id of feature ``f`` is there, which is its word ``first + f`` read as an unsigned number.  ``count`` is how
    many are there in all; the CPU refuses another number, and the host does not wait for a GPU, which writes no more.
``pack_rows(table [R, W], rows [n], out [n, W], present, features, ends [k]) -> k numbers``
    Copies rows of int32 words into ``out``, for ``k`` batches of which number ``i`` ends before place ``ends[i]``, and says how
    many ids are there in each (see ``unpack_rows``).  One call for what a loader's thread does to several batches:
    it holds no lock of the interpreter.  CPU only.
``dense_steps(values [B, F], steps [S, F, 3]) -> [B, F]``
    float32 values after ``S`` steps of `tessera.kernels.dense_steps.Step`; ``steps`` is float64: by step
    and column the kind and its two settings.  A value's bits do not depend on the others.  A GPU, which the host does not
    wait for, takes an unknown kind as none.
``xxh64(bytes [n], offsets [k + 1]) -> [k]``
    The id of each of ``k`` strings, int64: XXH64 with seed 0 of its bytes, which for text are UTF-8.
    ``bytes`` is uint8, ``offsets`` int32 or int64: string ``i`` is ``bytes[offsets[i] : offsets[i + 1]]``.
    CPU only.
``find_ids(identities [Z], ids [n], sizes [b], firsts [b], first_row, range, divides, reserved, probes) -> [n]``
    The rows of ids in a hash-based map, int64.  `tessera.training.modules.hash_places` says what the arguments mean.  An
    id whose bucket is not here is an error on the CPU, and on a GPU one of row -1.  No graph of a package calls it.
``learn_ids(identities, ids, ..., probes, last_hours [Z], hours [n], hour, now, oldest, let_in [n]) -> ([n], [E])``
    `find_ids` after new ids got rows; and the rows that another id had before, on a GPU with -1 between them.
    ``identities`` and ``last_hours`` change.  The host does not wait for a GPU.  No graph of a package calls it.
``exchange_rows(storage [bytes], rows [n], values [n, width], offset, stride)``
    The bytes of row ``r`` of a table, ``storage[offset + r * stride :][:width]``, change places with those of
    ``values``, uint8 both; ``rows`` is int64 or int32, strictly ascending.  No graph of a package may call it.  CPU only.
``exchange_rows_of(storages, rows, values, offsets, strides)``
    `exchange_rows` of one after the other in one call, which changes nothing where any of them would be refused.
    No graph of a package may call it.  CPU only.
``restore_rows(storages, rows, values, offsets, strides, threads)``
    The same bytes of rows become those of ``values``, which do not change: what `exchange_rows_of` one after the other with
    these arguments leaves in the storages.  Several commits are taken back so, in an order that memory is fast in and on
    ``threads`` threads at most.  No graph of a package may call it.  CPU only.
``touch_rows_of(storages, rows, values, offsets, strides)``
    Changes no byte, but has the pages of the rows that `exchange_rows_of` with the same arguments will exchange written to and
    the rows in the caches, so that it takes less time; others may read the storages meanwhile.  No graph of a package
    may call it.  CPU only.
``touch_rows_aside(storages, rows, values, offsets, strides, share, seconds)``
    `touch_rows_of`, and the pages of ``values`` as well, with pauses so that the calling thread uses ``share`` of one CPU
    at most; there are no pauses after ``seconds``.  No graph of a package may call it.  CPU only.
``overlay_make(storages, rows, values, offsets, strides) -> int``
    The number of an overlay of the rows that `exchange_rows_of` with these arguments would exchange, at least one of each table:
    lookups of the storages can read the new rows where they are staged until the tables have them, so that no lookup
    has to wait while they are written.  It copies nothing yet.  Raises ``RuntimeError`` where rows of one storage lie
    within others.  No graph of a package may call this operator, or the next ones.  CPU only.
``overlay_keep(overlay) -> bool``
    Before `overlay_show`, beside lookups: copies the new rows, and to where they were in ``values`` those of the tables, which must not
    change from then on.  It does a piece of some 100 microseconds, and says whether there is more.
``overlay_make_aside(storages, rows, values, offsets, strides, share, seconds) -> int``
    `overlay_make` and all of `overlay_keep`, on a thread that runs while CPUs have nothing else to do, and that uses ``share`` of
    one CPU at most until ``seconds`` are over.
``overlay_show(overlay)``, ``overlay_take_back(overlay)``, ``overlay_drop(overlay)``
    From now on lookups read the new rows; from now on they read what the tables had, which gets back what was written;
    the overlay ends.  To be called while no lookup of the storages runs.
``overlay_show_beside(overlay)``, ``overlay_look_up_to(overlay)``, ``overlay_fits(overlay) -> bool``
    The first is `overlay_show` beside lookups of threads that see older overlays alone: those that have called the second
    with a smaller number (it holds for the calling thread until it is called again; numbers rise, and 0 is below all).  The
    rows may be written, and taken back, once nobody looks up to an older one, or nobody to this one.  A lookup under whose
    plan rows cannot be laid, as its scales lie apart, raises ``RuntimeError`` meanwhile; then the third gives False.
``overlay_write(overlay) -> bool``, ``overlay_write_aside(overlay, share, seconds)``
    After `overlay_show`, beside lookups: the tables get the new rows, the first a piece of them, the second all as `overlay_make_aside` works.
    Afterwards lookups read the tables, and ``values`` hold what undoes it.
``read_aside(out [bytes], descriptor, offset, share)``
    Reads ``bytes`` bytes (uint8) of an open file from ``offset``, on a thread that runs while CPUs have nothing else to do,
    or on the calling one where they always have, with pauses so that it uses ``share`` of one CPU at most.  Raises
    ``RuntimeError`` where the file ends before.  No graph of a package may call it.  CPU only.
``page_marks(memory [bytes]) -> [pages] int16``, ``take_back_pages(memory [bytes], marks) -> bool``
    Of memory (uint8) that begins where a page of 4,096 bytes does, and is to be left to the system (``MADV_FREE``): a byte of each page
    that tells whether the page is still there.  The second takes the memory back from the system by writing to each page,
    the last one as a whole, and says whether it has all of its content.  Both pause between pieces of 4 MiB.  No graph of a
    package may call them.  CPU only.
``table_batch(dense, dense_present, ids, ids_present, list_..., first, rows, weighted)``
    Rows ``first`` to ``first + rows - 1`` of a table's columns as a batch, ``B = rows``: dense values ``[B, D]``
    (NaN where missing), lengths ``[F * B]`` int32 and ids ``[N]`` int64 feature after feature (those of one
    id first), and with ``weighted`` the ids' weights ``[N]``, 1 where a feature has none.  ``dense`` are float32
    vectors and ``ids`` int64 ones; each has a bitmap as Arrow has them, empty where no row lacks a value.  A feature
    with lists has ``list_values[i]``, ``list_weights[i]`` (empty: none), ``list_starts[i]`` and
    ``list_lengths[i]`` (int32): a row's ids are ``values[start : start + length]``.  CPU only.
``table_interleave(dense, dense_present, ids, ids_present, rows, dense_out, ids_out, masks_out)``
    The columns' ``rows`` (None: all), one row after the other: into ``[n, D]``, ``[n, S]`` int64 and ``[n, S / 64]``
    int64 rounded up, whose bits say which features have an id, the first in the lowest.  CPU only.
``table_batch_at(dense [n, D], ids [n, S], masks, list_..., rows [B], weighted)``
    The batch of `table_batch` of any rows of what `table_interleave` wrote.  CPU only.

Arguments:
    weights: uint8 ``[bytes]``, all tables (`tessera.kernels.tables.pack_tables`).
    plan: int64 ``[F, PLAN_COLUMNS]`` on the same device (`tessera.kernels.tables.make_plan`).
    indices: int32 or int64 ``[N]``, feature-major: raw ids where the plan hashes them.
    lengths: int32 or int64 ``[F * B]``; with ``offsets=True`` instead ``[F * B + 1]`` bag starts.
    id_weights: float32 ``[N]``, a factor per id; None: one.
    sample_rows: int32 or int64 ``[B]``, each in ``[0, U)``.
    shared: bool, one per feature; features beyond its end are not shared.
    dense: ``[B, G]`` of the output's dtype, copied to columns ``[0, G)`` by `lookup`.
    outside: int64 ``[F]``; ids outside their table are added to it.
    dtype: float32 (default), float16 or bfloat16; in `lookup` also float8_e4m3fn.
    scale: what a float8_e4m3fn result is multiplied by before it is rounded; 1 for other types.  ``dense``
        comes with it.  Beyond the largest number of that type, 448, results become that.
    launch: `launch_hint` of the plan; lets a GPU start a kernel made for its tables.  Values never
        depend on it.

Columns that no feature and no ``dense`` writes are uninitialised in `lookup`.  On the CPU sizes,
lengths and the plan are checked in each call (`RuntimeError` names the argument).  On a GPU a
check of values would wait for the device: there an id or length that is wrong can give a wrong
vector but never a read outside the buffers; the plan must come from `make_plan`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.kernels.plan import IdRule, OutOfRange, PlanRow, Pooling, ScaleType, plan_rows
from tessera.kernels.row_types import kernel_types

LIBRARY = "tessera_ops"


_WARP_THREADS = 32
_BLOCK_THREADS = 128
_BLOCK_PARTS = 2048
_COLUMNS_OF_16_BYTES = 8
"""A thread of a GPU writes as many columns of 16 bits at once."""


def _columns_per_thread(kernel_number: int) -> int:
    """The columns of a row that a GPU thread reads at once: 16, or 16 bytes."""
    (bits,) = (kind.bits for kind in kernel_types() if kind.kernel_number == kernel_number)
    return min(16, 128 // bits)


def launch_hint(plan: Tensor, *, shares: bool = True) -> int:
    """What a GPU launch has to know of a plan before it can read it there.

    Bits 0 to 7: the number of threads that the widest bag takes, 1 to 128.  Bits 8 to 15: 0 where
    the features differ in kind or an id may have no row; 1 where all have one weight type and one
    scale per table or none; 2 the same with float16 scales per row or few rows; 3 the same with
    books of scales.  Bits 16 to 23: that weight type.  Bit 24: all features are summed and have
    one width, which fills the threads of bits 0 to 7, a power of two.  Bit 25: not every id is a
    row, clamped.  Bit 26: a row of every feature is read by as many threads.  Bit 27: some
    feature's columns of the output begin or end between multiples of eight.  Bit 28: widths differ,
    and a row of the last quarter of the features is more than half as wide as the widest.  Bits 32
    to 59: what a bag of every feature takes of a block of 128 threads that holds whole groups, in
    2048ths.

    Without ``shares`` the bits from 26 on are 0 and bits 0 to 7 at most 32.  A package for CPUs,
    which has no use for either, so keeps the bytes that it had before they came.
    """
    features = plan_rows(plan)
    counts = [-(-row.dim // _columns_per_thread(row.weight_type)) for row in features]
    lanes = min(max(counts), _BLOCK_THREADS if shares else _WARP_THREADS)
    hint = int(lanes)
    if shares:
        groups = [_BLOCK_THREADS // min(count, _BLOCK_THREADS) for count in counts]
        parts = sum(-(-_BLOCK_PARTS // group) for group in groups)
        uneven = any((row.out_column | row.dim) % _COLUMNS_OF_16_BYTES for row in features)
        alike = len(set(counts)) == 1
        dims = [row.dim for row in features]
        wide_last = not alike and 2 * max(dims[3 * len(dims) // 4 :]) > max(dims)
        hint |= alike << 26 | uneven << 27 | wide_last << 28 | min(parts, 2**28 - 1) << 32
    weight_types = {row.weight_type for row in features}
    kinds = set.intersection(*(_kinds(row) for row in features))
    if len(weight_types) > 1 or not kinds:
        return hint
    weight_type = weight_types.pop()
    width = lanes * _columns_per_thread(weight_type)
    one_width = all(row.dim == width and row.pooling == Pooling.SUM for row in features)
    exact = one_width and lanes <= _WARP_THREADS and lanes & (lanes - 1) == 0
    rows = all(
        row.id_rule == IdRule.NONE and row.out_of_range == OutOfRange.CLAMP for row in features
    )
    return int(hint | min(kinds) << 8 | weight_type << 16 | exact << 24 | (not rows) << 25)


def _kinds(row: PlanRow) -> set[int]:
    """The values of the hint's bits 8 to 15 that hold for a feature."""
    if row.id_rule == IdRule.NONE and row.out_of_range == OutOfRange.ZERO:
        return set()
    kinds = set()
    if row.scale_type == ScaleType.NONE or (row.rows - 1) >> row.scale_shift == 0:
        kinds.add(1)
    if row.scale_type == ScaleType.FLOAT16:
        kinds.add(2)
    if row.scale_type == ScaleType.BOOK:
        kinds = {3}
    return kinds


_Fake = Callable[[dict[str, Any]], Tensor | None]


def _batch(call: dict[str, Any]) -> Any:
    bags = call["lengths"].shape[0] - (1 if call["offsets"] else 0)
    return bags // call["plan"].shape[0]


def _fake_lookup(call: dict[str, Any]) -> Tensor:
    shape = (_batch(call), call["width"])
    fresh: Tensor = call["weights"].new_empty(shape, dtype=call["dtype"] or torch.float32)
    return fresh


def _fake_nothing(call: dict[str, Any]) -> None:
    del call


def _fake_lookup_partly_shared(call: dict[str, Any]) -> Tensor:
    shape = (call["sample_rows"].shape[0], call["width"])
    fresh: Tensor = call["weights"].new_empty(shape, dtype=torch.float32)
    return fresh


def _fake_lookup_rows(call: dict[str, Any]) -> Tensor:
    shape = (call["indices"].shape[0], call["width"])
    fresh: Tensor = call["weights"].new_empty(shape, dtype=call["dtype"] or torch.float32)
    return fresh


def _fake_dot_interaction(call: dict[str, Any]) -> Tensor:
    dense: Tensor = call["dense"]
    batch, dim = dense.shape
    count = call["sparse"].shape[1] // dim
    return dense.new_empty((batch, dim + count * (count + 1) // 2))


def _fake_lookup_dot_interaction(call: dict[str, Any]) -> Tensor:
    dense: Tensor = call["dense"]
    count = call["plan"].shape[0]
    return dense.new_empty((dense.shape[0], dense.shape[1] + count * (count + 1) // 2))


def _fake_linear(call: dict[str, Any]) -> Tensor:
    fresh: Tensor = call["input"].new_empty((call["input"].shape[0], call["outputs"]))
    return fresh


def _fake_cross_layer(call: dict[str, Any]) -> Tensor:
    fresh: Tensor = call["x0"].new_empty(call["x0"].shape)
    return fresh


def _fake_linear_fp8(call: dict[str, Any]) -> Tensor:
    shape = (call["input"].shape[0], call["weight"].shape[0])
    fresh: Tensor = call["input"].new_empty(shape, dtype=call["dtype"] or torch.float8_e4m3fn)
    return fresh


def _fake_linear_thin(call: dict[str, Any]) -> Tensor:
    shape = (call["input"].shape[0], call["weight"].shape[0])
    fresh: Tensor = call["input"].new_empty(shape, dtype=call["dtype"] or torch.float32)
    return fresh


def _fake_rows_of_ids(call: dict[str, Any]) -> Tensor:
    fresh: Tensor = call["ids"].new_empty(call["ids"].shape, dtype=torch.int64)
    return fresh


def _fake_dense_steps(call: dict[str, Any]) -> Tensor:
    values: Tensor = call["values"]
    return values.new_empty(values.shape)


def _fake_xxh64(call: dict[str, Any]) -> Tensor:
    offsets: Tensor = call["offsets"]
    return offsets.new_empty((offsets.shape[0] - 1,), dtype=torch.int64)


_FAKES: dict[str, _Fake] = {
    "lookup": _fake_lookup,
    "lookup_out": _fake_nothing,
    "lookup_shared": _fake_nothing,
    "lookup_partly_shared": _fake_lookup_partly_shared,
    "lookup_rows": _fake_lookup_rows,
    "dot_interaction": _fake_dot_interaction,
    "lookup_dot_interaction": _fake_lookup_dot_interaction,
    "linear": _fake_linear,
    "linear_bf16": _fake_linear,
    "cross_layer": _fake_cross_layer,
    "cross_layer_fp8": _fake_cross_layer,
    "linear_fp8": _fake_linear_fp8,
    "linear_thin": _fake_linear_thin,
    "rows_of_ids": _fake_rows_of_ids,
    "dense_steps": _fake_dense_steps,
    "xxh64": _fake_xxh64,
}


def _register_fake(name: str, fake: _Fake) -> None:
    """Give operator ``name`` the shapes that tracing and export work with."""
    arguments = getattr(torch.ops.tessera, name).default._schema.arguments  # noqa: SLF001 (torch has no other way to read a schema)

    def from_call(*args: Any, **kwargs: Any) -> Tensor | None:
        call = {argument.name: argument.default_value for argument in arguments}
        call |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
        return fake(call | kwargs)

    torch.library.register_fake(f"tessera::{name}", from_call)


@functools.cache
def load() -> None:
    """Load the operator library and register its shape functions; later calls do nothing.

    Raises:
        LibraryError: the library was not built, or was built for another torch.
    """
    load_libraries([LIBRARY])
    for name, fake in _FAKES.items():
        _register_fake(name, fake)


@functools.cache
def is_built_for(name: str, device: str) -> bool:
    """Whether an operator of this library was built for devices of a kind, such as ``cpu`` or ``cuda``."""
    try:
        load()
    except LibraryError:
        return False
    return hasattr(torch.ops.tessera, name) and torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001 (torch has no other way to ask)
        f"tessera::{name}", device.upper()
    )


def trains_on_gpus() -> bool:
    """Whether the operators for training under bfloat16 were built for GPUs, too."""
    return is_built_for("relu_backward_bf16", "cuda")
