"""Our dense layers against torch's, one thread, interleaved: microseconds and GFLOP/s.

    python -m tessera.kernels.bench.cpu_linear [--layers 13x512,512x256,...] [--out FILE.json]

Contenders, all from float32 inputs to float32 outputs with bias and ReLU:

* ``fp32``, ``bf16``: ``tessera::linear`` and ``tessera::linear_bf16``;
* ``torch fp32``, ``torch bf16``: oneDNN with weights packed beforehand, the latter with the
  input's and the output's conversion, and ``in bf16`` without them.

TESSERA_CPU_KERNELS (scalar, avx2, avx512, amx) chooses the instruction set of ours.  A round calls
every contender once, in turn; figures are medians over the rounds.  ``all`` is the layers one after the
other, each with weights that the others have driven out of the nearest caches, as in a model.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.kernels import ops
from tessera.kernels.bench.cpu_lookup import medians_us, processor
from tessera.kernels.linear import pack_linear, pack_linear_bf16

LAYERS = "13x512,512x256,256x64,415x512,512x256,256x1"
BATCHES = (1, 4, 16, 64, 512)
Layer = Callable[[Tensor], Tensor]


def contenders(weight: Tensor, bias: Tensor) -> dict[str, Layer]:
    """One layer in each form."""
    outputs = len(weight)
    narrow, narrow_bias = weight.bfloat16(), bias.bfloat16()
    ours, ours_bf16 = pack_linear(weight, bias), pack_linear_bf16(weight, bias)
    reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 (torch's own name for it)
    product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 (likewise)
    theirs, theirs_bf16 = reorder(weight), reorder(narrow)

    def in_bfloat16(x: Tensor) -> Tensor:
        result: Tensor = product(x, theirs_bf16, narrow_bias, "relu", [], None)
        return result

    return {
        "fp32": lambda x: torch.ops.tessera.linear(x, *ours, outputs, True),
        "bf16": lambda x: torch.ops.tessera.linear_bf16(x, *ours_bf16, outputs, True),
        "torch fp32": lambda x: product(x, theirs, bias, "relu", [], None),
        "torch bf16": lambda x: in_bfloat16(x.bfloat16()).float(),
        "in bf16": in_bfloat16,
    }


def one_after_the_other(layers: list[Layer], inputs: list[Tensor]) -> Callable[[int], Any]:
    """All layers, each on its own input, as a function of the round's number."""

    def call(_round: int) -> None:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    return call


def measure(shapes: list[tuple[int, int]], batch: int, rounds: int) -> dict[str, float]:
    """Median microseconds of each contender for all ``shapes``."""
    generator = torch.Generator().manual_seed(0)
    layers: dict[str, list[Layer]] = {}
    inputs = []
    for k, n in shapes:
        weight = torch.randn(n, k, generator=generator) / k**0.5
        forms = contenders(weight, torch.randn(n, generator=generator))
        x = torch.randn(batch, k, generator=generator)
        torch.testing.assert_close(forms["bf16"](x), forms["fp32"](x), rtol=0.05, atol=0.05)
        inputs.append(x)
        for name, form in forms.items():
            layers.setdefault(name, []).append(form)
    narrow = [x.bfloat16() for x in inputs]
    calls = {
        name: one_after_the_other(each, narrow if name == "in bf16" else inputs)
        for name, each in layers.items()
    }
    with torch.inference_mode():
        return medians_us(calls, rounds)


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", default=LAYERS, help="inputs x outputs (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=300, help="at B=64 (default %(default)s)")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args()
    shapes = [(int(k), int(n)) for k, n in (layer.split("x") for layer in args.layers.split(","))]
    ops.load()
    torch.set_num_threads(1)
    chosen = os.environ.get("TESSERA_CPU_KERNELS", "") or "the best"
    print(f"{processor()}, torch {torch.__version__}, 1 thread, our instruction set: {chosen}")
    results = []
    for name, group in [
        ("all", shapes),
        *((f"{k}x{n}", [(k, n)]) for k, n in dict.fromkeys(shapes)),
    ]:
        for batch in BATCHES:
            found = measure(group, batch, max(20, args.rounds * 64 // max(batch, 16)))
            products = 2e-3 * batch * sum(k * n for k, n in group)
            results.append({"layers": name, "batch": batch, "us": found})
            cells = (f"{who} {us:7.1f} us {products / us:6.1f}" for who, us in found.items())
            print(f"{name:<8} B={batch:<4} " + "  ".join(cells), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"results": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
