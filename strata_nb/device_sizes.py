"""What a model takes on a device, and the files given with it: known before anything is loaded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_nb.cache.kv_layout import HeadPlane, KVLayout, blocks_for
from strata_nb.cache.profile import Profile, load_profile
from strata_nb.cache.routing import RoutingTrace, forced_routes
from strata_nb.cache.slots import SlotLayout
from strata_nb.errors import ConfigError
from strata_nb.gguf import GGUFFile
from strata_nb.loading_layout import ExpertLayout, expert_layout
from strata_nb.models.description import Description
from strata_nb.models.tensors import EXPERT_PARTS, is_expert
from strata_nb.options import Options

ROPE_FACTORS = "rope_freqs.weight"  # read at the start, and by no kernel


class Sizes(NamedTuple):
    """Hold what the table of tensors and the options say.

    dense         names of tensors
    stacks        of each layer, by part: names of tensors
    table_width   K/V blocks of a sequence
    rope_bytes    of the table of cosines and sines: float32 (context, 2, planes)
    """

    dense: list[str]
    stacks: list[dict[str, str]]
    experts: ExpertLayout | None
    slots: SlotLayout
    kv: KVLayout
    table_width: int
    rope_bytes: int


def measure(file: GGUFFile, model: Description, options: Options, ctx_size: int) -> Sizes:
    """Lay out what the model needs; nothing is read but the table of tensors."""
    dense = [name for name in file.tensors if not is_expert(name) and name != ROPE_FACTORS]
    stacks = [
        {part: f"blk.{layer}.{part}.weight" for part in EXPERT_PARTS}
        for layer in range(model.layers if model.experts else 0)
    ]
    experts = expert_layout(file, stacks) if stacks else None
    slots = SlotLayout(experts.blob_bytes if experts is not None else (), model.experts)
    kv = KVLayout(
        model.layers,
        model.kv_heads,
        HeadPlane(options.cache_type_k or "f16", model.key_length),
        HeadPlane(options.cache_type_v or "f16", model.value_length),
    )
    rope_bytes = ctx_size * model.rope_dims * 4
    return Sizes(dense, stacks, experts, slots, kv, blocks_for(ctx_size), rope_bytes)


class Given(NamedTuple):
    """Hold what files about experts say, and the trace that is to be kept; None: not asked for.

    prior    the profile
    forced   int16 (layers, context, top_k): the experts that each position uses
    """

    prior: Profile | None
    trace: RoutingTrace | None
    forced: npt.NDArray[np.int16] | None


def read_given(options: Options, model: Description, ctx_size: int) -> Given:
    """Read the profile and the routes that are given, and begin the trace that is asked for.

    ConfigError where a file cannot be read or does not fit, and for a model without experts.
    """
    profile = options.profile_path()
    asked = [
        (profile, "--expert-profile"),
        (options.expert_profile_save, "--expert-profile-save"),
        (options.routing_trace, "--routing-trace"),
        (options.force_routes, "--force-routes"),
    ]
    for value, flag in asked:
        if value is not None and not model.experts:
            raise ConfigError(f"{flag} {value}: this model has no experts", hint="leave it out")
    prior: Profile | None = None
    trace: RoutingTrace | None = None
    forced: npt.NDArray[np.int16] | None = None
    if profile is not None:
        try:
            prior = load_profile(profile, model.layers, model.experts)
        except OSError as error:
            raise ConfigError(
                f"--expert-profile {profile}: {error.strerror}",
                hint="check the name and the permissions",
            ) from error
    sizes = model.layers, model.experts, model.top_k
    if options.routing_trace is not None:
        trace = RoutingTrace(*sizes)
    if options.force_routes is not None:
        forced = forced_routes(options.force_routes, *sizes, ctx_size)
    return Given(prior, trace, forced)
