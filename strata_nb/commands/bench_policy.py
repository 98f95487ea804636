"""`strata_nb bench policy`: replay recorded routes against policies, and print a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from strata_nb.cache import policy
from strata_nb.cache.profile import Profile, load_profile, rank_by_use
from strata_nb.cache.replay import Outcome, Routes, optimum, replay
from strata_nb.cache.routing import count_use, load_trace
from strata_nb.commands.arguments import Arguments
from strata_nb.errors import ConfigError
from strata_nb.models.description import bytes_text
from strata_nb.options import check_swaps

Read = TypeVar("Read")

BUDGETS = "10,25,50"
OPTIMUM = "optimum"


class Case(NamedTuple):
    """Routes that are replayed, and the profile that slots are filled from before."""

    name: str
    routes: Routes
    experts: int
    profile: Profile
    learned_from: str


class Line(NamedTuple):
    """What a policy did with a budget, in percent of all experts."""

    budget: float
    slots: int
    policy: str
    outcome: Outcome


def run(arguments: Arguments) -> int:
    """Run the command; returns 0."""
    budgets = _budgets(arguments.text("--budgets"))
    slot_bytes = arguments.size_bytes("--slot-bytes")
    makers = policies(arguments)
    worst: list[tuple[float, str]] = []
    for number, path in enumerate(arguments.paths("TRACE")):
        case = _case(path, arguments)
        if number:
            print()
        print(_title(case))
        print(f"{'slots':>14}  policy    hits  to optimum  {'over the link':>15}  {'to slots':>12}")
        for budget in budgets:
            lines = list(measure(case, budget, makers))
            for line in lines:
                print(_text(line, lines[-1].outcome, slot_bytes))
            worst.append((_lead(lines), f"{path} at {budget:g}%"))
    lead, where = min(worst)
    print(f"\ninsert against the better of static and lru: {lead:+.2f} points at worst ({where})")
    return 0


def policies(arguments: Arguments) -> dict[str, policy.Maker]:
    """Return the policies by name, in the order of the table; the swaps are as the flags say."""
    every = arguments.integer("--adapt-every")
    swaps = arguments.integer("--adapt-swaps")
    decay = arguments.real("--adapt-decay")
    check_swaps(every, swaps, decay)
    return {
        "static": policy.static,
        "lru": lambda ranks: policy.LeastRecent(*ranks.shape),
        "lfu": lambda ranks: policy.LeastUsed(*ranks.shape),
        "swap": policy.swaps(every, swaps, decay),
        "insert": policy.Insertion,
    }


def measure(case: Case, budget: float, makers: dict[str, policy.Maker]) -> Iterator[Line]:
    """Replay a trace with a budget against each policy, the optimum last."""
    slots = int(case.profile.layers * case.experts * budget / 100)
    ranks = case.profile.ranks()
    for name, make in makers.items():
        outcome = replay(case.routes, case.experts, make(ranks), slots, case.profile.order())
        yield Line(budget, slots, name, outcome)
    yield Line(budget, slots, OPTIMUM, optimum(case.routes, case.experts, slots))


def _lead(lines: list[Line]) -> float:
    """Return the lead of our policy over the better of those that anybody would take, in points."""
    rates = {line.policy: 100 * line.outcome.hit_rate for line in lines}
    return rates["insert"] - max(rates["static"], rates["lru"])


def _text(line: Line, best: Outcome, slot_bytes: int | None) -> str:
    def size(experts: float) -> str:
        return f"{experts:.2f}" if slot_bytes is None else bytes_text(round(experts * slot_bytes))

    outcome = line.outcome
    gap = f"{100 * (outcome.hit_rate - best.hit_rate):+.1f}" if line.policy != OPTIMUM else ""
    return (
        f"{line.budget:5g}% {line.slots:7,}  {line.policy:7} {outcome.hit_rate:6.1%}  {gap:>10}  "
        f"{size(outcome.moved_a_token):>15}  {size(outcome.written_a_token):>12}"
    )


def _title(case: Case) -> str:
    tokens, layers, top_k = case.routes.shape
    return (
        f"{case.name}: {tokens:,} tokens of {layers} layers, {top_k} of {case.experts} experts; "
        f"profile of {case.learned_from}; what is moved is a token's"
    )


def _read(load: Callable[[], Read], path: str) -> Read:
    try:
        return load()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", hint="check the name and the permissions"
        ) from None


def _case(path: str, arguments: Arguments) -> Case:
    routes = _read(lambda: load_trace(path), path)
    learn, given = arguments.path("--learn"), arguments.path("--expert-profile")
    if learn is not None and given is not None:
        raise ConfigError("--learn and --expert-profile: both given", hint="give one of them")
    learned = _read(lambda: load_trace(str(learn)), str(learn)) if learn is not None else None
    if learned is not None and learned.shape[1:] != routes.shape[1:]:
        raise ConfigError(
            f"--learn {learn}: (layers, top-k) {learned.shape[1:]}, of {path} {routes.shape[1:]}",
            hint="give a trace of the same model",
        )
    experts = _experts(path, routes, learned, arguments.integer("--experts"))
    layers = routes.shape[1]
    if given is not None:
        profile = _read(lambda: load_profile(str(given), layers, experts), given)
        return Case(path, routes, experts, profile, given)
    if learned is not None:
        return Case(path, routes, experts, rank_by_use(count_use(learned, experts)), str(learn))
    half = len(routes) // 2
    if not half:
        raise ConfigError(f"{path}: one token, too few to learn from", hint="give --learn FILE")
    profile = rank_by_use(count_use(routes[:half], experts))
    return Case(path, routes[half:], experts, profile, f"the {half:,} tokens before")


def _experts(path: str, routes: Routes, learned: Routes | None, given: int | None) -> int:
    """Return how many experts a layer has."""
    named = 1 + max(int(some.max()) for some in (routes, learned) if some is not None)
    if given is not None and not named <= given <= np.iinfo(np.int16).max + 1:
        raise ConfigError(
            f"--experts {given}: {path} names {named}", hint=f"give {named} or more, up to 32768"
        )
    return named if given is None else given


def _budgets(given: str | None) -> list[float]:
    text = BUDGETS if given is None else given
    parts = text.split(",")
    number = r"[0-9]{1,3}(\.[0-9]{1,6})?"
    if not all(re.fullmatch(number, part) and float(part) <= 100 for part in parts):
        raise ConfigError(
            f"--budgets {text}: not shares of all experts in percent",
            hint="give --budgets 10,25,50",
        )
    return [float(part) for part in parts]
