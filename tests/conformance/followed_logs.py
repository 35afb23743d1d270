"""A log of commits, and of each of its states a whole package, by which answers are held."""

from __future__ import annotations

import itertools
import json
import shutil

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.commits.file import read_commit
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import MANIFEST_RECORD
from tests.conformance.test_answers import run_in_process
from tests.packaging.archives import read_records, with_record

DRAFTS = itertools.count()
ROWS = 40


class History:
    """Commits of version 3 of the model ``m``, made once for many tests.

    ``commits[n]`` are the bytes of commit ``n``, ``expected(n, message)`` what the whole package of the state after
    it answers (0: the package itself).
    """

    def __init__(self, folder, package, count, *, seed=0, key=None, whole=True):
        self.package = package
        self._whole = whole  # without it there are the commits alone
        self.folder = folder / "m" / "3"
        self.folder.mkdir(parents=True)
        shutil.copy(package, self.folder / "model.pt")
        self.publisher = SyntheticPublisher(self.folder, seed=seed, key=key)
        self.commits = {}
        self._packages = {0: load_package(package)} if whole else {}
        for _ in range(count):
            self.publish()

    def publish(self, **options):
        """One more commit; returns its number."""
        options = {"rows": ROWS, "newest_example_s": 1e9} | options
        path = self.publisher.publish(**options)
        number = int(path.name.split(".")[0])
        self.commits[number] = path.read_bytes()
        if self._whole:
            self._packages[number] = self._whole_package(number)
        return number

    def sha256(self, number):
        """How a fence names commit ``number``."""
        return read_commit(self.folder / LOG_FOLDER / commit_name(number)).sha256

    def _whole_package(self, number):
        """The package of the state as it is now, written anew and loaded as any other."""
        tensors = self.publisher.state.tensors
        records = read_records(self.package)
        path = self.package
        for name, content in records.items():
            if name != MANIFEST_RECORD and name in tensors and tensors[name].tobytes() != content:
                other = self.folder / f".{number}-{name.replace('/', '-')}.pt"
                path = with_record(path, other, name, tensors[name].tobytes())
        # Its golden answers are those of the commit, which servers compare.
        return load_package(path, verify_golden=False)

    def expected(self, number, message):
        return run_in_process(self._packages[number], message).tobytes()


class FollowedVersion:
    """The folder of version 3 of the model ``m`` in a repository, whose log a test fills."""

    def __init__(self, repository, history):
        self.repository = repository
        self.history = history
        self.folder = repository / "m" / "3"
        self.folder.mkdir(parents=True)
        shutil.copy(history.package, self.folder / "model.pt")
        self.log = self.folder / LOG_FOLDER

    def put(self, number, content):
        """Commit ``number`` appears, or is replaced, by rename."""
        self.log.mkdir(exist_ok=True)
        draft = self.log / f".{next(DRAFTS)}.partial"
        draft.write_bytes(content)
        draft.rename(self.log / commit_name(number))

    def fence(self, fenced):
        """The fence is as it says: by number a hash, or None."""
        self.log.mkdir(exist_ok=True)
        entries = [{"number": number, "sha256": fenced[number]} for number in sorted(fenced)]
        draft = self.log / f".{next(DRAFTS)}.partial"
        draft.write_text(json.dumps({"format": 1, "fenced": entries}))
        draft.rename(self.log / "fenced.json")


def wait_for_commit(server, message, number):
    """The first answer that names commit ``number``."""
    found = []

    def answered():
        found.append(server.predict(message))
        return found[-1].model_commit == number

    server.wait_for(answered)
    return found[-1]
