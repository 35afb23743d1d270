"""A name with the addresses of the servers that are ready, as a headless Service of Kubernetes has."""

import contextlib
import socket
import struct
import threading

_HEADER = struct.Struct(">HHHHHH")
_ANSWER = 0x8480  # an answer, authoritative, with recursion
_A, _IN, _TTL_S = 1, 1, 0


class NameServer:
    """Answers each question of DNS for IPv4 addresses with ``addresses``, whatever the name; none for other questions.

    ``target(port)`` is what a gRPC client is given.
    """

    def __init__(self):
        self._addresses = ()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def target(self, port):
        return f"dns://127.0.0.1:{self._socket.getsockname()[1]}/tessera-pods.test:{port}"

    def set(self, addresses):
        with self._lock:
            self._addresses = tuple(addresses)

    def _serve(self):
        while True:
            try:
                asked, peer = self._socket.recvfrom(512)
            except OSError:
                return
            if not asked:
                return
            with contextlib.suppress(OSError):
                self._socket.sendto(self._answer(asked), peer)

    def _answer(self, asked):
        number = _HEADER.unpack_from(asked)[0]
        end = _HEADER.size
        while asked[end]:
            end += 1 + asked[end]
        question = asked[_HEADER.size : end + 5]
        (kind,) = struct.unpack_from(">H", asked, end + 1)
        with self._lock:
            addresses = self._addresses if kind == _A else ()
        head = _HEADER.pack(number, _ANSWER, 1, len(addresses), 0, 0)
        record = struct.pack(">HHHIH", 0xC000 | _HEADER.size, _A, _IN, _TTL_S, 4)
        return head + question + b"".join(record + socket.inet_aton(one) for one in addresses)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        # Closing alone does not wake the thread that waits.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()
