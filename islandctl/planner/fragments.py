"""How many bytes each fragment is on the wire."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from islandctl.config.codec import FACTS, CodecName, body_bytes
from islandctl.config.exchange import Exchange
from islandctl.config.model import Model
from islandctl.config.placement import place, weight
from islandctl.config.recipe import ModelRecipe
from islandctl.ledger.packet import PacketHeader, pack
from islandctl.planner.parameters import NamedParameter, named_parameters

CODEC_HEADER_BYTES = 16
"""In front of every chunk's values."""
REQUEST_BYTES = 512
"""A packet's HTTP request, TLS record headers and answer, rounded up; counted in the upper bounds only."""


@cache
def packet_header_bytes() -> int:
    """Bytes in front of a packet's payload: a real header, with a name and numbers of usual length."""
    header = PacketHeader(
        run="demo-20300131-1",
        config_hash="0" * 64,
        attempt=1,
        cell=0,
        fragment=1,
        window=10,
        chunk=1,
        num_chunks=10,
        version=10,
        base="0" * 64,
        step=1000,
        tokens=10_000,
        codec="int8",
        payload_hash="0" * 64,
        payload_bytes=100_000,
    )
    return len(pack(header, b""))


class FragmentSize(Model):
    """One fragment: its values and their bytes when a cell sends them once."""

    index: int
    small: int
    """Values of norms, routers, the token embedding and what the recipe's ``exact`` names: bf16, not in the codec."""
    large: int
    """All other values, in the recipe's codec."""
    num_chunks: int
    encoded_bytes: int

    @property
    def values(self) -> int:
        """All values."""
        return self.small + self.large

    @property
    def whole_bytes(self) -> int:
        """The codec's bytes where every value travels whole: after a warm-up, and in a run's last rounds."""
        return 4 * self.values + self.num_chunks * CODEC_HEADER_BYTES

    def with_headers(self, encoded: int) -> int:
        """``encoded`` bytes of this fragment as its packets hold them."""
        return encoded + self.num_chunks * packet_header_bytes()


def fragment_sizes(model: ModelRecipe, exchange: Exchange) -> tuple[FragmentSize, ...]:
    """Every fragment's size, by the worker's own rule.

    Raises ``ValueError`` when there are more fragments than blocks, unless nothing is exchanged.
    """
    num = exchange.fragments if exchange.mode != "none" else min(exchange.fragments, model.layers)
    if num > model.layers:
        raise ValueError(f"{num} fragments are more than the model's {model.layers} layers")
    parts = [(one, _is_small(one, exchange)) for one in named_parameters(model)]
    layers, others = [0] * model.layers, []
    for parameter, is_small in parts:
        size = parameter.values * weight(exchange.placement, exchange.codec, exact=is_small)
        if parameter.layer is None:
            others.append((-size, parameter.name))
        else:
            layers[parameter.layer] += size
    others.sort()
    of_layers, of_others = place(layers, [-size for size, _ in others], num, exchange.placement)
    of_other = dict(zip((name for _, name in others), of_others, strict=True))
    small, large = [0] * num, [0] * num
    for parameter, is_small in parts:
        index = of_other[parameter.name] if parameter.layer is None else of_layers[parameter.layer]
        (small if is_small else large)[index] += parameter.values
    return tuple(_size(index, small[index], large[index], exchange) for index in range(num))


def chunk_bytes(exchange: Exchange) -> int:
    """A whole chunk of the recipe's codec as its packet travels."""
    block = FACTS[exchange.codec].block and (exchange.block or FACTS[exchange.codec].block)
    return body_bytes(exchange.codec, block, exchange.chunk) + CODEC_HEADER_BYTES + packet_header_bytes()


def _is_small(parameter: NamedParameter, exchange: Exchange) -> bool:
    return parameter.few or any(fnmatchcase(parameter.name, pattern) for pattern in exchange.exact)


def unused_pattern(model: ModelRecipe, exchange: Exchange) -> str | None:
    """A pattern of ``exchange.exact`` that fits no parameter of the model, if there is one."""
    names = [parameter.name for parameter in named_parameters(model)] if exchange.exact else []
    return next((one for one in exchange.exact if not any(fnmatchcase(name, one) for name in names)), None)


def _size(index: int, small: int, large: int, exchange: Exchange) -> FragmentSize:
    chunk, codec = exchange.chunk, exchange.codec
    num_chunks = -(-small // chunk) - (-large // chunk)
    block = FACTS[codec].block and (exchange.block or FACTS[codec].block)
    encoded = num_chunks * CODEC_HEADER_BYTES
    encoded += _region(small, chunk, "fp32" if codec == "fp32" else "bf16", 0) + _region(large, chunk, codec, block)
    return FragmentSize(index=index, small=small, large=large, num_chunks=num_chunks, encoded_bytes=encoded)


def _region(values: int, chunk: int, codec: CodecName, block: int) -> int:
    """Bytes of ``values`` cut into chunks, without their headers."""
    full, rest = divmod(values, chunk)
    return full * body_bytes(codec, block, chunk) + body_bytes(codec, block, rest)
