"""Options and Sampling: the defaults, and what each field refuses in which words."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from strata_nb.errors import ConfigError
from strata_nb.options import MAX_SEED, Options, Sampling

FLAGS = {
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repeat_penalty": "--repeat-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "repeat_last_n": "--repeat-last-n",
    "seed": "--seed",
    "model": "--model",
    "device": "--device",
    "ctx_size": "--ctx-size",
    "threads": "--threads",
    "prefill": "--prefill",
    "cache_type_k": "--cache-type-k",
    "cache_type_v": "--cache-type-v",
    "expert_cache": "--expert-cache",
    "vram_reserve_mib": "--vram-reserve-mib",
    "vram_limit": "--vram-limit",
    "vram_elastic": "--vram-elastic",
    "kv_grow": "--kv-grow",
    "kv_grow_init": "--kv-grow-init",
    "kv_grow_step": "--kv-grow-step",
    "deterministic": "--deterministic",
    "overlap": "--no-overlap",
    "prefill_borrow": "--no-prefill-borrow",
    "cpu_pool": "--no-cpu-pool",
    "pin": "--no-pin",
    "pcie_frac": "--pcie-frac",
    "adapt": "--adapt",
    "adapt_every": "--adapt-every",
    "adapt_swaps": "--adapt-swaps",
    "adapt_decay": "--adapt-decay",
    "expert_profile": "--expert-profile",
    "expert_profile_save": "--expert-profile-save",
    "routing_trace": "--routing-trace",
    "force_routes": "--force-routes",
    "trace": "--trace",
}

REAL_FIELDS = {
    "temperature": (-0.001, 1e7),
    "top_p": (-0.001, 1.001),
    "min_p": (-0.001, 1.001),
    "repeat_penalty": (0.0, 1e7),
    "presence_penalty": (-1e7, 1e7),
    "frequency_penalty": (-1e7, 1e7),
}
REFUSED_SAMPLING: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name, outside in REAL_FIELDS.items()
        for value in (*outside, math.nan, math.inf, -math.inf, "1", None, True)
    ),
    *(("top_k", value) for value in (-1, 2**31, 1.0, "40", None, True)),
    *(("repeat_last_n", value) for value in (-2, 2**31, 64.0, None, False)),
    *(("seed", value) for value in (-1, MAX_SEED + 1, 1.0, "1", True)),
]
REFUSED_OPTIONS: list[tuple[str, Any]] = [
    *(("model", value) for value in ("", 5)),
    *(
        ("device", value)
        for value in (
            "",
            "cuda:",
            "cuda:1000",
            "cuda:-1",
            "Reference",
            "reference:1",
            "host:",
            None,
        )
    ),
    *(
        ("expert_cache", value)
        for value in ("", "all", "-1", "101%", "3TiB", "1e3", "nan%", "12 GiB", None, 5)
    ),
    *(("vram_reserve_mib", value) for value in (-1, 2**31, 0.5, "64", True)),
    *(("vram_limit", value) for value in (-1, 0, (1 << 20) - 1, 2**63 + 1, 2.0**30, "12GiB", True)),
    *(
        (name, value)
        for name in (
            "deterministic",
            "vram_elastic",
            "overlap",
            "prefill_borrow",
            "cpu_pool",
            "pin",
        )
        for value in (0, 1, None, "yes")
    ),
    *(("kv_grow", value) for value in (0, 1, "yes")),
    *(("pcie_frac", value) for value in (-0.1, 1.1, math.nan, "0.5", "all", None, True)),
    *(("adapt", value) for value in ("", "on", "lru", None, True)),
    *(
        (name, value)
        for name in ("adapt_every", "adapt_swaps")
        for value in (-1, 2**31, 4.0, "4", True)
    ),
    *(("adapt_decay", value) for value in (-0.1, 1.1, math.nan, "0.7", True)),
    *(
        (name, value)
        for name in ("kv_grow_init", "kv_grow_step")
        for value in (0, -1, 2**31, 1.5, "64", True)
    ),
    *(
        (name, value)
        for name in (
            "expert_profile",
            "expert_profile_save",
            "routing_trace",
            "force_routes",
            "trace",
        )
        for value in ("", 5)
    ),
    *(("ctx_size", value) for value in (0, -1, 2**31, 1.5, "2048", True)),
    *(("threads", value) for value in (0, -1, 1025, 2.0, "4", True)),
    *(("prefill", value) for value in (0, -1, 65537, 1.0, "all", None, True)),
    *(
        (name, value)
        for name in ("cache_type_k", "cache_type_v")
        for value in ("", "q8_0", "F16", 16)
    ),
]


def test_the_sampling_defaults_are_those_of_llama_cpp() -> None:
    assert Sampling() == Sampling(
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        repeat_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repeat_last_n=64,
        seed=None,
    )


@pytest.mark.parametrize(
    ("flag", "options"),
    [("--no-cpu-pool", {"cpu_pool": False}), ("--deterministic", {"deterministic": True})],
)
def test_a_share_of_nothing_is_refused(flag: str, options: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match=f"--pcie-frac 0.5: {flag} leaves the CPU no experts"):
        Options(pcie_frac=0.5, **options)  # type: ignore[arg-type]
    assert Options(**options).pcie_frac == "auto"  # type: ignore[arg-type]


def test_options_leave_every_choice_to_the_engine() -> None:
    options = Options()
    assert {field.name: getattr(options, field.name) for field in fields(options)} == {
        "model": None,
        "device": "auto",
        "ctx_size": None,
        "threads": None,
        "prefill": "auto",
        "cache_type_k": None,
        "cache_type_v": None,
        "expert_cache": "auto",
        "vram_reserve_mib": None,
        "vram_limit": None,
        "vram_elastic": False,
        "kv_grow": None,
        "kv_grow_init": None,
        "kv_grow_step": None,
        "deterministic": False,
        "overlap": True,
        "prefill_borrow": True,
        "cpu_pool": True,
        "pin": True,
        "pcie_frac": "auto",
        "adapt": "insert",
        "adapt_every": None,
        "adapt_swaps": None,
        "adapt_decay": None,
        "expert_profile": None,
        "expert_profile_save": None,
        "routing_trace": None,
        "force_routes": None,
        "trace": None,
    }


def test_a_named_model_is_a_path_and_has_no_profile_but_a_given_one() -> None:
    options = Options("m.gguf")
    assert options.model == options.model_path() == Path("m.gguf")
    assert options.profile_path() is None
    assert replace(options, expert_profile="p").profile_path() == Path("p")
    assert replace(options, expert_profile="none").profile_path() is None
    assert replace(options, expert_profile="./none").profile_path() == Path("none")


@pytest.mark.parametrize(("name", "value"), REFUSED_SAMPLING)
def test_a_sampling_value_outside_its_range_is_refused_by_its_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{FLAGS[name]} {re.escape(str(value))}: ") as caught:
        Sampling(**{name: value})
    assert caught.value.hint.startswith(f"give {FLAGS[name]} ")
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(("name", "value"), REFUSED_OPTIONS)
def test_an_option_outside_its_range_is_refused_by_its_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{FLAGS[name]} {re.escape(str(value))}: ") as caught:
        Options(**{"model": "m.gguf", name: value})
    assert caught.value.hint.startswith(f"give {FLAGS[name]} ")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_p": 0, "min_p": 0, "top_k": 0, "repeat_last_n": 0, "seed": 0},
        {"temperature": 1e6, "top_p": 1, "min_p": 1.0, "top_k": 2**31 - 1, "repeat_last_n": -1},
        {"repeat_penalty": 1e-6, "presence_penalty": -1e6, "frequency_penalty": 1e6},
        {"seed": MAX_SEED},
    ],
)
def test_the_ends_of_the_sampling_ranges_are_usable(values: dict[str, Any]) -> None:
    sampling = Sampling(**values)
    assert {name: getattr(sampling, name) for name in values} == values


@pytest.mark.parametrize(
    "values",
    [
        {"device": "reference", "ctx_size": 1, "threads": 1, "prefill": 1},
        {"device": "auto", "ctx_size": 2**31 - 1, "threads": 1024, "prefill": 65536},
        {"cache_type_k": "f16", "cache_type_v": "int8"},
        {"cache_type_k": "f32", "cache_type_v": "f32", "prefill": "auto"},
        {"device": "host:16x64KiB@4KiB", "expert_cache": "0", "vram_reserve_mib": 0},
        {"expert_cache": "100%", "vram_reserve_mib": 2**31 - 1, "deterministic": True},
        {"overlap": False, "force_routes": "r.npy"},
        {"adapt": "swap", "adapt_every": 0, "adapt_swaps": 0, "adapt_decay": 0},
        {"adapt": "swap", "adapt_every": 2**31 - 1, "adapt_decay": 1.0},
        {"adapt": "off"},
        {"expert_cache": "0.5GiB", "routing_trace": "r.npy", "expert_profile": "p"},
    ],
)
def test_the_ends_of_the_option_ranges_are_usable(values: dict[str, Any]) -> None:
    options = Options("m.gguf", **values)
    assert {name: getattr(options, name) for name in values} == values


def test_every_field_is_covered_by_these_tests() -> None:
    refused = {name for name, _ in REFUSED_SAMPLING} | {name for name, _ in REFUSED_OPTIONS}
    names = {field.name for kind in (Options, Sampling) for field in fields(kind)}
    assert names == refused == set(FLAGS)


def test_a_refusal_lists_the_values_that_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        Options("m.gguf", device="tpu")
    assert caught.value.hint == (
        "give --device one of: auto, cuda, cuda:1, host, host:1x512MiB, reference"
    )
    with pytest.raises(ConfigError) as caught:
        Options("m.gguf", cache_type_k="q4")
    assert caught.value.hint == "give --cache-type-k one of: f32, f16, int8"


def test_a_changed_copy_is_checked_and_the_original_cannot_change() -> None:
    sampling = Sampling()
    with pytest.raises(ConfigError, match="--top-p 2"):
        replace(sampling, top_p=2)
    with pytest.raises(FrozenInstanceError):
        sampling.top_p = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("values", [{"adapt_every": 4}, {"adapt_swaps": 0}, {"adapt_decay": 0.7}])
@pytest.mark.parametrize("adapt", ["insert", "off"])
def test_what_is_said_of_swaps_is_refused_where_nothing_swaps(
    values: dict[str, Any], adapt: str
) -> None:
    (name,) = values
    with pytest.raises(
        ConfigError, match=rf"^{FLAGS[name]} .*: --adapt {adapt} does not swap"
    ) as e:
        Options("m.gguf", adapt=adapt, **values)
    assert e.value.hint == "give --adapt swap"
