"""Record which experts each token used, for those who compare ways of keeping experts.

The file is a numpy array, int16 (tokens, layers, top_k): ids in no order, as
`tools/make_routes.py` makes them without a model. It is kept in memory until it is saved: 768 bytes
a token for 48 layers and 8 experts.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from strata_nb.errors import ConfigError, FileFormatError, RuleViolation
from strata_nb.whole_files import whole_file

MOST_EXPERTS = 1 << 15  # of a layer, that int16 can name

_WRITERS = "generate --routing-trace FILE writes routes of text, tools/make_routes.py makes some"


class RoutingTrace:
    """Collect the routes of a model; a token uses `top_k` of the experts of each layer."""

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        if experts > MOST_EXPERTS:
            raise ConfigError(f"a routing trace of {experts:,} experts: it holds {MOST_EXPERTS:,}")
        self._shape = (layers, top_k)
        self._experts = experts
        self._parts: list[npt.NDArray[np.int16]] = []

    @property
    def tokens(self) -> int:
        return sum(map(len, self._parts))

    def append(self, routes: npt.NDArray[np.integer]) -> None:
        """Add the routes of some tokens, (tokens, layers, top_k); the array may be used again."""
        if routes.shape[1:] != self._shape:
            raise RuleViolation(16, f"routes {routes.shape} of a model with {self._shape}")
        if routes.size and not 0 <= routes.min() <= routes.max() < self._experts:
            numbers = f"{routes.min()} to {routes.max()}, the model has {self._experts}"
            raise RuleViolation(16, f"routes to experts {numbers}")
        self._parts.append(routes.astype(np.int16))

    def routes(self) -> npt.NDArray[np.int16]:
        """Return all routes so far, int16 (tokens, layers, top_k)."""
        return np.concatenate([np.empty((0, *self._shape), np.int16), *self._parts])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all routes so far; a reader sees the old file or the new one. Raises OSError."""
        with whole_file(path) as file:
            np.save(file, self.routes())


def load_trace(path: str | os.PathLike[str]) -> npt.NDArray[np.int16]:
    """Read routes, int16 (tokens, layers, top_k). Raises FileFormatError and OSError."""
    try:
        # Mapped, the file must hold what it promises: no memory is asked for on its word.
        mapped = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OverflowError) as error:
        raise FileFormatError(path, 0, f"no numpy array: {error}", hint=_WRITERS) from None
    if mapped.dtype != np.int16 or mapped.ndim != 3:
        found = f"{mapped.dtype} {mapped.shape}"
        raise FileFormatError(
            path, 0, f"{found}, a routing trace is int16 (tokens, layers, top-k)", hint=_WRITERS
        )
    routes = np.array(mapped)
    if not routes.size:
        raise FileFormatError(
            path, 0, f"a routing trace of no choices: {routes.shape}", hint=_WRITERS
        )
    order = np.sort(routes, axis=2)
    if order.min() < 0 or np.any(order[..., 1:] == order[..., :-1]):
        wrong = (order[..., 0] < 0) | np.any(order[..., 1:] == order[..., :-1], axis=2)
        token, layer = np.argwhere(wrong)[0]
        raise FileFormatError(
            path,
            None,
            f"token {token}, layer {layer}: experts {routes[token, layer].tolist()}, which must be "
            "different numbers from 0",
            hint=_WRITERS,
        )
    return routes


def forced_routes(
    path: str | os.PathLike[str], layers: int, experts: int, top_k: int, context: int
) -> npt.NDArray[np.int16]:
    """Read routes for a model to take in place of its routers': int16 (layers, context, top_k).

    A context of more tokens than the file has begins with the first one again. ConfigError for a
    file that cannot be read or is of another model, FileFormatError for one that holds no routes.
    """
    flag = f"--force-routes {os.fspath(path)}"
    fitting = f"--layers {layers} --experts {experts} --top-k {top_k}"
    if not experts:
        raise ConfigError(f"{flag}: this model has no experts", hint="leave it out")
    try:
        routes = load_trace(path)
    except OSError as error:
        raise ConfigError(
            f"{flag}: {error.strerror}", hint="check the name and the permissions"
        ) from None
    if routes.shape[1:] != (layers, top_k):
        raise ConfigError(
            f"{flag}: {routes.shape[2]} experts in each of {routes.shape[1]} layers, where the "
            f"model uses {top_k} in each of {layers}",
            hint=f"tools/make_routes.py {fitting} makes routes for it",
        )
    if routes.max() >= experts:
        token, layer, place = np.argwhere(routes >= experts)[0]
        raise ConfigError(
            f"{flag}: token {token}, layer {layer}: expert {routes[token, layer, place]}, where "
            f"the model has {experts}",
            hint=f"tools/make_routes.py {fitting} makes routes for it",
        )
    wanted = np.take(routes, np.arange(context) % len(routes), axis=0)
    return np.ascontiguousarray(wanted.swapaxes(0, 1))


def count_use(routes: npt.NDArray[np.integer], experts: int) -> npt.NDArray[np.int64]:
    """Return how often each expert was chosen: (layers, experts)."""
    layers = routes.shape[1]
    numbers = routes.astype(np.int64) + experts * np.arange(layers)[:, None]
    return np.bincount(numbers.reshape(-1), minlength=layers * experts).reshape(layers, experts)
