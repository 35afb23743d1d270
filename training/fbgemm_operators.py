"""``torch.ops.fbgemm`` is there as soon as the library is imported, and loaded when it is used.

Programs written for TorchRec call FBGEMM's operators without importing it, since ``import torchrec``
does.  Loading it takes as long as torch itself, which a program that never asks for one of them, such
as ``tessera --help``, need not wait for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def offer_operators() -> None:
    """Let ``torch.ops.fbgemm`` load FBGEMM at its first use; torch may be imported later."""
    if "torch" in sys.modules:
        _offer()
    else:
        sys.meta_path.insert(0, _AfterTorch())


class _AfterTorch(MetaPathFinder):
    """Finds nothing itself: has `_offer` called at the end of torch's import, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for every module but torch; for it the spec that the other finders give."""
        del path, target
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_offer(module: ModuleType) -> None:
                execute(module)
                _offer()

            loader.exec_module = execute_and_offer
        return spec


def _offer() -> None:
    if "fbgemm_gpu" in sys.modules:
        return
    import torch  # noqa: PLC0415 - it is imported already; this module must not bring it
    from torch._ops import _OpNamespace  # noqa: PLC0415 - as above

    class Offered(_OpNamespace):
        """FBGEMM's namespace before it is loaded; afterwards torch's own takes its place."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("__") or vars(torch.ops).get("fbgemm") is not self:
                    raise
            _load()
            setattr(torch.ops, "fbgemm", _OpNamespace("fbgemm"))  # noqa: B010 - torch declares no names
            return getattr(torch.ops.fbgemm, name)

    setattr(torch.ops, "fbgemm", Offered("fbgemm"))  # noqa: B010 - torch declares no names


def _load() -> None:
    from tessera.errors import UserError  # noqa: PLC0415 - not needed before an operator is
    from tessera.training.fbgemm import load_sparse_operators  # noqa: PLC0415 - as above

    try:
        load_sparse_operators()
    except UserError as error:  # what a missing attribute is asked for with, such as hasattr
        raise AttributeError(str(error)) from error
