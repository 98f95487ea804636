"""Turn a conversation into token ids through the model's chat template.

    messages --protect--> marked messages --ChatTemplate.render--> text --encode_protected--> ids

Control tokens come from the template only. A user who writes `<|im_end|>` means these ten
characters, so all that the caller gives (messages, tools, documents and other variables) gets marks
before the template sees it; text/protection.py says which and what they cannot prevent.

One rule for BOS: a template that writes it is right, and the model's add_bos is not applied on top;
one that does not write it gets it from add_bos.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol

import jinja2
from jinja2.exceptions import UndefinedError

from strata_nb.errors import ConfigError, TemplateError
from strata_nb.text.protection import NAME, marks_restored, protect
from strata_nb.text.template_sandbox import Refusal, TemplateEnvironment

MAX_TEMPLATE = 1 << 17  # characters; the longest template known has 17,000
MAX_RENDERED = 1 << 26  # characters, some 16 million tokens

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

_OTHER_TEMPLATE = "give another one: --chat-template chatml, or --chat-template-file FILE"

# What a program in the template language can raise.
_PROGRAM_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

Message = dict[str, Any]  # role, content (text, or a list of {"type": "text", "text": ...}), ...


class ChatTokenizer(Protocol):
    """What this module asks of a tokenizer."""

    @property
    def add_bos(self) -> bool:
        """Whether the model wants BOS before every text."""

    @property
    def bos_id(self) -> int | None:
        """The id of BOS, if there is one."""

    @property
    def eos_id(self) -> int | None:
        """The id of EOS, if there is one."""

    @property
    def control_texts(self) -> Sequence[str]:
        """The texts of all control tokens."""

    @property
    def user_defined_texts(self) -> Sequence[str]:
        """The texts of all tokens that are parsed in every text."""

    def text(self, token: int) -> str:
        """Return the text of a token."""

    def encode_protected(self, text: str, mark: str) -> list[int]:
        """Return ids: control tokens without a mark inside are parsed, then marks are dropped."""


class ChatTemplate:
    """Hold a compiled template; `origin` is how messages about it call it."""

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", origin: str = "the model's template"
    ) -> None:
        self.source = source
        self.origin = origin
        self._given = {"bos_token": bos, "eos_token": eos}
        if len(source) > MAX_TEMPLATE:
            raise TemplateError(
                f"{origin} has {len(source):,} characters, more than {MAX_TEMPLATE:,}",
                hint=_OTHER_TEMPLATE,
            )
        try:
            self._template = TemplateEnvironment().from_string(source)
        except (
            jinja2.TemplateError,
            SyntaxError,
            RecursionError,
            MemoryError,
            ValueError,
        ) as error:
            raise self._failure(error) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation; `variables` are further names for the template.

        Raises TemplateError where the template refuses the conversation, fails or does not end.
        """
        text, _ = self.render_and_warn(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
        return text

    def render_and_warn(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, list[str]]:
        """Return what `render` returns, and the warnings, one line each."""
        given = {
            "documents": None,
            **self._given,
            **variables,
            "messages": list(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(given), []
        except TemplateError as failure:
            if tools is not None or not isinstance(failure.__cause__, TypeError | UndefinedError):
                raise
            # Templates written for tool calls only loop over `tools` without a test, or add
            # `functions` to a text: an empty list or text is how they spell "no tools".
            without = {"functions": "", "datetime": _now(), **given, "tools": []}
            try:
                text = self._render(without)
            except TemplateError:
                raise failure from failure.__cause__
            return text, [f"{failure.message}; it was given an empty list of tools instead"]

    def _render(self, given: dict[str, Any]) -> str:
        pieces, length = [], 0
        try:
            for piece in self._template.generate(TemplateEnvironment.variables(given)):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED:
                    raise TemplateError(
                        f"{self.origin} wrote more than {MAX_RENDERED:,} characters",
                        hint=_OTHER_TEMPLATE,
                    )
        except _PROGRAM_ERRORS as error:
            raise self._failure(error) from error
        return "".join(pieces)

    def _failure(self, error: Exception) -> TemplateError:
        """Say what stopped the template, in its own words where it has some."""
        if isinstance(error, Refusal):
            return TemplateError(
                f"{self.origin} refused the conversation: {error.message}",
                hint="change the conversation (some take no --system), or " + _OTHER_TEMPLATE,
            )
        if isinstance(error, RecursionError | SyntaxError):  # Python's limits on what jinja2 wrote
            return TemplateError(f"{self.origin} is nested too deeply", hint=_OTHER_TEMPLATE)
        line = _line(error)
        place = "" if line is None else f" at line {line}"
        message = getattr(error, "message", None) or str(error) or type(error).__name__
        if missing := re.match(r"No (filter|test) named '(.*?)'", message):
            message = f"unknown {missing[1]} {missing[2]}"
        elif isinstance(error, jinja2.TemplateSyntaxError):
            message, place = f"syntax error{place}: {message}", ""
        return TemplateError(f"{self.origin}: {message}{place}", hint=_OTHER_TEMPLATE)


def choose_template(
    file_template: str | None,
    given: str | None,
    text_from_file: str | None,
    tokenizer: ChatTokenizer,
) -> ChatTemplate:
    """Return the template to use: the text of a template file, what was given, or the model's own.

    file_template    the model's default template (tokenizer.chat_template), if it has one
    given            None or "auto" for the model's, "chatml", or a template's text
    text_from_file   the content of --chat-template-file

    Raises ConfigError where there is none or `given` is not one, TemplateError for a broken one.
    """
    if text_from_file is not None:
        source, origin = text_from_file, "the template of --chat-template-file"
        if not _has_tags(source):
            raise ConfigError(
                f"--chat-template-file: {len(source)} characters without {{{{ or {{%, which is not "
                "a chat template",
                hint="give a file with a jinja template",
            )
    elif given is None or given == "auto":
        if file_template is None:
            raise ConfigError(
                "the model file has no chat template",
                hint="give one: --chat-template chatml is the most common form",
            )
        source, origin = file_template, "the model's template"
    elif given == "chatml":
        source, origin = CHATML, "the chatml template"
    elif _has_tags(given):
        source, origin = given, "the template of --chat-template"
    else:
        raise ConfigError(
            f"--chat-template {given}: neither a name nor a template",
            hint="give auto, chatml, or the text of a jinja template",
        )
    return ChatTemplate(
        source,
        bos="" if tokenizer.bos_id is None else tokenizer.text(tokenizer.bos_id),
        eos="" if tokenizer.eos_id is None else tokenizer.text(tokenizer.eos_id),
        origin=origin,
    )


def encode_chat(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] | None = None,
    **variables: Any,
) -> tuple[list[int], list[str]]:
    """Return the ids of a conversation and the warnings, one line each.

    A file may type `<think>` and the like as user-defined, which are tokens in every text. Those
    that the template itself writes steer the model as control tokens do, and are kept from messages
    too. Raises TemplateError as `ChatTemplate.render` does, and if the template writes nothing or
    escapes that hide the marks; ConfigError for a role that is no name.
    """
    for message in messages:
        role = message.get("role", "")
        if "role" in message and not (isinstance(role, str) and NAME.fullmatch(role)):
            raise ConfigError(
                f"a message has the role {role!r}",
                hint="a role is made of letters, digits, _ and -: system, user, assistant, tool",
            )
    steering = [
        text for text in tokenizer.user_defined_texts if text.strip() and text in template.source
    ]
    (messages, tools, variables), mark = protect(
        (messages, tools, variables), [*tokenizer.control_texts, *steering]
    )
    text, warnings = template.render_and_warn(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
    )
    ids = tokenizer.encode_protected(marks_restored(text, mark, template.origin), mark)
    if not ids:
        raise TemplateError(
            f"{template.origin} wrote nothing for this conversation", hint=_OTHER_TEMPLATE
        )
    bos = tokenizer.bos_id
    if not tokenizer.add_bos or bos is None:
        return ids, warnings
    if ids[0] == bos:
        warning = f"{template.origin} writes BOS itself; the model's add_bos is left out"
        return ids, [*warnings, warning]
    return [bos, *ids], warnings


def _now() -> str:
    return datetime.now().strftime("%b %d %Y %H:%M:%S")


def _has_tags(source: str) -> bool:
    return "{{" in source or "{%" in source


def _line(error: Exception) -> int | None:
    """Return the template's line that failed: jinja2 gives the traceback its line numbers."""
    line: int | None = getattr(error, "lineno", None)
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
