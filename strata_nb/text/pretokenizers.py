r"""Know how a byte-level BPE vocabulary wants its text cut into words, by the name in the file.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and does not carry it: which regular
expressions a name means is knowledge of the converter and of every reader. The table below is
llama.cpp's (src/llama-vocab.cpp and src/unicode.cpp; MIT licence, the ggml authors), in the syntax
of Oniguruma, the engine inside `tokenizers`. Where a published tokenizer.json and llama.cpp differ,
llama.cpp's reading is kept, because the files were converted and tested against it.

The expressions of a row are applied one after the other: each cuts the words that the one before
left, its matches and what lies between them become words, and it sees one word at a time, so that
`(?!\S)` and `\z` hold at the end of a word.

Changed against the source, with equal results: `(?<!\s)\s+\z` for `\s+$`, which is quadratic in
long runs of spaces; and `&&[^\s]` or a narrower range where llama.cpp replaces wide spaces by a
control character before it matches a range that would have held them. Not here: names whose words
cannot be said in regular expressions (kimi-k2, afmoe, tiny_aya, superbpe), or whose tokens are not
written byte by byte (gemma4, sarvam-moe, whitespace), and some of other kinds of models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Say how text becomes words, and which defaults of the vocabulary come with the name.

    expressions   applied in order
    whole_words   a word that is a token is not cut further (llama.cpp: ignore_merges)
    add_bos       whether BOS goes first where the file does not say
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


def find(name: str) -> PreTokenizer | None:
    """Return the pre-tokenizer with this name, or None if the name is not known."""
    return _BY_NAME.get(name)


_ENDING = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CAPITALISED = (
    r"[^\r\n\p{L}\p{N}]?(?:(?=\p{L})[^a-z])*(?:(?=\p{L})[^A-Z])+",
    r"[^\r\n\p{L}\p{N}]?(?:(?=\p{L})[^a-z])+(?:(?=\p{L})[^A-Z])*",
)
_ASCII_SIGN_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_HAN_AND_HANGUL = r"[一-龥ࠀ-一가-퟿&&[^\s]]+"
_LETTERS_WITH_CASE = (  # escaped, since some of these letters do not survive normalisation
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT2 = (_GPT2_WORDS,)
_DIGIT_BY_DIGIT = (r"\p{N}", _GPT2_WORDS)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")
_LLAMA3 = (rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",)
_QWEN2 = (rf"{_ENDING}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",)
_QWEN35 = (
    rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_LETTERS_WITH_CASE}]+",
    r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
    r"(?<!\s)\s+\z",
    _HAN_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _HAN_AND_KANA,
    rf"{_ASCII_SIGN_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SPARK = (
    r"\p{N}{1,3}",
    _HAN_AND_KANA,
    rf"{_ASCII_SIGN_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)
_VIKING = (*_BLOOM, r"\p{N}")
_TEKKEN = (rf"{'|'.join(_CAPITALISED)}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)
_GPT4O = (
    rf"{_CAPITALISED[0]}{_ENDING}?|{_CAPITALISED[1]}{_ENDING}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
    rf"|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
)
_SEED_CODER = (rf"{_ENDING}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
_EXAONE_MOE = (
    rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)
_MINICPM5 = (r"\p{N}{1,3}", rf"{_ENDING}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}")
_LAGUNA = (r"[^\n]+|\n+", *_QWEN2)
_UFAKZEKA = (rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",)

DEFAULT = PreTokenizer(_DEFAULT)

_LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"

_BY_NAME: dict[str, PreTokenizer] = {
    name: PreTokenizer(expressions)
    for expressions, names in (
        (_DEFAULT, "default"),
        (
            _GPT2,
            "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v2-code jina-v1-en roberta-bpe"
            " gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling",
        ),
        (
            _DIGIT_BY_DIGIT,
            "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        ),
        (_LLAMA3, "dbrx smaug-bpe chatglm-bpe"),
        (
            _QWEN2,
            "qwen2 stablelm2 megrez deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2",
        ),
        (_QWEN35, "qwen35"),
        (_DEEPSEEK_LLM, "deepseek-llm"),
        (_DEEPSEEK_CODER, "deepseek-coder"),
        (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
        (_SPARK, "spark2_5"),
        (_FALCON, "falcon"),
        (_BLOOM, "bloom gpt3-finnish poro-chat"),
        (_VIKING, "viking"),
        (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
        (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
        (_SEED_CODER, "seed-coder"),
        (_EXAONE_MOE, "exaone-moe"),
        (_LAGUNA, "laguna"),
        (_UFAKZEKA, "ufakzeka"),
    )
    for name in names.split()
}
_BY_NAME |= {
    name: PreTokenizer(_LLAMA3, whole_words=True, add_bos=True) for name in _LLAMA3_NAMES.split()
}
_BY_NAME |= {
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, add_bos=True),
    "minicpm5": PreTokenizer(_MINICPM5, whole_words=True),
    "glm4": PreTokenizer(_LLAMA3, whole_words=True),
    "glm5": PreTokenizer(_LLAMA3, whole_words=True),
}
