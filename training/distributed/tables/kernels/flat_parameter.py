"""Tables that are parameters of their own to their owner, and one parameter to autograd.

Twenty replicas of twenty tables would be twenty gradients: each made, averaged over the ranks
and kept by itself.  Here the tables lie in one flat parameter, which is what lookups
differentiate and ``DistributedDataParallel`` averages.  What users, optimizers and state dicts
see is still one ``nn.Parameter`` per table, in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable


def _this_pass() -> int:
    return torch._C._current_graph_task_id()  # noqa: SLF001 - torch's only name of a backward pass


class FlatParameter:
    """Holds one flat parameter and the tables that are views of it.

    At the end of a backward pass, after the ranks' average if there is one, each table's ``grad``
    is its part of the flat gradient, and its post-accumulate-grad hooks run.  What is done to a
    table's ``grad`` between two backward passes holds: a gradient that was dropped counts as
    zeros, and one that was replaced is taken over, when the next backward pass adds to it.
    ``Tensor.register_hook`` on a table is not heard: no graph has the table in it.

    A lookup's backward pass gives its gradient to autograd, or writes it where it belongs
    (`gradient`) and gives autograd nothing.  The latter saves making and copying a gradient as
    large as the tables, which on a CPU is most of a step.

    Args:
        flat: all numbers.
        tables: views of it, ``[rows, columns]`` each.

    Attributes:
        flat: the parameter of the graph.
        tables: the parameters of the model; ``requires_grad`` of theirs says whether they get
            their gradient.

    Memory: the flat gradient stays when the tables' are dropped.
    """

    def __init__(self, flat: nn.Parameter, tables: Sequence[Tensor]) -> None:
        self.flat = flat
        self.tables = [nn.Parameter(table.detach()) for table in tables]
        self._places = [(table.storage_offset(), table.shape) for table in tables]
        # Where the gradients lie that were given to the tables; 0: nowhere.
        self._given = [0] * len(self.tables)
        # The backward passes that `gradient` was last asked in, and the tables last heard of.
        self._pass = self._published_pass = -1
        flat.register_hook(self._before_adding)  # type: ignore[no-untyped-call] # torch leaves it untyped
        flat.register_post_accumulate_grad_hook(self._publish_late)  # type: ignore[no-untyped-call] # torch leaves it untyped

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """The flat gradient so far, for the backward pass of a lookup to add to."""
        this_pass = _this_pass()
        if self._pass != this_pass:
            self._pass = this_pass
            if self._take_over():
                pass
            elif self.flat.grad is None:
                self.flat.grad = torch.zeros_like(self.flat)
            else:
                self.flat.grad.zero_()
            self._publish_late(self.flat)
        assert self.flat.grad is not None, "made above, earlier in this pass"
        return self.flat.grad

    @torch.no_grad()
    def _before_adding(self, gradient: Tensor | None) -> None:
        """Before autograd adds: what it adds to is what the tables have."""
        # A lookup that has written its gradient itself gives None.
        if gradient is not None and not self._take_over():
            self.flat.grad = None

    def _take_over(self) -> bool:
        """Make the flat gradient the tables' one; False: none of them has one."""
        own = [table.grad for table in self.tables]
        if self.flat.grad is None:
            # Dropped through the flat parameter: its old parts are not gradients any more.
            own = [
                None if gradient is None or gradient.data_ptr() == given else gradient
                for gradient, given in zip(own, self._given, strict=True)
            ]
        if all(gradient is None for gradient in own):
            return False
        if self.flat.grad is None:
            self.flat.grad = torch.zeros_like(self.flat)
        for gradient, part in zip(own, self._parts(self.flat.grad), strict=True):
            if gradient is None:
                part.zero_()
            elif gradient.data_ptr() != part.data_ptr():
                part.copy_(gradient)
        return True

    def _parts(self, gradient: Tensor) -> list[Tensor]:
        return [
            gradient[first : first + shape.numel()].view(shape) for first, shape in self._places
        ]

    def _publish_late(self, _flat: Tensor) -> None:
        # Autograd calls it too after a lookup that gave it no gradient.
        this_pass = _this_pass()
        if self._published_pass == this_pass:
            return
        self._published_pass = this_pass
        # Twice: DDP may put the gradient elsewhere in a callback of its own, queued after the
        # first one (the first step of a static graph does).
        queue = Variable._execution_engine.queue_callback  # noqa: SLF001 - DDP's own way to the end of a backward pass
        queue(lambda: queue(self._publish))

    def _publish(self) -> None:
        assert self.flat.grad is not None, "the backward pass has just made it"
        for number, part in enumerate(self._parts(self.flat.grad)):
            table = self.tables[number]
            if not table.requires_grad:
                continue
            table.grad = part
            self._given[number] = part.data_ptr()
            for hook in list((table._post_accumulate_grad_hooks or {}).values()):  # noqa: SLF001 - where torch keeps them
                hook(table)
