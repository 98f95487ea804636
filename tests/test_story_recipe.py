"""The recipe of the story model: plots are sound, draws repeat, files that are exported load."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

RECIPE = Path(__file__).parents[1] / "tools" / "stories"
sys.path.append(str(RECIPE))

import corpus  # noqa: E402 - a folder of programs, no package
import export  # noqa: E402
import vocabulary  # noqa: E402
from plots import Plot, draw_draft, faults_of, fill, read_plots  # noqa: E402

from strata_nb import Engine, Options, story_model  # noqa: E402
from strata_nb.gguf import GGUFFile  # noqa: E402
from strata_nb.tokenizer import Tokenizer  # noqa: E402

SOUND = Plot(
    name="a_lost_ball",
    heroes=("boy",),
    helpers=("owl",),
    places=("in a small town",),
    beats=(
        ("{name} wanted to find {thing}.", "{He} looked for {thing}.", "And where was {thing}?"),
    )
    * 5,
    words={"thing": (("a red ball",), ("a blue hat",))},
)


@pytest.fixture(scope="module")
def plots() -> list[Plot]:
    return read_plots(list((RECIPE / "plots").glob("*.toml")))


def test_all_plots_are_sound(plots: list[Plot]) -> None:
    assert len(plots) == 271


def test_a_sound_plot_has_no_faults() -> None:
    assert list(faults_of(SOUND)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{name} saw {nobody} in the town.", "unknown ['nobody']"),
        ("{name} saw nobody in the town", "no whole sentences"),
        (" {name} saw nobody in the town.", "no whole sentences"),
        ('"Nobody is in the town, said {name}.', "quotes"),
        ("{name} saw nobody.", "length (3 words)"),
        ("{name} sat down in the café.", "signs"),
    ],
)
def test_a_wording_that_cannot_be_used_is_named(text: str, fault: str) -> None:
    beats = ((text, *SOUND.beats[0][1:]), *SOUND.beats[1:])
    plot = Plot("p", SOUND.heroes, SOUND.helpers, SOUND.places, beats, SOUND.words)
    (found,) = faults_of(plot)
    assert fault in found


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"beats": SOUND.beats[:4]}, "4 beats, needs 5 to 9"),
        ({"beats": (SOUND.beats[0][:2], *SOUND.beats[1:])}, "beat 0: 2 wordings, needs 3"),
        ({"heroes": ("little boy",)}, "the adjective may be drawn again"),
        ({"words": {"thing": (("a", "b"), ("c",))}}, "choices of different lengths"),
        ({"words": {**SOUND.words, "place": (("x",),)}}, "a word that the program fills in"),
        ({"helpers": ()}, "unknown ['friend']"),
    ],
)
def test_a_plot_that_cannot_be_used_is_named(changes: dict[str, object], fault: str) -> None:
    fields = {
        "name": "p",
        "heroes": SOUND.heroes,
        "helpers": SOUND.helpers,
        "places": SOUND.places,
        "beats": (("{name} met {friend} there.",) * 3, *SOUND.beats[1:]),
        "words": SOUND.words,
    }
    found = list(faults_of(Plot(**{**fields, **changes})))  # type: ignore[arg-type]
    assert any(fault in each for each in found)


def test_an_article_fits_the_word_behind_it() -> None:
    words = {"x": "owl", "y": "fox"}
    assert fill("A {x} and a {y} saw Anna {x}.", words) == "An owl and a fox saw Anna owl."


def test_the_same_seed_draws_the_same_stories(plots: list[Plot]) -> None:
    rng = random.Random(7)
    texts = [" ".join(draw_draft(rng, plot).sentences()) for plot in plots]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert digest.startswith("d15b3647da6e629c")


def test_what_the_draws_hold_is_the_logarithm_of_how_many_there_are() -> None:
    draft = draw_draft(random.Random(1), SOUND)
    # Two things and three wordings of five beats at least, and names and openings beside them.
    assert draft.nats > np.log(2 * 3**5)
    assert draft.nats < 25


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus and its vocabulary."""
    folder = tmp_path_factory.mktemp("stories")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["corpus.py", "--stories=3000", str(folder / "corpus")])
        corpus.main()
        words = ["vocabulary.py", "--size=2000", str(folder / "corpus"), str(folder / "ids")]
        patch.setattr(sys, "argv", words)
        vocabulary.main()
    return folder


def stories_of(made: Path, name: str) -> list[str]:
    return (made / "corpus" / f"{name}.txt").read_text().splitlines()


def test_no_story_is_held_out_and_trained_on(made: Path) -> None:
    train, held_out = stories_of(made, "train"), stories_of(made, "held_out")
    assert (len(train), len(held_out)) == (2940, 60)
    assert len({*train, *held_out}) == 3000


def test_plots_that_are_held_out_are_not_trained_on(made: Path, plots: list[Plot]) -> None:
    names = json.loads((made / "corpus" / "corpus.json").read_text())["new_plots"]
    assert names["stories"] == len(stories_of(made, "new_plots"))
    train = " ".join(stories_of(made, "train"))
    # The longest run of plain words of a wording says whose it is.
    for story in stories_of(made, "new_plots")[:50]:
        sentences = story.split(". ")
        assert not all(sentence in train for sentence in sentences[2:6])


def test_the_ids_are_those_of_our_tokenizer(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, made, experts=2)
    ids = np.load(made / "ids" / "held_out.npy").astype(int).tolist()
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    first = stories_of(made, "held_out")[0]
    assert [*tokenizer.encode(first), 0] == ids[: ids.index(0) + 1]


@pytest.mark.parametrize(("experts", "architecture"), [(2, "qwen3moe"), (1, "qwen3")])
def test_an_exported_file_runs(made: Path, tmp_path: Path, experts: int, architecture: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny(path, made, experts)
    with Engine.open(Options(path, device="reference")) as engine:
        assert engine.description.architecture == architecture
        logits = engine.logits(engine.encode("Once upon a time"))
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def write_tiny(path: Path, made: Path, experts: int) -> None:
    """Export random weights of a small network."""
    words = json.loads((made / "ids" / "vocabulary.json").read_text())
    shape = {
        "vocab": len(words["tokens"]),
        "layers": 1,
        "width": 64,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "experts": experts,
        "top_k": 1,
        "inner": 32,
        "context": 64,
        "rope_base": 10000.0,
        "eps": 1e-6,
    }
    rng = np.random.default_rng(1)

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(np.float32)

    weights = {
        "token_embd": normal(shape["vocab"], 64),
        "output_norm": normal(64),
        "blk.0.attn_norm": normal(64),
        "blk.0.attn_q": normal(64, 64),
        "blk.0.attn_k": normal(32, 64),
        "blk.0.attn_v": normal(32, 64),
        "blk.0.attn_q_norm": normal(32),
        "blk.0.attn_k_norm": normal(32),
        "blk.0.attn_output": normal(64, 64),
        "blk.0.ffn_norm": normal(64),
        "blk.0.ffn_gate_inp": normal(experts, 64),
        "blk.0.ffn_gate_exps": normal(experts, 32, 64),
        "blk.0.ffn_up_exps": normal(experts, 32, 64),
        "blk.0.ffn_down_exps": normal(experts, 64, 32),
    }
    export.write(path, shape, weights, words, "Q8_0", "tiny")


def test_the_model_of_the_package_says_what_it_is() -> None:
    with GGUFFile.open(story_model.model_path()) as file:
        assert file.metadata["general.license"] == "mit"
        assert "tools/stories" in file.metadata["general.description"]
