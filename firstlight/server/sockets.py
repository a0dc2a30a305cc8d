"""What the kernel knows of a connection: whether the other machine is still there, and how much it has not taken.

Knows sockets, not what goes over them.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from typing import NamedTuple

try:
    import fcntl
    import termios
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Outgoing", "is_silent", "notice_dead_peers", "outgoing", "unread_bytes"]

_NUM_PROBES = 3
_TCP_INFO = struct.Struct("=2xBB52xI")
"""Of Linux's `struct tcp_info`: retransmissions and probes in a row without an answer, ms since the last answer."""
_TCP_PROGRESS = struct.Struct("=B119xQ16xI")
"""Of the same: the connection's state, bytes that were acknowledged, bytes that were never sent."""
_TCP_CLOSED = 7


def notice_dead_peers(sock: socket.socket, silent_s: float) -> None:
    """Has the kernel drop connections that `sock` accepts after `silent_s` without an answer, while none owes bytes.

    Where bytes are owed the kernel would try for a quarter of an hour: see `is_silent`. TCP_USER_TIMEOUT is no way out,
    for it ends a client that answers every probe but reads slowly, too.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, math.ceil(silent_s / (_NUM_PROBES + 1)))
    for name, value in (("TCP_KEEPIDLE", probe_s), ("TCP_KEEPINTVL", probe_s), ("TCP_KEEPCNT", _NUM_PROBES)):
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_silent(transport: asyncio.BaseTransport, silent_s: float) -> bool:
    """Several packets in a row found no answer, and there was none for `silent_s`: the other machine is gone."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, ValueError):  # closed meanwhile: its number is then negative
        return False
    num_retransmits, num_probes, last_answer_ms = _TCP_INFO.unpack(told)
    return bool(num_retransmits + num_probes >= _NUM_PROBES and last_answer_ms > silent_s * 1000)


def unread_bytes(transport: asyncio.WriteTransport) -> int:
    """Bytes written to the transport that the other machine has not acknowledged: ours, then the kernel's.

    A full receive buffer acknowledges nothing, so this falls only as fast as the client reads.
    """
    if transport.is_closing():
        return 0
    num_bytes = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if fcntl is None or sock is None:
        return num_bytes
    try:
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except (OSError, ValueError):  # not a socket that can tell, or closed meanwhile
        return num_bytes
    return num_bytes + int(struct.unpack("i", queued)[0])


class Outgoing(NamedTuple):
    """What became of the bytes that the kernel was given for one connection."""

    acknowledged: int
    unacknowledged: int
    """The rest, `unsent` included."""
    unsent: int
    """Not sent at all: the other machine, or the network, has no room."""


def outgoing(sock: socket.socket) -> Outgoing | None:
    """The connection's outgoing bytes; None where it is gone, or the system does not say (Linux does)."""
    if fcntl is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_PROGRESS.size)
        (unacknowledged,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
    except (OSError, ValueError):  # closed meanwhile: its number is then negative
        return None
    if len(told) < _TCP_PROGRESS.size:  # an old kernel
        return None
    state, acknowledged, unsent = _TCP_PROGRESS.unpack(told)
    return None if state == _TCP_CLOSED else Outgoing(acknowledged, unacknowledged, unsent)
