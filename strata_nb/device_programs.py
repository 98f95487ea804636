"""The programs of a model over its places on a device.

They are emitted twice: over buffers that begin at 0 before anything is read, which tells what is to
be compiled and how many bytes buffers take; then over the places that there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb import models
from strata_nb.backend import Backend
from strata_nb.device_filling import FillingPlaces
from strata_nb.device_sizes import Sizes
from strata_nb.device_streaming import BatchTables
from strata_nb.fill_plans import plan_type
from strata_nb.models.description import Description
from strata_nb.models.places import (
    Buffers,
    ExpertPlaces,
    KVPlaces,
    PlacedTensor,
    Places,
    Programs,
)
from strata_nb.steps import WINDOW_ROWS

HEAD_ROWS = 32  # whose logits are computed at a time: 20 MB for a vocabulary of 150,000


class TablePlaces(NamedTuple):
    """Say where the device has the tables that change between steps; 0: they are not there yet.

    blocks                  of the K/V
    addresses, tiers, use   of experts, int64, uint8 and int64 (layers, experts)
    tally                   hits and misses
    batch                   what prompt batches read in place of `addresses`, where they do
    """

    blocks: int = 0
    addresses: int = 0
    tiers: int = 0
    use: int = 0
    tally: int = 0
    batch: BatchTables | None = None


class Emitted(NamedTuple):
    """Hold programs, and what buffers there are for them.

    batch          of prompt batches; None where all steps have the same programs
    filling        None where the device gives no slots
    rope, forced   addresses of the rope table and of forced routes, which begin the buffers
    """

    programs: Programs
    batch: Programs | None
    filling: FillingPlaces | None
    rope: int
    forced: int
    buffer_bytes: int


def emit(
    model: Description,
    sizes: Sizes,
    backend: Backend[Any],
    tensors: Mapping[str, PlacedTensor],
    buffers: Buffers,
    tables: TablePlaces,
    forced: npt.NDArray[np.int16] | None,
    max_rows: int,
) -> Emitted:
    """Return the programs for steps of so many rows over these places.

    forced   as `Given` has it
    """
    rope = buffers.take(sizes.rope_bytes)
    routes = buffers.take(forced.nbytes) if forced is not None else 0
    kv = KVPlaces(
        table=tables.blocks,
        table_width=sizes.table_width,
        key_type=sizes.kv.key.cache_type,
        value_type=sizes.kv.value.cache_type,
        key_offsets=[sizes.kv.part_offset(layer, "k") for layer in range(model.layers)],
        value_offsets=[sizes.kv.part_offset(layer, "v") for layer in range(model.layers)],
    )
    filling: FillingPlaces | None = None
    experts: list[ExpertPlaces] = []
    if sizes.experts is not None:
        if backend.fills:
            filling = _filling_places(model, buffers, tables.addresses)
        route_bytes = forced[0].nbytes if forced is not None else 0
        for layer, parts in enumerate(sizes.experts.parts):
            before = model.experts * layer
            of_layer = ExpertPlaces(
                tables.addresses + 8 * before,
                tables.tiers + before,
                tables.use + 8 * before,
                tables.tally,
                routes + route_bytes * layer,
                parts,
            )
            if filling is not None:
                homes, seen, plan = filling.of_layer(layer, model.experts)
                of_layer = of_layer._replace(homes=homes, seen=seen, plan=plan)
            experts.append(of_layer)
    places = Places(tensors, experts, kv, rope)

    def programs(places: Places, max_rows: int, head_rows: int) -> Programs:
        return models.emit_programs(
            model,
            places,
            buffers,
            max_rows=max_rows,
            head_rows=min(head_rows, max_rows),
            packed_row_bytes=backend.packed_row_bytes,
            bytes_beside=backend.bytes_beside,
            chooses_tokens=backend.chooses_tokens,
            attends_in_runs=backend.attends_in_runs,
            gathers_rows=backend.gathers_rows,
        )

    batch: Programs | None = None
    if not backend.batches_apart:
        steps = programs(places, max_rows, HEAD_ROWS)
    else:
        steps = programs(places, min(max_rows, WINDOW_ROWS), WINDOW_ROWS)
        if max_rows > WINDOW_ROWS:
            places = places._replace(experts=_of_batches(experts, tables.batch, model.experts))
            batch = programs(places, max_rows, WINDOW_ROWS)
    return Emitted(steps, batch, filling, rope, routes, buffers.size_bytes)


def _filling_places(model: Description, buffers: Buffers, addresses: int) -> FillingPlaces:
    count = model.experts * model.layers
    homes, seen = (buffers.take(8 * count) for _ in range(2))
    plan = buffers.take(plan_type(model.experts).itemsize * model.layers)
    return FillingPlaces(addresses, homes, seen, plan)


def _of_batches(
    experts: list[ExpertPlaces], tables: BatchTables | None, count: int
) -> list[ExpertPlaces]:
    """Return where batches find experts, of which a layer has so many."""
    if tables is None:
        return experts
    return [
        one._replace(
            addresses=tables.reads_address + 8 * count * layer,
            homes=one.homes and tables.missed_address + 8 * count * layer,
        )
        for layer, one in enumerate(experts)
    ]
