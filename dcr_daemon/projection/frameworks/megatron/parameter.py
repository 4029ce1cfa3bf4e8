"""One parameter of a whole Megatron model, before any process has a share of it, and where in the model it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.canonical.region import Region
from dcr_daemon.errors import UsageError
from dcr_daemon.projection.frameworks.megatron.splits import Split, SplitPart, Uneven, held

Part = Literal["first", "decoder", "last", "prediction"]  #: of the model; a pipeline's stages follow from it


@dataclass(frozen=True, slots=True)
class LayerPosition:
    part: Part
    layer: int = 0  #: of the whole model, from 0


@dataclass(frozen=True, slots=True)
class Target:
    """A canonical tensor; `base` is where the parameter's slice of it begins, for stacked experts."""

    spec: TensorSpec
    base: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """Attributes:
    names: what the parameter may be called, by the layer spec in use; `{layer}` and `{expert}` count within a process.
    kind: of tensor, for people.
    targets: canonical tensors, in the order in which the split counts them.
    expert: number in its layer; `None` for what is no expert's.
    add: constant added on export (zero-centred norms).
    """

    names: tuple[str, ...]
    kind: str
    place: LayerPosition
    split: Split
    targets: tuple[Target, ...]
    expert: int | None = None
    add: float = 0.0

    def held(self, rank: int, ranks: int) -> SplitPart:
        """The share of one tensor-parallel rank.

        Raises:
            UsageError: so many ranks cannot share it.
        """
        try:
            split = held(self.split, rank, ranks)
        except Uneven as error:
            what = "expert tensor" if self.expert is not None else "tensor"
            raise UsageError(
                f"{self.targets[0].spec.name} cannot be split {ranks} ways: {error}",
                hint=f"choose a degree of {what} parallelism that divides it",
            ) from None
        return SplitPart(split.shape, tuple(self._named(region) for region in split.regions))

    def _named(self, region: Region) -> Region:
        target = self.targets[int(region.name)]
        return replace(region, name=target.spec.name, dst=region.dst + target.base)

    def local_names(self, layer: int, expert: int | None) -> Iterable[str]:
        return (name.format(layer=layer, expert=expert) for name in self.names)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a block stands: what its names begin with, here and in the checkpoint."""

    prefixes: tuple[str, ...]
    canonical: str
    place: LayerPosition
    dtype: str

    def parameter(
        self,
        names: str,
        kind: str,
        split: Split,
        *targets: tuple[str, tuple[int, ...]],
        dtype: str = "",
        add: float = 0.0,
    ) -> Parameter:
        """A parameter that is whole canonical tensors, called in this site what `targets` say; `names` has alternatives
        with blanks between them."""
        specs = tuple(Target(TensorSpec(self.canonical + name, dtype or self.dtype, shape)) for name, shape in targets)
        return Parameter(self.names(names), kind, self.place, split, specs, add=add)

    def names(self, names: str) -> tuple[str, ...]:
        return tuple(prefix + name for prefix in self.prefixes for name in names.split())
