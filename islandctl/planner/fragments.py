"""How many bytes each fragment is on the wire."""

from __future__ import annotations

from fnmatch import fnmatchcase

from islandctl.config.codec import FACTS, CodecName, body_bytes
from islandctl.config.model import Model
from islandctl.config.recipe import Exchange, ModelRecipe
from islandctl.planner.parameters import named_parameters

CODEC_HEADER_BYTES = 16
"""In front of every chunk's values."""
PACKET_OVERHEAD_BYTES = 1024
"""A packet's own header and its HTTP request, rounded up; counted in the upper bounds only."""


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


def fragment_sizes(model: ModelRecipe, exchange: Exchange) -> tuple[FragmentSize, ...]:
    """Every fragment's size, by the worker's own rule.

    Blocks go to fragments in turn; embedding, head and last norm go, largest first, to the fragment that is smallest
    then. Raises ``ValueError`` when there are more fragments than blocks.
    """
    num = exchange.fragments
    if num > model.layers:
        raise ValueError(f"{num} fragments are more than the model's {model.layers} layers")
    small, large = [0] * num, [0] * num
    for parameter in named_parameters(model):
        if parameter.layer is None:
            sizes = [a + b for a, b in zip(small, large, strict=True)]
            fragment = sizes.index(min(sizes))
        else:
            fragment = parameter.layer % num
        is_small = parameter.few or any(fnmatchcase(parameter.name, pattern) for pattern in exchange.exact)
        (small if is_small else large)[fragment] += parameter.values
    return tuple(_size(index, small[index], large[index], exchange) for index in range(num))


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
