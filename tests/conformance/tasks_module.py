"""A user's own module with several outputs, ids with weights and ids that a map gives rows, as a package."""

import numpy as np
import torch
from torch import nn

from tessera.serving import package_model
from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.runner import HostBatch
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from tessera.training.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

POISON = 1e6
"""A dense value that the module below cannot take."""

KNOWN = [*range(30), 10**15, -7]
"""The items that the module below has rows for."""


def tables(*names):
    return [
        EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=8, feature_names=[name])
        for name in names
    ]


class Tasks(nn.Module):
    """A score per sample and three logits, from plain bags, weighted bags and dense values.

    Of the items `KNOWN` have rows of their own, all others share one.

    A dense value of `POISON` or more is used as an index that is not there.
    """

    def __init__(self):
        super().__init__()
        self.plain = EmbeddingBagCollection(tables=tables("user"))
        items = tables("item")
        rows = MCHManagedCollisionModule(50, torch.device("cpu"), LFU_EvictionPolicy(), 1)
        self.mapped = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=items), ManagedCollisionCollection({"item": rows}, items)
        )
        known = torch.tensor(KNOWN)
        self.mapped(KeyedJaggedTensor(["item"], known, lengths=torch.ones_like(known)))
        self.weighted = EmbeddingBagCollection(tables=tables("history"), is_weighted=True)
        self.layer = nn.Linear(2 + 24, 4)
        self.register_buffer("choices", torch.tensor([1.0, 2.0]))

    def forward(self, dense, bags, weighted):
        row = (dense[:, 0] >= POISON).long() * 7
        scale = self.choices.index_select(0, row).unsqueeze(1)
        vectors = [dense, self.plain(bags).values(), self.mapped(bags)[0].values()]
        vectors.append(self.weighted(weighted).values())
        out = self.layer(torch.cat(vectors, dim=1)) * scale
        return {"score": out[:, 0], "logits": out[:, 1:]}


def package_tasks(path):
    """Write the module, with random weights, as the package "tasks"."""
    torch.manual_seed(0)
    lengths = torch.tensor([1, 2, 0, 1])
    plain = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 3, 4]), lengths=lengths)
    weighted = KeyedJaggedTensor(
        ["history"], torch.tensor([5, 6]), torch.tensor([0.5, 2.0]), torch.tensor([1, 1])
    )
    package_model(Tasks().eval(), None, (torch.randn(2, 2), plain, weighted), out=path)


def draw(loaded, count, seed=0):
    drawer = RequestDrawer(
        loaded.manifest.schema, Draw(ids="uniform", bags="uniform", max_bag=4), seed=seed
    )
    return pb.PredictionRequest.FromString(encode_request(drawer.samples(count)))


def expected(loaded, message):
    def group(part):
        return (
            torch.from_numpy(np.frombuffer(part.lengths, "<i4").copy()),
            torch.from_numpy(np.frombuffer(part.values_int64, "<i8").copy()),
        )

    plain, scored = group(message.id_list_features), group(message.id_score_list_features)
    weights = np.frombuffer(message.id_score_list_features.weights, "<f4").copy()
    dense = np.frombuffer(message.float_features.values, "<f4").copy()
    batch = HostBatch(
        float_features=torch.from_numpy(dense).view(message.batch_size, -1),
        id_list_features_lengths=plain[0],
        id_list_features_values=plain[1],
        id_score_list_features_lengths=scored[0],
        id_score_list_features_values=scored[1],
        id_score_list_features_weights=torch.from_numpy(weights),
        batch_size=message.batch_size,
    )
    return {name: scores.numpy() for name, scores in loaded.runner.forward(batch).items()}
