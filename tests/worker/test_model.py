"""The decoder: sizes, causality, the mixture against a naive form, deterministic initial values."""

import math

import pytest
import torch
import torch.nn.functional as F

from islandctl.config.recipe import ModelRecipe
from islandctl.worker.experts import ALIGNMENT, Experts, Layout, balance_loss, grouped_linear
from islandctl.worker.model import Decoder, initialise

MOE = ModelRecipe(kind="moe", layers=2, width=32, heads=4, kv_heads=2, hidden=24, experts=6, active_experts=2)
DENSE = ModelRecipe(kind="dense", layers=3, width=32, heads=4, hidden=48)


def made(recipe: ModelRecipe, seed: int = 0) -> Decoder:
    model = Decoder(recipe)
    initialise(model, seed)
    return model


def tokens(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_parameter_counts_follow_the_formula() -> None:
    attention = 32 * 32 * 2 + 2 * 32 * 16
    moe = 2 * (2 * 32 + attention + 32 * 6 + 3 * 6 * 32 * 24) + 2 * 256 * 32 + 32
    dense = 3 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 48) + 2 * 256 * 32 + 32
    assert sum(p.numel() for p in made(MOE).parameters()) == moe
    assert sum(p.numel() for p in made(DENSE).parameters()) == dense


def test_parameter_names_are_the_ones_that_packets_and_checkpoints_use() -> None:
    names = dict(made(MOE).named_parameters())
    assert {name for name in names if name.startswith("blocks.1.")} == {
        "blocks.1.attention_norm.weight",
        *(f"blocks.1.attention.{part}.weight" for part in "qkvo"),
        "blocks.1.ffn_norm.weight",
        "blocks.1.ffn.router.weight",
        *(f"blocks.1.ffn.{part}" for part in ("gate", "up", "down")),
    }
    assert {name for name in names if not name.startswith("blocks.")} == {
        "embedding.weight",
        "norm.weight",
        "head.weight",
    }


@pytest.mark.parametrize("recipe", [MOE, DENSE])
def test_a_position_does_not_see_what_comes_after_it(recipe: ModelRecipe) -> None:
    model, seen = made(recipe), tokens()
    changed = seen.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(seen)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_the_mixture_equals_a_loop_over_tokens_forwards_and_backwards() -> None:
    experts = Decoder(MOE).blocks[0].ffn
    assert isinstance(experts, Experts)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    x = torch.randn(2, 5, 32, requires_grad=True)
    y, (counts, _) = experts(x)
    y.square().sum().backward()
    got = {name: p.grad.clone() for name, p in experts.named_parameters() if p.grad is not None}
    got_x, x.grad = x.grad, None
    experts.zero_grad()

    rows = []
    for token in x.flatten(0, 1):
        probs = experts.router(token).softmax(-1)
        top, chosen = probs.topk(2)
        weights = top / top.sum()
        rows.append(
            sum(
                weight * ((F.silu(token @ experts.gate[e]) * (token @ experts.up[e])) @ experts.down[e])
                for weight, e in zip(weights, chosen.tolist(), strict=True)
            )
        )
    naive = torch.stack(rows).view_as(x)
    naive.square().sum().backward()
    torch.testing.assert_close(y, naive)
    torch.testing.assert_close(got_x, x.grad, rtol=1e-3, atol=1e-4)
    for name, parameter in experts.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-4)
    assert counts.sum() == 2 * 10


def test_the_fused_product_gives_the_same_also_for_an_expert_without_tokens() -> None:
    x, weight, counts = torch.randn(12, 16), torch.randn(4, 16, 8), torch.tensor([5, 0, 4, 3])
    torch.testing.assert_close(
        grouped_linear(x, weight, counts, fused=True), grouped_linear(x, weight, counts, fused=False)
    )


def test_the_padded_layout_for_the_fused_product_changes_nothing() -> None:
    experts = Decoder(MOE).blocks[0].ffn
    assert isinstance(experts, Experts)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    chosen = torch.tensor([[0, 3], [3, 5], [0, 1], [3, 0], [5, 3]]).flatten()  # two experts get nothing
    results = []
    for padded in (False, True):
        x = torch.linspace(-1, 1, 5 * 32).view(5, 32).requires_grad_()
        layout = Layout.of(chosen, 6, padded=padded)
        y = experts.mix(x, layout, fused=padded)
        y.square().sum().backward()
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(p.grad for p in (experts.gate, experts.up, experts.down))])
        experts.zero_grad()
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-4)
    assert layout.counts_E.sum() == len(layout.source_M) == 56
    assert (layout.counts_E % ALIGNMENT == 0).all()


def test_balance_loss_is_one_a_block_when_even_and_grows_when_not() -> None:
    even = balance_loss(torch.full((3, 4), 8.0), torch.full((3, 4), 4.0), 16)
    assert even.item() == pytest.approx(3.0)
    one_expert = torch.tensor([[16.0, 0, 0, 0]])
    assert balance_loss(one_expert, one_expert, 16).item() == pytest.approx(4.0)
    empty = torch.zeros(0, 0)
    assert balance_loss(empty, empty, 16).item() == 0.0


def test_initial_values_depend_on_the_seed_alone() -> None:
    first, again, other = made(MOE), made(MOE), made(MOE, seed=1)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert not torch.equal(first.head.weight, other.head.weight)
    gate = first.get_parameter("blocks.0.ffn.gate")
    assert not torch.equal(gate[0], gate[1])
    assert gate.std().item() == pytest.approx(1 / math.sqrt(32), rel=0.1)


def test_an_untrained_model_knows_nothing_yet() -> None:
    logits, _ = made(MOE)(tokens(4, 32))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(4, 32).flatten())
    assert math.log(256) - 0.1 < loss.item() < math.log(256) + 1.5


def test_bfloat16_arithmetic_leaves_the_routers_exact() -> None:
    model, seen = made(MOE), tokens()
    exact = model(seen)[1].counts_LE[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, routing = model(seen)
    assert routing.probs_LE.dtype == torch.float32
    assert torch.isfinite(logits).all()
    assert (routing.counts_LE[0] - exact).abs().sum() <= 8
