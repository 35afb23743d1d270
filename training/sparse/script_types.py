"""Types under the names that TorchScript resolves inside a class: without dots and unions.

In a module with postponed annotations TorchScript looks every annotation up as one name.  A
device may be given as text in Python; scripted code has devices only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import dtype as DType  # noqa: N812 - a type, and no variable, where it is used
from torch._jit_internal import is_scripting

if TYPE_CHECKING:
    Device = torch.device | str
else:
    Device = torch.device

__all__ = ["DType", "Device", "is_scripting"]
