"""Random files in Criteo's formats, for tests of programs that read them."""

from __future__ import annotations

import contextlib
import random
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.training.datasets import criteo


class CriteoTest(unittest.TestCase):
    """Base of test cases that need files of Criteo's click logs.

    The numbers are drawn from numpy's and Python's global generators, in TorchRec's order: the
    same seed gives both the same ``.npy`` files.
    """

    INT_FEATURE_COUNT = 13
    CAT_FEATURE_COUNT = 26
    LABEL_VAL_RANGE = (0, 1)
    INT_VAL_RANGE = (0, 100)
    CAT_VAL_RANGE = (0, 1000)

    @classmethod
    @contextlib.contextmanager
    def _create_dataset_tsv(
        cls,
        num_rows: int = 10,
        train: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        filename: str = "criteo",
    ) -> Iterator[str]:
        """A file of tab-separated lines, with labels if ``train``; it is deleted in the end."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / filename
            lines = []
            for _ in range(num_rows):
                label = [str(random.randint(*cls.LABEL_VAL_RANGE))] if train else []  # noqa: S311 - not a secret
                numbers = [
                    str(random.randint(*cls.INT_VAL_RANGE))  # noqa: S311 - not a secret
                    for _ in range(cls.INT_FEATURE_COUNT)
                ]
                ids = [
                    f"{random.randint(*cls.CAT_VAL_RANGE) * 2654435761 % 2**32:08x}"  # noqa: S311 - not a secret
                    for _ in range(cls.CAT_FEATURE_COUNT)
                ]
                lines.append("\t".join([*label, *numbers, *ids]) + "\n")
            path.write_text("".join(lines))
            yield str(path)

    @classmethod
    @contextlib.contextmanager
    def _create_dataset_npys(  # noqa: PLR0917 - the signature TorchRec users know
        cls,
        num_rows: int = 10,
        filename: str = "criteo",
        filenames: Sequence[str] | None = None,
        generate_dense: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        generate_sparse: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        generate_labels: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        dense: npt.NDArray[Any] | None = None,
        sparse: npt.NDArray[Any] | None = None,
        labels: npt.NDArray[Any] | None = None,
    ) -> Iterator[tuple[str, ...]]:
        """For each name ``NAME_dense.npy``, ``NAME_sparse.npy`` and ``NAME_labels.npy``.

        Numbers that are not given are drawn for the first name, and all names have the same.
        """
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name in filenames or [filename]:
                if generate_dense:
                    if dense is None:
                        dense = np.random.random((num_rows, criteo.INT_FEATURE_COUNT))  # noqa: NPY002 - the seeds of programs are global
                        dense = dense.astype(np.float32)
                    paths.append((f"{name}_dense.npy", dense))
                if generate_sparse:
                    if sparse is None:
                        sparse = cls._integers(
                            cls.CAT_VAL_RANGE, num_rows, criteo.CAT_FEATURE_COUNT
                        )
                    paths.append((f"{name}_sparse.npy", sparse))
                if generate_labels:
                    if labels is None:
                        labels = cls._integers(cls.LABEL_VAL_RANGE, num_rows, 1)
                    paths.append((f"{name}_labels.npy", labels))
            for file, values in paths:
                np.save(Path(folder) / file, values)
            yield tuple(str(Path(folder) / file) for file, _ in paths)

    @staticmethod
    def _integers(bounds: tuple[int, int], rows: int, columns: int) -> npt.NDArray[Any]:
        least, most = bounds
        return np.random.randint(least, most + 1, size=(rows, columns), dtype=np.int32)  # noqa: NPY002 - see above
