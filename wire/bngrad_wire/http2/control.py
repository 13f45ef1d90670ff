"""The frames that are about the connection or a call's window and end, not its contents (RFC 9113, section 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode, PeerGoneError, error_name, error_of_reset

if TYPE_CHECKING:
    from bngrad_wire.http2.connection import BaseConnection

_SIZES = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_ON_CONNECTION = {frames.SETTINGS, frames.PING, frames.GOAWAY}
_ON_STREAM = {frames.PRIORITY, frames.RST_STREAM}
_NO_TABLE = b"\x20"  # Sets the size of the encoder's dynamic table, which is never used, to zero.
_DEFAULT_TABLE_NBYTES = 4096


def handle(connection: BaseConnection, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
    """Acts on one frame.

    Raises:
        PeerGoneError: GOAWAY says that the running call will not be handled.
        ProtocolError: The frame is malformed, or not for this end.
    """
    if (size := _SIZES.get(kind)) is not None and len(payload) != size:
        connection.connection_error(
            ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {len(payload)} bytes, not {size}"
        )
    if (kind in _ON_CONNECTION and stream_id) or (kind in _ON_STREAM and not stream_id):
        connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} came on stream {stream_id}")
    if kind == frames.WINDOW_UPDATE:
        _window_update(connection, stream_id, frames.UINT32.unpack(payload)[0] & frames.MAX_WINDOW)
        return
    if kind == frames.SETTINGS:
        _settings(connection, flags, payload)
    elif kind == frames.PING:
        if not flags & frames.ACK:
            connection.send_control(frames.frame(frames.PING, frames.ACK, 0, payload))
    elif kind == frames.RST_STREAM:
        _rst_stream(connection, stream_id, frames.UINT32.unpack(payload)[0])
    elif kind == frames.GOAWAY:
        _goaway(connection, payload)
    elif kind != frames.PRIORITY:
        connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} came where none may")
    connection.count_idle_frame()


def _window_update(connection: BaseConnection, stream_id: int, increment: int) -> None:
    if not increment:
        connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE by 0 on stream {stream_id}")
    if not stream_id:
        connection.send_window += increment
        if connection.send_window > frames.MAX_WINDOW:
            connection.connection_error(
                ErrorCode.FLOW_CONTROL_ERROR, "WINDOW_UPDATE makes the connection's window too large"
            )
    elif (stream := connection.active_stream(stream_id, "WINDOW_UPDATE")) is not None:
        stream.send_window += increment
        if stream.send_window > frames.MAX_WINDOW:
            connection.connection_error(
                ErrorCode.FLOW_CONTROL_ERROR, f"WINDOW_UPDATE makes the window of stream {stream_id} too large"
            )


def _settings(connection: BaseConnection, flags: int, payload: bytes) -> None:
    if flags & frames.ACK:
        if payload:
            connection.connection_error(ErrorCode.FRAME_SIZE_ERROR, "the acknowledgement of SETTINGS has a payload")
        return
    if len(payload) % frames.SETTING.size:
        connection.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    for key, value in frames.SETTING.iter_unpack(payload):
        if key == frames.INITIAL_WINDOW_SIZE:
            if value > frames.MAX_WINDOW:
                connection.connection_error(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
            if connection.stream is not None:
                connection.stream.send_window += value - connection.initial_send_window
                if connection.stream.send_window > frames.MAX_WINDOW:
                    connection.connection_error(
                        ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS makes a stream's window too large"
                    )
            connection.initial_send_window = value
        elif key == frames.MAX_FRAME_SIZE:
            if not frames.MIN_FRAME_SIZE <= value <= frames.LARGEST_FRAME_SIZE:
                connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
            connection.max_frame_size = value
        elif key == frames.ENABLE_PUSH and value > 1:
            connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
        elif key == frames.HEADER_TABLE_SIZE and value < _DEFAULT_TABLE_NBYTES:
            connection.table_size_update = _NO_TABLE
    connection.settings_received = True
    connection.send_control(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))


def _rst_stream(connection: BaseConnection, stream_id: int, code: int) -> None:
    stream = connection.active_stream(stream_id, "RST_STREAM")
    if stream is not None:
        stream.ended = stream.reset = True
        stream.failure = stream.failure or error_of_reset(code)
        connection.acknowledge_received_data(len(stream.receive_buffer), None)
        stream.receive_buffer.clear()


def _goaway(connection: BaseConnection, payload: bytes) -> None:
    if len(payload) < 8:
        connection.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
    last, code = (frames.UINT32.unpack_from(payload, offset)[0] for offset in (0, 4))
    connection.going_away = True
    if connection.goaway_ends_call(last & frames.MAX_STREAM_ID):
        reason = payload[8:].decode(errors="replace")
        raise PeerGoneError(f"the peer gave the connection up with GOAWAY, {error_name(code)} {reason}".rstrip())
