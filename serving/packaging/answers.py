"""Hold each form of a module against the module itself, at batch sizes that it was not traced with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from tessera.errors import UserError
from tessera.serving.package.runner import HostBatch, TorchScriptRunner, zero_batch
from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.passes.tensors import observe
from tessera.serving.packaging.write.golden import LONG_BAG, golden_batch, long_batch
from tessera.users_code import first_line, users_place

# Two ways through the same operators; a difference beyond this is another calculation.
_SAME_ANSWERS = 1e-4
# Ids of a bag that a module must stand; beyond them nobody tries.
_LONGEST_BAG = 2000


class Answers:
    """What a module with a package's six inputs answers to requests of every size.

    A module that fails or gives a NaN is refused by a `UserError`.
    """

    def __init__(self, eager: Callable[..., Any], schema: InputSchema) -> None:
        self._golden = golden_batch(schema)
        self._batches = {
            f"a batch of {self._golden.batch_size} samples with empty bags (sample 0), the lowest "
            f"and highest ids (1 to 3) and bags of {LONG_BAG} ids (4)": self._golden,
            "a batch of one sample": zero_batch(schema, 1, wide_ids=True),
            f"bags of {_LONGEST_BAG} ids": long_batch(schema, _LONGEST_BAG),
        }
        self._expected = {
            what: _answer(eager, batch, what) for what, batch in self._batches.items()
        }

    def met_while_observed(self, graph: fx.GraphModule) -> bool:
        """Whether a traced graph answers alike, at one batch size.

        Notes what each of its tensors looks like; see `tessera.serving.packaging.passes.tensors`.
        """
        try:
            found = observe(graph, *self._golden.tensors())
        except RuntimeError:  # sizes that do not fit those of a tensor of the module's own
            return False
        expected = next(iter(self._expected.values()))
        return all(_close(found[name], value) for name, value in expected.items())

    def check(self, form: Callable[..., Any], instead: Callable[..., Any] | None = None) -> None:
        """Hold a form of the module against it or another form; refuse other answers."""
        for what, batch in self._batches.items():
            expected = self._expected[what]
            if instead is not None:
                expected = TorchScriptRunner(instead).forward(batch)
            wrong, cause = "", None
            try:
                found = TorchScriptRunner(form).forward(batch)
            except RuntimeError as error:
                wrong, cause = f"the traced graph fails on {what}", error
            else:
                for name, value in expected.items():
                    if not _close(found[name], value):
                        wrong = f"output {name!r} of {what} differs between the module and its traced graph"
                        break
            if wrong:
                raise UserError(
                    f"{wrong}, which has a number of the sample batch or of a constant in it; take "
                    "batch sizes from the arguments' own shapes inside forward"
                ) from cause


def _answer(eager: Callable[..., Any], batch: HostBatch, what: str) -> dict[str, Tensor]:
    try:
        found = TorchScriptRunner(eager).forward(batch)
    except Exception as error:
        raise UserError(
            f"the module fails on {what}{users_place(error)}: {first_line(error)}; every such "
            "request must have an answer: take the number of samples from the arguments, cut "
            "long bags and bound what is used as an index"
        ) from error
    for name, value in found.items():
        missing = torch.isnan(value)
        if bool(missing.any()):
            row = int(torch.nonzero(missing.reshape(len(value), -1).any(dim=1))[0])
            raise UserError(
                f"output {name!r} is NaN for sample {row} of {what}; let the module give a number "
                "for every request"
            )
    return found


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    bound = _SAME_ANSWERS * max(1.0, float(expected.abs().max()))
    return bool((found - expected).abs().max() <= bound)
