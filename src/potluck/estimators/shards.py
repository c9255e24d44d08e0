"""Shards: this rank's part of the data, and what all ranks must know of each other's parts.

The checks of scikit-learn run on each shard. Their errors travel as facts, so that all ranks raise
the same error and their group lives on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import check_array, check_random_state, gen_batches

from potluck._core.context import DistributedContext
from potluck.training.sampler import Holding, holding_of, warn_of_equal_samples
from potluck.training.transfer import gather_states

Array = NDArray[Any]


class OnShards:
    """The base of all estimators here, before scikit-learn's estimator: no sparse samples, no
    several outputs. Copies work in the same group; pickled ones are without their context, which
    belongs to this process."""

    ctx: DistributedContext | None
    own_parameters: ClassVar[tuple[str, ...]] = ("ctx",)
    """The parameters that the estimator of scikit-learn does not know."""

    def _keep(self, given: dict[str, Any], **fixed: Any) -> None:
        """Keep the arguments of ``__init__``, which are ``given`` as its ``locals()``; ``fixed``
        are options of scikit-learn's estimator that have one value here."""
        own = {name: given[name] for name in self.own_parameters}
        super().__init__(**{k: v for k, v in given.items() if k not in {"self", *own}}, **fixed)
        for name, value in own.items():
            setattr(self, name, value)

    def __copy__(self) -> Self:
        return self._with(self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with(copy.deepcopy(self.__dict__, memo))

    def _with(self, attributes: Mapping[str, Any]) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(attributes)
        return made

    def __getstate__(self) -> Any:
        return {**super().__getstate__(), "ctx": None}  # type: ignore[dict-item]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.sparse = False
        tags.target_tags.multi_output = False
        if tags.classifier_tags is not None:
            tags.classifier_tags.multi_label = False
        return tags


@dataclass
class Shard:
    """One rank's samples: ``X`` of shape (n, features), with ``y`` and ``weights`` of length n.

    ``X`` has no rows on a rank without samples. ``facts`` are further values for the other ranks.
    """

    X: Array
    y: Array | None = None
    weights: Array | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def check(
    ctx: DistributedContext, model: Any, make: Callable[[], Shard]
) -> tuple[Shard | None, dict[str, Any]]:
    """Run the checks of ``model``, and make its shard. Returns the shard, and the facts that
    ``compare`` sends to the other ranks.

    An error, perhaps on this rank only, becomes an error of all ranks; then there is no shard. In a
    world of one it is raised as it is.
    """
    parameters = {
        name: _plain(value)
        for name, value in model.get_params(deep=False).items()
        if name not in _MAY_DIFFER
    }
    try:
        shard = make()
        _check_values(model)
    except Exception as error:
        if ctx.world_size == 1:
            raise
        kinds = (ValueError, TypeError)
        kind = next((each.__name__ for each in kinds if isinstance(error, each)), "")
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        return None, {"error": [kind or "ValueError", text]}
    num, features = shard.X.shape
    columns = [each for each in (shard.X, shard.y) if each is not None]
    warns = getattr(model, "warns_of_equal_shards", False)
    return shard, {
        "error": None,
        "num": num,
        "features": features,
        "dtype": shard.X.dtype.name,
        "weight": float(num if shard.weights is None else shard.weights.sum()),
        "parameters": parameters,
        "held": holding_of(num, columns).row if warns else None,
        "names": _column_names(model),
        **shard.facts,
    }


def _column_names(estimator: Any) -> list[str] | None:
    """The names of the features that scikit-learn's checks found in a data frame."""
    names = getattr(estimator, "feature_names_in_", None)
    return None if names is None else [str(name) for name in names]


def _check_values(model: Any) -> None:
    """Checks that scikit-learn itself makes only while it fits. ValueError or TypeError."""
    if hasattr(model, "random_state"):
        check_random_state(model.random_state)
    factors = getattr(model, "class_weight", None)
    for label, factor in factors.items() if isinstance(factors, Mapping) else ():
        if not isinstance(factor, Real) or not 0 <= float(factor) < np.inf:
            raise ValueError(
                f"class_weight of {label!r} is {factor!r:.60}; it must be 0 or more, and finite"
            )


def random_of(model: Any) -> np.random.RandomState:
    """The random numbers of ``model``; others if ``check`` has refused its seed, on this rank only
    perhaps: then no fit follows."""
    try:
        found: np.random.RandomState = check_random_state(model.random_state)
    except ValueError:
        found = np.random.RandomState(0)
    return found


def seed_of(model: Any) -> int:
    """The seed of a fit: that of ``model``, or one that is drawn from its random numbers."""
    seed = model.random_state
    return int(seed if isinstance(seed, int | np.integer) else random_of(model).randint(2**31 - 1))


_MAY_DIFFER = {"ctx", "random_state", "n_jobs", "verbose", "copy", "copy_x", "copy_X"}
"""Parameters of estimators that change nothing for other ranks; the seed is that of rank 0."""


def _plain(value: Any) -> str:
    """Equal texts for equal parameters. Of what has no short text, such as an array, the type.

    NumPy's numbers differ from Python's, since arithmetic with them may give other dtypes."""
    if isinstance(value, str | Real | np.bool_ | None):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        pairs = sorted(f"{_plain(key)}: {_plain(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    return type(value).__name__


def compare(
    ctx: DistributedContext, facts: dict[str, Any], *, min_samples: int, name: str
) -> tuple[list[dict[str, Any]], Exception | None]:
    """Gather all ranks' ``facts``, which ``check`` returned.

    Also returns the error that every rank must raise, None if the shards and the parameters of the
    estimators fit together. A collective call of two all_gathers.
    """
    rows = gather_states(ctx, facts)
    problem = _error_of_a_rank(ctx, rows) or _difference(ctx, rows)
    if problem is None and ctx.is_master and facts["held"] is not None:
        warn_of_equal_samples([Holding.of(row["held"]) for row in rows], "")
    total = sum(row["num"] for row in rows) if problem is None else 0
    if problem is None and total < min_samples:
        shape = (total, rows[0]["features"])
        problem = ValueError(
            f"Found array with {total} sample(s) (shape={shape}) while a minimum of {min_samples} "
            f"is required by {name}."
        )
    if problem is None and not sum(row["weight"] for row in rows):
        problem = ValueError("Sample weights must contain at least one non-zero number.")
    return rows, problem


def weights_of(given: Any, X: Array) -> Array:
    """The weights of the samples ``X``, of its dtype and shape (n,); ones if ``given`` is None."""
    if given is None or isinstance(given, Real):
        return np.full(len(X), 1.0 if given is None else given, X.dtype)
    weights = check_array(
        given, dtype=X.dtype, ensure_2d=False, ensure_min_samples=0, input_name="sample_weight"
    )
    if weights.shape != (len(X),):
        raise ValueError(f"sample_weight.shape == {weights.shape}, expected {(len(X),)}!")
    return np.ascontiguousarray(weights)


def totals_of(numbers: Array, weights: Array, count: int) -> Array:
    """The weights of the samples of each number, float64 of shape (count,)."""
    found = np.bincount(numbers, weights=weights, minlength=count)
    return found.astype(np.float64)  # without samples NumPy gives integers


def common_dtype(rows: list[dict[str, Any]]) -> np.dtype[Any]:
    """The dtype in which all ranks compute: float32 only if all shards are float32."""
    return np.result_type(*(row["dtype"] for row in rows))


def _error_of_a_rank(ctx: DistributedContext, rows: list[dict[str, Any]]) -> Exception | None:
    for rank, row in enumerate(rows):
        if row["error"] is not None:
            kind, text = row["error"]
            error = TypeError if kind == "TypeError" else ValueError
            return error(f"the shard of {ctx.group.describe(rank)}: {text}")
    return None


def _difference(ctx: DistributedContext, rows: list[dict[str, Any]]) -> Exception | None:
    first = rows[0]
    for rank, row in enumerate(rows):
        if row["features"] != first["features"]:
            return ValueError(
                f"the shard of {ctx.group.describe(0)} has {first['features']} features, that of "
                f"{ctx.group.describe(rank)} has {row['features']}: give every rank the same "
                "features in the same order"
            )
        if row.get("names") != first.get("names"):
            return ValueError(
                f"the columns of {ctx.group.describe(0)} are {first.get('names')}, those of "
                f"{ctx.group.describe(rank)} are {row.get('names')}: give every rank the same "
                "features in the same order"
            )
        for name, value in first["parameters"].items():
            if (other := row["parameters"].get(name, value)) != value:
                return ValueError(
                    f"the ranks have different values of {name}: give every rank the same "
                    f"({ctx.group.describe(0)} has {value[:100]}, {ctx.group.describe(rank)} has "
                    f"{other[:100]})"
                )
    return None


BLOCK = 1 << 16
"""Rows that are worked on at once, so that temporary arrays stay in the cache."""


_MOMENTS_VALUES = 1 << 17


def blocks(num: int, size: int = BLOCK) -> list[slice]:
    """Slices that cover ``num`` rows."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of each feature, all float64 of shape (features,).

    ``num`` counts samples, or their weights; it differs between features if values are missing.
    """

    num: Array
    mean: Array
    squares: Array

    def merged(self, other: Moments) -> Moments:
        """The moments of both samples together (Chan, Golub and LeVeque 1983, "Algorithms for
        computing the sample variance", formula 2.1)."""
        num = self.num + other.num
        fraction = np.divide(other.num, num, out=np.zeros_like(num), where=num > 0)
        delta = other.mean - self.mean
        mean = self.mean + delta * fraction
        squares = self.squares + other.squares + delta**2 * self.num * fraction
        return Moments(num, mean, squares)

    def packed(self) -> Array:
        """One array of shape (3, features)."""
        return np.stack([self.num, self.mean, self.squares])


def moments(X: Array, weights: Array | None = None) -> Moments:
    """The moments of a shard without missing values: of blocks that fit in the cache, merged."""
    num, features = X.shape
    found = Moments(np.zeros(features), np.zeros(features), np.zeros(features))
    for rows in blocks(num, max(1, _MOMENTS_VALUES // max(1, features))):
        away = X[rows].astype(np.float64)
        some = np.ones(len(away)) if weights is None else weights[rows].astype(np.float64)
        total = some.sum()
        mean = some @ away / total if total else np.zeros(features)
        away -= mean
        rest = some @ away  # the rounding of the mean
        away *= away
        squares = some @ away
        if total:
            mean += rest / total
            squares -= rest**2 / total
        found = found.merged(Moments(np.full(features, total), mean, squares))
    return found


def merge(parts: list[Array]) -> Moments:
    """The moments of all shards, given as ``packed`` ones in rank order."""
    found = [Moments(*part) for part in parts]
    whole = found[0]
    for part in found[1:]:
        whole = whole.merged(part)
    return whole


@dataclass(frozen=True)
class Place:
    """Where this rank's samples are among those of all ranks, in rank order.

    ``start`` is the number of the first, ``own`` counts this rank's, ``num`` those of all ranks.
    """

    start: int
    own: int
    num: int

    def batches(self, order: Array, size: int) -> Iterator[tuple[int, Array]]:
        """Each mini-batch of ``size`` samples in ``order``: its size, and the rows of this rank's
        samples in it. ``order`` has the numbers of samples of all ranks."""
        for batch in gen_batches(len(order), size):
            yield batch.stop - batch.start, self.rows(order[batch])[1]

    def rows(self, numbers: Array) -> tuple[Array, Array]:
        """Which of the samples ``numbers`` this rank has: their positions in ``numbers``, and their
        rows in the shard."""
        rows = numbers - self.start
        positions = np.flatnonzero((rows >= 0) & (rows < self.own))
        return positions, rows[positions]


def place_of(ctx: DistributedContext, own: int) -> Place:
    """The place of this rank's ``own`` samples. One all_gather of 8 bytes per rank."""
    counts = ctx.all_gather(np.array([own], np.int64)).ravel()
    return Place(int(counts[: ctx.rank].sum()), own, int(counts.sum()))


def saved(random: Any) -> dict[str, Any]:
    """The state of a RandomState, as entries of a fit's state."""
    name, keys, position, _, _ = random.get_state()
    assert name == "MT19937"
    return {"keys": keys, "position": int(position)}


def restored(state: dict[str, Any]) -> Any:
    """The RandomState that was ``saved``."""
    random = np.random.RandomState()
    random.set_state(("MT19937", state["keys"], state["position"], 0, 0.0))
    return random
