"""Commands and options that name no model: a small one comes with the package.

Here a tiny random one takes its place; the real one is in `test_story_model.py`.
"""

from __future__ import annotations

import configparser
import json
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from console import Console
from model_shapes import LOGITS_SHAPES

from strata_nb import Engine, Options, story_model
from strata_nb.cache.profile import load_profile, rank_by_use, save_profile
from strata_nb.errors import ConfigError, FileFormatError

SHAPE = LOGITS_SHAPES["qwen3moe"]
SLOTS = ["--device", "host:1x8MiB", "--expert-cache", "4", "-c", "128"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model of the package would be; nothing is there yet."""
    monkeypatch.setattr(story_model, "_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def stories(folder: Path, model: str) -> Path:
    """Put the tiny model and a profile that ranks its experts from the last one on there."""
    (folder / "stories.gguf").symlink_to(model)
    use = np.arange(SHAPE.layers * SHAPE.experts).reshape(SHAPE.layers, SHAPE.experts)
    save_profile(folder / "stories.strp", rank_by_use(use))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    return Console(capsys, monkeypatch)


@pytest.mark.usefixtures("stories")
def test_generate_alone_writes_a_story_from_its_first_word(run: Console, model: str) -> None:
    flags = ["--temp", "0", "-n", "9"]
    status, out, err = run("generate", *flags)
    assert status == 0
    assert out == run("generate", "-m", model, *flags, "Once upon a time", "--echo")[1]
    assert "no prompt given" in err
    assert run("generate", *flags, "--no-echo")[1] == out.removeprefix("Once upon a time")


@pytest.mark.usefixtures("stories")
def test_generate_continues_a_prompt_with_the_story_model_and_says_what_it_is(
    run: Console, model: str
) -> None:
    flags = ["generate", "hello", "--temp", "0", "-n", "9"]
    status, out, err = run(*flags)
    named = run(*flags, "-m", model)
    assert (status, out) == (0, named[1])
    (line,) = [line for line in err.splitlines() if line.startswith("stories: ")]
    assert f"{SHAPE.layers} layers of {SHAPE.experts} experts" in line
    assert "-m FILE" in line
    assert "no prompt given" not in err
    assert "stories" not in named[2]


@pytest.mark.usefixtures("stories")
def test_a_story_goes_on_until_the_model_ends_it(run: Console, tmp_path: Path, model: str) -> None:
    stats = tmp_path / "stats.json"
    flags = ["hello", "--ignore-eos", "--seed", "1", "-c", "400", "--stats-json", str(stats)]
    run("generate", *flags)
    assert json.loads(stats.read_text())["finish"] == "context"
    run("generate", "-m", model, *flags)
    assert json.loads(stats.read_text())["finish"] == "length"


@pytest.mark.usefixtures("stories")
def test_the_other_commands_use_the_story_model_where_none_is_named(
    run: Console, model: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("hello there " * 20)
    for words in (
        ["tokenize", "hello", "--ids"],
        ["perplexity", "-f", str(text), "-c", "32", "--device", "reference"],
    ):
        without, named = run(*words), run(*words, "-m", model)
        assert without[0] == named[0] == 0
        assert without[1] == named[1]
    status, out, _ = run("info")
    assert status == 0
    assert out.splitlines()[0].startswith("file          stories.gguf: ")


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["chat"], "chat"),
        (["chat", "--chat-template", "chatml"], "chat"),
        (["generate", "hello", "--system", "be brief"], "--system"),
        (["generate", "--chat-template", "auto"], "a chat template"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_story_model_is_not_asked_to_answer(run: Console, words: list[str], asked: str) -> None:
    status, out, err = run(*words, stdin="hello\n")
    assert (status, out) == (2, "")
    cause, hint = err.splitlines()
    assert cause.startswith(f"strata_nb: {asked}: ")
    assert "cannot answer" in cause
    assert hint.startswith("hint: -m FILE")


@pytest.mark.usefixtures("stories")
def test_slots_are_filled_by_the_models_own_profile_unless_another_or_none_is_given(
    run: Console, tmp_path: Path
) -> None:
    flags = ["generate", "hello", "--temp", "0", "-n", "5", *SLOTS]
    other = tmp_path / "other"
    assert "profile stories.strp" in run(*flags)[2]
    assert "profile" not in run(*flags, "--expert-profile", "none")[2]
    run(*flags, "--expert-profile-save", str(other))
    assert "profile other" in run(*flags, "--expert-profile", str(other))[2]
    model = SHAPE.layers, SHAPE.experts
    last = load_profile(other, *model).order()[-1]
    assert last == (0, 0)  # as in the model's own profile: it was not used


@pytest.mark.usefixtures("stories")
def test_an_engine_that_is_opened_without_options_runs_the_story_model(model: str) -> None:
    with Engine.open() as engine, Engine.open(Options(model)) as named:
        assert engine.expert_profile is not None
        assert named.expert_profile is None
        ids = engine.encode("hello")
        assert np.array_equal(engine.logits(ids), named.logits(ids))
    with Engine.open(Options(device="host:1x8MiB", expert_cache="4", ctx_size=128)) as engine:
        assert engine.describe().resident == 4
        assert engine.expert_profile == story_model.profile_path()


@pytest.mark.usefixtures("stories")
def test_the_judge_runs_the_story_model_without_a_profile(run: Console) -> None:
    for more in ([], ["--expert-profile", "none"]):
        assert run("generate", "hello", "-n", "2", "--device", "reference", *more)[0] == 0


@pytest.mark.parametrize("words", [["generate"], ["tokenize", "x"], ["info"]])
def test_a_missing_model_is_said_with_its_place_and_two_ways_out(
    run: Console, folder: Path, words: list[str]
) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    cause, hint = err.splitlines()[-2:]
    assert f"{folder / 'stories.gguf'}: missing" in cause
    assert "install the package again" in hint
    assert "-m FILE" in hint


def test_a_stub_in_place_of_the_model_is_told_from_a_broken_one(folder: Path) -> None:
    model = folder / "stories.gguf"
    model.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match="without its large files") as caught:
        Engine.open()
    assert str(model) in caught.value.message
    assert "-m FILE" in caught.value.hint
    model.write_bytes(bytes(5000))
    with pytest.raises(FileFormatError):
        Engine.open()


def test_a_missing_profile_is_refused_with_a_way_to_go_on(run: Console, stories: Path) -> None:
    (stories / "stories.strp").unlink()
    status, _, err = run("generate", "-n", "1", *SLOTS)
    assert status == 2
    assert f"{stories / 'stories.strp'}: missing" in err
    assert run("generate", "-n", "1", *SLOTS, "--expert-profile", "none")[0] == 0


def test_a_package_in_an_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.writestr("strata_nb/__init__.py", "")
    with zipfile.ZipFile(tmp_path / "package.zip") as archive:
        inside = zipfile.Path(archive, "strata_nb/")
        monkeypatch.setattr("importlib.resources.files", lambda name: inside)
        with pytest.raises(ConfigError, match="inside an archive"):
            story_model.model_path()


def test_an_installed_package_holds_the_model_and_its_profile() -> None:
    root = Path(__file__).parents[1]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    patterns = setup["options.package_data"]["strata_nb"].split()
    folder = story_model._folder()
    assert folder == root / "strata_nb" / "stories"
    for name in ("stories.gguf", "stories.strp"):
        assert any(fnmatch(f"stories/{name}", pattern) for pattern in patterns)
