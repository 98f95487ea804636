"""Assembly: the one place where a file, its tokenizer, its model and a device meet.

An engine owns the file and the model that runs on a device; closing it frees them and ends its
sessions. A device is either the judge, the float32 forward of `models`, or a backend's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from strata_nb import cpu, models
from strata_nb.cache.routing import forced_routes
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.options import (
    DEFAULT_CONTEXT_LIMIT,
    DEFAULT_PREFILL_ROWS,
    REFERENCE,
    Options,
    Sampling,
)
from strata_nb.refusals import not_traced, refuse_on_backend, refuse_on_judge
from strata_nb.reports import Report, VramReport
from strata_nb.session import Generation, Session, Token
from strata_nb.steps import WINDOW_ROWS, ReferenceSteps, Row, StepModel
from strata_nb.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strata_nb.cache.look import Look
    from strata_nb.card_profile import WindowProfile
    from strata_nb.device_model import DeviceModel
    from strata_nb.models import Description
    from strata_nb.plain_read import PlainRead
    from strata_nb.progress import Progress

__all__ = ["Engine", "Generation", "Report", "Session", "Token", "VramReport"]


class Engine:
    """Hold an open model: `with Engine.open(Options(model="m.gguf")) as engine: ...`.

    description      of the model; `tokenizer` is its own
    chat_template    the text of the file's chat template, None where it has none
    device, threads  where and with how many threads it computes; on the judge a single token takes
                     one without `Options.threads`
    device_reason    why "auto" chose this device; "" where it was named
    ctx_size         cells of a session's K/V; `prefill_rows` of a prompt batch
    load_s           seconds that opening took
    say              called with lines about what happens to memory; may be exchanged
    warnings         one line each, for the user
    off              what the device does not do, each with the reason
    expert_profile   the file that ranked its experts at the start, None where there was none
    """

    def __init__(
        self,
        options: Options,
        file: GGUFFile,
        progress: Progress | None,
        compiling: Progress | None,
        say: Callable[[str], None],
        resources: ExitStack,
    ) -> None:
        started = time.perf_counter()
        self.say = say
        self.device, self.device_reason = options.device, ""
        self.threads = options.threads or cpu.physical_cores()
        self.description: Description = models.describe(file)
        self.tokenizer = Tokenizer.from_gguf(file)
        self.warnings = list(self.tokenizer.warnings)
        self.chat_template = file.metadata.text("tokenizer.chat_template", None)
        trained = self.description.context
        self.ctx_size = options.ctx_size or min(trained, DEFAULT_CONTEXT_LIMIT)
        self.description.check_context(self.ctx_size)
        if self.ctx_size > trained:
            self.warnings.append(
                f"a context of {self.ctx_size} cells is more than the {trained} tokens this model "
                "was trained for: expect weaker text beyond them"
            )
        prefill = options.prefill if isinstance(options.prefill, int) else DEFAULT_PREFILL_ROWS
        self.prefill_rows = min(prefill, self.ctx_size)
        self.expert_profile = options.profile_path()
        self._vram_elastic = options.vram_elastic
        self._on_device: DeviceModel | None = None
        self._model: StepModel
        if self.device == REFERENCE:
            self._model = self._open_judge(file, options, progress)
        else:
            self._model = self._on_device = self._open_device(
                file, options, progress, compiling, resources
            )
        resources.callback(self._model.close)  # at once: it ends before its backend
        self.warnings += self._model.warnings
        self.off = [] if self._on_device is None else self._on_device.off
        self._resources = resources.pop_all()
        self.load_s = time.perf_counter() - started

    def _open_judge(
        self, file: GGUFFile, options: Options, progress: Progress | None
    ) -> ReferenceSteps:
        refuse_on_judge(options)
        forced = None
        if options.force_routes is not None:  # read first: to load a model takes longer
            model = self.description
            sizes = model.layers, model.experts, model.top_k
            forced = forced_routes(options.force_routes, *sizes, self.ctx_size)
        judge = models.open_reference(file, self.description, progress=progress)
        judge.forced = forced
        return ReferenceSteps(
            judge,
            self.ctx_size,
            (options.cache_type_k or "f32", options.cache_type_v or "f32"),
            max(WINDOW_ROWS, self.prefill_rows),
            self.threads,
            options.threads or 1,
        )

    def _open_device(
        self,
        file: GGUFFile,
        options: Options,
        progress: Progress | None,
        compiling: Progress | None,
        resources: ExitStack,
    ) -> DeviceModel:
        # Here, because these load Numba, which the judge does without.
        from strata_nb.backend import choose_backend, open_backend
        from strata_nb.device_model import DeviceModel
        from strata_nb.tracing import Recorder

        recorder: Recorder | None = None

        def record(device: str) -> Recorder | None:
            nonlocal recorder
            if options.trace is not None:
                if device == "host":
                    raise not_traced(options.trace, device)
                recorder = Recorder(options.trace, say=lambda line: self.say(line))
                resources.callback(recorder.close)
            return recorder

        if self.device == "auto":
            backend, self.device_reason = choose_backend(self.threads, record)
            self.device = backend.name
        else:
            backend = open_backend(self.device, self.threads, record)
        resources.callback(backend.close)
        refuse_on_backend(options, backend, self.device)
        backend.overlaps = backend.overlaps and options.overlap
        backend.same_bits = backend.same_bits or options.deterministic
        if options.prefill == "auto":
            self.prefill_rows = min(backend.usual_rows(options.vram_limit), self.ctx_size)
        self.warnings += backend.warnings
        most_rows = max(WINDOW_ROWS, self.prefill_rows)
        if backend.most_rows is not None and most_rows > backend.most_rows:
            most_rows = self.prefill_rows = min(backend.most_rows, self.ctx_size)
            self.warnings.append(
                f"--prefill {options.prefill}: the device {self.device} reads prompts "
                f"{self.prefill_rows} rows at a time at most"
            )
        return DeviceModel(
            file,
            self.description,
            options,
            self.ctx_size,
            most_rows,
            backend,
            progress=progress,
            compiling=compiling,
            say=lambda line: self.say(line),
            announce=recorder.announce if recorder is not None else None,
        )

    @classmethod
    def open(
        cls,
        options: Options | None = None,
        *,
        progress: Progress | None = None,
        compiling: Progress | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Engine:
        """Open the model that `options` names; without options, the story model of the package.

        `progress` is called with (bytes done, bytes in all); `compiling`, at a first start, with
        (kernels done, kernels in all); `say` with lines about that, and later about what happens to
        memory. Raises FileFormatError for a file that cannot be used, ConfigError for options that
        do not fit it; then nothing stays open.
        """
        if options is None:
            options = Options()
        if not isinstance(options, Options):
            raise ConfigError(
                f"{options!r}: not Options", hint="Engine.open(Options(model='model.gguf'))"
            )
        with ExitStack() as resources:
            file = resources.enter_context(GGUFFile.open(options.model_path()))
            return cls(options, file, progress, compiling, say, resources)

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Return the token ids of `text`; control tokens in it are parsed only where asked."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """Return the bytes that `ids` stand for."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def open_session(self) -> Session:
        """Return a new conversation, with nothing in it."""
        return Session(
            self._model, self.description, self.tokenizer, self.ctx_size, self.prefill_rows
        )

    def describe(self) -> Report:
        """Describe devices, slots and K/V as they are now, and how experts were found so far."""
        return self._model.report()

    def look(self) -> Look:
        """Look at the chunks of the device's memory as they are now; the judge has none."""
        return self._device().look()

    def set_vram_reserve(self, mib: int | None) -> VramReport:
        """Leave `mib` MiB of the device free for others; None: as many as at the start, 0: none.

        Waits for the step that runs. Experts give up slots for it, the coldest first, down to one
        slot a layer, and the K/V what is idle; the answer says how much is really free. With a
        smaller reserve experts come back. Nothing of this changes a token. Raises ConfigError
        without `Options.vram_elastic`, DriverError where the device fails.
        """
        if not self._vram_elastic or self._on_device is None:
            raise ConfigError(
                "the engine was not opened to change what it leaves free",
                hint="add --vram-elastic: Options(vram_elastic=True)",
            )
        if mib is not None and (
            isinstance(mib, bool) or not isinstance(mib, int) or not 0 <= mib < 2**31
        ):
            raise ConfigError(
                f"a reserve of {mib} MiB: not usable", hint="0 or more, None: as at the start"
            )
        done = self._on_device.set_reserve(None if mib is None else mib << 20)
        device, plan = done.device, self._on_device.ledger.plan
        return VramReport(
            reserve_mib=done.reserve_bytes >> 20,
            expert_slots=device.slots,
            expert_slots_full=plan.most_slots,
            expert_cache_mib=device.bytes_by_owner["experts"] >> 20,
            expert_cache_full_mib=plan.arena_chunks * plan.chunk_bytes >> 20,
            vram_free_mib=max(0, device.free_bytes or 0) >> 20,
            prompt_chunk=self.prefill_rows,
        )

    def save_expert_profile(self, path: str | os.PathLike[str]) -> None:
        """Write which experts this engine's text used most, for the next start."""
        self._device().save_profile(path)

    def save_routing_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the experts of every token so far; `Options.routing_trace` must have been given."""
        self._device().save_trace(path)

    def step_bytes(self, cells: int) -> int:
        """Return the bytes that a step of one token reads behind so many: weights and K/V."""
        return self._device().step_bytes(cells)

    def plain_read(self) -> PlainRead:
        """Measure how fast the device's memory can be read; StrataError where that cannot be."""
        return self._device().plain_read()

    def link_rate(self) -> PlainRead:
        """Measure how fast pinned memory is copied to the device; StrataError where it cannot."""
        return self._device().link_rate()

    def empty_slots(self) -> None:
        """Let every expert leave its slot, and forget the profile and what was used so far.

        For those who measure how experts come. A profile that is saved counts from here on.
        """
        self._device().empty_slots()

    def profile(self, cells: int) -> WindowProfile:
        """Measure, kernel by kernel, the last step, which read one token and gave its logits.

        cells   that it saw, its own among them

        On cards only: UnsupportedDevice elsewhere; ConfigError where that step cannot run again.
        Tokens that follow are the same as without it.
        """
        return self._device().profile(cells)

    def encode_prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Return the ids of a text that is to be continued, at least one.

        BOS comes first where the file asks for it. EOS never comes last, whatever the file asks
        for: nothing follows an end. An empty text is the token that begins one. Raises ConfigError
        where there is none.
        """
        tokenizer = self.tokenizer
        ids = self.encode(text, add_special=True, parse_special=parse_special)
        if tokenizer.add_eos and ids[-1:] == [tokenizer.eos_id]:
            del ids[-1]
        if ids:
            return ids
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if first is None:
            raise ConfigError(
                "the prompt is empty, and the model has no token that begins a text",
                hint="give a prompt of at least one character",
            )
        return [first]

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the logits (len(ids), vocab) after each of `ids` in a fresh context."""
        self.description.check_ids(ids)
        if len(ids) > self.ctx_size:
            raise ConfigError(
                f"{len(ids)} tokens do not fit a context of {self.ctx_size} cells",
                hint=f"open the engine with ctx_size={len(ids)} or more",
            )
        sequence = self._model.open_sequence()
        out = np.empty((len(ids), self.description.vocab_size), np.float32)
        try:
            for at in range(0, len(ids), self.prefill_rows):
                batch = [Row(sequence, token, True) for token in ids[at : at + self.prefill_rows]]
                out[at : at + len(batch)] = self._model.step(batch)
        finally:
            self._model.forget_sequence(sequence)
        return out

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] | None = None,
        ignore_eos: bool = False,
        progress: Progress | None = None,
    ) -> Generation:
        """Continue `ids` in a fresh session; see `Session.generate`. The prompt is read at once.

        `progress` is that of `Session.extend`.
        """
        session = self.open_session()
        try:
            session.extend(ids, progress)
        except BaseException:
            session.close()  # and not when the error is forgotten, which holds it until then
            raise
        return session.generate(
            max_tokens=max_tokens, sampling=sampling, stop=stop, ignore_eos=ignore_eos
        )

    def close(self) -> None:
        """Free the model and close the file; sessions of this engine end. Idempotent."""
        self._resources.close()

    def _device(self) -> DeviceModel:
        if self._on_device is None:
            raise ConfigError(
                "the reference device counts no experts and has no memory of its own",
                hint="open the engine on another device",
            )
        return self._on_device

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
