"""What a random model consists of: sizes, metadata keys, and the list of its tensors.

Names, shapes and keys are those on which llama.cpp and the converters of an architecture agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from strata_nb.errors import ConfigError
from strata_nb.formats import DEQUANTISABLE, TensorType, block_layout, tensor_bytes

LEAST_VOCAB = 258  # 256 bytes, one merge, and the end

ARCHITECTURES = {  # architecture: (base of the rotary frequencies, epsilon of the norms)
    "llama": (500000.0, 1e-5),
    "qwen2moe": (1000000.0, 1e-6),
    "qwen3": (1000000.0, 1e-6),
    "qwen3moe": (1000000.0, 1e-6),
    "olmoe": (10000.0, 1e-5),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Choose an architecture and its sizes; the fields are flags of `make_model.py`.

    The defaults are small, and differ among themselves where they may, so that one size taken for
    another does not fit. ConfigError for a shape that llama.cpp could not load.
    """

    architecture: str
    layers: int = 2
    experts: int = 8
    top_k: int = 3
    dim: int = 256
    ff: int = 256
    shared_ff: int = 0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512
    context: int = 1024
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(
                f"architecture {self.architecture}: not known", hint=f"one of {known}"
            )
        for name in ("layers", "dim", "ff", "heads", "kv_heads", "head_dim", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} {getattr(self, name)}: not usable", hint="give 1 or more"
                )
        for present, fault in self._faults():
            if present:
                raise ConfigError(f"{self.architecture}: {fault}")

    def _faults(self) -> Iterator[tuple[bool, str]]:
        dense = self.experts == 0
        old = self.architecture in ("qwen2moe", "olmoe")
        yield self.vocab < LEAST_VOCAB, f"{self.vocab} tokens, needs {LEAST_VOCAB} or more"
        yield (
            dense and self.architecture not in ("llama", "qwen3"),
            "0 experts, needs 1 or more",
        )
        yield (
            self.architecture == "qwen3" and not dense,
            f"{self.experts} experts, needs 0",
        )
        yield (
            not 0 <= self.top_k <= self.experts or (self.top_k == 0) != dense,
            f"{self.top_k} of {self.experts} experts cannot be used",
        )
        yield (
            (self.shared_ff > 0) != (self.architecture == "qwen2moe"),
            f"a shared expert of width {self.shared_ff}, which is for qwen2moe",
        )
        yield (
            self.heads % self.kv_heads != 0,
            f"{self.heads} heads, no multiple of {self.kv_heads} key/value heads",
        )
        yield (
            self.architecture == "olmoe" and self.kv_heads != self.heads,
            f"{self.kv_heads} key/value heads, needs {self.heads} as of queries",
        )
        yield (
            old and self.q_dim != self.dim,
            f"heads x head_dim = {self.q_dim}, needs dim = {self.dim}",
        )
        yield old and self.tied_head, "a tied head, which llama.cpp does not know here"

    @property
    def q_dim(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim


LOGITS_SHAPES = {
    "llama": ModelShape("llama", experts=0, top_k=0, ff=768),
    "mixtral": ModelShape("llama", top_k=2, ff=512),
    "qwen2moe": ModelShape("qwen2moe", shared_ff=512),
    "qwen3": ModelShape("qwen3", experts=0, top_k=0, ff=768, heads=8),
    "qwen3moe": ModelShape("qwen3moe", heads=8),
    "olmoe": ModelShape("olmoe", kv_heads=4),
}

# Llama-3.1-8B, Mixtral-8x7B, Qwen2-57B-A14B, Qwen3-8B, Qwen3-30B-A3B, OLMoE-1B-7B
BENCH_SHAPES = {
    "llama": ModelShape("llama", 32, 0, 0, 4096, 14336, 0, 32, 8, 128, 128256, 131072),
    "mixtral": ModelShape("llama", 32, 8, 2, 4096, 14336, 0, 32, 8, 128, 32000, 32768),
    "qwen2moe": ModelShape("qwen2moe", 28, 64, 8, 3584, 2560, 20480, 28, 4, 128, 151936, 32768),
    "qwen3": ModelShape("qwen3", 36, 0, 0, 4096, 12288, 0, 32, 8, 128, 151936, 40960),
    "qwen3moe": ModelShape("qwen3moe", 48, 128, 8, 2048, 768, 0, 32, 4, 128, 151936, 262144),
    "olmoe": ModelShape("olmoe", 16, 64, 8, 2048, 1024, 0, 16, 16, 128, 50304, 4096),
}

SHAPES = {"logits": LOGITS_SHAPES, "bench": BENCH_SHAPES}  # preset: family: shape


class Spread(NamedTuple):
    """Say how far random values spread: the standard deviation of each kind of tensor.

    With `keeps_rows`, those of head, matrices, outputs and routers are divided by the square root
    of the row length: 1 then turns a row of deviation 1 into another one of deviation 1.
    """

    embedding: float
    head: float
    matrix: float
    layer_output: float
    router: float
    norm: float  # around 1
    bias: float
    keeps_rows: bool


SPREADS = {
    # Each layer adds a good part of what the token itself is: one layer more moves the logits by a
    # fifth of their deviation, which is 3 so that the best token stands apart.
    "logits": Spread(1.0, 3.0, 1.0, 1.0, 1.0, norm=0.2, bias=0.5, keeps_rows=True),
    # Small outputs of layers, so that the hidden rows of different tokens stay different through
    # 48 layers: with larger ones they become alike, and every token chooses the same experts.
    "bench": Spread(1.0, 0.02, 0.02, 0.005, 0.02, norm=0.0, bias=0.1, keeps_rows=False),
}

Rule = tuple[str, TensorType]  # a pattern of tensor names, and the type of those that fit

Q4_K_M: tuple[Rule, ...] = (  # where llama.cpp's mix of that name keeps more bits
    ("output.weight", TensorType.Q6_K),
    ("*.attn_v.weight", TensorType.Q6_K),
    ("blk.*[02468].ffn_down*", TensorType.Q6_K),
    ("*", TensorType.Q4_K),
)


class PlannedTensor(NamedTuple):
    """Describe a tensor to be made; `shape` is in numpy's order, the row last.

    `normal` is set for float32 tensors drawn as mean + std * z, rows times exp(row_skew * z).
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    std: float
    normal: bool = False
    mean: float = 0.0
    row_skew: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return tensor_bytes(self.kind, self.shape)


def plan_tensors(
    shape: ModelShape, rules: Sequence[Rule], spread: Spread, skew: float
) -> Iterator[PlannedTensor]:
    """Yield the tensors of a model in the order of the file.

    Matrices have the type of the first rule that fits their name; norms, biases and routers are
    F32. Router rows are scaled by exp(skew * z). ConfigError for a row that is no whole number of
    blocks.
    """

    def scaled(std: float, row: int) -> float:
        return std / math.sqrt(row) if spread.keeps_rows else std

    def matrix(name: str, std: float, *sizes: int) -> PlannedTensor:
        name += ".weight"
        return PlannedTensor(name, sizes, _type_of(name, sizes[-1], rules), std)

    def plain(name: str, std: float, *sizes: int) -> PlannedTensor:
        return PlannedTensor(name, sizes, TensorType.F32, std, normal=True)

    def norm(name: str, size: int) -> PlannedTensor:
        return plain(f"{name}.weight", spread.norm, size)._replace(mean=1.0)

    dim, ff, experts, architecture = shape.dim, shape.ff, shape.experts, shape.architecture
    head_std = scaled(spread.head, dim)
    inner_std = scaled(spread.matrix, dim)
    router_std = scaled(spread.router, dim)
    yield matrix("token_embd", head_std if shape.tied_head else spread.embedding, shape.vocab, dim)
    yield norm("output_norm", dim)
    if not shape.tied_head:
        yield matrix("output", head_std, shape.vocab, dim)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield norm(block + "attn_norm", dim)
        yield matrix(block + "attn_q", inner_std, shape.q_dim, dim)
        yield matrix(block + "attn_k", inner_std, shape.kv_dim, dim)
        yield matrix(block + "attn_v", inner_std, shape.kv_dim, dim)
        output_std = scaled(spread.layer_output, shape.q_dim)
        yield matrix(block + "attn_output", output_std, dim, shape.q_dim)
        if architecture == "qwen2moe":
            yield plain(block + "attn_q.bias", spread.bias, shape.q_dim)
            yield plain(block + "attn_k.bias", spread.bias, shape.kv_dim)
            yield plain(block + "attn_v.bias", spread.bias, shape.kv_dim)
        if architecture in ("qwen3", "qwen3moe"):  # one norm, used for each head
            yield norm(block + "attn_q_norm", shape.head_dim)
            yield norm(block + "attn_k_norm", shape.head_dim)
        if architecture == "olmoe":  # a norm over all heads together
            yield norm(block + "attn_q_norm", shape.q_dim)
            yield norm(block + "attn_k_norm", shape.kv_dim)
        yield norm(block + "ffn_norm", dim)
        down_std = scaled(spread.layer_output, ff)
        if experts == 0:
            yield matrix(block + "ffn_gate", inner_std, ff, dim)
            yield matrix(block + "ffn_up", inner_std, ff, dim)
            yield matrix(block + "ffn_down", down_std, dim, ff)
            continue
        router = plain(block + "ffn_gate_inp.weight", router_std, experts, dim)
        yield router._replace(row_skew=skew)
        yield matrix(block + "ffn_gate_exps", inner_std, experts, ff, dim)
        yield matrix(block + "ffn_up_exps", inner_std, experts, ff, dim)
        yield matrix(block + "ffn_down_exps", down_std, experts, dim, ff)
        if shape.shared_ff:
            down_std = scaled(spread.layer_output, shape.shared_ff)
            yield plain(block + "ffn_gate_inp_shexp.weight", router_std, dim)
            yield matrix(block + "ffn_gate_shexp", inner_std, shape.shared_ff, dim)
            yield matrix(block + "ffn_up_shexp", inner_std, shape.shared_ff, dim)
            yield matrix(block + "ffn_down_shexp", down_std, dim, shape.shared_ff)


def _type_of(name: str, row: int, rules: Sequence[Rule]) -> TensorType:
    kind = next((kind for pattern, kind in rules if fnmatchcase(name, pattern)), None)
    if kind is None:
        raise ConfigError(f"{name}: no rule gives its type", hint="end with a rule for *")
    if kind not in DEQUANTISABLE:
        raise ConfigError(f"{name}: random {kind.name} blocks cannot be made")
    values = block_layout(kind).values
    if row % values:
        raise ConfigError(
            f"{name}: rows of {row} values are no whole {kind.name} blocks of {values}",
            hint=f"choose sizes that are multiples of {values}, or another type",
        )
    return kind


def architecture_keys(shape: ModelShape) -> dict[str, int | float]:
    """Return the metadata of the architecture: integers for uint32 keys, floats for float32."""
    rope_base, eps = ARCHITECTURES[shape.architecture]
    keys: dict[str, int | float] = {
        "vocab_size": shape.vocab,
        "context_length": shape.context,
        "embedding_length": shape.dim,
        "block_count": shape.layers,
        "feed_forward_length": shape.ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": rope_base,
    }
    if shape.experts:
        keys |= {"expert_count": shape.experts, "expert_used_count": shape.top_k}
    if shape.architecture in ("qwen2moe", "qwen3moe"):
        # The plain width is that of a dense layer, which these models do not have.
        keys["feed_forward_length"] = shape.ff * shape.top_k
        keys["expert_feed_forward_length"] = shape.ff
    if shape.shared_ff:
        keys["expert_shared_feed_forward_length"] = shape.shared_ff
    return {f"{shape.architecture}.{key}": value for key, value in keys.items()}
