"""``ArgInfo`` of TorchRec's reference: a part of a batch by the names and keys that lead there.

Pipelines keep steps (`tessera.training.distributed.train_pipeline.arguments`), as TorchRec 1.8's do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.training.distributed.train_pipeline import arguments


@dataclass
class ArgInfo:
    """Says which part of the batch an argument is, in the words of TorchRec's reference.

    Attributes:
        input_attrs: names or keys on the way into the batch; empty: the batch itself.
        is_getitems: for each of them, whether it is ``[key]`` rather than ``.name``.
        name: of a keyword argument; None for a positional one.
    """

    input_attrs: list[Any]
    is_getitems: list[bool]
    name: str | None

    def take(self, batch: Any) -> Any:
        """Return the argument for this batch.

        Raises:
            ValueError: ``is_getitems`` has another length than ``input_attrs``.
        """
        steps: list[arguments.BaseArgInfoStep] = [arguments.NoopArgInfoStep()]
        for attribute, is_item in zip(self.input_attrs, self.is_getitems, strict=True):
            steps.append(
                arguments.GetItemArgInfoStep(attribute)
                if is_item
                else arguments.GetAttrArgInfoStep(attribute)
            )
        return arguments.ArgInfo(steps).process_steps(batch)
