"""A client that speaks HTTP/2 by hand, so that it can misbehave as gRPC's own never does.

It begins calls, sends of their message what it is told to, and reads of the answers what it is told to.
"""

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
FRAME_BYTES = 16_384
WINDOW_BYTES = 65_535


def frame(kind, flags, stream, content=b""):
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def literal(name, value):
    """A header that is in no table (RFC 7541, 6.2.2), both parts shorter than 127 bytes."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


CALL = b"".join(
    literal(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/predictor.Predictor/Predict"),
        (":authority", "test"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)


class Http2Client:
    """One connection.

    Args:
        address: ``HOST:PORT``.
        reply_window: bytes of an answer that the server may send before it is told that they were read.
    """

    def __init__(self, address, *, reply_window=WINDOW_BYTES):
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 10)
        self._received = b""
        self._window = WINDOW_BYTES
        self._initial = WINDOW_BYTES
        self._windows = {}
        self._unsent = {}
        self._next = 1
        self.ended = set()
        self.closed = False
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, reply_window)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._socket.setblocking(False)
        self._outgoing = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def call(self, message, *, announced=None, encoding=None):
        """Begin a call; returns its stream.

        Args:
            message: what is sent of the call's message.
            announced: bytes that the message is said to have.
            encoding: how the message is said to be compressed.
        """
        stream, self._next = self._next, self._next + 2
        size = len(message) if announced is None else announced
        self._windows[stream] = self._initial
        self._unsent[stream] = (
            memoryview(struct.pack(">BI", encoding is not None, size) + message),
            len(message) >= size,
        )
        said = b"" if encoding is None else literal("grpc-encoding", encoding)
        self._outgoing += frame(HEADERS, END_HEADERS, stream, CALL + said)
        return stream

    def turn(self):
        """Send what the server takes now and read what it says; whether anything moved."""
        moved = self._read()
        for stream in list(self._unsent):
            moved |= self._send(stream)
        return self._flush() or moved

    def unsent(self):
        """Bytes of messages that the server has not let in."""
        return sum(len(rest) for rest, _ in self._unsent.values()) + len(self._outgoing)

    def _send(self, stream):
        rest, ends = self._unsent[stream]
        moved = False
        while rest and len(self._outgoing) < 1 << 20:
            count = min(len(rest), FRAME_BYTES, self._window, self._windows[stream])
            if count <= 0:
                break
            last = ends and count == len(rest)
            self._outgoing += frame(DATA, END_STREAM if last else 0, stream, bytes(rest[:count]))
            rest = rest[count:]
            self._window -= count
            self._windows[stream] -= count
            moved = True
        if rest:
            self._unsent[stream] = (rest, ends)
        else:
            del self._unsent[stream]
        return moved

    def _flush(self):
        if self.closed or not self._outgoing:
            return False
        try:
            sent = self._socket.send(self._outgoing)
        except BlockingIOError:
            return False
        except OSError:
            self._close()
            return False
        self._outgoing = self._outgoing[sent:]
        return sent > 0

    def _close(self):
        self.closed = True
        self._unsent.clear()
        self._outgoing = b""

    def _read(self):
        if self.closed:
            return False
        try:
            content = self._socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            content = b""
        if not content:
            self._close()
            return False
        self._received += content
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                break
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            body, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            self._handle(kind, flags, stream, body)
        return True

    def _set(self, body):
        for name, value in struct.iter_unpack(">HI", body):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self._windows:
                    self._windows[stream] += value - self._initial
                self._initial = value

    def _handle(self, kind, flags, stream, body):
        if kind == SETTINGS and not flags & ACK:
            self._set(body)
            self._outgoing += frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self._outgoing += frame(PING, ACK, 0, body)
        elif kind == WINDOW_UPDATE:
            more = struct.unpack(">I", body)[0]
            if stream == 0:
                self._window += more
            elif stream in self._windows:
                self._windows[stream] += more
        elif kind == RESET or (kind in {DATA, HEADERS} and flags & END_STREAM):
            self.ended.add(stream)
            self._unsent.pop(stream, None)
        elif kind == GOAWAY:
            self._close()
