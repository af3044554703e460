"""The cut of a batch, without processes: which tensors are cut, along which dim, and what is known before."""

from typing import Any

import pytest
import torch

from ds_tsp.data import MARK, cut, recognise, shard_batch, shifted
from ds_tsp.layout import SequenceLayout
from ds_tsp.mesh import Mesh

B, S = 2, 13


def mesh_of(size: int, rank: int = 0, layout: str = "zigzag") -> Mesh:
    alone = {"dp_size": 1, "dp_rank": 0, "dp_group": None, "dp_ranks": (rank,)}
    return Mesh(size, rank, None, tuple(range(size)), layout=layout, **alone)


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.arange(B * S).view(B, S)
    return {"input_ids": ids, "labels": ids.clone(), **more}


PER_TOKEN = {
    "token_type_ids": torch.arange(B * S).view(B, S) % 3,
    "loss_weights": torch.linspace(0, 1, B * S).view(B, S),
    "extra": torch.arange(B * S * 4).view(B, S, 4),
}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_per_token_tensors_are_cut_alike(size: int, layout: str) -> None:
    for rank in range(size):
        positions = SequenceLayout(S, size, layout).positions(rank)
        real = positions < S
        got = cut(batch(**PER_TOKEN), mesh_of(size, rank, layout)).arguments
        for name, value in batch(**PER_TOKEN).items():
            if name != "labels":
                assert torch.equal(got[name][:, real], value[:, positions[real]]), name
        assert got["position_ids"].tolist() == [positions.clamp(max=S - 1).tolist()]


def test_labels_are_shifted_before_the_cut() -> None:
    for rank in range(3):
        mesh = mesh_of(3, rank)
        got, positions = cut(batch(), mesh), SequenceLayout(S, 3).positions(rank)
        whole = torch.nn.functional.pad(shifted(batch()["labels"]), (0, 18 - S), value=-100)
        assert torch.equal(got.shift_labels, whole[:, positions])  # type: ignore[arg-type]
        given = cut({**batch(), "shift_labels": shifted(batch()["labels"])}, mesh)
        assert torch.equal(given.shift_labels, got.shift_labels) and "shift_labels" not in given.arguments  # type: ignore


def test_what_is_not_per_token_is_left_alone() -> None:
    mesh, whole = mesh_of(2), torch.arange(B)
    got = cut(batch(row=whole, scale=0.5, none=None, table=torch.ones(S, B)), mesh).arguments
    assert torch.equal(got["row"], whole) and got["scale"] == 0.5 and "none" not in got
    assert got["table"].shape == (S, B)


@pytest.mark.parametrize("shape", [(1, S), (B, S), (3, B, S), (4, 1, S)])
def test_positions_are_cut_on_their_last_dim(shape: tuple[int, ...]) -> None:
    positions = torch.arange(S).expand(shape) + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))
    mesh = mesh_of(2, 1)
    index = SequenceLayout(S, 2).positions(1).clamp(max=S - 1)
    got = cut(batch(position_ids=positions), mesh).arguments["position_ids"]
    assert torch.equal(got, positions[..., index])


def test_early_cut_is_recognised_and_moves() -> None:
    mesh = mesh_of(2, 1)
    early = shard_batch(batch(), mesh)
    assert (
        shard_batch(early, mesh) is early and early[MARK].to(torch.float32).arguments["input_ids"].is_floating_point()
    )
    known = recognise({**early, "more": 1}, mesh)
    assert not known.problem and known.arguments["more"] == 1 and MARK not in known.arguments
    without = {k: v for k, v in early.items() if k != "labels"}
    assert recognise(without, mesh).shift_labels is None
    with pytest.raises(ValueError, match=r"was cut for .* \(2, 1, 'zigzag'\), but is given to \(2, 0, 'zigzag'\)"):
        shard_batch(early, mesh_of(2, 0))
    assert "was cut for" in recognise(dict(early), mesh_of(4, 1)).problem


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"inputs_embeds": torch.ones(B, S, 4).requires_grad_(), "input_ids": None}, "require a gradient"),
        ({"input_ids": torch.ones(S, dtype=torch.int64)}, r"got shape \(13,\)"),
        ({"input_ids": [[1, 2]]}, "needs a tensor input_ids"),
        ({"seq_idx": torch.zeros(B, S - 1)}, r"seq_idx has shape \(2, 12\)"),
        ({"attention_mask": torch.ones(B, 1, S, S)}, r"attention_mask has shape \(2, 1, 13, 13\)"),
        ({"position_ids": torch.arange(S + 1)[None]}, "but there are 13 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 26])}, "but there are 2 rows"),
    ],
)
def test_wrong_structure_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(batch(**wrong), mesh_of(2))
