"""What becomes of a version whose load ends when it is not wanted any more."""

import pytest

from tessera.serving.repository.control import ControlRecord
from tessera.serving.repository.wanted import Wanted
from tessera.serving.server.repository.model_versions import ModelVersions


@pytest.mark.parametrize(
    ("record", "wanted", "asked", "unloaded"),
    [
        (ControlRecord(), {2}, None, False),
        (ControlRecord(), {3}, None, False),  # superseded: it answers until 3 is ready
        (ControlRecord(remove=frozenset({2})), {3}, None, True),
        (ControlRecord(remove=frozenset({2})), {2}, None, False),
        (ControlRecord(remove=frozenset({2})), {3}, {2}, False),
        (ControlRecord(unloaded=True), set(), None, True),
        (None, set(), None, False),
    ],
)
def test_only_what_a_call_has_unloaded_is_let_go_of(record, wanted, asked, unloaded):
    model = ModelVersions("m", record=record, wanted=Wanted(versions=frozenset(wanted)))
    model.asked = None if asked is None else frozenset(asked)
    assert model.was_unloaded(2) is unloaded
