"""How policies do on the story model: on stories, on text it was not trained on, and on both."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_nb import Engine, Options, Sampling, story_model
from strata_nb.cache.policy import Insertion, LeastRecent, Static
from strata_nb.cache.profile import Profile, load_profile, rank_by_use
from strata_nb.cache.replay import Routes, optimum, replay
from strata_nb.cache.routing import count_use, load_trace

LAYERS, EXPERTS = 8, 32
DOCUMENT = Path(__file__).parent / "data" / "document.txt"
TOKENS = 1024
TURN = 128  # tokens


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Routes]:
    """Routes of twice as many tokens as are replayed: profiles are learned from the first half."""
    path = tmp_path_factory.mktemp("routes") / "routes.npy"
    with Engine.open(Options(threads=1, routing_trace=path)) as engine:
        stories = written(engine, 2 * TOKENS)
        document = engine.encode(DOCUMENT.read_text())
        turns = [
            token
            for at in range(0, TOKENS, TURN)
            for part in (stories, document)
            for token in part[at : at + TURN]
        ]
        before = engine._device()._given.trace.tokens
        texts = {"stories": stories, "a document": document, "turns": turns}
        for text in texts.values():
            for at in range(0, 2 * TOKENS, 512):
                engine.logits(text[at : at + 512])
        engine.save_routing_trace(path)
    routes = load_trace(path)[before:]
    assert len(routes) == 3 * 2 * TOKENS
    return {name: routes[2 * TOKENS * n :][: 2 * TOKENS] for n, name in enumerate(texts)}


def written(engine: Engine, tokens: int) -> list[int]:
    """Return stories of so many tokens or more."""
    found: list[int] = []
    opening, seed = engine.encode_prompt(story_model.OPENING), 0
    while len(found) < tokens:
        stories = engine.generate(opening, sampling=Sampling(seed=seed))
        found += [*opening, *(token.id for token in stories)]
        seed += 1
    return found


@pytest.mark.parametrize("percent", [10, 25, 50])
@pytest.mark.parametrize("text", ["stories", "a document", "turns"])
def test_ours_is_no_worse_than_lru_and_than_profiles(
    traces: dict[str, Routes], text: str, percent: int
) -> None:
    """Half a point of hits is allowed; profiles are the model's own, and of an earlier part."""
    slots = LAYERS * EXPERTS * percent // 100
    learned, rest = traces[text][:TOKENS], traces[text][TOKENS:]
    own = load_profile(story_model.profile_path(), LAYERS, EXPERTS)
    best = optimum(rest, EXPERTS, slots)
    for profile in (own, rank_by_use(count_use(learned, EXPERTS))):
        ours, lru, static = hit_rates(rest, profile, slots)
        assert max(lru, static) - 0.005 <= ours <= best.hit_rate
        assert best.hit_rate - ours < 0.3  # no policy sees the future


def hit_rates(routes: Routes, profile: Profile, slots: int) -> list[float]:
    policies = (Insertion(profile.ranks()), LeastRecent(LAYERS, EXPERTS), Static(LAYERS, EXPERTS))
    return [replay(routes, EXPERTS, one, slots, profile.order()).hit_rate for one in policies]
