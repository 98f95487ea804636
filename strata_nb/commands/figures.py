"""What a run took: the line at its end, and the same as JSON for `--stats-json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strata_nb.engine import Engine, Generation
from strata_nb.models.description import bytes_text
from strata_nb.reports import Report
from strata_nb.whole_files import whole_file

STATS_SCHEMA = 1


@dataclass
class Figures:
    """Sum up what a run did; rates are tokens a second, 0 where nothing was measured.

    Counts are kept up while the run goes on, so they are right also when it is interrupted.
    """

    load_s: float = 0.0
    prompt_tokens: int = 0
    prompt_s: float = 0.0
    ttft_s: float = 0.0
    generated_tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    finish: str | None = None
    seed: int | None = None

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s else 0.0

    @property
    def decode_tps(self) -> float:
        """Generated tokens a second, each answer's first one left out."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    def add_answer(self, generation: Generation, prompt_s: float) -> None:
        """Count an answer; `prompt_s` is what reading its prompt took."""
        if self.generated_tokens == 0:
            self.ttft_s = prompt_s + generation.first_token_s
        self.generated_tokens += generation.generated
        self.decode_tokens += max(generation.generated - 1, 0)
        self.decode_s += generation.decode_s
        self.finish = generation.finish
        self.seed = generation.seed if generation.random else None

    def line(self, engine: Engine, cells: int) -> str:
        """Return the line that ends a run, in which `cells` of the K/V hold tokens."""
        seed = f" · seed {self.seed}" if self.seed is not None else ""
        return (
            f"prompt {self.prompt_tokens} tokens, {self.prompt_tps:.1f} tok/s · "
            f"generated {self.generated_tokens} tokens, {self.decode_tps:.1f} tok/s"
            f"{memory_text(engine, cells)}{seed}"
        )

    def stats(self, engine: Engine) -> dict[str, object]:
        """Return what `--stats-json` writes."""
        report = engine.describe()
        return {
            "schema": STATS_SCHEMA,
            "model": engine.description.name,
            "device": engine.device,
            "threads": engine.threads,
            "ctx_size": engine.ctx_size,
            "load_s": self.load_s,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tps": self.prompt_tps,
            "ttft_s": self.ttft_s,
            "generated_tokens": self.generated_tokens,
            "decode_tps": self.decode_tps,
            "finish": self.finish,
            "seed": self.seed,
            "link_bytes_per_token": report.link_bytes
            / max(1, self.prompt_tokens + self.generated_tokens),
            **memory_stats(report),
        }


def memory_stats(report: Report) -> dict[str, object]:
    """Return the part of `--stats-json` about the devices' memory.

    limited_to_bytes   that --vram-limit leaves of device_bytes; 0 without one
    """
    return {
        "slots": report.slots,
        "resident": report.resident,
        "hit_rate": report.hit_rate,
        "hits": report.hits,
        "misses": report.misses,
        "filled": report.filled,
        "streamed": report.streamed,
        "streamed_bytes": report.streamed_bytes,
        "cpu_experts": report.cpu_experts,
        "cpu_bytes": report.cpu_bytes,
        "cpu_wait_s": report.cpu_wait_s,
        "missed_bytes": report.missed_bytes,
        "link_bytes": report.link_bytes,
        "inserted": report.inserted,
        "inserted_bytes": report.inserted_bytes,
        "kv_cells": report.kv_cells,
        "bytes_by_owner": report.bytes_by_owner,
        "limited_to_bytes": sum(one.total_bytes or 0 for one in report.devices if one.limit_text),
        "device_bytes": sum(one.device_bytes or 0 for one in report.devices),
    }


def device_lines(engine: Engine) -> list[str]:
    """Return a line for each device: which experts fit, what the K/V holds, what the rest takes."""
    model, lines = engine.description, []
    for device in engine.describe().devices:
        sizes = {owner: bytes_text(size) for owner, size in device.bytes_by_owner.items()}
        experts, cells = model.layers * model.experts, min(device.kv_cells, engine.ctx_size)
        parts = []
        if device.slots:
            share = f"{100 * device.slots // experts}%, {sizes['experts']}"
            parts.append(f"slots for {device.slots:,} of {experts:,} experts ({share})")
            if engine.expert_profile is not None:
                parts.append(f"profile {engine.expert_profile.name}")
        elif experts:
            parts.append(f"{experts:,} experts read in place")
        parts.append(f"K/V for {cells:,} of {engine.ctx_size:,} cells ({sizes['kv']})")
        parts.append(f"weights and buffers {sizes['dense']}")
        if device.bytes_by_owner.get("outside"):
            parts.append(f"driver and other programs {sizes['outside']}")
        if device.free_bytes is not None and device.total_bytes is not None:
            free = f"{bytes_text(max(0, device.free_bytes))} of {bytes_text(device.total_bytes)}"
            kept = f", {bytes_text(device.reserve_bytes)} of it kept for others"
            parts.append(f"free {free}{kept if device.reserve_bytes else ''}")
        if engine.off:
            parts.append("off: " + ", ".join(engine.off))
        name = ", ".join(filter(None, (device.name, device.limit_text)))
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines


def memory_text(engine: Engine, cells: int) -> str:
    """Return how the devices' memory served, as a part of the line that ends a run."""
    report = engine.describe()
    if not report.devices:
        return ""
    # Memory comes in chunks, which may hold more; and the latest token may not have been read.
    most, there = engine.ctx_size, report.kv_cells
    text = f" · K/V {min(cells, most, there):,} of {most:,} cells"
    if there < most:
        text += f" (memory for {there:,})"
    if report.hit_rate is not None:
        hits = f"{report.hit_rate:.1%} hits with {report.resident:,} experts"
        moved = f"{report.inserted:,} inserted, {bytes_text(report.inserted_bytes)}"
        text += f" · {hits} in {report.slots:,} slots, {moved}"
        if report.filled:
            text += (
                f", {report.filled:,} of {report.misses:,} misses kept, "
                f"{bytes_text(report.link_bytes)} over the link"
            )
        if report.cpu_experts:
            text += (
                f", {report.cpu_experts:,} computed by the CPU ({bytes_text(report.cpu_bytes)}), "
                f"{report.cpu_wait_s:.2f} s waited for it"
            )
    elif engine.description.experts:
        text += " · experts read in place"
    if report.streamed:
        text += f", {report.streamed:,} streamed to prompts"
    return " · ".join(
        [text, *(device.limit_text for device in report.devices if device.limit_text)]
    )


def write_json(path: Path | None, content: Mapping[str, object]) -> None:
    """Write a JSON file, whole or not at all; a path of None writes nothing.

    JSON has no infinity: a number that is none is written as null.
    """
    if path is not None:
        numbers = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in content.items()
        }
        with whole_file(path) as stream:
            stream.write((json.dumps(numbers, indent=2, allow_nan=False) + "\n").encode())
