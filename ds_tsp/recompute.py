"""What a folded block keeps from forward to backward, and what it computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # out and log-sum-exp of one term's attention


@dataclass
class _Layer:
    """One call of a checkpointed layer: how often it has run, and what its blocks kept, by their place in a run."""

    runs: int = 0
    place: int = 0
    pairs: dict[int, list[Pair]] = field(default_factory=dict)
    graphs: dict[int, Graphs] = field(default_factory=dict)


class Recompute:
    """One model's policy, shared by its blocks.

    "selective": a block keeps its input, and each term's output and log-sum-exp of attention: projections are computed
    again, the quadratic kernel is not. "full": the input alone. "none": each term's graph, less the weights.

    Inside of a layer under gradient checkpointing, whose first run keeps nothing and whose second is differentiated:
    with "selective" and "none" the second run finds the attention of the first; with "none" it keeps its graphs.
    """

    def __init__(self, policy: str = "selective"):
        self.policy = policy
        self._layer: _Layer | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """`checkpoint(function, *args)`, whose second run of `function` finds what its first run kept."""
        if getattr(checkpoint, "tsp_recompute", None) is self:
            return checkpoint

        @functools.wraps(checkpoint)
        def remembering(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            layer = _Layer()

            def run(*args: Any, **kwargs: Any) -> Any:
                outer, self._layer = self._layer, layer
                layer.runs, layer.place = layer.runs + 1, 0
                try:
                    return function(*args, **kwargs)
                finally:
                    self._layer = outer

            return checkpoint(run, *args, **kwargs)

        remembering.tsp_recompute = self  # type: ignore[attr-defined]
        return remembering

    def begin(self, differentiated: bool, attention: bool) -> Kept:
        """For one forward of one block."""
        layer, place = self._layer, 0
        if layer is not None:
            place, layer.place = layer.place, layer.place + 1
        kept = Kept(layer, place)
        first = layer is not None and layer.runs == 1
        if layer is not None and not first:
            kept.replay = layer.pairs.pop(place, None)
        if self.policy == "none" and differentiated and not first:
            kept.graphs = Graphs()
        # Both runs of a checkpointed layer must save as many tensors, whatever the policy.
        saves = differentiated and (layer is not None or self.policy != "full")
        kept.for_second_run = first and self.policy != "full"
        if attention and kept.replay is None and (saves or kept.for_second_run):
            kept.tape = []
        return kept


@dataclass
class Kept:
    """What one forward of a block keeps. tape: pairs that it makes, replay: pairs that it was given."""

    layer: _Layer | None
    place: int
    tape: list[Pair] | None = None
    replay: list[Pair] | None = None
    graphs: Graphs | None = None
    for_second_run: bool = False

    def replayed(self, term: int) -> Pair | None:
        return self.replay[term] if self.replay else None

    def end(self) -> None:
        """The forward is done."""
        if self.layer is not None and self.tape is not None and self.for_second_run:
            self.layer.pairs[self.place] = self.tape
        if self.layer is not None and self.graphs is not None:
            self.layer.graphs[self.place], self.graphs = self.graphs, None

    def pairs(self) -> list[Tensor]:
        """The pairs in one list, for autograd to save: it knows when to drop them. They are forgotten here."""
        pairs, self.tape, self.replay = self.tape or self.replay or [], None, None
        return [x for pair in pairs for x in pair]

    def take_graphs(self) -> Graphs | None:
        """The graphs, once: a second backward through the same forward computes again."""
        if self.layer is not None:
            # Non-reentrant checkpointing differentiates the first run with the tensors of the second.
            return self.layer.graphs.pop(self.place, None)
        graphs, self.graphs = self.graphs, None
        return graphs


class Graphs:
    """The autograd graph of each term of one forward, without the weights: those pass by again in backward."""

    def __init__(self) -> None:
        self.terms: list[tuple[Any, list[Tensor]]] = []  # where y leaves the graph, and the leaves it came from
        self._weights: list[Tensor] = []

    def record(self, run: Callable[[], Tensor], leaves: list[Tensor], weights: list[Tensor]) -> Tensor:
        """y of the term `run`, whose graph with `leaves` is kept, but for what is a view of one of `weights`."""
        self._weights = weights
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            y = run()
        self.terms.append((torch.autograd.graph.get_gradient_edge(y), leaves))
        self._weights = []
        return y.detach()

    def differentiate(self, term: int, wanted: list[int], dy: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
        """Gradients of the leaves numbered `wanted`, with the weights at hand again; None where y has no such leaf."""
        (y, leaves), self._weights = self.terms[term], weights
        grads = torch.autograd.grad(y, [leaves[i] for i in wanted], dy, allow_unused=True)
        self._weights = []
        return list(grads)

    def _pack(self, tensor: Tensor) -> Any:
        storage, place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        for i, weight in enumerate(self._weights):  # several may lie in one storage
            offset = place - weight.storage_offset()
            if storage == weight.untyped_storage().data_ptr() and 0 <= offset < weight.numel():
                return i, tensor.size(), tensor.stride(), offset
        return tensor

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        i, size, stride, offset = packed
        return self._weights[i].as_strided(size, stride, self._weights[i].storage_offset() + offset)
