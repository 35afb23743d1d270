"""Is copied as `sitecustomize.py` beside a program: makes its run comparable, and records it.

The same program with two libraries gives the same losses only from the same weights, and each
library draws them in an order of its own. So in every process of the program:

* weights are functions of their names and places, set once a model is distributed
  (`DistributedModelParallel`, `DistributedDataParallel`) or, where no model was, as each one gets
  its first optimizer;
  the columns of the layer above DLRM's pairs are in each library's order of pairs
  (docs/torchrec.md);
* the generators are seeded when torch is imported and again when the weights are set;
* the value of each tensor on which `backward` is called is appended to a file
  `RANK-TIME-PROCESS.losses` in the folder `PROGRAM_RECORD`;
* a moved program (`PROGRAM_LIBRARY=tessera.training`) that imports `torchrec` ends with an error.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import time
import types
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_STARTED_NS = time.time_ns()
_state = {"distributed": False}


# The weights of a cross network of low rank have other names in TorchRec (docs/torchrec.md).
_THEIR_NAMES = (
    (r"crossnet\._w\.(\d+)\.weight$", r"crossnet.W_kernels.\1"),
    (r"crossnet\._v\.(\d+)\.weight$", r"crossnet.V_kernels.\1"),
    (r"crossnet\._w\.(\d+)\.bias$", r"crossnet.bias.\1"),
)


def _rank() -> int:
    """Returns the rank of this process, as far as it knows one by now."""
    return int(os.environ.get("RANK", "0"))


def _seed(seed: int) -> None:
    """Seeds every generator that a program may draw from."""
    import random  # noqa: PLC0415 - a process may need nothing of this

    import torch  # noqa: PLC0415 - see above

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _fill(name: str, tensor: Any, first: Sequence[int] = (0, 0)) -> None:
    """Sets `tensor`, which begins at row and column `first` of the weight called `name`."""
    import torch  # noqa: PLC0415 - imported when the program has

    for ours, theirs in _THEIR_NAMES:
        name = re.sub(ours, theirs, name)
    if tensor.numel() == 0 or not tensor.is_floating_point() or tensor.is_meta:
        return
    with torch.no_grad():
        flat_RC = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
        rows, columns = (torch.arange(size, dtype=torch.float64) for size in flat_RC.shape)
        phase = float(zlib.crc32(name.encode()) % 9973)
        angles_RC = (rows + first[0])[:, None] * 12.9898 + (columns + first[1]) * 78.233 + phase
        new = (angles_RC.sin() * 0.05).reshape(tensor.shape)
        tensor.detach().copy_(new.to(device=tensor.device, dtype=tensor.dtype))


def _fill_module(module: Any, *, distributed: bool) -> None:
    """Sets the weights of a module, whole ones and shards."""
    names = {name for name, _ in module.named_parameters()}
    for name, value in module.state_dict().items():
        if name not in names and not hasattr(value, "local_shards"):
            continue
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                _fill(name, shard.tensor, (*shard.metadata.shard_offsets, 0)[:2])
        else:
            _fill(name, value)
    for part in module.modules():
        if type(part).__name__ == "DLRM" and type(part).__module__.startswith("tessera."):
            _reorder_pairs(part)
    _state["distributed"] |= distributed
    _seed(1000 + _rank())


def _reorder_pairs(dlrm: Any) -> None:
    """Puts the columns for pairs of vectors in our order: row by row below the diagonal."""
    import torch  # noqa: PLC0415 - imported when the program has

    with torch.no_grad():
        weight = next(dlrm.over_arch.parameters())
        count = len(dlrm.sparse_arch.dims) + 1
        above = torch.triu_indices(count, count, offset=1)
        below = torch.tril_indices(count, count, offset=-1)
        place = torch.zeros(count, count, dtype=torch.int64)
        place[above[0], above[1]] = torch.arange(above.size(1))
        dense = weight.size(1) - above.size(1)
        weight[:, dense:] = weight[:, dense + place[below[1], below[0]]]


def _after_torch(torch: Any) -> None:
    """Records what `backward` is called on."""
    backward = torch.Tensor.backward
    record = Path(os.environ["PROGRAM_RECORD"])

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        losses = record / f"{_rank():03d}-{_STARTED_NS}-{os.getpid()}.losses"
        with losses.open("a") as file:
            file.write(f"{float(self.detach().double().sum())!r}\n")
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = recorded
    _seed(_rank())


def _after_optimizers(module: Any) -> None:
    """Sets the weights of each model that nothing distributes when it gets its first optimizer."""
    begin = module.Optimizer.__init__

    def begun(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        import torch  # noqa: PLC0415 - imported when the program has

        begin(self, params, *args, **kwargs)
        if _state["distributed"]:
            return
        weights = [weight for group in self.param_groups for weight in group["params"]]
        new = [
            (place, weight)
            for place, weight in enumerate(weights)
            if type(weight) is torch.nn.Parameter and not weight.is_meta
            if not hasattr(weight, "set_by_observer")
        ]
        for place, weight in new:
            _fill(str(place), weight)
            weight.set_by_observer = True  # type: ignore[attr-defined]
        if new:
            _seed(1000 + _rank())

    module.Optimizer.__init__ = begun


def _after_class(name: str, *, first: bool, distributed: bool = True) -> Callable[[Any], None]:
    """Returns what sets the weights of the modules that the class `name` is given or becomes."""

    def after(module: Any) -> None:
        cls = getattr(module, name)
        begin = cls.__init__

        def begun(self: Any, *args: Any, **kwargs: Any) -> None:
            if first:
                _fill_module(args[0] if args else kwargs["module"], distributed=distributed)
            begin(self, *args, **kwargs)
            if not first:
                _fill_module(self, distributed=distributed)

        cls.__init__ = begun

    return after


_AFTER = {
    "torch": _after_torch,
    "torch.optim.optimizer": _after_optimizers,
    "torch.nn.parallel.distributed": _after_class("DistributedDataParallel", first=True),
    "torchrec.modules.fused_embedding_modules": _after_class(
        "FusedEmbeddingBagCollection", first=False, distributed=False
    ),
    "tessera.training.distributed.collections.fused": _after_class(
        "FusedEmbeddingBagCollection", first=False, distributed=False
    ),
    "torchrec.distributed.model_parallel": _after_class("DistributedModelParallel", first=False),
    "tessera.training.distributed.model.model_parallel": _after_class(
        "DistributedModelParallel", first=False
    ),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Calls what `_AFTER` has for a module once it is imported."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module as others would, and watches its loading."""
        del path, target
        library = os.environ["PROGRAM_LIBRARY"]
        if library != "torchrec" and name.partition(".")[0] == "torchrec":
            raise ImportError(f"a program that was moved to {library} imports {name}")
        if name not in _AFTER:
            return None
        after = _AFTER.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: types.ModuleType) -> None:
            load(module)
            after(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


if "PROGRAM_RECORD" in os.environ:
    sys.meta_path.insert(0, _Finder())
