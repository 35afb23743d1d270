"""What the flags of connections ask of gRPC, and what the system's limit of open files leaves of them."""

import resource

import pytest

from tessera.errors import UserError
from tessera.serving.server.config import ModelSource, ServerConfig
from tessera.serving.server.front import connection_limits
from tessera.serving.server.front.connection_limits import (
    ConnectionLimits,
    connections_to_be_had,
)


@pytest.mark.parametrize(
    ("files", "others", "had"),
    [
        (resource.RLIM_INFINITY, 0, 4_096),
        (1_048_576, 0, 4_096),
        (1_024, 0, 960),
        (1_024, 500, 460),
        (70, 0, 16),
    ],
)
def test_no_more_than_there_are_descriptors_for(monkeypatch, files, others, had):
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda _: (files, files))
    assert connections_to_be_had(4_096, others) == had
    assert connections_to_be_had(8, others) == 8


def test_an_age_of_zero_is_any_age():
    named = dict(ConnectionLimits(most=3, max_age_s=0, idle_s=7).grpc_options())
    assert named == {
        "grpc.max_allowed_incoming_connections": 3,
        "grpc.max_connection_idle_ms": 7_000,
    }
    named = dict(ConnectionLimits(most=3, max_age_s=2, idle_s=7).grpc_options())
    assert named["grpc.max_connection_age_ms"] == 2_000


def test_processes_share_the_connections():
    of = {"models": (ModelSource(path="model.pt"),), "processes": 4}
    assert ServerConfig(max_connections=10, **of).of_one_process().max_connections == 2
    with pytest.raises(UserError, match=r"max_connections.* 3.*each of 4 processes needs one"):
        ServerConfig(max_connections=3, **of)
