"""How many bytes each fragment is on the wire."""

from __future__ import annotations

from islandctl.config.model import Model
from islandctl.config.placement import place, weight
from islandctl.config.recipe import Exchange, ModelRecipe
from islandctl.planner.parameters import parameters

SCALE_BLOCK = 256
"""Values per bf16 scale of the int8 codec."""
CODEC_HEADER_BYTES = 16
"""In front of every chunk's values."""
PACKET_OVERHEAD_BYTES = 1024
"""A packet's own header and its HTTP request, rounded up; counted in the upper bounds only."""


class FragmentSize(Model):
    """One fragment: its values and their bytes when a cell sends them once."""

    index: int
    small: int
    """Values of norms, routers and the token embedding: bf16 whatever the codec."""
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

    Raises ``ValueError`` when there are more fragments than blocks.
    """
    counts = parameters(model)
    num = exchange.fragments
    if num > model.layers:
        raise ValueError(f"{num} fragments are more than the model's {model.layers} layers")
    few, many = (weight(exchange.placement, exchange.codec, exact=exact) for exact in (True, False))
    others = ((counts.embedding, 0), (0, counts.head), (model.width, 0))
    parts = [*[(counts.layer_small, counts.layer_large)] * model.layers, *others]
    sizes = [few * a + many * b for a, b in parts]
    of_layers, of_others = place(sizes[: model.layers], sizes[model.layers :], num, exchange.placement)
    small, large = [0] * num, [0] * num
    for index, (a, b) in zip([*of_layers, *of_others], parts, strict=True):
        small[index] += a
        large[index] += b
    return tuple(_size(index, small[index], large[index], exchange) for index in range(num))


def _size(index: int, small: int, large: int, exchange: Exchange) -> FragmentSize:
    chunk = exchange.chunk
    num_chunks = -(-small // chunk) - (-large // chunk)
    encoded = num_chunks * CODEC_HEADER_BYTES + _region(small, chunk, "bf16") + _region(large, chunk, exchange.codec)
    return FragmentSize(index=index, small=small, large=large, num_chunks=num_chunks, encoded_bytes=encoded)


def _region(values: int, chunk: int, codec: str) -> int:
    """Bytes of ``values`` cut into chunks: fp32 4, bf16 2, int8 1 and a scale of 2 bytes per started block."""
    match codec:
        case "fp32":
            return 4 * values
        case "bf16":
            return 2 * values
        case "int8":
            full, rest = divmod(values, chunk)
            return values + 2 * (full * -(-chunk // SCALE_BLOCK) - (-rest // SCALE_BLOCK))
        case _:
            raise ValueError(f"no size known for codec {codec}")
