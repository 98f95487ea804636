"""What a model is: the facts about one file that every other module works from.

`Description` is plain data. It is made by `models.describe`, which first makes sure that nothing
in the file was misunderstood: see `keys.py` and `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata_nb.errors import ConfigError
from strata_nb.formats import cache_type
from strata_nb.kernels.reference import RopeStyle


@dataclass(frozen=True, slots=True)
class Description:
    """Describe a model; sizes are counts of values unless a name says bytes.

    architecture      as the file names it: "llama", "qwen2moe", ...
    name              of the model, for people; may be empty
    layers, width     transformer blocks; length of a hidden row
    heads, kv_heads   of queries; of keys and values (heads is a multiple of it)
    key_length        of a query or key head; value_length of a value head
    rope_dims         values of a head that are rotated, from its start
    rope_base, rope_scale, rope_style
                      see `kernels.reference.rope_frequencies` and `rope_rotate`
    eps               under the root of every norm
    vocab_size        rows of the embedding and of the head, number of tokens
    context           tokens the model was trained for, at most its sliding window
    sliding_window    cells that attention sees back, None: all. Within it nothing slides, and a
                      longer K/V cache is refused
    ff_width          inner width of the dense feed-forward; 0 where experts take its place
    experts, top_k    per layer, and how many of them a row uses; 0 in a dense model
    expert_width      inner width of an expert; shared_width of the shared one, 0: none
    tied_head         the embedding is also the head
    parameters        values in all tensors
    dense_bytes       of all tensors but the experts, as they lie in the file
    embedding_bytes   of these, the embedding's
    expert_bytes      of all experts of all layers, as they lie in the file
    one_expert_bytes  of one expert (gate, up and down) of each layer
    """

    architecture: str
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    key_length: int
    value_length: int
    rope_dims: int
    rope_base: float
    rope_scale: float
    rope_style: RopeStyle
    eps: float
    vocab_size: int
    context: int
    sliding_window: int | None
    ff_width: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    tied_head: bool
    parameters: int
    dense_bytes: int
    embedding_bytes: int
    expert_bytes: int
    one_expert_bytes: tuple[int, ...]

    @property
    def row_weight_bytes(self) -> int:
        """Bytes of weights that a step of one row reads.

        All dense ones, but a single row of an embedding that is not the head as well, and `top_k`
        experts of each layer.
        """
        unread = 0 if self.tied_head else self.embedding_bytes * (self.vocab_size - 1)
        experts = self.top_k * sum(self.one_expert_bytes)
        return self.dense_bytes - unread // self.vocab_size + experts

    def check_context(self, cells: int) -> None:
        """Raise ConfigError for a K/V cache of `cells` that this model cannot use."""
        if cells < 1:
            raise ConfigError(f"a context of {cells} cells: not usable", hint="1 or more")
        if self.sliding_window is not None and cells > self.sliding_window:
            raise ConfigError(
                f"a context of {cells} cells: attention of this model slides over the last "
                f"{self.sliding_window}, which is not supported",
                hint=f"give --ctx-size {self.sliding_window} or less",
            )

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ConfigError if one of `ids` is not an integer, or not a token of the vocabulary."""
        strange = [t for t in ids if isinstance(t, bool) or not isinstance(t, (int, np.integer))]
        if strange:
            raise ConfigError(
                f"ids with {strange[0]!r}: not a list of integers",
                hint="give the ids that encode returns",
            )
        tokens = np.asarray(ids)  # of whatever type holds them: an id may be any integer
        outside = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if outside.size:
            place = int(outside[0])
            raise ConfigError(
                f"token {ids[place]} at place {place} is not in the vocabulary of "
                f"{self.vocab_size} tokens",
                hint="encode the text with this model's own tokenizer",
            )

    def kv_bytes_per_cell(self, type_k: str, type_v: str) -> int:
        """Return the bytes that one token's keys and values take in all layers."""
        key_bytes = cache_type(type_k).head_bytes(self.key_length)
        value_bytes = cache_type(type_v).head_bytes(self.value_length)
        return self.layers * self.kv_heads * (key_bytes + value_bytes)


def bytes_text(count: int) -> str:
    """Return a number of bytes in the unit that people read: "12.00 GiB"."""
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
