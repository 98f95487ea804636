"""The model that comes with the package: what it is, that it writes, what its profile does."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from console import Console

from strata_nb import Engine, Options, Sampling, story_model
from strata_nb.cache.profile import load_profile
from strata_nb.gguf import GGUFFile
from strata_nb.models import describe

GREEDY = Sampling(temperature=0)
# What the kernels of the host compute, stored when the model was made.
FIRST_GREEDY = [
    *(12, 339, 284, 259, 1148, 741, 344, 801, 390, 366, 302, 259, 483, 951, 14, 801),
    *(364, 259, 904, 995, 1078, 14, 447, 440, 290, 2866, 298, 2622, 964, 262, 510, 14),
]
FIRST_OF_SEED_1 = [
    *(12, 339, 284, 259, 1117, 741, 344, 825, 390, 366, 628, 259, 686, 1048, 14, 825),
    *(440, 259, 510, 302, 262, 455, 3683, 619, 12, 355, 259, 647, 495, 14, 447, 527),
]
OPENINGS = ("Once upon a time", "One day, a little girl", "The dog was")


@pytest.fixture(scope="module")
def story() -> str:
    """What the model writes after its usual opening, to its end."""
    with Engine.open() as engine:
        tokens = engine.generate(engine.encode_prompt(story_model.OPENING), sampling=GREEDY)
        return "".join(token.text for token in tokens)


def test_the_model_is_small_a_mixture_and_cannot_chat() -> None:
    path = story_model.model_path()
    assert path.stat().st_size <= 25_000_000
    with GGUFFile.open(path) as file:
        model = describe(file)
        assert "tokenizer.chat_template" not in file.metadata
    assert (model.architecture, model.layers, model.experts, model.top_k) == ("qwen3moe", 8, 32, 4)
    assert 15e6 < model.parameters < 25e6
    assert model.context >= 512


def test_a_story_is_made_of_words_and_comes_to_an_end(story: str) -> None:
    words = re.findall(r"[a-z']+", story.lower())
    assert len(words) > 40
    assert {"the", "and", "was", "to"} <= set(words)
    assert len(set(words)) > 0.3 * len(words)  # it does not go round in circles
    assert story.isprintable() or set(re.findall(r"[^ -~]", story)) <= set("\n“”‘’—")
    assert story.rstrip()[-1] in '.!?"”'


def test_a_story_ends_by_the_models_own_choice() -> None:
    with Engine.open() as engine:
        for seed, opening in enumerate(OPENINGS):
            ids = engine.encode_prompt(opening)
            generation = engine.generate(ids, sampling=Sampling(seed=seed))
            for _ in generation:
                pass
            assert generation.finish == "end"


def test_the_text_of_the_opening_is_likely() -> None:
    with Engine.open() as engine:
        ids = engine.encode_prompt(
            "Once upon a time, there was a little girl named Lily who lived in a small village."
        )
        logits = engine.logits(ids)[:-1].astype(np.float64)
        largest = logits.max(axis=1, keepdims=True)
        logs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
        mean = -logs[np.arange(len(ids) - 1), ids[1:]].mean()
    assert mean < 1.5  # nats a token; a uniform guess over the vocabulary is 8.7


def test_the_host_agrees_with_the_judge() -> None:
    with Engine.open(Options(device="reference")) as judge, Engine.open() as host:
        ids = judge.encode_prompt("Once upon a time there was a dog. He liked to run and")
        expected, found = judge.logits(ids), host.logits(ids)
    error = np.sqrt(((found - expected) ** 2).mean()) / expected.std()
    assert error < 0.1
    sure = np.sort(expected, axis=1)[:, -1] - np.sort(expected, axis=1)[:, -2] > 0.5
    assert sure.any()
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[sure].all()


def test_the_profile_ranks_every_expert_of_the_model() -> None:
    with GGUFFile.open(story_model.model_path()) as file:
        model = describe(file)
    profile = load_profile(story_model.profile_path(), model.layers, model.experts)
    assert len(profile.order()) == model.layers * model.experts


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (GREEDY, FIRST_GREEDY),
        (Sampling(seed=1), FIRST_OF_SEED_1),
    ],
)
def test_the_first_tokens_are_those_that_were_stored(
    sampling: Sampling, expected: list[int]
) -> None:
    """Every path of the processor gives these, and so does a device with slots for a quarter."""
    quarter = Options(device="host:1x32MiB", expert_cache="25%")
    for options in (Options(), quarter):
        with Engine.open(options) as engine:
            ids = engine.encode_prompt(story_model.OPENING)
            found = [token.id for token in engine.generate(ids, max_tokens=32, sampling=sampling)]
        assert found == expected


def test_the_profile_says_which_experts_are_in_slots_at_the_start() -> None:
    options = Options(device="host:1x32MiB", expert_cache="25%")
    with Engine.open(options) as engine:
        report = engine.describe()
    assert report.slots == report.resident == 64
    with Engine.open(replace(options, expert_profile="none")) as engine:
        without = engine.describe()
    assert (without.slots, without.resident) == (64, 0)


def test_the_command_alone_prints_a_story(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, story: str
) -> None:
    status, out, err = Console(capsys, monkeypatch)("generate", "--temp", "0")
    assert status == 0
    assert out == f"{story_model.OPENING}{story}".rstrip("\n") + "\n"
    assert "stories: " in err
