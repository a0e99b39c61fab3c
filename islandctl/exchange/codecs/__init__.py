"""Codecs: fp32 values to bytes and back, the same bytes for the same key on every machine.

What a codec writes, all integers little-endian::

    b"ISLC"   magic
    u8        format version (2)
    u8        codec number
    u16       block length (0: none)
    u64       number of values
    body      fp32 (1): the values; bf16 (2): their upper halves; int8 (3), int4 (4), 2bit (5): bf16 scales of all
              blocks, then the codes, the first value in the lowest bits: 1, 2 or 4 values a byte

Decoding gives the same bits on every processor. So does encoding on the CPU: it uses elementwise IEEE arithmetic,
sums of a fixed order, and random bits that are a function of the key alone, so a packet that is sent again has the
same bytes. An accelerator has random bits of its own (``fused``).
"""

from islandctl.exchange.codecs.base import Codec
from islandctl.exchange.codecs.bits import Key
from islandctl.exchange.codecs.payload import decode, encode
from islandctl.exchange.codecs.registry import codec_named

__all__ = ["Codec", "Key", "codec_named", "decode", "encode"]
