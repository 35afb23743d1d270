"""From a trained model to one servable file.

The files are the steps, in their order: `quantize` (with `weight_types`) stores the tables as
rows, `shard` places them, `embedding` and `lookup` swap the model's tables for the stored ones
(with the operators of `tessera_backend` or `fbgemm_backend`), `predict` gives the model the
package's six inputs (and, with `same_bits`, answers that do not depend on the batch), `trace`,
`pack` and `script` make it TorchScript, `golden` chooses the recorded inputs, `evaluate` measures
the loss, `archive` writes the file.  `package` runs them; `FORMAT.md` beside this folder
describes the file.
"""
