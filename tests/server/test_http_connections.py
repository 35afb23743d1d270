"""The HTTP port answers whoever asks, however many others hold connections without asking."""

import asyncio
import contextlib
import errno
import socket

import pytest

from tessera.serving.server.front.http_connections import HttpConnections, HttpTimes, listen_on
from tests.patience import PATIENCE_S
from tests.server.server_harness import config, serving

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = HttpTimes(first_byte_s=3_600, request_s=3_600, answer_s=3_600, idle_s=3_600)


class Log:
    def __init__(self):
        self.lines = []

    def warning(self, event, **fields):
        self.lines.append((event, fields))


class Lines(asyncio.Protocol):
    """Answers each line with itself; ``big`` with more than a socket holds."""

    def __init__(self, connections):
        self.connections = connections

    def connection_made(self, transport):
        self.transport = transport
        self.rest = b""

    def data_received(self, data):
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.connections[0].request_came(self.transport)
            self.transport.write((b"x" * (32 << 20) if line == b"big" else line) + b"\n")


@contextlib.asynccontextmanager
async def listening(most, times=LONG):
    holder, log = [], Log()
    connections = HttpConnections(lambda: Lines(holder), max_connections=most, log=log, times=times)
    holder.append(connections)
    listeners = listen_on("127.0.0.1", 0)
    connections.accept_from(listeners)
    port = listeners[0].getsockname()[1]
    try:
        yield connections, port, log
    finally:
        await connections.stop()


async def connect(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    return reader, writer


async def ask(connection, line=b"hello\n"):
    reader, writer = connection
    writer.write(line)
    return await asyncio.wait_for(reader.readline(), PATIENCE_S)


async def closed(connection):
    """Wait until the server has closed ``connection``."""
    reader, _ = connection
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), PATIENCE_S)


async def until(holds):
    while not holds():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.005)


def run(body):
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_the_oldest_without_a_complete_request_makes_room():
    async def body():
        async with listening(3) as (_, port, _):
            silent = await connect(port)
            slow = await connect(port)
            slow[1].write(b"hal")
            await slow[1].drain()
            busy = await connect(port)
            reader, writer = busy
            writer.write(b"big\n")
            await reader.readexactly(1)  # its answer is on its way
            new = []
            for connection in (silent, slow):
                new.append(await connect(port))
                assert await ask(new[-1]) == b"hello\n"
                await closed(connection)
            rest = await asyncio.wait_for(reader.readexactly(32 << 20), PATIENCE_S)
            assert rest.endswith(b"x\n")

    run(body)


def test_who_does_not_take_its_answer_goes_when_nobody_else_can():
    async def body():
        async with listening(2) as (_, port, _):
            stuck = [await connect(port) for _ in range(2)]
            for reader, writer in stuck:
                writer.write(b"big\n")
                await reader.readexactly(1)
                writer.transport.pause_reading()
            assert await ask(await connect(port)) == b"hello\n"

    run(body)


@pytest.mark.parametrize(
    ("name", "sent"),
    [("first_byte_s", b""), ("request_s", b"hel"), ("idle_s", b"hello\n"), ("answer_s", b"big\n")],
)
def test_every_state_has_its_limit(name, sent):
    times = {"first_byte_s": 3_600, "request_s": 3_600, "answer_s": 3_600, "idle_s": 3_600}

    async def body():
        async with listening(9, HttpTimes(**{**times, name: 0.01})) as (connections, port, _):
            _, writer = await connect(port)
            writer.write(sent)
            if name == "answer_s":
                writer.transport.pause_reading()
                await asyncio.sleep(0)
            await until(lambda: connections._held)
            await until(lambda: not connections._held)
            writer.close()

    run(body)


def test_a_connection_may_ask_again_and_again():
    async def body():
        async with listening(2) as (_, port, _):
            connection = await connect(port)
            for _ in range(5):
                assert await ask(connection) == b"hello\n"

    run(body)


def test_without_descriptors_it_waits_and_says_so_once(monkeypatch):
    async def body():
        async with listening(2) as (_, port, log):
            first = await connect(port)
            assert await ask(first) == b"hello\n"
            loop = asyncio.get_running_loop()
            accept, refused = loop.sock_accept, []

            async def starved(listener):
                if len(refused) < 5:
                    refused.append(listener)
                    raise OSError(errno.EMFILE, "Too many open files")
                return await accept(listener)

            monkeypatch.setattr(loop, "sock_accept", starved)
            second = await connect(port)  # by the accept that had begun before
            third = await connect(port)
            assert await ask(third) == b"hello\n"
            assert len(refused) == 5
            assert [event for event, _ in log.lines] == ["http_accept_failed"]
            await closed(first)  # they made room
            await closed(second)

    run(body)


def test_probes_are_answered_while_a_thousand_hold_connections():
    with serving(config(max_http_connections=16)) as server, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.thread.http_port)
        for number in range(300):
            client = stack.enter_context(socket.create_connection(address, PATIENCE_S))
            if number % 2:
                client.sendall(GET[: number % len(GET)])
        assert server.http("/healthz") == "ok\n"
        assert server.http_state() == 200
        assert "tessera_build_info" in server.http("/metrics")
        # A client that asks and asks keeps its connection.
        with socket.create_connection(address, PATIENCE_S) as client:
            for _ in range(3):
                client.sendall(GET)
                assert client.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_body_is_not_waited_for():
    """Its connection ends behind the answer, however much of the body is still to come."""

    async def body():
        with serving() as server:
            reader, writer = await connect(server.thread.http_port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"1\r\nx\r\n" * 10)
            assert (await reader.readline()).startswith(b"HTTP/1.1 405 ")
            await closed((reader, writer))

    run(body)
