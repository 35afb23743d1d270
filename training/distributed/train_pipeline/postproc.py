"""Modules between the batch and the sharded modules, run when the ids are sent.

A model may change a batch's ids before it looks them up: hash them, add a feature, cut sequences.
Such a module is called ahead, in the stage that sends the ids; the model's forward pass then gets the
result that was kept.  It must have no trainable parameters (its result would be a step out of date)
and be called once in a forward pass, with parts of the batch or results of other such modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tessera.training.distributed.train_pipeline.arguments import BaseArgInfoStep, CallArgs
from tessera.training.distributed.train_pipeline.streams import hand_over_all

if TYPE_CHECKING:
    import torch

    from tessera.training.distributed.train_pipeline.contexts import TrainPipelineContext


class PipelinedPostproc:
    """Stands in for the forward pass of a module that runs ahead of the model's.

    The module stays where it is in the model, so its state and its path are as they were.

    Args:
        postproc_module: the module.
        fqn: its path in the model.
        args: what it is called with.
    """

    def __init__(self, postproc_module: nn.Module, fqn: str, args: CallArgs) -> None:
        self._postproc_module = postproc_module
        self._fqn = fqn
        self._args = args
        self._forward = postproc_module.forward
        self._context: TrainPipelineContext | None = None
        self._dist_stream: torch.cuda.Stream | None = None

    @property
    def postproc_module(self) -> nn.Module:
        """Return the module."""
        return self._postproc_module

    @property
    def fqn(self) -> str:
        """Return the module's path in the model."""
        return self._fqn

    @property
    def args(self) -> CallArgs:
        """Return what the module is called with."""
        return self._args

    def attach(self, context: TrainPipelineContext, dist_stream: torch.cuda.Stream | None) -> None:
        """Take the place of the module's forward pass.

        Args:
            context: of the batch whose forward pass is next.
            dist_stream: the stream that ids are sent on; None on a CPU.
        """
        self._context = context
        self._dist_stream = dist_stream
        # Set on the instance: nn.Module.__call__ finds it before the class's.
        self._postproc_module.forward = self

    def detach(self) -> None:
        """Give the module its own forward pass back."""
        del self._postproc_module.forward

    def set_context(self, context: TrainPipelineContext | None) -> None:
        """Keep results in ``context``, and take them from there."""
        self._context = context

    def get_context(self) -> TrainPipelineContext | None:
        """Return the context whose results are taken."""
        return self._context

    def take(self, batch: Any) -> Any:
        """The module's result for ``batch``; computed once for each context."""
        assert self._context is not None
        results = self._context.postproc_fwd_results
        if self._fqn not in results:
            positional, by_name = self._args.build_args_kwargs(batch)
            results[self._fqn] = self._forward(*positional, **by_name)
        return results[self._fqn]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module gave ahead; without that, what it gives now."""
        kept = self._context.postproc_fwd_results if self._context is not None else {}
        if self._fqn not in kept:
            return self._forward(*args, **kwargs)
        hand_over_all(self._dist_stream, kept[self._fqn])
        return kept[self._fqn]


@dataclass
class PostprocArgInfoStep(BaseArgInfoStep):
    """Runs a module that may run ahead on the batch.

    Attributes:
        postproc_module: the module; its own arguments are taken from the batch.
    """

    postproc_module: PipelinedPostproc

    def process(self, arg: Any) -> Any:
        """Return the module's result for the batch ``arg``."""
        return self.postproc_module.take(arg)


@contextlib.contextmanager
def use_context_for_postprocs(
    pipelined_postprocs: Sequence[PipelinedPostproc], next_batch_context: TrainPipelineContext
) -> Iterator[None]:
    """While it is entered, results are kept for the batch of ``next_batch_context``."""
    before = [postproc.get_context() for postproc in pipelined_postprocs]
    for postproc in pipelined_postprocs:
        postproc.set_context(next_batch_context)
    try:
        yield
    finally:
        for postproc, context in zip(pipelined_postprocs, before, strict=True):
            postproc.set_context(context)
