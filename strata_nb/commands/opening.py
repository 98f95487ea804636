"""Open what a command works with: the model, with a bar and its warnings, and a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from strata_nb.chat import ChatTemplate, choose_template
from strata_nb.commands.arguments import Arguments, options_from, read_text_file
from strata_nb.commands.control import ControlSocket
from strata_nb.commands.figures import device_lines
from strata_nb.commands.output_files import output_file
from strata_nb.commands.terminal import note, progress_bar, warn
from strata_nb.engine import Engine
from strata_nb.errors import ConfigError
from strata_nb.options import Options


@contextmanager
def open_engine(arguments: Arguments, ctx_size: int | None = None) -> Iterator[Engine]:
    """Open the model that the flags name; `ctx_size` stands in for --ctx-size."""
    options = options_from(arguments)
    if ctx_size is not None:
        options = replace(options, ctx_size=ctx_size)
    profile = output_file(arguments, "--expert-profile-save")
    trace = output_file(arguments, "--routing-trace")
    output_file(arguments, "--trace")  # the engine writes it as it goes; here it may be refused
    with ExitStack() as around:
        control = None
        if (path := arguments.path("--control")) is not None:
            control = ControlSocket(path)
            around.callback(control.close)
        yield from _opened(arguments, options, profile, trace, control)


def _opened(
    arguments: Arguments,
    options: Options,
    profile: Path | None,
    trace: Path | None,
    control: ControlSocket | None,
) -> Iterator[Engine]:
    with (
        progress_bar("compiling", unit="kernels") as compiling,
        progress_bar("loading", unit="bytes") as progress,
    ):
        engine = Engine.open(options, progress=progress, compiling=compiling, say=note)
    with engine:
        for warning in engine.warnings:
            warn(warning)
        if engine.device_reason and arguments.flag("--verbose"):
            note(f"device {engine.device}: {engine.device_reason}")
        has_memory = any(one.free_bytes is not None for one in engine.describe().devices)
        if has_memory or arguments.flag("--verbose"):
            for line in device_lines(engine):
                note(line)
        if arguments.flag("--verbose"):
            known = engine.description
            note(
                f"{known.name}: {known.architecture}, {known.layers} layers, device "
                f"{engine.device}, {engine.threads} threads, context {engine.ctx_size} cells, "
                f"loaded in {engine.load_s:.2f} s"
            )
        with ExitStack() as at_the_end:  # each is written even if another cannot be
            if profile is not None:
                at_the_end.callback(engine.save_expert_profile, profile)
            if trace is not None:
                at_the_end.callback(engine.save_routing_trace, trace)
            if control is not None:
                at_the_end.enter_context(control.serving(engine))
            yield engine


def refuse_to_answer_with_the_story_model(arguments: Arguments, asked: str) -> None:
    """Refuse `asked`, which takes a model that answers, where no flag names a model."""
    if arguments.path("--model") is None:
        raise ConfigError(
            f"{asked}: the model that comes with strata_nb continues stories and cannot answer",
            hint="-m FILE names one that can",
        )


@dataclass(frozen=True)
class TemplateChoice:
    """Hold what the flags say about the chat template, read before the model is loaded."""

    given: str | None  # --chat-template
    text: str | None  # of --chat-template-file

    @classmethod
    def from_flags(cls, arguments: Arguments) -> TemplateChoice:
        """Read the flags and the file they name; ConfigError for a file that cannot be read."""
        given = arguments.text("--chat-template")
        name = arguments.path("--chat-template-file")
        if given is not None and name is not None:
            raise ConfigError(
                "--chat-template and --chat-template-file: both given", hint="give one of them"
            )
        text = None if name is None else read_text_file("--chat-template-file", name)
        return cls(given, text)

    @property
    def asked_for(self) -> bool:
        """Whether a flag asks for a template at all."""
        return self.given is not None or self.text is not None

    def of(self, engine: Engine) -> ChatTemplate:
        """Return the template to use with this model."""
        return choose_template(engine.chat_template, self.given, self.text, engine.tokenizer)
