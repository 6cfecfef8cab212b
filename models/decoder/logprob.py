"""Log-probability and entropy of labelled tokens, with a vocabulary that is cut over tensor-parallel ranks.

One autograd function computes both from hidden states, in chunks of tokens whose logits take CHUNK_BYTES. Logits are
never kept; the backward pass computes them again. The caller passes only the labelled tokens.

N labelled tokens, h hidden size, V rows of the vocabulary on this rank, R of these rows without padding, C tokens of a
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHUNK_BYTES = 64 * 2**20
"""The bytes of one float32 [C, R] matrix of logits. At most two of them exist at a time, and a third in the weights'
dtype where that is not float32. Larger chunks read the weight less often; smaller chunks save memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The inputs of `linear_logprob` that are not tensors."""

    group: dist.ProcessGroup
    """The tensor-parallel ranks, in the order of their rows."""
    vocab_size: int
    """The size of the vocabulary. Rows after it are padding and are ignored."""
    temperature: float = 1.0
    """The temperature by which logits are divided."""


def linear_logprob(
    hidden_Nh: torch.Tensor, weight_Vh: torch.Tensor, labels_N: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([N] log-probabilities of the labels, [N] entropies), float32, the same on all ranks of the group.

    `hidden_Nh` must be the same on all ranks. Its gradient is this rank's part, and the caller sums the parts. A loss
    that does not use the entropies saves one matrix per chunk and one pass over it.
    """
    logprobs, entropy = _LinearLogprob.apply(hidden_Nh, weight_Vh, labels_N, head)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows_Rh = _real_rows(weight, head)
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy, log_sum = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for chunk in _chunks(hidden.shape[0], rows_Rh):
            logits = _logits(hidden[chunk], rows_Rh, head)
            peak = logits.amax(-1)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=head.group)
            logits.sub_(peak[:, None])
            column, mine = _label_columns(labels[chunk], weight, rows_Rh, head)
            label_logit = torch.where(mine, logits.gather(1, column).squeeze(1), 0.0)
            exp = logits.exp()
            sums = torch.stack([exp.sum(-1), logits.mul_(exp).sum(-1), label_logit])
            del logits, exp
            dist.all_reduce(sums, group=head.group)
            log_total = sums[0].log()
            logprobs[chunk] = sums[2] - log_total
            entropy[chunk] = log_total - sums[1] / sums[0]
            log_sum[chunk] = peak + log_total
        ctx.save_for_backward(hidden, weight, labels, log_sum, entropy)
        ctx.head = head
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_sum, entropy = ctx.saved_tensors
        rows_Rh = _real_rows(weight, ctx.head)
        has_entropy = bool(grad_entropy.any())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for chunk in _chunks(hidden.shape[0], rows_Rh):
            logp = _logits(hidden[chunk], rows_Rh, ctx.head).sub_(log_sum[chunk, None])
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            if has_entropy:
                probs = logp.exp()
                logp.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None]).add_(grad_logprobs[chunk, None])
                grad = probs.mul_(logp.neg_())
                del probs
            else:
                grad = logp.exp_().mul_(grad_logprobs[chunk, None].neg())
            del logp
            column, mine = _label_columns(labels[chunk], weight, rows_Rh, ctx.head)
            grad.scatter_add_(1, column, torch.where(mine, grad_logprobs[chunk], 0.0)[:, None])
            grad = _scaled(grad, ctx.head).to(hidden.dtype)
            grad_hidden[chunk] = grad @ rows_Rh
            _add_product(grad_weight[: len(rows_Rh)], grad, hidden[chunk])
            del grad
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(num_tokens: int, rows: torch.Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (torch.float32.itemsize * len(rows)))
    for begin in range(0, num_tokens, size):
        yield slice(begin, min(num_tokens, begin + size))


def _real_rows(weight: torch.Tensor, head: Head) -> torch.Tensor:
    """Return [R, h] this rank's rows without those that pad the vocabulary; a view."""
    num_real = head.vocab_size - _first_row(weight, head)
    if num_real < 1:
        raise ValueError(
            f"tensor-parallel rank {head.group.rank()} of {head.group.size()} holds none of the {head.vocab_size} rows "
            "of the vocabulary, only padding; choose a smaller parallel.tp"
        )
    return weight[:num_real]


def _first_row(weight: torch.Tensor, head: Head) -> int:
    return head.group.rank() * weight.shape[0]


def _logits(hidden: torch.Tensor, rows: torch.Tensor, head: Head) -> torch.Tensor:
    """Return [C, R] float32 logits."""
    return _scaled((hidden @ rows.t()).float(), head)


def _scaled(values: torch.Tensor, head: Head) -> torch.Tensor:
    """Return the values, divided by the temperature in place."""
    return values if head.temperature == 1.0 else values.div_(head.temperature)


def _label_columns(
    labels: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for the C labels of a chunk, ([C, 1] the label's column in this rank's `rows`, [C] True if it is there).

    A label of another rank gets a column of this one, which the caller masks."""
    column = labels - _first_row(weight, head)
    mine = (column >= 0) & (column < len(rows))
    return column.clamp(0, len(rows) - 1)[:, None], mine


def _add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add grad^T hidden to `total`, without a temporary matrix of the weight's size where all are float32."""
    if hidden.dtype is torch.float32:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden
