"""Golden answers: inputs and outputs recorded when the model was packaged.

``golden.bin`` is a safetensors file.  ``in.<name>`` are `HostBatch`'s six tensors by field name,
``out.<name>`` the outputs.  A loader replays them, so that a machine on which the operators
give other answers refuses the model instead of serving wrong scores.

A server that follows a log does that with each commit, beside answering.  So the files are read and answers are compared by NumPy:
every operator of torch that nothing else calls takes a busy server a millisecond of a CPU, until its code is in the caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load
from safetensors.torch import save
from torch import Tensor

from tessera.serving.package.manifest import GoldenInfo
from tessera.serving.package.runner import HostBatch, Runner, as_shared

_INPUTS = [field.name for field in fields(HostBatch)][:6]  # `HostBatch.tensors`

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
"""By the kind of device, how far an answer may be off, for answers of up to 1 in magnitude.

They come from float32 sums whose order differs between processors; a relative difference of 1e-6
in a logit of size 10 moves a score by 2.5e-6 at most.  A GPU's order differs from that of the CPU
that packaged in every sum.
"""

BF16_TOLERANCE = 2**-8
"""The same where dense layers are bfloat16: the distance of two neighbours below 1.

On a CPU their own sums have the same bits on every processor, but what they take in (interactions,
torch's functions) differs in the last bit, and an input between two bfloat16 numbers may then be rounded
the other way.  On a GPU the sums' order differs as well, with the same effect on their results.
"""

FP8_TOLERANCE = 2**-4
"""The same where they are e4m3, by the same reckoning: again the distance of two neighbours below 1."""

_DENSE_TOLERANCE = {"bf16": BF16_TOLERANCE, "fp8": FP8_TOLERANCE}


class GoldenMismatchError(ValueError):
    """The model's answers are not the recorded ones; the message says which and by how much."""


def golden_info(
    batch: HostBatch,
    answers: Mapping[str, Tensor],
    *,
    device: str = "cpu",
    dense_dtype: str = "fp32",
) -> GoldenInfo:
    """How a loader must meet the ``answers`` to ``batch`` on a kind of device."""
    tolerance = _DENSE_TOLERANCE.get(dense_dtype, TOLERANCE[device])
    largest = max((float(answer.abs().max()) for answer in answers.values()), default=0.0)
    return GoldenInfo(samples=batch.batch_size, atol=tolerance * max(1.0, largest), rtol=0.0)


def write_golden(batch: HostBatch, outputs: dict[str, Tensor]) -> bytes:
    """The content of ``golden.bin`` for one batch and its outputs."""
    tensors = {f"in.{name}": getattr(batch, name).contiguous() for name in _INPUTS}
    tensors |= {f"out.{name}": output.contiguous() for name, output in outputs.items()}
    return save(tensors)


def read_golden(content: bytes) -> tuple[HostBatch, dict[str, Tensor]]:
    """Read what `write_golden` wrote.

    Raises:
        ValueError: the content is not a safetensors file, or it lacks a tensor.
    """
    try:
        tensors = {name: torch.from_numpy(array) for name, array in load(content).items()}
        inputs = {name: tensors.pop(f"in.{name}") for name in _INPUTS}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"golden.bin cannot be read: {error}") from error
    outputs = {name.removeprefix("out."): tensor for name, tensor in tensors.items()}
    return HostBatch(**inputs, batch_size=inputs["float_features"].shape[0]), outputs


def replay_golden(runner: Runner, content: bytes, info: GoldenInfo) -> None:
    """Score the recorded inputs and compare; a model that shares rows does it that way, too.

    Raises:
        ValueError: the content cannot be read.
        GoldenMismatchError: an output is missing, extra, of another shape or type, or differs
            by more than ``info`` allows.
    """
    batch, expected = read_golden(content)
    compare_golden(runner, batch, expected, info)
    if runner.shares_rows:
        compare_golden(runner, as_shared(batch), expected, info)


def compare_golden(
    runner: Runner, batch: HostBatch, expected: Mapping[str, Tensor], info: GoldenInfo
) -> None:
    """Score what `read_golden` has read, in one way, and compare.

    A commit is checked by this alone while answers wait for it: it changes weights, which are the same in both ways, and no code.

    Raises:
        GoldenMismatchError: see `replay_golden`.
    """
    _compare(runner.forward(batch), expected, info)


def _compare(found: dict[str, Tensor], expected: Mapping[str, Tensor], info: GoldenInfo) -> None:
    if found.keys() != expected.keys():
        raise GoldenMismatchError(
            f"the outputs are {sorted(found)}, the golden answers have {sorted(expected)}"
        )
    for name, golden in expected.items():
        answer = found[name]
        if answer.shape != golden.shape or answer.dtype != golden.dtype:
            raise GoldenMismatchError(
                f"output {name!r} is {answer.dtype} {list(answer.shape)}, the golden answer is "
                f"{golden.dtype} {list(golden.shape)}"
            )
        found_here, recorded = answer.numpy(), golden.numpy()
        with np.errstate(invalid="ignore", over="ignore"):
            # Written so that a NaN fails.
            holds = np.abs(found_here - recorded) <= info.atol + info.rtol * np.abs(recorded)
        if not holds.all():
            row = int(np.nonzero(~holds.reshape(len(recorded), -1).all(axis=1))[0][0])
            raise GoldenMismatchError(
                f"output {name!r} of golden sample {row} is {found_here[row].tolist()}, recorded was "
                f"{recorded[row].tolist()}"
            )
