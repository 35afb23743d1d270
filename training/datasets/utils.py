"""`Batch`, and the pieces that streams of samples are made of.

A piece is an ``IterDataPipe`` of torch, so ``.batch(n)``, ``.map(f)``, ``.shuffle()`` work on it.
"""

# ruff: noqa: FBT001, FBT002 - signatures that TorchRec users know

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe, get_worker_info

from tessera.training.data.batch import Batch

__all__ = [
    "PATH_MANAGER_KEY",
    "Batch",
    "Limit",
    "LoadFiles",
    "ParallelReadConcat",
    "ReadLinesFromCSV",
    "idx_split_train_val",
    "rand_split_train_val",
    "safe_cast",
    "train_filter",
    "val_filter",
]

T = TypeVar("T")

PATH_MANAGER_KEY = "torchrec"
"""The name by which TorchRec's programs ask iopath for their path manager; nothing here uses iopath."""

_READING = {"b": "rb", "t": "rt", "rb": "rb", "rt": "rt", "r": "r"}


def safe_cast(val: T, dest_type: Callable[[T], Any], default: Any) -> Any:
    """``dest_type(val)``, or ``default`` where that raises a ValueError."""
    try:
        return dest_type(val)
    except ValueError:
        return default


class _Filtered(IterDataPipe[Any]):
    """The samples for which what ``new_filter`` gives anew for each pass says yes, by their number."""

    def __init__(
        self, datapipe: Iterable[Any], new_filter: Callable[[], Callable[[int], bool]]
    ) -> None:
        super().__init__()
        self._source = datapipe
        self._new_filter = new_filter

    def __iter__(self) -> Iterator[Any]:
        keeps = self._new_filter()
        for number, sample in enumerate(self._source):
            if keeps(number):
                yield sample


def _check_share(train_perc: float) -> None:
    if not 0.0 < train_perc < 1.0:
        raise ValueError(f"train_perc is {train_perc}; give a share between 0 and 1")


def train_filter(
    key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int
) -> bool:
    """Whether sample ``idx`` is for training: the last digits of its key are below the share.

    Args:
        key_fn: the number of a sample to an integer.
        train_perc: the share for training.
        decimal_places: how many digits of the share count.
        idx: the sample's number.
    """
    whole: int = 10**decimal_places
    return key_fn(idx) % whole < round(train_perc * whole)


def val_filter(
    key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int
) -> bool:
    """Whether sample ``idx`` is for validation; see `train_filter`."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


def _number_itself(number: int) -> int:
    return number


def idx_split_train_val(
    datapipe: IterDataPipe[Any],
    train_perc: float,
    decimal_places: int = 2,
    key_fn: Callable[[int], int] = _number_itself,
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Training and validation samples, told apart by their numbers; see `train_filter`.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    _check_share(train_perc)

    def split(keep: Callable[..., bool]) -> IterDataPipe[Any]:
        return _Filtered(
            datapipe, lambda: lambda number: keep(key_fn, train_perc, decimal_places, number)
        )

    return split(train_filter), split(val_filter)


def rand_split_train_val(
    datapipe: IterDataPipe[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Training and validation samples by a draw for each; every pass draws the same.

    Args:
        datapipe: the samples, in one order.
        train_perc: how likely a sample is for training.
        random_seed: of the draws.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    _check_share(train_perc)

    def split(wanted: bool) -> IterDataPipe[Any]:
        def draws() -> Callable[[int], bool]:
            numbers = random.Random(random_seed)  # noqa: S311 - a split need not be unpredictable
            return lambda _: (numbers.random() < train_perc) is wanted

        return _Filtered(datapipe, draws)

    return split(True), split(False)


class Limit(IterDataPipe[Any]):
    """The first ``limit`` samples."""

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        super().__init__()
        self._source = datapipe
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self._source, self._limit)


def _limit(datapipe: IterDataPipe[Any], limit: int) -> Limit:
    """The first ``limit`` samples of ``datapipe``: the method that programs for TorchRec call."""
    return Limit(datapipe, limit)


if "limit" not in IterDataPipe.functions:
    # Not by `functional_datapipe`, which takes a name once: TorchRec could then not be imported any more.
    IterDataPipe.limit = _limit  # type: ignore[attr-defined]


class LoadFiles(IterDataPipe[Any]):
    """Pairs of path and open file, each closed when the next one is asked for.

    Args:
        datapipe: the paths.
        mode: ``b`` or ``t``, also as ``open`` spells them.
        length: the number of paths, where ``len()`` is asked for; -1: it is not known.
        **open_kw: further arguments of ``open``.

    Raises:
        ValueError: a mode that does not read.
    """

    def __init__(
        self, datapipe: Iterable[str], mode: str = "b", length: int = -1, **open_kw: Any
    ) -> None:
        super().__init__()
        if mode not in _READING:
            raise ValueError(f"mode is {mode!r}; give one of {', '.join(_READING)}")
        self._paths = datapipe
        self._mode = _READING[mode]
        self._length = length
        self._open_kw = open_kw

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for path in self._paths:
            with Path(path).open(self._mode, **self._open_kw) as file:
                yield path, file

    def __len__(self) -> int:
        if self._length == -1:
            raise TypeError("the number of files is not known; give length=")
        return self._length


class ReadLinesFromCSV(IterDataPipe[Any]):
    """The rows of files, each a list of texts.

    Args:
        datapipe: pairs of path and file, open as text.
        skip_first_line: whether files begin with a line of names.
        **kw: arguments of ``csv.reader``, such as ``delimiter``.
    """

    def __init__(
        self, datapipe: Iterable[tuple[str, Any]], skip_first_line: bool = False, **kw: Any
    ) -> None:
        super().__init__()
        self._files = datapipe
        self._skip = skip_first_line
        self._kw = kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self._files:
            yield from itertools.islice(csv.reader(file, **self._kw), int(self._skip), None)


def _share_of_worker(datapipes: Sequence[IterDataPipe[Any]]) -> Sequence[IterDataPipe[Any]]:
    """Neighbouring pipes for each process of a DataLoader, the first ones having one more."""
    worker = get_worker_info()
    if worker is None:
        return datapipes
    if worker.num_workers > len(datapipes):
        raise ValueError(
            f"{worker.num_workers} workers share {len(datapipes)} datapipes; take fewer workers"
        )
    each, more = divmod(len(datapipes), worker.num_workers)
    first = worker.id * each + min(worker.id, more)
    return datapipes[first : first + each + (worker.id < more)]


class ParallelReadConcat(IterDataPipe[Any]):
    """Several streams one after the other; processes of a DataLoader read some of them each.

    A stream that shares its files out among processes itself, as `CriteoIterDataPipe` does, would have
    them shared out twice: give such a one to the DataLoader directly.

    Args:
        *datapipes: the streams.
        dp_selector: picks those of this process.
    """

    def __init__(
        self,
        *datapipes: IterDataPipe[Any],
        dp_selector: Callable[
            [Sequence[IterDataPipe[Any]]], Sequence[IterDataPipe[Any]]
        ] = _share_of_worker,
    ) -> None:
        super().__init__()
        self._datapipes = datapipes
        self._select = dp_selector

    def __iter__(self) -> Iterator[Any]:
        for datapipe in self._select(self._datapipes):
            yield from datapipe
