"""Writing the folder of a checkpoint, on all ranks together: whole or not at all."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tessera.durable import sync
from tessera.training.distributed.checkpoint.basics import (
    CheckpointError,
    partial_path,
    replaced_path,
    restore_replaced,
)
from tessera.training.distributed.checkpoint.digests import (
    INDEX,
    Records,
    file_digest,
    hash_records,
    plain_digest,
)
from tessera.training.distributed.checkpoint.layout import Content
from tessera.training.distributed.checkpoint.reader import SavedTensors

FORMAT = "tessera-sharded-checkpoint"
VERSION = 2
PLAIN_FILE = "tessera.json"

T = TypeVar("T")
_gloo: tuple[Any, Any] | None = None


class PendingSave:
    """Represents a save that a thread carries out."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            self._error = error

    @property
    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save has ended.

        Raises:
            CheckpointError: it failed; older checkpoints are as they were.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


def cpu_group() -> dist.ProcessGroup | None:
    """All ranks, over the CPU; None without a process group.  Every rank must come here."""
    global _gloo  # noqa: PLW0603 - one group of its kind per default group
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if _gloo is None or _gloo[0] is not world:
        _gloo = (world, dist.new_group(backend="gloo"))
    made: dist.ProcessGroup = _gloo[1]
    return made


def together(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank; an error on one is an error on all, so that none waits."""
    result, error = None, None
    try:
        result = work()
    except Exception as raised:  # noqa: BLE001 - raised again below, on every rank
        error = raised
    errors = _of_all_ranks(None if error is None else str(error), group)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            raise CheckpointError(f"rank {rank} failed: {other}")
    return cast("T", result)


def _of_all_ranks(own: T, group: dist.ProcessGroup | None) -> list[T]:
    if group is None:
        return [own]
    gathered = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def write(
    folder: Path, content: Content, extra: dict[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Write one checkpoint; every rank of ``group`` calls it with its part of the content.

    Raises:
        CheckpointError: it cannot be written, on this or another rank.
    """
    first = group is None or dist.get_rank(group) == 0
    partial = partial_path(folder)

    def prepare() -> None:
        if first:
            folder.parent.mkdir(parents=True, exist_ok=True)
            restore_replaced(folder.parent)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def tensors() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(
                content.tensors,
                storage_writer=FileSystemWriter(partial, sync_files=True),
                process_group=group,
                no_dist=group is None,
            )

    # Rank 0 need not hold a shard of every table, nor the interaction of every tower.
    columns = _merged(_of_all_ranks(content.columns, group))
    numbers = _merged(_of_all_ranks(content.numbers, group))
    groups = _merged_groups(_of_all_ranks(content.groups, group))

    def finish(records: Records) -> None:
        if not first:
            return
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "ranks": 1 if group is None else dist.get_world_size(group),
            "columns": columns,
            "numbers": numbers,
            "groups": groups,
            "extra": extra,
            "index": file_digest(partial / INDEX),
            "records": records,
        }
        # As a reader will see it: keys that are not texts become texts.
        plain = json.loads(json.dumps(plain))
        plain["sha256"] = plain_digest(plain)
        with (partial / PLAIN_FILE).open("w") as stream:
            json.dump(plain, stream, allow_nan=True)
        sync(partial / PLAIN_FILE)
        sync(partial)
        if folder.exists():
            old = replaced_path(folder)
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            partial.rename(folder)
        sync(folder.parent)

    try:
        together(group, prepare)
        # A rank that fails here makes torch's own exchange fail on all of them.
        tensors()
        records = _merged(_of_all_ranks(together(group, lambda: _own(partial, group)), group))
        together(group, lambda: finish(records))
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {folder}: {_reason(error)}") from error


def _own(folder: Path, group: dist.ProcessGroup | None) -> Records:
    """Hashes of the records in the files that this rank has written, as torch names them."""
    rank = 0 if group is None else dist.get_rank(group)
    places = SavedTensors(folder).places()
    return hash_records(folder, [place for place in places if place[0].startswith(f"__{rank}_")])


def _merged(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}


def _merged_groups(
    groups_per_rank: Sequence[list[dict[str, Any]] | None],
) -> list[dict[str, Any]] | None:
    """The first rank's groups of parameters, with the parameters that only other ranks have.

    Those join the first group with the same settings, or have a group of their own.  None: the first rank has
    no groups to save.
    """
    first, *others = groups_per_rank
    if first is None:
        return None
    merged = [{**group, "params": list(group.get("params", []))} for group in first]
    known = {name for group in merged for name in group["params"]}
    for group in (group for groups in others for group in groups or []):
        new = [name for name in group.get("params", []) if name not in known]
        if not new:
            continue
        known.update(new)
        settings = {**group, "params": None}
        alike = [own for own in merged if {**own, "params": None} == settings]
        if alike:
            alike[0]["params"] += new
        else:
            merged.append({**group, "params": new})
    return merged


def _reason(error: BaseException) -> str:
    """In one line; torch's own exception, no ``Exception``, holds one per rank that failed."""
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {_reason(found[0])}" for rank, found in error.failures.items()
        )
    # torch hides a full disk behind an error of its archive writer.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
