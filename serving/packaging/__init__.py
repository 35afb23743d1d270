"""From a module to one servable file; a trained run is a module with a served head.

The files are the steps, in their order:

* `source` and `ranking` (a module of a user's own, a trained run), `options` (what the user chooses),
  `inputs` (what the module takes and gives);
* `collections/` finds the modules that hold tables and swaps them for lookups of stored rows;
* `tables/` chooses each table's type and place and stores it as rows; `lookups/` has the two
  backends' operators that look them up;
* `predict` gives the module the package's six inputs; `trace` makes it one flat graph;
* `passes/` changes the graph, one file per pass: which run, and in which order, follows from the
  backend, the device and the type of the dense layers;
* `script` makes it TorchScript; `answers` compares each form with the module; `servable` runs the steps
  up to here;
* `evaluate` measures the loss, `type_report` compares types; `write/` chooses the golden inputs and
  writes the file; `package` runs it all.

`FORMAT.md` beside this folder describes the file.
"""
