"""Write tests/data/vocab/expected.json.xz: random texts, and the ids that llama.cpp gives them.

    PYTHONPATH=.:tests python tools/oracle_vocabularies.py

It needs the extra `dev` and llama-cpp-python, of which 0.3.36 was used. The keys of the file:

texts           the random texts
plain           vocabulary -> ids of each text
parsed          vocabulary -> ids of each text with control tokens parsed
pre_tokenizers  name -> ids of each text with the vocabulary of qwen2 under that pre-tokenizer
ends            vocabulary -> the tokens that end a generation
"""

from __future__ import annotations

import json
import lzma
import random
import tempfile
from pathlib import Path

import llama_cpp
from vocab_files import PRE_TOKENIZERS, VOCABULARIES, VocabFiles

OUT = Path(__file__).parents[1] / "tests" / "data" / "vocab"

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    "    \t\n\r\v\f",
    "'\"!?.,;:-_+*/\\|<>[](){}@#$%^&~`=",
    "äöüßéèñçøåÀÉÎÕ",
    "нещоБългарскиЩЭЮ",
    "你好世界工作我想在的是龥中文",
    "こんにちはカタカナ・ー",
    "กำนี้ไทย",
    "កាន់តែពិសេស",
    "हिन्दीक्षि",
    "العربيةُِّ",
    "가나다한국어",
    "🚀🙂😶‍🌫️🦙👩‍👩‍👧‍👦✅",
    "\u0301\u0308\u200d\ufe0f\u3000\u00a0\u2003\u0085\u2028\u180e\ufeff\u200b",
    "①②½¾Ⅳ²³٠١٢",
    "€£¥©®™±×÷≠∞，。！？：；、“”‘’…—（）【】",
    "\x01\x07\x1b\x1c\x1d\x1e\x1f\x7f\x80\x9f",
    "𐐀𝔘𝟘𠀀ǅǈﬁſKİı",
)
WORDS = (
    *("'s", "'S", "'RE", "'ll", "'Ve", "I'm", "don't", "Hello", " world", "the", "  ", "   "),
    *("\n\n", "\r\n", "\n", "\t\t", " \n", "1234567", "3.14", "2024-01-02", "http://x.y/z?a=b"),
    *("def f(x):\n    return x", "====", "------", "!!!!!", "....", "aaaaaaa", "\n   \n"),
    *("ABCdef", "XMLHttpRequest", "<|", "|>", "<s", "__init__", "<0x41>", "。", "\u3000\u3000"),
)
SPECIAL = ("<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>")


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(2, 14)):
        dice = rng.random()
        if dice < 0.45:
            alphabet = rng.choice(ALPHABETS)
            parts.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 6))))
        elif dice < 0.75:
            parts.append(rng.choice(WORDS))
        elif dice < 0.85:
            parts.append(rng.choice(" \na=7\t🚀\u0301!。") * rng.randint(1, 40))
        elif dice < 0.95:
            parts.append(rng.choice(SPECIAL))
        else:
            special = rng.choice(SPECIAL)
            parts.append(special[: rng.randint(1, len(special))])
        if rng.random() < 0.3:
            parts.append(" ")
    return "".join(parts)


def main() -> None:
    rng = random.Random(2)
    texts = [random_text(rng) for _ in range(150)]
    expected: dict[str, dict[str, list[object]]] = {"plain": {}, "parsed": {}}
    expected |= {"pre_tokenizers": {}, "ends": {}}
    with tempfile.TemporaryDirectory() as directory:
        files = VocabFiles(Path(directory))
        for name in VOCABULARIES:
            model = llama_cpp.Llama(str(files.path(name)), vocab_only=True, verbose=False)
            raw = model._model.vocab
            size = llama_cpp.llama_vocab_n_tokens(raw)
            expected["ends"][name] = [
                token for token in range(size) if llama_cpp.llama_vocab_is_eog(raw, token)
            ]
            for key, special in (("plain", False), ("parsed", True)):
                expected[key][name] = [
                    model.tokenize(text.encode(), False, special) for text in texts
                ]
        for name in PRE_TOKENIZERS:
            path = files.path("qwen2", pre_tokenizer=name)
            model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            expected["pre_tokenizers"][name] = [
                model.tokenize(text.encode(), False, False) for text in texts[:75]
            ]
    content = json.dumps({"texts": texts, **expected}, separators=(",", ":")).encode()
    (OUT / "expected.json.xz").write_bytes(lzma.compress(content, preset=9))


if __name__ == "__main__":
    main()
