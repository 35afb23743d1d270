"""Experts and gates: what models of several labels share, and what each label has of its own.

Sources: Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts" (2018); Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task
Learning Model for Personalized Recommendations" (2020).

Shapes: ``B`` samples, ``N`` columns of an input, ``E`` experts, ``H`` columns of an expert's output,
``L`` labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.training.models.dlrm_parts import OverArch
from tessera.training.modules.mlp import MLP


class Experts(nn.Module):
    """MLPs side by side, all of the same sizes.

    Args:
        count: ``E``.
        in_features: ``N``.
        layer_sizes: columns after each layer; the last is ``H``.
        dropout: share of each layer's outputs that training sets to zero.
        batch_norm: whether each layer is normalised over the batch.
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        layer_sizes: list[int],
        *,
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            MLP(in_features, layer_sizes, dropout=dropout, batch_norm=batch_norm)
            for _ in range(count)
        )

    def forward(self, features: Tensor) -> list[Tensor]:
        """``[B, N]`` to one ``[B, H]`` per expert."""
        return [expert(features) for expert in self.experts]


class Gate(nn.Module):
    """A mean of experts' outputs, weighted by ``softmax(W x)``.

    Args:
        in_features: ``N``.
        experts: ``E``.
    """

    def __init__(self, in_features: int, experts: int) -> None:
        super().__init__()
        self.logits = nn.Linear(in_features, experts, bias=False)

    def forward(self, features: Tensor, outputs: list[Tensor]) -> Tensor:
        """``[B, N]`` and ``E`` outputs ``[B, H]`` to ``[B, H]``."""
        weights = torch.softmax(self.logits(features), dim=1)
        return (weights.unsqueeze(2) * torch.stack(outputs, dim=1)).sum(dim=1)


class MMoE(nn.Module):
    """Experts that all labels share, and a gate for each label.

    Args:
        in_features: ``N``.
        labels: ``L``.
        experts: ``E``.
        expert_sizes: columns after each layer of an expert.
        dropout: in the experts, while training.
        batch_norm: whether the experts' layers are normalised over the batch.
    """

    def __init__(
        self,
        in_features: int,
        labels: int,
        *,
        experts: int,
        expert_sizes: list[int],
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self.experts = Experts(
            experts, in_features, expert_sizes, dropout=dropout, batch_norm=batch_norm
        )
        self.gates = nn.ModuleList(Gate(in_features, experts) for _ in range(labels))

    def forward(self, features: Tensor) -> list[Tensor]:
        """``[B, N]`` to one ``[B, H]`` per label."""
        outputs = self.experts(features)
        return [gate(features, outputs) for gate in self.gates]


class ExtractionLevel(nn.Module):
    """One level of PLE: each label's own experts and the shared ones, mixed by gates.

    Args:
        in_features: ``N``.
        labels: ``L``.
        own_experts: experts of each label.
        shared_experts: experts of all labels.
        expert_sizes: columns after each layer of an expert.
        last: whether no level follows, so that nothing shared is handed on.
        dropout: in the experts, while training.
        batch_norm: whether the experts' layers are normalised over the batch.
    """

    def __init__(
        self,
        in_features: int,
        labels: int,
        *,
        own_experts: int,
        shared_experts: int,
        expert_sizes: list[int],
        last: bool,
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self.own = nn.ModuleList(
            Experts(own_experts, in_features, expert_sizes, dropout=dropout, batch_norm=batch_norm)
            for _ in range(labels)
        )
        self.shared = Experts(
            shared_experts, in_features, expert_sizes, dropout=dropout, batch_norm=batch_norm
        )
        self.gates = nn.ModuleList(
            Gate(in_features, own_experts + shared_experts) for _ in range(labels)
        )
        self.shared_gate: Gate | None = None
        if not last:
            self.shared_gate = Gate(in_features, labels * own_experts + shared_experts)

    def forward(self, own: Sequence[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        """Go one level up.

        Args:
            own: ``[B, N]`` per label.
            shared: ``[B, N]``, what the shared experts are given.

        Returns:
            ``[B, H]`` per label, and the next level's ``shared``; behind the last level that is
            the given one.
        """
        of_labels = [experts(x) for experts, x in zip(self.own, own, strict=True)]
        of_all = self.shared(shared)
        mixed = [
            gate(x, [*outputs, *of_all])
            for gate, x, outputs in zip(self.gates, own, of_labels, strict=True)
        ]
        if self.shared_gate is None:
            return mixed, shared
        every = [output for outputs in of_labels for output in outputs]
        return mixed, self.shared_gate(shared, [*every, *of_all])


class PLE(nn.Module):
    """Levels of experts, each above the other; the first one's inputs are all the same.

    Args:
        in_features: ``N``.
        labels: ``L``.
        levels: how many.
        own_experts: experts of each label, on each level.
        shared_experts: experts of all labels, on each level.
        expert_sizes: columns after each layer of an expert.
        dropout: in the experts, while training.
        batch_norm: whether the experts' layers are normalised over the batch.
    """

    def __init__(
        self,
        in_features: int,
        labels: int,
        *,
        levels: int,
        own_experts: int,
        shared_experts: int,
        expert_sizes: list[int],
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self._labels = labels
        self.levels = nn.ModuleList(
            ExtractionLevel(
                in_features if level == 0 else expert_sizes[-1],
                labels,
                own_experts=own_experts,
                shared_experts=shared_experts,
                expert_sizes=expert_sizes,
                last=level == levels - 1,
                dropout=dropout,
                batch_norm=batch_norm,
            )
            for level in range(levels)
        )

    def forward(self, features: Tensor) -> list[Tensor]:
        """``[B, N]`` to one ``[B, H]`` per label."""
        own, shared = [features] * self._labels, features
        for level in self.levels:
            own, shared = level(own, shared)
        return own


class Towers(nn.Module):
    """An MLP of its own for each label, which gives the label's logit.

    Args:
        in_features: ``H``.
        labels: ``L``.
        layer_sizes: hidden layers of a tower; at least one.
        dropout: in the hidden layers, while training.
        batch_norm: whether they are normalised over the batch.
    """

    def __init__(
        self,
        in_features: int,
        labels: int,
        layer_sizes: list[int],
        *,
        dropout: float,
        batch_norm: bool,
    ) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            OverArch(in_features, [*layer_sizes, 1], dropout=dropout, batch_norm=batch_norm)
            for _ in range(labels)
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """``[B, H]`` per label to logits ``[B, L]``."""
        logits = [tower(x) for tower, x in zip(self.towers, features, strict=True)]
        return torch.cat(logits, dim=1)
