"""Log-probability and entropy of labelled tokens under a vocabulary cut over tensor-parallel ranks.

One autograd function from hidden states to both, in chunks of tokens: logits are never kept, the backward pass
computes them again. Leaves out which tokens are labelled; only those come in.

N labelled tokens, h hidden size, V this rank's rows of the vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the function must know besides tensors."""

    group: dist.ProcessGroup
    """Tensor-parallel ranks, in the order of their rows."""
    vocab_size: int
    """Rows beyond it, which pad the vocabulary to a multiple of the ranks, take no part."""
    temperature: float = 1.0
    """Logits are divided by it."""


def linear_logprob(
    hidden_Nh: torch.Tensor, weight_Vh: torch.Tensor, labels_N: torch.Tensor, head: Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] log-probabilities of the labels, [N] entropies), float32, the same on all ranks of the group.

    `hidden_Nh` must be the same on all ranks; its gradient is this rank's part, for the caller to sum.
    """
    logprobs, entropy = _LinearLogprob.apply(hidden_Nh, weight_Vh, labels_N, head)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy, log_sum = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for chunk in _chunks(hidden.shape[0]):
            logits = _logits(hidden[chunk], weight, head)
            peak = logits.amax(-1)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=head.group)
            logits.sub_(peak[:, None])
            column, mine = _columns(labels[chunk], weight, head)
            label_logit = torch.where(mine, logits.gather(1, column).squeeze(1), 0.0)
            exp = logits.exp()
            moment = (exp * logits.masked_fill_(exp == 0, 0.0)).sum(-1)
            sums = torch.stack([exp.sum(-1), moment, label_logit])
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
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for chunk in _chunks(hidden.shape[0]):
            logp = _logits(hidden[chunk], weight, ctx.head).sub_(log_sum[chunk, None])
            probs = logp.exp()
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            logp.masked_fill_(probs == 0, 0.0).add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None])
            grad = probs.mul_(logp.add_(grad_logprobs[chunk, None]).neg_())
            column, mine = _columns(labels[chunk], weight, ctx.head)
            grad.scatter_add_(1, column, torch.where(mine, grad_logprobs[chunk], 0.0)[:, None])
            grad = grad.div_(ctx.head.temperature).to(hidden.dtype)
            grad_hidden[chunk] = grad @ weight
            grad_weight += (grad.t() @ hidden[chunk]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(begin, begin + CHUNK_TOKENS) for begin in range(0, num_tokens, CHUNK_TOKENS)]


def _first_row(weight: torch.Tensor, head: Head) -> int:
    return head.group.rank() * weight.shape[0]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, head: Head) -> torch.Tensor:
    """[C, V] float32; -inf in the rows that pad the vocabulary."""
    logits = (hidden @ weight.t()).float().div_(head.temperature)
    num_real = max(0, min(weight.shape[0], head.vocab_size - _first_row(weight, head)))
    logits[:, num_real:] = float("-inf")
    return logits


def _columns(labels: torch.Tensor, weight: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """([C, 1] column of each label on this rank, clamped; [C] is it really here)."""
    column = labels - _first_row(weight, head)
    mine = (column >= 0) & (column < weight.shape[0])
    return column.clamp(0, weight.shape[0] - 1)[:, None], mine
