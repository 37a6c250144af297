"""Kernels of our own have the bits of what they replace, or those of the same sums in every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from elastic.config.sections import Optim
from elastic.engine.optim.adamw import update
from elastic.engine.optim.base import Hyper, Part
from storage.slices import Slice

if TYPE_CHECKING:
    from elastic.kernels.attention import Mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 5


def state(elements: int) -> list[Tensor]:
    """Returns values and both moments of a parameter."""
    values, average = torch.randn(2, elements, device="cuda")
    return [values, average * 1e-3, torch.rand(elements, device="cuda") * 1e-5]


def updated(by: str, elements: int, clip: float) -> list[Tensor]:
    """Returns the state after a few updates, by torch's functions or by the kernel."""
    from elastic.kernels import triton_kernels as kernels

    torch.manual_seed(0)
    values, average, square = state(elements)
    for step in range(1, STEPS + 1):
        grad, tokens, lr, decay = (
            torch.randn(elements, device="cuda") * 100 * step,
            float(8191 * step),
            3e-4 / step,
            0.1 * (step % 2),
        )
        if by == "kernel":
            bias1, bias2 = 1 - 0.9 ** float(step), 1 - 0.95 ** float(step)
            kernels.adamw_(
                values,
                grad,
                average,
                square,
                kernels.AdamW(tokens, clip, 1 - lr * decay, 0.9, 0.95, lr / bias1, bias2**0.5, 1e-8),
            )
            continue
        torch._foreach_div_([grad], tokens)
        if clip != 1.0:
            torch._foreach_mul_([grad], clip)
        settings = {
            "beta1": 0.9,
            "beta2": 0.95,
            "lr": lr,
            "weight_decay": decay,
            "eps": 1e-8,
            "maximize": False,
        }
        counted = [torch.tensor(float(step - 1))]
        adamw([values], [grad], [average], [square], [], counted, foreach=True, amsgrad=False, **settings)  # type: ignore[arg-type]
    return [values, average, square]


@pytest.mark.parametrize("clip", [1.0, 0.37])
@pytest.mark.parametrize("elements", [1, 7, 1023, 1025, 1 << 20])
def test_an_update_in_one_pass_has_the_bits_of_torch_s(elements: int, clip: float) -> None:
    """The control: another clipping has other bits."""
    expected = updated("torch", elements, clip)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(updated("kernel", elements, clip), expected, strict=True)
    )
    assert not torch.equal(updated("kernel", elements, 0.9)[0], expected[0])


def part_of(case: str) -> Part:
    """Returns a part with moments in bfloat16: all of a tensor, rows of it in two boxes, columns, or the
    middle of three dimensions.
    """
    boxes, shape = {
        "whole": ([((0, 0), (300, 1000))], (300, 1000)),
        "rows": ([((3, 0), (20, 1000)), ((100, 0), (300, 1000))], (300, 1000)),
        "columns": ([((10, 250), (300, 500))], (300, 1000)),
        "middle": ([((1, 32, 0), (3, 64, 100))], (4, 96, 100)),
        "vector": ([((5,), (5000,))], (5001,)),
    }[case]
    torch.manual_seed(0)
    rows = sum(stop[0] - start[0] for start, stop in boxes)
    own = (rows, *(b - a for a, b in zip(boxes[0][0][1:], boxes[0][1][1:], strict=True)))
    values, average, square = (torch.randn(own, device="cuda") for _ in range(3))
    moments = {"exp_avg": average.mul_(1e-3).bfloat16(), "exp_avg_sq": square.abs_().mul_(1e-5).bfloat16()}
    return Part(
        "w",
        tuple(Slice("w", "parameter", start, stop) for start, stop in boxes),
        values,
        moments,
        True,
        shape,
        True,
    )


@pytest.mark.parametrize("case", ["whole", "rows", "columns", "middle", "vector"])
def test_moments_are_rounded_in_one_pass_as_in_many(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: in another step the bits are others."""

    def moments(step: int, by_kernel: bool) -> list[Tensor]:
        part = part_of(case)
        grad = torch.randn(part.values.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        hyper = Hyper(
            Optim(lr=3e-4), 3e-4, torch.tensor(float(3)), {}, 0.1, divide=3.0, clip=0.5, seed=5, step=step
        )
        with monkeypatch.context() as patch:
            if not by_kernel:
                patch.setattr("elastic.engine.optim.adamw.lines", lambda part: None)
            update([part], [grad], hyper)
        return [part.values, *part.moments.values()]

    expected = moments(4, by_kernel=False)
    assert all(map(torch.equal, moments(4, by_kernel=True), expected))
    assert not torch.equal(moments(5, by_kernel=True)[1], expected[1])


@pytest.mark.parametrize(
    ("rows", "columns"), [(5, 2), (7, 3), (33, 1000), (2048, 8192), (128_256, 2048), (4, 32_768)]
)
def test_squares_are_added_by_the_tree_of_the_norm(rows: int, columns: int) -> None:
    """The control: torch's own sum has other bits, if there is anything to add in another order."""
    from elastic.engine import norm
    from elastic.kernels import triton_kernels as kernels

    torch.manual_seed(0)
    values = torch.randn(rows, columns, device="cuda") * torch.rand(rows, 1, device="cuda")
    sums = torch.zeros(rows, dtype=torch.float64, device="cuda")
    kernels.squares_(values, sums)
    squares = values.square()
    assert torch.equal(sums, norm.tree_sum(squares).double())
    assert columns <= 3 or not torch.equal(sums, squares.sum(-1).double())


def test_the_fused_loss_repeats_bit_for_bit_and_is_torch_s() -> None:
    """It has 8,192 tokens and 128,256 words in bf16, some masked.  The control: one target more that is
    masked changes the sum.
    """
    from elastic.kernels.cross_entropy import cross_entropy

    torch.manual_seed(0)
    hidden = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(128_256, 256, device="cuda") * 0.05).bfloat16().requires_grad_()
    targets = torch.randint(-10_000, 128_256, (8192,), device="cuda").clamp_min(-1)

    def found() -> list[Tensor]:
        loss = cross_entropy(hidden, weight, targets)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    first, again = found(), found()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    logits = (hidden @ weight.T).float()
    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    expected = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
    for mine, theirs in zip(first, expected, strict=True):
        assert (mine.double() - theirs.double()).norm() < 0.01 * theirs.double().norm()
    targets[int(targets.argmax())] = -1
    assert not torch.equal(found()[0], first[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("seq", "dim", "heads"), [(2048, 64, 32), (8192, 128, 8)])
def test_flash_attention_4_repeats_bit_for_bit(
    seq: int, dim: int, heads: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in bf16, beside plain attention in float64.  The control: not told of an order, it has other
    bits.
    """
    pytest.importorskip("flash_attn.cute", exc_type=ImportError)
    from elastic.kernels.attention import Kernel, causal_attention, open_flash_4

    open_flash_4()
    torch.compiler.reset()  # other numbers of heads are another model
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, n, seq, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, 2, 2)
    )
    grad = torch.randn_like(q)
    attend = torch.compile(causal_attention, fullgraph=True) if compiled else causal_attention

    def found() -> list[Tensor]:
        out = attend(q, k, v, Kernel.FLASH_4, 0.0)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        first = found()
        assert all(all(map(torch.equal, first, found())) for _ in range(20))
        if not compiled:
            with monkeypatch.context() as patch:
                patch.setattr(
                    "elastic.kernels.attention.torch.are_deterministic_algorithms_enabled", lambda: False
                )
                assert not all(all(map(torch.equal, found(), found())) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(before)
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    out = causal_attention(*wide, None, 0.0)
    for mine, right in zip(
        first, [out.detach(), *torch.autograd.grad(out, wide, grad.double())], strict=True
    ):
        assert (mine.double() - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize(("seq", "dim", "heads"), [(1000, 64, 2), (2048, 128, 8), (256, 32, 1)])
def test_flex_attention_within_documents_is_the_default_with_a_mask(seq: int, dim: int, heads: int) -> None:
    """It is in bf16, beside the default in float64.  It repeats bit for bit, and new documents compile
    nothing anew.

    The controls: attention over the whole sample is far away, and so is that of other documents.
    """
    from elastic.kernels.attention import Kernel, attention_mask, causal_attention, document_mask

    compiled = torch.compile(causal_attention, fullgraph=True)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, h, seq, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (8, heads, heads)
    )
    weight = torch.randn_like(q)

    def found(by: Callable[..., Tensor], mask: Mask, *inputs: Tensor) -> list[Tensor]:
        out = by(*inputs, mask, 0.0)
        return [out.detach(), *torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)]

    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    torch._dynamo.utils.counters.clear()
    others: list[list[Tensor]] = [found(causal_attention, None, *wide)]
    for chance in (8 / seq, 0.1, 1.0):  # of a border
        documents = (torch.rand(2, seq, device="cuda") < chance).cumsum(1, dtype=torch.int32)
        first, again = (found(compiled, document_mask(documents), q, k, v) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        expected = found(causal_attention, attention_mask(documents, documents, Kernel.TORCH), *wide)
        for number, (mine, theirs) in enumerate(zip(first, expected, strict=True)):
            # queries and keys have no gradient where each token is alone
            near = 0.02 * theirs.norm() + 0.005 * weight.double().norm()
            assert (
                (mine.double() - theirs).norm()
                < near
                < 0.5 * min((other[number] - theirs).norm() for other in others)
            )
        others.append(expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_masks_of_documents_are_made_without_waiting_for_the_device() -> None:
    """The control: reading a number of them waits."""
    from elastic.kernels.attention import Kernel, attention_mask, document_mask, positions_of

    documents = (torch.rand(2, 1000, device="cuda") < 0.01).cumsum(1, dtype=torch.int32)
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        document_mask(documents)
        positions_of(documents)
        attention_mask(documents, documents, Kernel.TORCH)
        with pytest.raises(RuntimeError, match="synchronizing"):
            documents.max().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["loss", "RMSNorm", "SwiGLU", "block"])
def test_f7_fused_operations_are_measured_beside_plain_ones(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """F7: output and gradients are the plain ones to 1e-5 in float32.  The speed-up in bf16 is told with the
    device, and not asserted.
    """
    from tests.benchmarks.fused import measured, pairs

    low = pairs("tiny", "cuda", torch.float32)[name]
    for fused, plain in zip(low.results(low.fused), low.results(low.plain), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    large = pairs("large", "cuda", torch.bfloat16)[name]
    fused_ms, plain_ms = measured(large, "cuda")
    told = (
        f"{torch.cuda.get_device_name(0)}: {name} fused {fused_ms:.3f} ms, plain {plain_ms:.3f} ms, "
        f"{plain_ms / fused_ms:.2f} times as fast"
    )
    record_property("speed_up", told)
    print(told)


def test_a_target_beyond_the_vocabulary_reads_no_other_memory() -> None:
    """Its loss is NaN, and so is its gradient, so that no step applies it; other rows are as they were (torch
    has the right values).
    """
    from elastic.kernels.triton_kernels import cross_entropy_

    logits = torch.randn(4, 300, device="cuda")
    targets = torch.tensor([7, 300, -1, 10**6], device="cuda")
    expected = torch.nn.functional.cross_entropy(logits[:1], targets[:1], reduction="none")
    losses = torch.empty(4, device="cuda")
    cross_entropy_(logits, targets, losses)
    assert torch.isnan(losses).tolist() == [False, True, False, True]
    assert torch.isnan(logits).any(1).tolist() == [False, True, False, True]
    torch.testing.assert_close(losses[:1], expected)
    assert losses[2] == 0
