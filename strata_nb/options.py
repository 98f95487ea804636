"""What a caller may choose: one field per long flag of the command line, checked when it is made.

`Options` says which model runs where and with how much memory; `Sampling` says how the next token
is chosen. Both are frozen: a changed copy comes from `dataclasses.replace`. Values that cannot be
used are refused here, so that the command line and the Python API give the same message.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from strata_nb import story_model
from strata_nb.errors import ConfigError

REFERENCE = "reference"
ADAPTATIONS = ("insert", "swap", "off")
NO_PROFILE = "none"  # in place of a file
_EXPERT_CACHE = re.compile(r"(\d{1,12})|(\d{1,9}(?:\.\d{1,9})?)(%|MiB|GiB)", re.ASCII)
DEFAULT_CONTEXT_LIMIT = 8192  # cells, where neither the user nor the model asks for less
DEFAULT_PREFILL_ROWS = 512  # rows of a prompt batch under `--prefill auto`; a card has more
MAX_SEED = 2**64 - 1


def _refuse(flag: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{flag} {value}: not usable", hint=f"give {flag} {wanted}")


def _check_integer(flag: str, value: object, low: int, high: int, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(flag, value, wanted)


def _check_real(flag: str, value: object, low: float, high: float, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _refuse(flag, value, wanted)  # a NaN is in no range


def _check_cache_type(flag: str, value: str | None) -> None:
    from strata_nb.formats import CACHE_TYPES  # numpy comes with it, and `--help` must not wait

    if value is not None and value not in CACHE_TYPES:
        raise _refuse(flag, value, "one of: " + ", ".join(CACHE_TYPES))


def expert_cache_size(text: str) -> tuple[float, str] | None:
    """Return what `--expert-cache TEXT` asks for: a number and its unit ("", "%", "MiB" or "GiB").

    None for auto. ConfigError for another text, or a share of more than 100%.
    """
    if text == "auto":
        return None
    match = _EXPERT_CACHE.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match[3] == "%" and float(match[2]) > 100):
        wanted = "auto, a number of slots, N% of all experts, NMiB or NGiB"
        raise _refuse("--expert-cache", text, wanted)
    return (float(match[1]), "") if match[1] else (float(match[2]), match[3])


def check_swaps(every: int | None, swaps: int | None, decay: float | None) -> None:
    """Refuse what `--adapt-every`, `--adapt-swaps` and `--adapt-decay` cannot be; None is right."""
    for flag, value in (("--adapt-every", every), ("--adapt-swaps", swaps)):
        if value is not None:
            _check_integer(flag, value, 0, 2**31 - 1, "a whole number, 0 or more")
    if decay is not None:
        _check_real("--adapt-decay", decay, 0.0, 1.0, "a number from 0 to 1")


def _check_path(flag: str, value: object) -> None:
    if value is not None and (not isinstance(value, (str, os.PathLike)) or not os.fspath(value)):
        raise _refuse(flag, value, "the path of a file")


def _check_device(device: object) -> None:
    from strata_nb.host import parse_host_devices  # not needed for `--help`

    known = ("auto", REFERENCE, "host", "cuda")
    if not isinstance(device, str) or device.split(":")[0] not in known:
        hint = "one of: auto, cuda, cuda:1, host, host:1x512MiB, " + REFERENCE
        raise _refuse("--device", device, hint)
    if device.startswith("host"):
        parse_host_devices(device)
    elif device.startswith("cuda"):
        if not re.fullmatch(r"cuda(:[0-9]{1,3})?", device):
            raise _refuse("--device", device, "cuda, or cuda:1 for the second card")
    elif ":" in device:
        raise _refuse("--device", device, device.split(":")[0])


@dataclass(frozen=True, slots=True)
class Options:
    """Choose the model, the device and the sizes.

    model           path of a GGUF file (of a split one, any shard); None: the small story model
                    that comes with the package
    device          "auto": the first NVIDIA card that can be used, or else the host; "host": this
                    machine, the experts read where they are; "host:1x512MiB": a small device made
                    of its memory, with slots for experts; "cuda", "cuda:1": the first or second
                    NVIDIA card; "reference": the float32 judge
    ctx_size        cells of the K/V cache; None: the model's context, at most 8,192
    threads         that load, and that compute where the host does; None: physical cores within
                    affinity and quota. Of the CPU pool the most; None: one a core, and a
                    processor left to the caller
    prefill         rows of a prompt batch, or "auto" (`Backend.usual_rows`); a card reads 4,096 at
                    most
    cache_type_k/v  how keys and values are stored, a name of `formats.CACHE_TYPES`: "f32", "f16",
                    "int8" (a scale per 64 values); None: the device's own choice (reference: f32,
                    others: f16)
    expert_cache    of a device with slots: "auto" (as many as there is room for), or a number of
                    slots, "N%" of all experts, "NMiB" or "NGiB"
    vram_reserve_mib   MiB of the device that stay free for other programs; None: none, or 700 of a
                    card
    vram_limit      bytes that a device with slots counts as having, of which contexts and other
                    programs use what they use; None: all that it has
    vram_elastic    whether `Engine.set_vram_reserve` may change that while the model is open
    kv_grow         whether the K/V begins small and grows as text needs it; None: on a device of
                    its own memory, where experts use the rest meanwhile
    kv_grow_init    cells that it begins with; None: a quarter of the context, 512 to 16,384
    kv_grow_step    cells that it grows by; None: an eighth of the context, 64 to 8,192
    deterministic   a row's bits depend on its own tokens alone: not on how a prompt is cut, on the
                    number of threads, or on which experts are resident. The host always does so,
                    and so do cards, where that is asked for
    overlap         whether a card begins a kernel while the one in front of it ends, if it can; the
                    bits are the same
    prefill_borrow  whether a prompt on a card borrows memory for the experts that it misses: what
                    nobody uses, or slots; else it has buffers of its own
    adapt           how the experts in slots follow the text: "insert" (a miss comes when it is more
                    likely to be used than who leaves), "swap" (the most used exchange with the
                    least used at times), "off" (who came first stays)
    adapt_every, adapt_swaps, adapt_decay   of "swap" only: windows between two rounds (0: never),
                    exchanges of a round, what a round leaves of each count; None: 4, 96 and 0.7
    cpu_pool        whether the CPU computes some of the experts that a card misses; never where
                    `deterministic` is true, for the order of sums depends on who did
    pin             whether host memory is registered with a card, which then reads the experts that
                    have no slot; else the CPU computes all of those, and what is copied to slots
                    goes through a small staging
    pcie_frac       share of the missed that a card reads over its link, 0 to 1; "auto": as many as
                    lets both end at the same time, by what is measured
    expert_profile, expert_profile_save   files that rank experts by use: read to fill slots at the
                    start, and written at the end. No profile is read for None, but of the story
                    model its own; "none" reads none of any model
    routing_trace   file that gets the experts of every token
    force_routes    such a file: token t of a text uses the experts of line t, or of t modulo their
                    number, with the shares that the router gives them. For those who measure
    trace           file that gets every driver operation and what the ledger did (docs/trace.md),
                    of a device with memory of its own
    """

    model: str | os.PathLike[str] | None = None
    device: str = "auto"
    ctx_size: int | None = None
    threads: int | None = None
    prefill: int | str = "auto"
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    expert_cache: str = "auto"
    vram_reserve_mib: int | None = None
    vram_limit: int | None = None
    vram_elastic: bool = False
    kv_grow: bool | None = None
    kv_grow_init: int | None = None
    kv_grow_step: int | None = None
    deterministic: bool = False
    overlap: bool = True
    prefill_borrow: bool = True
    adapt: str = "insert"
    adapt_every: int | None = None
    adapt_swaps: int | None = None
    adapt_decay: float | None = None
    cpu_pool: bool = True
    pin: bool = True
    pcie_frac: float | str = "auto"
    expert_profile: str | os.PathLike[str] | None = None
    expert_profile_save: str | os.PathLike[str] | None = None
    routing_trace: str | os.PathLike[str] | None = None
    force_routes: str | os.PathLike[str] | None = None
    trace: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            _check_path("--model", self.model)
            object.__setattr__(self, "model", Path(self.model))
        _check_device(self.device)
        if self.ctx_size is not None:
            _check_integer(
                "--ctx-size", self.ctx_size, 1, 2**31 - 1, "a number of cells, 1 or more"
            )
        if self.threads is not None:
            _check_integer("--threads", self.threads, 1, 1024, "a number from 1 to 1024")
        if self.prefill != "auto":
            _check_integer(
                "--prefill", self.prefill, 1, 65536, "a number of rows up to 65536, or auto"
            )
        if self.vram_reserve_mib is not None:
            _check_integer(
                "--vram-reserve-mib",
                self.vram_reserve_mib,
                0,
                2**31 - 1,
                "a number of MiB, 0 or more",
            )
        if self.vram_limit is not None:
            _check_integer("--vram-limit", self.vram_limit, 1 << 20, 2**63, "a size, 12GiB say")
        expert_cache_size(self.expert_cache)
        for flag, cells in (
            ("--kv-grow-init", self.kv_grow_init),
            ("--kv-grow-step", self.kv_grow_step),
        ):
            if cells is not None:
                _check_integer(flag, cells, 1, 2**31 - 1, "a number of cells, 1 or more")
        if self.kv_grow is not None and not isinstance(self.kv_grow, bool):
            raise _refuse("--kv-grow", self.kv_grow, "as True, False or None")
        for flag, value in (
            ("--deterministic", self.deterministic),
            ("--vram-elastic", self.vram_elastic),
            ("--no-overlap", self.overlap),
            ("--no-prefill-borrow", self.prefill_borrow),
            ("--no-cpu-pool", self.cpu_pool),
            ("--no-pin", self.pin),
        ):
            if not isinstance(value, bool):
                raise _refuse(flag, value, "as True or False")
        if self.pcie_frac != "auto":
            _check_real("--pcie-frac", self.pcie_frac, 0.0, 1.0, "a number from 0 to 1, or auto")
            if self.pcie_frac != 1 and (self.deterministic or not self.cpu_pool):
                other = "--deterministic" if self.deterministic else "--no-cpu-pool"
                raise ConfigError(
                    f"--pcie-frac {self.pcie_frac}: {other} leaves the CPU no experts to share",
                    hint="leave one of them out",
                )
        if not self.pin:
            self._check_unpinned()
        self._check_adapt()
        _check_path("--expert-profile", self.expert_profile)
        _check_path("--expert-profile-save", self.expert_profile_save)
        _check_path("--routing-trace", self.routing_trace)
        _check_path("--force-routes", self.force_routes)
        _check_path("--trace", self.trace)
        _check_cache_type("--cache-type-k", self.cache_type_k)
        _check_cache_type("--cache-type-v", self.cache_type_v)

    def _check_unpinned(self) -> None:
        """Refuse what leaves experts without a slot to a card that cannot read them."""
        others = {
            "--deterministic": self.deterministic,
            "--no-cpu-pool": not self.cpu_pool,
            f"--pcie-frac {self.pcie_frac}": self.pcie_frac not in ("auto", 0),
        }
        for flag, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"--no-pin: the CPU computes all experts without a slot; {flag} forbids it",
                    hint="leave one of them out",
                )

    def _check_adapt(self) -> None:
        if self.adapt not in ADAPTATIONS:
            raise _refuse("--adapt", self.adapt, "one of: " + ", ".join(ADAPTATIONS))
        check_swaps(self.adapt_every, self.adapt_swaps, self.adapt_decay)
        swaps = {
            "--adapt-every": self.adapt_every,
            "--adapt-swaps": self.adapt_swaps,
            "--adapt-decay": self.adapt_decay,
        }
        for flag, value in swaps.items():
            if value is not None and self.adapt != "swap":
                raise ConfigError(
                    f"{flag} {value}: --adapt {self.adapt} does not swap", hint="give --adapt swap"
                )

    def model_path(self) -> Path:
        """Return the file of the model; ConfigError where the story model is not there."""
        return story_model.model_path() if self.model is None else Path(self.model)

    def profile_path(self) -> Path | None:
        """Return the profile to read, None for none; of the reference device only a given one.

        ConfigError where the story model's own is missing.
        """
        if self.expert_profile is not None:
            given = os.fspath(self.expert_profile)
            return None if given == NO_PROFILE else Path(given)
        if self.model is not None or self.device == REFERENCE:
            return None
        return story_model.profile_path()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choose how the next token is drawn; the defaults are llama.cpp's.

    temperature        0 takes the most likely token
    top_k              keep the k most likely tokens; 0 keeps all
    top_p              keep the smallest set whose probability reaches p; 1 keeps all
    min_p              drop tokens less likely than p times the most likely one; 0 drops none
    repeat_penalty     divide positive and multiply negative logits of recent tokens; 1 is off
    presence_penalty   subtract once from the logit of every recent token; 0 is off
    frequency_penalty  subtract once per occurrence; 0 is off
    repeat_last_n      how many tokens count as recent: 0 none, -1 all
    seed               of the random numbers; None draws one from the operating system
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_real("--temp", self.temperature, 0.0, 1e6, "a finite number, 0 or more")
        _check_integer("--top-k", self.top_k, 0, 2**31 - 1, "0 (all tokens) or more")
        _check_real("--top-p", self.top_p, 0.0, 1.0, "a number from 0 to 1")
        _check_real("--min-p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _check_real("--repeat-penalty", self.repeat_penalty, 1e-6, 1e6, "a positive number")
        _check_real("--presence-penalty", self.presence_penalty, -1e6, 1e6, "a finite number")
        _check_real("--frequency-penalty", self.frequency_penalty, -1e6, 1e6, "a finite number")
        _check_integer("--repeat-last-n", self.repeat_last_n, -1, 2**31 - 1, "-1 (all) or more")
        if self.seed is not None:
            _check_integer("--seed", self.seed, 0, MAX_SEED, f"a number from 0 to {MAX_SEED}")
