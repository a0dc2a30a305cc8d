"""One block as it lies below memory: what it holds, what it was computed on top of, and a checksum over all of it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from firstlight.errors import FirstlightError

__all__ = ["BlockRecord", "CorruptBlockError", "ForeignBlockError", "decode", "header_of"]

MAGIC = b"FLKV\x00\x00\x00\x01"
HEADER = struct.Struct("<8s32s32s32sIQ")
"""Magic and version, space, key, parent, bytes of content, bytes of payload; a digest of 32 bytes follows."""
DIGEST_BYTES = 32


class CorruptBlockError(FirstlightError):
    """Bytes that are no block, or are not the bytes that were written."""


class ForeignBlockError(FirstlightError):
    """A sound block of other weights, another layout, or another key."""


@dataclass(slots=True)
class BlockRecord:
    """A block's key, its parent's, its tokens and its KV bytes. `payload` and `digest` may be filled in later, once."""

    key: bytes
    parent: bytes
    content: bytes
    payload: bytes | None = None
    digest: bytes | None = None

    def seal(self, space: bytes) -> None:
        """Computes the digest. Cost: about a millisecond per megabyte, without the interpreter lock."""
        assert self.payload is not None
        self.digest = _digest(_header(self, space), self.content, self.payload)

    def is_intact(self, space: bytes) -> bool:
        """The bytes are those that were sealed."""
        return self.payload is not None and self.digest == _digest(_header(self, space), self.content, self.payload)


def _header(record: BlockRecord, space: bytes) -> bytes:
    payload = record.payload or b""
    return HEADER.pack(MAGIC, space, record.key, record.parent, len(record.content), len(payload))


def _digest(header: bytes, content: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=DIGEST_BYTES)
    digest.update(content)
    digest.update(payload)
    return digest.digest()


def header_of(record: BlockRecord, space: bytes) -> bytes:
    """What comes before content and payload in a file."""
    assert record.digest is not None
    return _header(record, space) + record.digest


def decode(raw: bytes, space: bytes, key: bytes) -> BlockRecord:
    """The block in a file's bytes.

    Raises:
        CorruptBlockError: it is cut short, too long, or its digest is wrong.
        ForeignBlockError: it is sound, but not the block `key` of `space`.
    """
    begin = HEADER.size + DIGEST_BYTES
    if len(raw) < begin:
        raise CorruptBlockError(f"{len(raw)} bytes, the header alone takes {begin}")
    magic, own_space, own_key, parent, num_content, num_payload = HEADER.unpack_from(raw)
    if magic != MAGIC or len(raw) != begin + num_content + num_payload:
        raise CorruptBlockError(f"{len(raw)} bytes are no block of this format")
    content = raw[begin : begin + num_content]
    record = BlockRecord(own_key, parent, content, raw[begin + num_content :], raw[HEADER.size : begin])
    if not record.is_intact(own_space):
        raise CorruptBlockError("the digest is wrong")
    if own_space != space or own_key != key:
        raise ForeignBlockError("a block of other weights, another layout or another key")
    return record
