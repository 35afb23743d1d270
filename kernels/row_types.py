"""Row types: how an embedding row is stored.  One record of `ROW_TYPES` is all there is to a type.

From the records are read or generated the choices of ``package-model --dtype``, what each backend
can look up, the numbers of the plan's column ``weight_type``, the C++ enum with its sizes
(``csrc/row_types.h``) and the names that the command line needs before torch is loaded
(``row_type_names.py``); ``python kernels/row_header.py --write`` generates the last two.

An element of a row is its number alone (``ScaleType.NONE``), ``bias + scale * number`` with a
float16 scale and bias before the row's numbers (``ScaleType.FLOAT16``), or ``book[code] * number``
where the table has a book of 16 scales and the row's blocks of columns hold codes into it
(``ScaleType.BOOK``).  int8, int4, int2, fp16 and fp32 are FBGEMM's rows to the bit.

Shapes: ``R`` rows, ``D`` columns.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.plan import ScaleType, scale_bytes
from tessera.kernels.row_codecs import (
    BLOCK_COLUMNS,
    affine_rows,
    block_rows,
    block_scales,
    cast_rows,
    float8_rows,
    plain,
    row_block_scales,
    scale_book,
    unpack_codes,
)

_LARGEST_FLOAT16 = 65504.0
_BOOK_SAMPLE = 1 << 12  # blocks of a chunk that tell how small blocks are


@dataclass(frozen=True, kw_only=True)
class RowType:
    """One row type.

    Attributes:
        name: as on the command line and in the manifest.
        summary: the layout in a line, for the generated header.
        bits: of one number.
        encoder: from float32 ``[R, D]``, finite and within ``largest``, and the table's book to
            stored rows ``[R, row_bytes(D)]`` uint8, scale and bias first.
        numbers: from the bytes of ``D`` numbers ``[R, data_bytes(D)]`` uint8, contiguous, and ``D``
            to the numbers before scale and bias, float32 ``[R, D]``.
        scale: how a number is scaled.
        scale_optional: whether a lookup may read the numbers without scale and bias.
        group_columns: columns that share a byte or a block; widths of packaged tables, and cuts
            between columns, are multiples of it.
        largest: the largest magnitude that the type can hold.
        kernel: the name in C++ and the number of our kernels' reading of the numbers, both without
            meaning where ``kernel_number`` is None.  Types that are read alike may share it.
        kernel_number: a value of the plan's column ``weight_type``, part of the package format;
            None where none of our kernels reads such rows.
        fbgemm_code: FBGEMM's ``SparseType`` number; None where its CPU lookup has no such rows.
        book: the table's scales, float32 ``[16]``, under ``ScaleType.BOOK``; `fitted` finds them.
    """

    name: str
    summary: str
    bits: int
    encoder: Callable[[Tensor, Tensor | None], Tensor]
    numbers: Callable[[Tensor, int], Tensor]
    scale: ScaleType = ScaleType.NONE
    scale_optional: bool = False
    group_columns: int = 1
    largest: float = math.inf
    kernel: str = ""
    kernel_number: int | None = None
    fbgemm_code: int | None = None
    book: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def scaled(self) -> bool:
        """Whether a row has a scale and a bias of its own."""
        return self.scale is ScaleType.FLOAT16

    @property
    def blocks(self) -> bool:
        """Whether rows are blocks, whose scales are in a book of the table."""
        return self.scale is ScaleType.BOOK

    @property
    def header_bytes(self) -> int:
        """Bytes of a row's scale and bias."""
        return scale_bytes(self.scale) if self.scaled else 0

    @property
    def book_bytes(self) -> int:
        """Bytes of a table's book."""
        return scale_bytes(self.scale) if self.blocks else 0

    @property
    def backends(self) -> tuple[str, ...]:
        """The package backends that look such rows up."""
        ours = ("tessera",) if self.kernel_number is not None else ()
        return ours + (("fbgemm",) if self.fbgemm_code is not None else ())

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that such rows can be looked up on; of the backends, ours knows GPUs."""
        return ("cpu", "cuda") if "tessera" in self.backends else ("cpu",)

    @property
    def needs(self) -> str:
        """What a user has to know before choosing the type; empty where it serves everywhere."""
        needs = [] if len(self.backends) > 1 else [f"--backend {name}" for name in self.backends]
        if self.group_columns > 1:
            needs.append(f"dimensions that are multiples of {self.group_columns}")
        return " and ".join(needs)

    def data_bytes(self, dim: int) -> int:
        """Bytes of ``dim`` numbers; a last group that is not full is filled up."""
        groups = -(-dim // self.group_columns)
        return groups * self.group_columns * self.bits // 8

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of ``dim`` elements, scale and bias included."""
        return self.header_bytes + self.data_bytes(dim)

    def fitted(self, chunks: Iterable[Tensor]) -> RowType:
        """The same type with what a whole table's rows share.

        Args:
            chunks: the table's rows in pieces, float32 ``[R, D]`` each; only read for blocks.
        """
        if not self.blocks:
            return self
        largest, samples = 0.0, []
        for chunk in chunks:
            needed = block_scales(chunk).flatten()
            largest = max(largest, needed.max().item())
            samples.append(needed[:: max(1, len(needed) // _BOOK_SAMPLE)])
        return replace(self, book=scale_book(largest, torch.cat(samples)))

    def encode(self, weights: Tensor) -> Tensor:
        """Store rows.

        Args:
            weights: ``[R, D]`` float32, finite and within ``largest``.

        Returns:
            ``[R, row_bytes(D)]`` uint8, scale and bias first.
        """
        assert not self.blocks or self.book is not None, "fitted() comes first"
        return self.encoder(weights, self.book)

    def decode(self, stored: Tensor, dim: int) -> Tensor:
        """The float32 values of stored rows.

        Args:
            stored: ``[R, row_bytes(dim)]`` uint8, or wider: what is beyond is not read.
            dim: ``D``.

        Returns:
            ``[R, D]`` float32.
        """
        data = plain(stored[:, self.header_bytes : self.row_bytes(dim)])
        numbers = self.numbers(data, dim)
        if self.blocks:
            assert self.book is not None, "fitted() comes first"
            return numbers * row_block_scales(data, self.book, dim)
        if not self.scaled:
            return numbers
        scale_bias = plain(stored[:, : self.header_bytes]).view(torch.float16).float()
        return scale_bias[:, 1:] + scale_bias[:, :1] * numbers

    def take_columns(self, stored: Tensor, begin: int, end: int) -> Tensor:
        """Columns ``[begin, end)`` of stored rows, with the whole rows' scales and biases.

        Args:
            stored: ``[R, row_bytes(D)]`` uint8.
            begin: a multiple of `group_columns`.
            end: a multiple of `group_columns`, or ``D``.

        Returns:
            ``[R, row_bytes(end - begin)]`` uint8.
        """
        header = self.header_bytes
        data = stored[:, header + self.data_bytes(begin) : header + self.data_bytes(end)]
        return torch.cat([stored[:, :header], data], dim=1)


ROW_TYPES: dict[str, RowType] = {}
"""Every row type by its name, in the order in which choices are shown."""


def register(row_type: RowType) -> RowType:
    """Add a type to `ROW_TYPES`; returns it.

    Raises:
        ValueError: the name is taken, or the type shares its kernel with one that is read otherwise.
    """
    if row_type.name in ROW_TYPES:
        raise ValueError(
            f"row type {row_type.name!r} exists already; give the new one another name"
        )
    for other in kernel_types():
        same = [getattr(one, what) for what in _READ_BY_KERNELS for one in (other, row_type)]
        if other.kernel_number == row_type.kernel_number and same[::2] != same[1::2]:
            raise ValueError(
                f"row type {row_type.name!r} has the kernel number of {other.name!r} but differs in "
                f"one of {', '.join(_READ_BY_KERNELS)}; give it a kernel of its own"
            )
    ROW_TYPES[row_type.name] = row_type
    return row_type


_READ_BY_KERNELS = ("kernel", "bits", "group_columns", "scale")


def row_type(name: str) -> RowType:
    """The type called ``name``.

    Raises:
        UserError: there is none.
    """
    found = ROW_TYPES.get(name)
    if found is None:
        near = difflib.get_close_matches(str(name), ROW_TYPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"dtype {name!r} is unknown; give one of {', '.join(ROW_TYPES)}{hint}")
    return found


def kernel_types() -> list[RowType]:
    """The types that our kernels read, the first of each kernel number, in the numbers' order."""
    found: dict[int, RowType] = {}
    for kind in ROW_TYPES.values():
        if kind.kernel_number is not None:
            found.setdefault(kind.kernel_number, kind)
    return [found[number] for number in sorted(found)]


def fbgemm_types() -> dict[int, RowType]:
    """The types that FBGEMM's lookup reads, the first of each of its codes, by code."""
    found: dict[int, RowType] = {}
    for kind in ROW_TYPES.values():
        if kind.fbgemm_code is not None:
            found.setdefault(kind.fbgemm_code, kind)
    return found


def _codes(bits: int) -> Callable[[Tensor, int], Tensor]:
    return lambda data, dim: unpack_codes(data, bits, dim)


def _cast_from(dtype: torch.dtype) -> Callable[[Tensor, int], Tensor]:
    return lambda data, dim: data.view(dtype)[:, :dim].float()


def _affine(bits: int) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda weights, _: affine_rows(weights, bits)


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], Tensor]:
    return lambda weights, _: cast_rows(weights, dtype)


def _in_blocks(weights: Tensor, book: Tensor | None) -> Tensor:
    assert book is not None
    return block_rows(weights, book)


INT8 = register(
    RowType(
        name="int8",
        summary="unsigned byte q: value = scale * q + bias",
        bits=8,
        encoder=_affine(8),
        numbers=_codes(8),
        scale=ScaleType.FLOAT16,
        largest=_LARGEST_FLOAT16,
        kernel="kInt8",
        kernel_number=4,
        fbgemm_code=2,
    )
)
INT4 = register(
    RowType(
        name="int4",
        summary="two unsigned numbers per byte, the even column in the low half",
        bits=4,
        encoder=_affine(4),
        numbers=_codes(4),
        scale=ScaleType.FLOAT16,
        group_columns=2,
        largest=_LARGEST_FLOAT16,
        kernel="kInt4",
        kernel_number=5,
        fbgemm_code=3,
    )
)
BLOCK_INT8 = register(
    RowType(
        name="int8b",
        summary="unsigned bytes in blocks of 16: value = book[code of the block] * (q - 128)",
        bits=8,
        encoder=_in_blocks,
        numbers=lambda data, dim: data[:, :dim].float() - 128,
        scale=ScaleType.BOOK,
        group_columns=BLOCK_COLUMNS,
        kernel="kBlockInt8",
        kernel_number=6,
    )
)
INT2 = register(
    RowType(
        name="int2",
        summary="four unsigned numbers per byte, the first in the lowest bits",
        bits=2,
        encoder=_affine(2),
        numbers=_codes(2),
        scale=ScaleType.FLOAT16,
        group_columns=4,
        largest=_LARGEST_FLOAT16,
        fbgemm_code=4,
    )
)
FLOAT8 = register(
    RowType(
        name="fp8",
        summary="e4m3fn under a scale that maps the row's largest magnitude to 448",
        bits=8,
        encoder=lambda weights, _: float8_rows(weights),
        numbers=_cast_from(torch.float8_e4m3fn),
        scale=ScaleType.FLOAT16,
        scale_optional=True,
        largest=_LARGEST_FLOAT16,
        kernel="kFloat8",
        kernel_number=3,
    )
)
FLOAT16 = register(
    RowType(
        name="fp16",
        summary="IEEE binary16",
        bits=16,
        encoder=_cast_to(torch.float16),
        numbers=_cast_from(torch.float16),
        largest=_LARGEST_FLOAT16,
        kernel="kFloat16",
        kernel_number=1,
        fbgemm_code=1,
    )
)
BFLOAT16 = register(
    RowType(
        name="bf16",
        summary="bfloat16",
        bits=16,
        encoder=_cast_to(torch.bfloat16),
        numbers=_cast_from(torch.bfloat16),
        kernel="kBFloat16",
        kernel_number=2,
    )
)
FLOAT32 = register(
    RowType(
        name="fp32",
        summary="IEEE binary32",
        bits=32,
        encoder=_cast_to(torch.float32),
        numbers=_cast_from(torch.float32),
        kernel="kFloat32",
        kernel_number=0,
        fbgemm_code=0,
    )
)
