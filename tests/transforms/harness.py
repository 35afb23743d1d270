"""Small batches, and a preprocessor in its three forms: eager, traced, scripted."""

from dataclasses import dataclass

import torch
from torch import nn

from tessera.training import KeyedJaggedTensor
from tessera.training.fx import symbolic_trace
from tessera.training.transforms.fitting import fit
from tessera.training.transforms.preprocessor import Preprocessor


@dataclass
class Rows:
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    row_numbers: torch.Tensor | None


def jagged(names, bags):
    """A `KeyedJaggedTensor` of ``bags[feature][sample]``, lists of ids."""
    flat = [bags[name] for name in names]
    values = [one for own in flat for bag in own for one in bag]
    lengths = [len(bag) for own in flat for bag in own]
    return KeyedJaggedTensor(
        list(names),
        torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=len(flat[0]) if flat else 0,
    )


def rows(dense, names, bags, labels, first=0):
    return Rows(
        torch.tensor(dense, dtype=torch.float32).view(
            len(labels), len(dense) // len(labels) if labels else 1
        ),
        jagged(names, bags),
        torch.tensor(labels, dtype=torch.float32),
        torch.arange(first, first + len(labels)),
    )


def fitted(transforms, *batches):
    learned = fit(transforms, lambda: iter(batches))
    made = Preprocessor(transforms, learned.sizes)
    made.load_state_dict(learned.state, strict=False)
    return made.eval()


class OfTensors(nn.Module):
    def __init__(self, made, names):
        super().__init__()
        self.made = made
        self.names = list(names)

    def forward(self, dense, values, lengths):
        given = KeyedJaggedTensor(self.names, values, lengths=lengths)
        values, features = self.made(dense, given)
        return values, features.values(), features.lengths()


def three_forms(made, names):
    """The preprocessor over plain tensors: eager, traced, scripted."""
    eager = OfTensors(made, names)
    traced = symbolic_trace(eager)
    return eager, traced, torch.jit.script(traced)
