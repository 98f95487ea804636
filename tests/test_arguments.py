"""The command line before a command runs: what is accepted, and what refuses the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_nb.commands.arguments import (
    Arguments,
    options_from,
    options_of,
    parse,
    sampling_from,
    text_from,
)
from strata_nb.errors import ConfigError
from strata_nb.options import Options, Sampling
from strata_nb.usage import USAGE

# Without which a command is none.
NEEDED = {"bench policy": ["routes.npy"]}


def parsed(command: str, *words: str) -> Arguments:
    needed = [] if {"-h", "--help"} & {*words} else NEEDED.get(command, [])
    return parse(command, USAGE[command], [*words, *needed])


@pytest.mark.parametrize("command", USAGE)
def test_every_option_of_a_usage_text_is_known_to_docopt_under_the_same_name(command: str) -> None:
    for flag, option in options_of(USAGE[command]).items():
        arguments = parsed(command, flag, *(["1"] if option.takes_value else []))
        if option.repeatable:
            assert arguments.texts(option.name) == ["1"]
        elif option.takes_value:
            assert arguments.text(option.name) == "1"
        else:
            assert arguments.flag(option.name)


@pytest.mark.parametrize("command", USAGE)
def test_nothing_given_is_nothing_parsed(command: str) -> None:
    arguments = parsed(command)
    for option in options_of(USAGE[command]).values():
        if option.repeatable:
            assert arguments.texts(option.name) == []
        else:
            assert arguments.text(option.name) is None or not arguments.flag(option.name)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--mod", "x"], "--mod: abbreviated flags are not accepted"),
        (["--mod=x"], "--mod: abbreviated flags are not accepted"),
        (["--ids"], "--ids: unknown flag of `strata_nb generate`"),
        (["-x"], "-x: unknown flag"),
        (["--model"], "--model: a value must follow"),
        (["-n"], "-n: a value must follow"),
        (["--verbose=1"], "--verbose: takes no value"),
        (["-n", "1", "--max-tokens=2"], "--max-tokens: given twice"),
        (["--ctk", "f16", "--cache-type-k", "f32"], "--cache-type-k: given twice"),
        (["one", "two"], "do not fit"),
    ],
)
def test_a_mistake_is_refused_with_its_cause_and_a_remedy(words: list[str], cause: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("generate", *words)
    assert cause in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_status == 2


def test_the_hint_names_the_flag_that_was_probably_meant() -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("generate", "--tmep", "1")
    assert refused.value.hint == "did you mean --temp?"


def test_values_may_begin_with_dashes_and_hold_equal_signs() -> None:
    arguments = parsed("generate", "-p", "--temp", "--stop=a=b", "--stop", "-x", "-n-1")
    assert arguments.text("--prompt") == "--temp"
    assert arguments.texts("--stop") == ["a=b", "-x"]
    assert arguments.integer("--max-tokens") == -1


def test_words_after_two_dashes_are_no_flags() -> None:
    assert parsed("generate", "--", "-5 degrees").text("PROMPT") == "-5 degrees"


def test_a_short_alias_and_a_long_one_mean_the_same() -> None:
    short = options_from(parsed("generate", "-m", "a", "-c", "7", "--ctk", "f16", "-t2"))
    long = options_from(
        parsed("generate", "--model=a", "--ctx-size=7", "--cache-type-k=f16", "--threads=2")
    )
    assert short == long == Options("a", ctx_size=7, cache_type_k="f16", threads=2)


def test_sampling_flags_reach_their_fields() -> None:
    words = "--temp 0.5 --top-k 3 --top-p 0.7 --min-p 0.1 --repeat-penalty 1.5 --seed 9"
    more = "--presence-penalty 0.25 --frequency-penalty -0.5 --repeat-last-n -1"
    arguments = parsed("generate", *words.split(), *more.split())
    assert sampling_from(arguments) == Sampling(0.5, 3, 0.7, 0.1, 1.5, 0.25, -0.5, -1, 9)
    assert sampling_from(parsed("generate")) == Sampling()
    assert sampling_from(parsed("generate", "--seed", "-1")) == Sampling(seed=None)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temp", "warm"),
        ("--temp", "nan"),
        ("--temp", "-1"),
        ("--top-p", "1.5"),
        ("--min-p", "inf"),
        ("--top-k", "1.5"),
        ("--seed", "-2"),
        ("--temp", "1_0"),
        ("--seed", "18446744073709551616"),
        ("--top-k", "99999999999999999999999"),
    ],
)
def test_a_sampling_value_that_cannot_be_used_is_named(flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sampling_from(parsed("generate", flag, value))
    assert f"{flag} {value}" in refused.value.message


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("-c", "0"),
        ("-t", "0"),
        ("--prefill", "0"),
        ("--prefill", "many"),
        ("--device", "cuda:x"),
        ("--ctk", "q4_0"),
        ("--ctv", "F16"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options_from(parsed("generate", "-m", "x", flag, value))
    assert value in refused.value.message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 2**30),
        ("12Gi", 12 * 2**30),
        ("700MiB", 700 * 2**20),
        ("1.5g", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("64000000", 64_000_000),
        ("100B", 100),
        ("3k", 3072),
    ],
)
def test_sizes_are_read_in_the_units_people_write(text: str, size: int) -> None:
    assert parsed("info", "--vram", text).size_bytes("--vram") == size


@pytest.mark.parametrize("text", ["", "GiB", "12 GiBs", "-1GiB", "1e9", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parsed("info", f"--vram={text}").size_bytes("--vram")


def test_the_text_comes_from_exactly_one_place(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file ä\n", encoding="utf-8")
    assert text_from(parsed("generate", "word"), "PROMPT") == "word"
    assert text_from(parsed("generate", "-p", ""), "PROMPT") == ""
    assert text_from(parsed("generate", "-f", str(file)), "PROMPT") == "from a file ä\n"
    assert text_from(parsed("generate"), "PROMPT") is None
    with pytest.raises(ConfigError, match="PROMPT and --prompt"):
        text_from(parsed("generate", "word", "-p", "text"), "PROMPT")


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "latin1.txt"
    broken.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ConfigError, match=r"latin1\.txt: not UTF-8 text, byte 0xe9 at offset 3"):
        text_from(parsed("generate", "-f", str(broken)), "PROMPT")
    with pytest.raises(ConfigError, match="No such file"):
        text_from(parsed("generate", "-f", str(tmp_path / "none")), "PROMPT")
    with pytest.raises(ConfigError, match="directory"):
        text_from(parsed("generate", "-f", str(tmp_path)), "PROMPT")


def test_an_argument_that_is_not_utf8_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match="PROMPT: not UTF-8 text at character 3"):
        text_from(parsed("generate", "caf\udce9"), "PROMPT")
    with pytest.raises(ConfigError, match="--stop: not UTF-8 text at character 0"):
        parsed("generate", "--stop", "\udce9").texts("--stop")
