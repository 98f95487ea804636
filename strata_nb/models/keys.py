"""Read an architecture's metadata so that nothing in it is passed over.

A key that is misunderstood gives a model that talks, and is wrong. So each key with the prefix of
the architecture is either read here, or has a value that switches its feature off, or is listed
as one that changes no result; `finish` refuses the file for any other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strata_nb.errors import FileFormatError
from strata_nb.gguf import GGUFFile
from strata_nb.kernels.reference import RopeStyle
from strata_nb.models.description import Description
from strata_nb.models.tensors import TensorSizes

MAX_LAYERS = 1000
MAX_WIDTH = 2**20
MAX_EXPERTS = 65536
MAX_VOCABULARY = 2**24
NAMES_SHOWN = 5  # of many keys or tensors that are not understood
SOFTMAX_GATING = 1  # of expert_gating_func
MODEL_TYPE = "model"  # of general.type; others are adapters, projectors, vocabularies

# Keys that change no result, and why.
IGNORABLE = {
    "rope.scaling.finetuned": "says how the model was trained, not how it runs",
    "rope.scaling.original_context_length": "only yarn and longrope, which are refused, use it",
}

# Keys of features that are not supported, the values that switch them off, and the feature.
OFF_VALUES: dict[str, tuple[tuple[object, ...], str]] = {
    "tensor_data_layout": (("Meta AI original pth",), "another order of the tensors' rows"),
    "use_parallel_residual": ((False,), "attention and feed-forward side by side"),
    "leading_dense_block_count": ((0,), "dense blocks before those with experts"),
    "interleave_moe_layer_step": ((0, 1), "blocks with and without experts in turn"),
    "moe_every_n_layers": ((0, 1), "blocks with and without experts in turn"),
    "nextn_predict_layers": ((0,), "layers that predict several tokens"),
    "expert_group_count": ((0, 1), "a router that chooses groups of experts first"),
    "expert_group_used_count": ((0, 1), "a router that chooses groups of experts first"),
    "expert_gating_func": ((0, SOFTMAX_GATING), "a router without softmax"),
    "expert_weights_scale": ((0.0, 1.0), "scaled shares of the experts"),
    "residual_scale": ((0.0, 1.0), "scaled residual rows"),
    "embedding_scale": ((0.0, 1.0), "scaled embedding rows"),
    "logit_scale": ((0.0, 1.0), "scaled logits"),
    "attn_logit_softcapping": ((0.0,), "soft-capped attention scores"),
    "router_logit_softcapping": ((0.0,), "soft-capped router logits"),
    "final_logit_softcapping": ((0.0,), "soft-capped logits"),
    "pooling_type": ((0,), "pooled embeddings instead of logits"),
    "attention.causal": ((True,), "attention to later tokens"),
    "attention.max_alibi_bias": ((0.0,), "ALiBi position biases"),
    "attention.clamp_kqv": ((0.0,), "clamped queries, keys and values"),
    "rope.scaling.attn_factor": ((1.0,), "scaled rotary tables"),
}


class Experts(NamedTuple):
    """Say how many experts a layer has, and how many a row uses; 0 and 0 in a dense model."""

    number: int
    top_k: int


class Keys:
    """Read the keys `ARCHITECTURE.*` of a file, each within sane bounds."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._metadata = file.metadata
        self.architecture = file.architecture
        kind = self._metadata.text("general.type", MODEL_TYPE)
        if kind != MODEL_TYPE:
            raise self._metadata.error(
                "general.type", f"the file holds a {kind}, wanted a model", "give the model's file"
            )
        self.layers = self.count("block_count", high=MAX_LAYERS)

    def count(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_WIDTH
    ) -> int:
        """Return an integer within bounds; None: the key must be there."""
        name = self._name(key)
        if default is None:
            return self._metadata.integer(name, low=low, high=high)
        return self._metadata.integer(name, default, low=low, high=high)

    def per_layer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_WIDTH
    ) -> int:
        """Return an integer that the file may give once or once for each layer, always the same."""
        name = self._name(key)
        if not isinstance(self._metadata.get(name), np.ndarray):
            return self.count(key, default, low=low, high=high)
        values = self._metadata.integers(name)
        if len(values) != self.layers:
            raise self._metadata.error(
                name, f"{len(values)} values for the {self.layers} layers of the model"
            )
        if values.min() != values.max():
            raise self._metadata.error(
                name,
                f"differs between layers ({values.min()} to {values.max()}): not supported",
            )
        value = int(values[0])
        if not low <= value <= high:
            raise self._metadata.error(name, f"is {value}, wanted an integer from {low} to {high}")
        return value

    def between(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number from `low` to `high`; default None: the key must be there."""
        name = self._name(key)
        value = self._metadata.real(name) if default is None else self._metadata.real(name, default)
        if not low <= value <= high:
            raise self._metadata.error(
                name, f"is {value}, wanted a number from {low:g} to {high:g}"
            )
        return value

    def experts(self, *, required: bool) -> Experts:
        """Return how many experts there are and how many are used."""
        count = self.count("expert_count", 0, low=0, high=MAX_EXPERTS)
        if count == 0 and required:
            raise self._metadata.error(
                self._name("expert_count"), "is 0 or missing, and this architecture has experts"
            )
        top_k = self.per_layer("expert_used_count", 0, low=0, high=MAX_EXPERTS)
        if top_k > count or (top_k == 0) != (count == 0):
            raise self._metadata.error(
                self._name("expert_used_count"), f"{top_k} experts are used of {count}"
            )
        return Experts(count, top_k)

    def inner_width(self, key: str, fallback: int) -> int:
        """Return a width given once or once for each layer; where it is not, the fallback's."""
        width = self.per_layer(key, 0, low=0) or fallback
        if width == 0:
            raise self._metadata.error(
                self._name(key), "missing, and it does not follow from feed_forward_length either"
            )
        return width

    def require(self, key: str, wanted: bool, feature: str) -> None:
        """Refuse a truth value that contradicts what the architecture always does."""
        name = self._name(key)
        if self._metadata.boolean(name, wanted) != wanted:
            raise self._metadata.error(name, f"is {not wanted}: {feature}, which is not supported")

    def shared_experts(self, highest: int) -> None:
        """Refuse more shared experts than the architecture has."""
        self.count("expert_shared_count", 0, low=0, high=highest)

    def finish(
        self,
        *,
        rope_style: RopeStyle,
        ff_width: int = 0,
        experts: Experts = Experts(0, 0),  # noqa: B008 (immutable)
        expert_width: int = 0,
        shared_width: int = 0,
    ) -> Description:
        """Read the keys that all architectures share, refuse what is left, return the whole."""
        width = self.count("embedding_length")
        heads = self.per_layer("attention.head_count", high=4096)
        kv_heads = self.per_layer("attention.head_count_kv", heads, high=4096)
        if heads % kv_heads:
            raise self._metadata.error(
                self._name("attention.head_count_kv"),
                f"{heads} query heads cannot share {kv_heads} heads of keys and values",
            )
        key_length = self._head_length("attention.key_length", width, heads)
        value_length = self._head_length("attention.value_length", width, heads)
        rope_dims = self.count("rope.dimension_count", key_length, high=key_length)
        if rope_dims % 2:
            raise self._metadata.error(
                self._name("rope.dimension_count"),
                f"{rope_dims} values cannot be rotated in pairs",
            )
        context = self.count("context_length", high=2**31 - 1)
        window = self.count("attention.sliding_window", 0, low=0, high=2**31 - 1)
        self._same("embedding_length_out", width)
        vocab_size = self._vocab_size()
        sizes = TensorSizes.of(self._file, experts.number, self.layers)
        description = Description(
            architecture=self.architecture,
            name=self._metadata.text("general.name", ""),
            layers=self.layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            key_length=key_length,
            value_length=value_length,
            rope_dims=rope_dims,
            rope_base=self.between("rope.freq_base", 1.0, 1e12, 10000.0),
            rope_scale=self._rope_scale(),
            rope_style=rope_style,
            eps=self.between("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
            vocab_size=vocab_size,
            context=min(context, window) if window else context,
            sliding_window=window or None,
            ff_width=ff_width,
            experts=experts.number,
            top_k=experts.top_k,
            expert_width=expert_width,
            shared_width=shared_width,
            tied_head="output.weight" not in self._file.tensors,
            parameters=sizes.parameters,
            dense_bytes=sizes.dense_bytes,
            embedding_bytes=sizes.embedding_bytes,
            expert_bytes=sizes.expert_bytes,
            one_expert_bytes=sizes.one_expert_bytes,
        )
        self._refuse_the_rest(key_length)
        return description

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _head_length(self, key: str, width: int, heads: int) -> int:
        if width % heads and self._name(key) not in self._metadata:
            raise self._metadata.error(
                self._name(key),
                f"missing, and a width of {width} does not divide by {heads} heads",
            )
        return self.count(key, width // heads, high=65536)

    def _same(self, key: str, wanted: int) -> None:
        """Refuse a number that is neither `wanted` nor 0, which says that it was not set."""
        name = self._name(key)
        value = self._metadata.integer(name, 0)
        if value not in (0, wanted):
            raise self._metadata.error(name, f"is {value}, wanted {wanted}")

    def _vocab_size(self) -> int:
        """Return the number of tokens, on which all that state it must agree.

        The tensors' shapes are checked against it afterwards.
        """
        stated = self.count("vocab_size", 0, low=0, high=MAX_VOCABULARY)
        tokens = len(self._metadata.texts("tokenizer.ggml.tokens", []))
        embedding = self._file.tensors.get("token_embd.weight")
        rows = embedding.shape[0] if embedding is not None and embedding.shape else 0
        size = tokens or stated or rows
        if stated not in (0, size):
            raise self._metadata.error(
                self._name("vocab_size"), f"is {stated}, but the file lists {tokens} tokens"
            )
        if rows != size:
            raise FileFormatError(
                self._file.path,
                None if embedding is None else embedding.offset,
                f"token_embd.weight has {rows} rows for a vocabulary of {size} tokens",
                hint="the vocabulary and the weights are not of one model: convert it again",
            )
        return size

    def _rope_scale(self) -> float:
        """Return what positions are divided by; scaling other than linear is refused by name."""
        name = self._name("rope.scaling.type")
        kind = self._metadata.text(name, "linear")
        old = self._metadata.real(self._name("rope.scale_linear"), 0.0)
        factor = self._metadata.real(self._name("rope.scaling.factor"), old)
        if kind == "none":
            return 1.0
        if kind != "linear":
            raise self._metadata.error(
                name, f"rope scaling {kind!r} is not supported", "supported are: none, linear"
            )
        if factor and not 1e-3 <= factor <= 1e6:  # 0 says that it was not set
            raise self._metadata.error(
                self._name("rope.scaling.factor"), f"is {factor}, wanted a number from 0.001 to 1e6"
            )
        return factor or 1.0

    def _refuse_the_rest(self, key_length: int) -> None:
        """Refuse the keys that nothing has read, unless they are off or ignorable."""
        strange = []
        for name in self._metadata.unread(f"{self.architecture}."):
            key = name.removeprefix(f"{self.architecture}.")
            off, feature = OFF_VALUES.get(key, ((), ""))
            value = self._metadata[name]
            if key in IGNORABLE or any(_equal(value, neutral) for neutral in off):
                continue
            if key == "attention.scale" and _is_usual_scale(value, key_length):
                continue
            if feature:
                shown = str(value)[:60] if np.isscalar(value) else self._metadata.describe(name)
                raise self._metadata.error(name, f"is {shown}: {feature}, which is not supported")
            strange.append(name)
        if strange:
            more = len(strange) - NAMES_SHOWN
            raise self._metadata.error(
                strange[0],
                f"{len(strange)} {'key is' if len(strange) == 1 else 'keys are'} not understood: "
                + ", ".join(strange[:NAMES_SHOWN])
                + (f" and {more} more" if more > 0 else ""),
                "running it regardless could give wrong text: use a program that knows these keys",
            )


def _equal(value: object, neutral: object) -> bool:
    """Compare without taking False for 0 or True for 1; an array equals nothing."""
    if not np.isscalar(value) or isinstance(value, bool) != isinstance(neutral, bool):
        return False
    return value == neutral


def _is_usual_scale(value: object, key_length: int) -> bool:
    """Tell whether attention.scale is unset or what it would be anyway, to float32 precision."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return value == 0 or abs(value * key_length**0.5 - 1) < 1e-6
