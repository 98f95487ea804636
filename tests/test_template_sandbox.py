"""What a template can do to its reader: nothing outside it, and nothing for long."""

from __future__ import annotations

import re
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from strata_nb.chat import MAX_TEMPLATE, ChatTemplate
from strata_nb.errors import TemplateError
from strata_nb.text.template_budget import Steps


def render(source: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(messages, **variables)


def failure(source: str, *messages: dict[str, Any]) -> str:
    with pytest.raises(TemplateError) as caught:
        render(source, *messages)
    assert "--chat-template" in caught.value.hint
    assert caught.value.exit_status == 1
    return caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ (1).to_bytes(2000000000, 'big') }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ 'a'.encode() }}",
        "{{ '{a}'.format_map({}) }}",
    ],
)
def test_the_sandbox_keeps_templates_in(source: str) -> None:
    assert "unsafe" in failure(source, {"role": "user", "content": "Hi"})


BIG = "{% set big = 'x' * 4000000 %}"
LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
STEPS = "stopped after 2,000,000 steps"
FOREVER = LOOP + LOOP + END + END
TUPLES = "{% set ns = namespace(t=1) %}" + LOOP + "{% set ns.t = (ns.t,) %}" + END


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (FOREVER, STEPS),
        ("{{ [-99999999] | map('count steps') | list }}" + FOREVER, STEPS),
        (LOOP + "{% for j in range(99999) if false %}" + END + END, STEPS),
        ("{% for a in [1] * 999 recursive %}{{ loop([1] * 999) }}{% endfor %}", "too deeply"),
        ("{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
         "{% endfor %}", STEPS),
        ("{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}"
         "{{ f(0) }}", STEPS),
        ("".join(f"{{% block b{n} %}}{{{{ self.b{n + 1}() * 2 }}}}{{{{ self.b{n + 1}() }}}}"
                 "{% endblock %}" for n in range(19)) + "{% block b19 %}{% endblock %}", STEPS),
        (LOOP + "{{ 'x' * 9999 }}" + END, "wrote more than 67,108,864"),
        (LOOP + "{% set x %}" + "x" * 100000 + "{% endset %}" + END, STEPS),
        (LOOP + "{% set x = [" + "1," * 9999 + "] %}" + END, STEPS),
        ("{% for a in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "nested too deeply"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, "nested too deeply"),
        ("{{ " + "9" * 5000 + " }}", "4300"),
        ("x" * (MAX_TEMPLATE + 1), "has 131,073 characters, more than 131,072"),
    ],
)  # fmt: skip
def test_a_template_that_would_not_end_is_stopped(source: str, message: str) -> None:
    assert message in failure(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' * 10 ** 10 }}", "`*` would build 10,000,000,000 characters"),
        ("{{ 10 ** 10 * [1] }}", "`*` would build 10,000,000,000 items"),
        ("{{ 9 ** 99999999 }}", "`**` would build"),
        ("{{ ('f' * 99999) | int(base=16) }}", "an integer of 399,996 bits"),
        ("{{ 1.5 | round(2000000000, 'ceil') }}", "`round` to 2,000,000,000 digits"),
        ("{{ lipsum(n=3000000) }}", "'lipsum' is undefined"),
        ("{{ [1] | batch(2000000000) | list }}", "unknown filter batch"),
        ("{{ 'a' | indent(2000000000) }}", "`indent` would build 4,000,000,0"),
        ("{{ 'a' | center(2000000000) }}", "`center` would build 2,000,000,0"),
        ("{{ 'a'.center(2000000000) }}", "`center` would build 2,000,000,0"),
        ("{{ 'a'.ljust(2000000000) }}", "`ljust` would build 2,000,000,0"),
        ("{{ 'a'.rjust(2000000000) }}", "`rjust` would build 2,000,000,0"),
        ("{{ 'a'.zfill(2000000000) }}", "`zfill` would build 2,000,000,0"),
        ("{{ ('a' * 9999) | replace('a', 'a' * 9999) }}", "`replace` would build 100,"),
        ("{{ ('a' * 9999).replace('a', 'a' * 9999) }}", "`replace` would build 100,"),
        ("{{ ('a' * 9999) | join('a' * 9999) }}", "`join` would build 99,9"),
        ("{{ ('a' * 9999).join(['a'] * 9999) }}", "`join` would build 10"),
        ("{{ ('{0}' * 9999).format('a' * 9999) }}", "`format` would build 4"),
        ("{{ '%2000000000d' | format(1) }}", "a width in a format"),
        ("{{ '%2000000000d' % 1 }}", "a width in a format"),
        ("{{ '%.2000000000f' % 1 }}", "a width in a format"),
        ("{{ '%%%2000000000d' % 1 }}", "a width in a format"),
        ("{{ '%*d' % (2000000000, 1) }}", "a width in a format"),
        ("{{ '%(a(b))2000000000d' % {'a(b)': 1} }}", "a name in a format"),
        ("{{ '{:2000000000}'.format(1) }}", "a width in a format"),
        ("{{ '{:{}}'.format(1, 2000000000) }}", "a width in a format"),
        ("{{ [1] | tojson(indent=2000000000) }}", "`tojson` would indent by more than 100"),
        ("{{ ([1] * 99999) | tojson(separators=('a' * 99999, ':')) }}", "`tojson` would build"),
        ("{{ strftime_now('%Y' * 99999) }}", "`strftime_now` got 199,998 characters"),
    ],
)
def test_no_operation_builds_a_giant(source: str, message: str) -> None:
    assert message in failure(source)


@pytest.mark.parametrize(
    ("doubling", "who"),
    [
        ("{% set ns.x = ns.x + ns.x %}", "`+` built"),
        ("{% set ns.x = ns.x ~ ns.x %}", "`~` built"),
        ("{% set ns.x = ns.x.replace('x', 'xx') %}", "`replace` would build"),
        ("{% set ns.x = [ns.x, ns.x] | join %}", "`join` would build"),
        ("{% set ns.x = '%s%s' % (ns.x, ns.x) %}", "`%` would build"),
        ("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", "`a template` built"),
    ],
)
def test_doubling_a_text_is_stopped_at_four_million_characters(doubling: str, who: str) -> None:
    source = "{% set ns = namespace(x='x') %}{% for i in range(50) %}" + doubling + END
    pattern = re.escape(who) + r" [0-9,]+ characters, more than 4,194,304"
    assert re.search(pattern, failure(source))


def test_doubling_a_list_is_stopped() -> None:
    source = "{% set ns = namespace(x=[1]) %}{% for i in range(50) %}{% set ns.x = ns.x + ns.x %}"
    assert STEPS in failure(source + END)


@pytest.mark.parametrize(
    "work",
    [
        "{% if 'y' in big %}{% endif %}",
        "{% if big + 'y' == big + 'z' %}{% endif %}",
        "{% if big is upper %}{% endif %}",
        "{% set x = big + 'y' %}",
        "{% set x = big ~ 'y' %}",
        "{% set x = big | upper %}",
        "{% set x = big | reverse %}",
        "{% set x = big | sort %}",
        "{% set x = big | list %}",
        "{% set x = big.upper() %}",
        "{% set x = big.split('x') %}",
        "{% set x = big.rfind('xy' + 'x' * 999999) %}",
        "{% set x = big.strip('y' * 999999 + 'x') %}",
        "{% set x = big | trim('y' * 999999 + 'x') %}",
        "{% set x = big[1:] %}",
        "{% set x = 'a'.join([big]) %}",
        "{% set x = [big] | unique | list %}",
        "{% set x = {big + 'y': 1} %}",
        "{% set x = {}[big + 'y'] %}",
        "{% set x = ([big] * 9999) | map('upper') | list %}",
        "{% set x = ([big] * 9999) | map('default') | sort %}",
        "{% set x = ([namespace(a=big)] * 9999) | join(attribute='a') %}",
        "{% set x = ([big] * 9999) | select('equalto', big + 'y') | list %}",
    ],
)
def test_work_on_large_values_is_paid_by_their_size(work: str) -> None:
    assert STEPS in failure(BIG + LOOP + work + END)


@pytest.mark.parametrize(
    "work",
    ["{{ ns.x }}", "{{ ns.x ~ '' }}", "{{ ns.x | string | length }}", "{{ ns.x == ns.y }}",
     "{{ '%s' % ns.x }}", "{{ ns.x in [[1]] }}"],
)  # fmt: skip
def test_lists_that_hold_a_list_twice_are_paid_as_if_it_were_two(work: str) -> None:
    """50 times: 2**50 items to print or compare."""
    source = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(50) %}"
    source += "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}" + END
    assert "would not end" in failure(source + work)


def test_namespaces_in_namespaces_are_paid_like_lists() -> None:
    source = "{% set ns = namespace(x=1) %}{% for i in range(50) %}"
    source += "{% set two = namespace() %}{% set two.a = ns.x %}{% set two.b = ns.x %}"
    source += "{% set ns.x = two %}" + END
    assert "would not end" in failure(source + "{{ ns.x }}")


@pytest.mark.parametrize(
    "use",
    ["{% set x = {ns.t: 1} %}", "{{ {}[ns.t] }}", "{{ {}.get(ns.t) }}", "{{ ns.t in {} }}",
     "{{ ns.t }}", "{{ dict([(ns.t, 1)]) }}", "{{ [ns.t] | unique | list }}",
     "{{ [ns.t] | select('in', {}) | list }}"],
)  # fmt: skip
def test_a_deeply_nested_value_does_not_end_the_process(use: str) -> None:
    """Python's hash of a tuple in a tuple, 100,000 deep, overruns the stack."""
    assert "values nested more than 100 deep" in failure(TUPLES + use)


def test_a_long_chain_of_filters_does_not_end_the_process() -> None:
    source = "{% set ns = namespace(g=[1]) %}" + LOOP + "{% set ns.g = ns.g | map('abs') %}" + END
    assert "nested too deeply" in failure(source + "{{ ns.g | list }}")


def test_a_loop_is_no_list_to_search() -> None:
    source = BIG + "{% for i in [big + 'y'] * 99999 %}{{ big in loop }}{% endfor %}"
    assert "`loop` is no list" in failure(source)


def test_the_time_ends_even_where_the_steps_do_not() -> None:
    steps = Steps(limit=10**9, seconds=-1.0)
    with pytest.raises(SecurityError, match=r"stopped after -1\.0 seconds"):
        steps.take(100)
    in_time = Steps(limit=10**9, seconds=1e6)
    in_time.take(100)


def test_nothing_gives_steps_back() -> None:
    steps = Steps(limit=10)
    steps.take(-1000)
    steps.build(-1000, "items", "*")
    steps.take(10)
    with pytest.raises(SecurityError, match="stopped after 10 steps"):
        steps.take(1)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_what_is_too_large_to_measure_costs_more_than_is_left(left: int) -> None:
    """A size is looked at until it exceeds what is left; what it is then is not known."""
    steps = Steps(limit=left)
    with pytest.raises(SecurityError, match=f"stopped after {left} steps"):
        steps.walk(["x"] * 1000)


# --- what is not in the way ---


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'a' ~ 1 ~ none ~ [1]", "a1None[1]"),
        ("'a' + 'b' + 'c'", "abc"),
        ("[1] + [2]", "[1, 2]"),
        ("7 // 2 - 1 + 7 % 4", "5"),
        ("'%s: %5.1f%%' % ('a', 2.25)", "a:   2.2%"),
        ("'%(a)s' | format(a=1)", "1"),
        ("'{} {b:>3}'.format('a', b=1)", "a   1"),
        ("'a\\nb' | indent(2)", "a\n  b"),
        ("'a\\nb' | indent('> ', true)", "> a\n> b"),
        ("'a'.center(3) ~ 'a'.ljust(2) ~ 'a'.rjust(2) ~ '1'.zfill(3)", " a a  a001"),
        ("'a' | center(3)", " a "),
        ("'aXb' | replace('X', '--') ~ 'aXb'.replace('X', '')", "a--bab"),
        ("', '.join(['a', 'b'] | map('upper'))", "A, B"),
        ("[{'n': 1}, {'n': 2}] | map(attribute='n') | join('+')", "1+2"),
        ("[{'n': 1}, {'n': 2}] | sum(attribute='n')", "3"),
        ("[3, 1, 2] | sort | list ~ ([3, 1] | max)", "[1, 2, 3]3"),
        ("['a', 'a'] | unique | list", "['a']"),
        ("2.567 | round(2) ~ (2.5 | round(0, 'ceil'))", "2.573.0"),
        ("1 < 2 < 3 and 'a' in 'abc' and 'b' in {'b': 1} and 3 not in [1]", "True"),
        ("[1, 2] == [1, 2] and [1, 2] != (1, 2)", "True"),
        ("[1, 2, 3][1:] ~ 'abc'[::-1] ~ [1, 2][-1] ~ {(1, 2): 3}[(1, 2)]", "[2, 3]cba23"),
        ("[{'a': 1}] | selectattr('a', 'equalto', 1) | list", "[{'a': 1}]"),
        ("[1, 2] | reject('in', [2]) | list", "[1]"),
        ("{'b': 1, 'a': 2} | dictsort", "[('a', 2), ('b', 1)]"),
        ("dict(a=1).items() | list", "[('a', 1)]"),
        ("{'a': 1} | items | first", "('a', 1)"),
        ("[1, 2] | reverse | list", "[2, 1]"),
        ("namespace(a=1).a", "1"),
    ],
)
def test_operators_filters_and_methods_give_what_they_give_without_a_budget(
    expression: str, expected: str
) -> None:
    assert render("{{ " + expression + " }}") == expected
    assert render("{% for i in [1] %}{{ " + expression + " }}{% endfor %}") == expected
    assert render("{% macro f() %}{{ " + expression + " }}{% endmacro %}{{ f() }}") == expected


def test_texts_that_are_escaped_stay_so_when_joined() -> None:
    joined = "{{ '<' ~ '&' }}{{ ('<' | safe) ~ '<' }}"
    assert render("{% autoescape true %}" + joined + "{% endautoescape %}") == "&lt;&amp;<&lt;"


def test_a_conversation_of_a_thousand_long_messages_is_within_the_budget() -> None:
    source = (
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}"
        "{% if m.role == 'user' and not m.content.startswith('<tool') and ns.last == 0 %}"
        "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set content = m.content | trim %}"
        "{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"
        "{% if 'tool_calls' in m %}{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    call = {"name": "find", "arguments": {"text": "b" * 100}}
    message = {"role": "user", "content": "<think>x</think>" + "a " * 2000, "tool_calls": [call]}
    assert len(render(source, *[message] * 1000)) > 4_000_000


def test_a_template_may_gather_a_long_conversation_in_one_text() -> None:
    source = "{% set ns = namespace(out='') %}{% for m in messages %}"
    source += "{% set ns.out = ns.out ~ m.role + m.content %}{% endfor %}{{ ns.out }}"
    message = {"role": "user", "content": "a " * 500}
    assert len(render(source, *[message] * 1000)) == 1_004_000
