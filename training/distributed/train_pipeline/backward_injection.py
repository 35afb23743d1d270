"""Work that is done within a backward pass, at a place that is named by a module.

A hook is put on a parameter of the module (it runs when the parameter's gradient is whole) or, at each
forward pass, on a tensor that the module takes or gives (it runs when the gradient comes there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

BackwardHookWork = Callable[[Any], None]
"""Work that is given the pipeline."""


@unique
class InjectionTargetType(Enum):
    """What a hook is put on."""

    PARAM_GRAD = "param_grad"  # one parameter of the module
    ACTIVATION = "activation"  # a tensor that the module takes or gives


@runtime_checkable
class GradTensorFinder(Protocol):
    """Picks a tensor of a module's arguments and output; None: there is none."""

    def __call__(
        self, module_input: Any, module_kwargs_input: Any, module_output: Any
    ) -> Tensor | None:
        """Return the tensor that the hook is put on."""


@dataclass(frozen=True)
class FirstGradTensorFinder:
    """Picks the first tensor that needs a gradient, in tuples, lists and dictionaries too.

    Of jagged tensors the weights are looked at.

    Attributes:
        use_input: whether the module's arguments are looked at, those by position first, and not its
            output.
    """

    use_input: bool = False

    def __call__(
        self, module_input: Any, module_kwargs_input: Any, module_output: Any
    ) -> Tensor | None:
        """Return the first tensor that needs a gradient."""
        looked_at = (module_input, module_kwargs_input) if self.use_input else (module_output,)
        return next(_tensors_with_gradients(looked_at), None)


def _tensors_with_gradients(value: Any) -> Iterator[Tensor]:
    if isinstance(value, JaggedTensor | KeyedJaggedTensor):
        value = value.weights_or_none()
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors_with_gradients(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            yield from _tensors_with_gradients(part)


@dataclass(frozen=True)
class InjectionSite:
    """A place in the backward pass.

    Attributes:
        fqn: the path of the module in the model.
        tensor_finder: picks the tensor; not asked for ``PARAM_GRAD``.
        target_type: what the hook is put on.
        hook_position: of ``PARAM_GRAD``: which of the module's parameters, 0 is the first and 1 the last;
            where that one has no gradient of its own, the nearest that has.
    """

    fqn: str
    tensor_finder: GradTensorFinder
    target_type: InjectionTargetType = InjectionTargetType.ACTIVATION
    hook_position: float = 1.0


def register_backward_hook(
    site: InjectionSite, model: nn.Module, hook_fn: Callable[[Tensor], Any]
) -> RemovableHandle:
    """Have a function called in each backward pass of a model.

    Args:
        site: where.
        model: has the module.
        hook_fn: called with the gradient of the parameter or tensor; what it returns is ignored.

    Returns:
        What removes it.

    Raises:
        ValueError: no such module, or none of its parameters has a gradient of its own.
        RuntimeError: in a forward pass: the finder finds no tensor.
    """
    try:
        target = model.get_submodule(site.fqn)
    except AttributeError as error:
        raise ValueError(f"the model has no module {site.fqn!r}") from error
    if site.target_type is InjectionTargetType.PARAM_GRAD:
        parameter = _nearest_with_gradient(site, list(target.parameters()))
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda own: _ignored(hook_fn(_grad_of(own)))
        )
        return handle

    def after_forward(
        _: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> None:
        found = site.tensor_finder(given, named, output)
        if found is None:
            raise RuntimeError(
                f"the tensor_finder of {site.fqn!r} found no tensor that needs a gradient in this pass"
            )
        found.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: _ignored(hook_fn(gradient))
        )

    return target.register_forward_hook(after_forward, with_kwargs=True)


def _ignored(_: Any) -> None:
    """Nothing: what a tensor's hook returns would take the gradient's place."""


def _grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "the hook runs when the gradient is there"
    return parameter.grad


def _nearest_with_gradient(site: InjectionSite, parameters: list[nn.Parameter]) -> nn.Parameter:
    wanted = min(int(min(max(site.hook_position, 0.0), 1.0) * len(parameters)), len(parameters) - 1)
    places = [
        place
        for place, parameter in enumerate(parameters)
        if parameter.requires_grad and parameter.is_leaf
    ]
    if not places:
        raise ValueError(
            f"none of the {len(parameters)} parameters of {site.fqn!r} is a leaf that needs a gradient; give "
            "ACTIVATION, or another module"
        )
    # Of two that are as near, the later one.
    return parameters[min(places, key=lambda place: (abs(place - wanted), -place))]
