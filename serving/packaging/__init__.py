"""From a trained model to one servable file.

The files are the steps, in their order: `quantize` (with `weight_types`) stores the tables as
rows, `shard` places them, `embedding` and `lookup` swap the model's tables for the stored ones,
`predict` gives the model the package's six inputs, `trace` and `script` make it TorchScript,
`golden` records answers, `evaluate` measures the loss, `archive` writes the file.  `package`
runs them; `summary` prints what came out.
"""
