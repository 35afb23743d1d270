"""Schemas that the client's tests share."""

from tessera.serving.package.schema import FeatureSpec, InputSchema, OutputSpec


def feature(name, group="id_list", *, rows=100, hashing="murmur3"):
    return FeatureSpec(
        name=name,
        group=group,
        table=f"t_{name}",
        rows=rows,
        dim=8,
        pooling="sum",
        hashing=hashing,
        out_of_range="reject",
    )


def schema(*, dense=2, features=None, missing="nan"):
    if features is None:
        features = (feature("C1"), feature("C2"), feature("W1", "id_score_list"))
    return InputSchema(
        dense_features=tuple(f"I{i}" for i in range(dense)),
        dense_missing=missing,
        dense_columns=("",) * dense,
        features=tuple(features),
        outputs=(OutputSpec(name="default", width=1),),
    )
