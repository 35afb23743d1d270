"""The one door to FBGEMM's training tables.

FBGEMM is imported when the first table is built, not before: it takes as long as torch itself.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from types import ModuleType

import torch

from tessera.errors import UserError
from tessera.releases import fbgemm_remedy, pair_is_known


@lru_cache(maxsize=1)
def _found_fbgemm() -> str:
    """Its version, looked for until it is found: that reads the folders of all packages, and each table asks."""
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        for distribution in metadata.distributions(name=name):
            return distribution.version
    raise LookupError(name)


def _installed_fbgemm() -> str | None:
    try:
        return _found_fbgemm()
    except LookupError:
        return None


def _is_other_than_version_remark(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "compatible with PyTorch" not in text and "_fbgemm_torch_compat_table" not in text


@contextmanager
def root_logger_untouched() -> Iterator[None]:
    """Keep FBGEMM's log calls from configuring the program's logging.

    They go through the root logger's functions, which install a handler where there is none:
    everybody's messages would be printed twice, or at all, from then on.
    """
    root, placeholder = logging.getLogger(), logging.NullHandler()
    root.addHandler(placeholder)
    try:
        yield
    finally:
        root.removeHandler(placeholder)


@contextmanager
def _quiet_about_known_pairs(*, known: bool) -> Iterator[None]:
    """Drop FBGEMM's remark on versions where the pair is known to fit, and nothing else."""
    root = logging.getLogger()
    if known:
        root.addFilter(_is_other_than_version_remark)
    try:
        with root_logger_untouched(), warnings.catch_warnings():
            # Lookups for solid-state tables are absent from every CPU build.
            warnings.filterwarnings("ignore", r"[\s\S]*Failed to import: fbgemm_gpu")
            yield
    finally:
        root.removeFilter(_is_other_than_version_remark)


def import_training_tables() -> ModuleType:
    """FBGEMM's module of training tables.

    Raises:
        UserError: FBGEMM is not installed or does not load.
    """
    return _load("fbgemm_gpu.split_table_batched_embeddings_ops_training")


@lru_cache(maxsize=1)
def load_sparse_operators() -> None:
    """Make FBGEMM's operators on jagged tensors known to torch; cheap to call before every use.

    Raises:
        UserError: FBGEMM is not installed or does not load.
    """
    _load("fbgemm_gpu")


def import_inference_tables() -> ModuleType:
    """FBGEMM's module of quantized tables; raises as `import_training_tables` does."""
    return _load("fbgemm_gpu.split_table_batched_embeddings_ops_inference")


def _load(name: str) -> ModuleType:
    version = _installed_fbgemm()
    if version is None:
        raise UserError("fbgemm-gpu is not installed; pip install 'tessera-rec[cpu]' (or [cuda])")
    known = pair_is_known(torch.__version__, version)
    try:
        with _quiet_about_known_pairs(known=known):
            return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise UserError(
            f"fbgemm-gpu {version} does not load with torch {torch.__version__}: {error}; "
            f"{fbgemm_remedy(torch.__version__)}"
        ) from error
