"""What a connection may have on its way to a client is bounded (`tessera.serving.server.front.send_buffer`)."""

import socket

from tessera.serving.server.front.own_sockets import listens, sockets_of
from tessera.serving.server.front.send_buffer import SEND_BUFFER_BYTES, bound_send_buffers
from tests.server.server_harness import request, serving


def size_of(one):
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def size_of_an_accepted(listener):
    with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
        return size_of(accepted)


def test_connections_of_the_port_and_of_no_other_have_the_size():
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        before = size_of_an_accepted(other)
        bound_send_buffers(one.getsockname()[1])
        assert size_of_an_accepted(one) == SEND_BUFFER_BYTES
        assert size_of_an_accepted(other) == before


def test_a_servers_connections_have_it_and_large_answers_are_whole():
    with serving() as server:
        port = int(server.thread.address.rpartition(":")[2])
        answer = server.predict(request(16_000))
        sizes = [size_of(one) for one in sockets_of(port) if not listens(one)]
    assert sizes == [SEND_BUFFER_BYTES]
    assert answer.ByteSize() > 2 * SEND_BUFFER_BYTES
    assert {len(vector.data) for vector in answer.predictions.values()} == {16_000, 32_000}
