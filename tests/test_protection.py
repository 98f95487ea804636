"""Control tokens in what users write are broken, wherever they stand; other text is not."""

from __future__ import annotations

import pytest

from strata_nb.chat import ChatTemplate
from strata_nb.errors import ConfigError, TemplateError
from strata_nb.text.protection import marks_restored, protect

MARK = "\ufdd0"
CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<think>", "</think>", "[INST]"]


def marked(text: str, *control_texts: str) -> str:
    protected, mark = protect([{"role": "user", "content": text}], control_texts or CONTROL)
    assert mark == MARK
    content: str = protected[0]["content"]
    assert content.replace(mark, "") == text
    return content.replace(mark, "^")


def test_each_sign_that_begins_a_control_text_is_marked() -> None:
    assert marked("a<|im_end|>b<s></s>") == "a<^|im_end|>b<^s><^/s>"
    assert marked("<think>[INST] plain <b> text") == "<^think>[^INST] plain <^b> text"
    assert marked("<|IM_END|> a [1] >") == "<^|IM_END|> a [^1] >"


def test_control_texts_of_letters_are_broken_where_they_stand() -> None:
    assert marked("aabab", "aab", "aba", "ab") == "a^a^ba^b"
    assert marked("an end, a pad", "end", " pad") == "an e^nd, a ^pad"


def test_an_end_that_could_grow_into_a_control_text_is_broken_too() -> None:
    assert marked("an en", "end") == "an e^n"
    assert marked("an ex", "end") == "an ex"
    assert marked("a <|im_") == "a <^|im_"
    assert marked("<") == "<^"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("text|replace('X', '')", "<|im_XendX|>"),
        ("text|lower", "<|IM_END|>"),
        ("text|lower|title|lower", "<|IM_end|>"),
        ("text[0:2] ~ text[3:]", "<||im_end|>"),
        ("text.split('@')|join", "<|im_@end|>"),
    ],
)
def test_no_control_text_comes_about_when_a_template_changes_a_text(
    expression: str, text: str
) -> None:
    protected, _ = protect([{"content": text}], CONTROL)
    template = ChatTemplate("{% set text = messages[0].content %}{{ " + expression + " }}")
    rendered = template.render(protected)
    assert not any(control in rendered for control in CONTROL)


def test_a_control_text_of_one_character_is_marked_behind_it() -> None:
    assert marked("a\x01b", "\x01") == "a\x01^b"


def test_keys_and_values_are_protected_at_every_depth() -> None:
    messages = [{"role": "user", "name": "<s>", "content": [{"type": "text", "text": "<s>"}]}]
    tools = [{"about": "</s>", "ok": None, "properties": {"<s>": {"type": "<s>", "n<": 1}}}]
    given = messages, tools, {"documents": [{"text": "a</s>"}], "style": "<s>", "n": 1}
    (safe_messages, safe_tools, variables), _ = protect(given, ["<s>", "</s>"])
    bos, eos = f"<{MARK}s>", f"<{MARK}/s>"
    assert safe_messages == [
        {"role": "user", "name": bos, "content": [{"type": "text", "text": bos}]}
    ]
    assert safe_tools == [
        {"about": eos, "ok": None, "properties": {bos: {"type": bos, f"n<{MARK}": 1}}}
    ]
    assert variables == {"documents": [{"text": f"a{eos}"}], "style": bos, "n": 1}
    assert messages[0]["name"] == "<s>"


def test_names_that_templates_look_for_stay_whole() -> None:
    """Even where a control token begins as they end."""
    message = {"role": "system", "type": "item", "enum": "item"}
    protected, _ = protect([message], ["madeupword0001"])
    assert protected == [{"role": "system", "type": "item", "enum": f"item{MARK}"}]


def test_an_answer_keeps_its_thinking_tags_and_nothing_else() -> None:
    text = "<think>hm</think>x<s>"
    protected, _ = protect(
        [{"role": role, "content": text} for role in ("assistant", "user")], CONTROL
    )
    assert protected[0]["content"] == f"<think>hm</think>x<{MARK}s>"
    assert protected[1]["content"] == f"<{MARK}think>hm<{MARK}/think>x<{MARK}s>"


def test_the_mark_occurs_in_no_message_and_is_refused_when_none_is_left() -> None:
    _, mark = protect([{"content": f"{MARK} and \ufdd1"}], ["<s>"])
    assert mark == "\ufdd2"
    _, mark = protect([{r"\UFDD0": "%EF%B7%91"}], ["<s>"])
    assert mark == "\ufdd2"
    everything = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(ConfigError, match=r"U\+FDD0 to U\+FDEF"):
        protect([{"content": everything}], ["<s>"])


def test_only_messages_of_the_assistant_keep_thinking_tags() -> None:
    content = [{"role": "assistant", "text": "<think>"}]
    protected, _ = protect([{"role": "user", "content": content}], CONTROL)
    assert protected[0]["content"][0]["text"] == f"<{MARK}think>"


def test_an_escaped_mark_is_a_mark_again_and_backslashes_stay() -> None:
    assert marks_restored(r"<\ufdd0s>", MARK, "it") == f"<{MARK}s>"
    assert marks_restored(r"a\\<\ufdd0s>", MARK, "it") == rf"a\\<{MARK}s>"
    assert marks_restored(rf"\\\ufdd0 \n {MARK}", MARK, "it") == rf"\\{MARK} \n {MARK}"


@pytest.mark.parametrize("text", [r"<\\ufdd0s>", r"<\UFDD0s>", "<%EF%B7%90s>", "ufdd0"])
def test_marks_that_are_hidden_in_other_ways_are_an_error(text: str) -> None:
    with pytest.raises(TemplateError, match="it writes the conversation in escapes") as caught:
        marks_restored(text, MARK, "it")
    assert caught.value.hint


def test_long_text_made_of_beginnings_is_marked_in_one_pass() -> None:
    signs = [f"<{'<' * 20}special_{n}|>" for n in range(1000)]
    letters = [f"a{'a' * 20}special_{n}" for n in range(1000)]
    protected, _ = protect([{"content": "<" * 100_000 + "a" * 100_000}], [*signs, *letters])
    assert protected[0]["content"] == f"<{MARK}" * 100_000 + "a" * 99_979 + f"a{MARK}" * 21
