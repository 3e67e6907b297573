"""Qwen3MoE in plain torch, made for training on a few CPU cores; knows no file and no corpus.

The arithmetic is that of the published architecture: RMSNorm, grouped-query attention with a norm
per head before rotary positions (halves rotated), a router with softmax over all experts, the top k
renormalised, and SiLU-gated experts. All experts of a layer are stacked in one parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of the model; the defaults are those of the demo model."""

    num_tokens: int
    num_layers: int = 4
    hidden: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    experts_used: int = 4
    expert_ff: int = 256
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    context_tokens: int = 2048
    block_ff: int = 512
    """Of the block that guesses a further token."""


class _Reorder(torch.autograd.Function):
    """Rows in another order; unlike plain indexing its gradient is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # noqa: ANN401 (torch gives an untyped context)
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 (as above)
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class Attention(nn.Module):
    """Grouped-query attention with a norm per head and rotary positions."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        q_width, kv_width = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        self.q = nn.Linear(dims.hidden, q_width, bias=False)
        self.k = nn.Linear(dims.hidden, kv_width, bias=False)
        self.v = nn.Linear(dims.hidden, kv_width, bias=False)
        self.output = nn.Linear(q_width, dims.hidden, bias=False)
        self.q_norm = nn.RMSNorm(dims.head_dim, eps=dims.norm_eps)
        self.k_norm = nn.RMSNorm(dims.head_dim, eps=dims.norm_eps)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Map x [B, T, D] with rotary angles [T, head_dim] to [B, T, D]."""
        dims = self.dims
        b, t, _ = x.shape
        q = self.q_norm(self.q(x).view(b, t, dims.num_heads, dims.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(b, t, dims.num_kv_heads, dims.head_dim)).transpose(1, 2)
        v = self.v(x).view(b, t, dims.num_kv_heads, dims.head_dim).transpose(1, 2)
        group = dims.num_heads // dims.num_kv_heads
        k = _rotate(k, angles).repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = functional.scaled_dot_product_attention(_rotate(q, angles), k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(b, t, -1))


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of each head."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class Experts(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.router = nn.Linear(dims.hidden, dims.num_experts, bias=False)
        shape_in = (dims.num_experts, dims.expert_ff, dims.hidden)
        shape_out = (dims.num_experts, dims.hidden, dims.expert_ff)
        self.gate = nn.Parameter(torch.empty(shape_in))
        self.up = nn.Parameter(torch.empty(shape_in))
        self.down = nn.Parameter(torch.empty(shape_out))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [N, D] to ([N, D], balance loss [], chosen experts [N, K])."""
        dims = self.dims
        probs = functional.softmax(self.router(x).float(), dim=-1)  # [N, E]
        weights, chosen = probs.topk(dims.experts_used, dim=-1)  # [N, K]
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        counts = torch.bincount(chosen.flatten(), minlength=dims.num_experts)
        k = dims.experts_used
        rows = x.unsqueeze(1).expand(-1, k, -1).reshape(-1, dims.hidden)
        rows = _Reorder.apply(rows, order, inverse)
        parts = []
        stacks = zip(
            rows.split(counts.tolist()),
            self.gate.unbind(0),
            self.up.unbind(0),
            self.down.unbind(0),
            strict=True,
        )
        for part, gate, up, down in stacks:
            inner = functional.silu(part @ gate.T) * (part @ up.T)
            parts.append(inner @ down.T)
        y = _Reorder.apply(torch.cat(parts), inverse, order).view(-1, k, dims.hidden)
        share = counts / counts.sum()
        balance = dims.num_experts * (share * probs.mean(0)).sum()
        return (y * weights.unsqueeze(-1)).sum(1), balance, chosen


class Layer(nn.Module):
    """Attention, then experts, each added to the residual."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(dims.hidden, eps=dims.norm_eps)
        self.attn = Attention(dims)
        self.ffn_norm = nn.RMSNorm(dims.hidden, eps=dims.norm_eps)
        self.experts = Experts(dims)

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x [B, T, D] to (x, balance loss, chosen experts [B * T, K])."""
        x = x + self.attn(self.attn_norm(x), angles)
        y, balance, chosen = self.experts(self.ffn_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance, chosen


class DemoModel(nn.Module):
    """The whole model: token ids in, logits out."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.embed = nn.Embedding(dims.num_tokens, dims.hidden)
        self.layers = nn.ModuleList(Layer(dims) for _ in range(dims.num_layers))
        self.norm = nn.RMSNorm(dims.hidden, eps=dims.norm_eps)
        self.head = nn.Linear(dims.hidden, dims.num_tokens, bias=False)

    def initialise(self, seed: int) -> None:
        """Draw all matrices anew; outputs into the residual start smaller the deeper the model."""
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * self.dims.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 if name.startswith("embed") else parameter.shape[-1] ** -0.5
            if name.endswith(("attn.output.weight", "experts.down")):
                std *= depth_scale
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Map ids [B, T] to (logits [B, T, V], mean balance loss [], chosen experts per layer)."""
        states, balance, routes = self.states(ids)
        return self.head(states), balance, routes

    def states(self, ids: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the same with the states [B, T, D] behind the last norm instead of logits."""
        angles = rotary_angles(self.dims, ids.shape[1])
        x = self.embed(ids)
        balances, routes = [], []
        for layer in self.layers:
            x, balance, chosen = layer(x, angles)
            balances.append(balance)
            routes.append(chosen)
        return self.norm(x), torch.stack(balances).mean(), routes


class NextTokenBlock(nn.Module):
    """The block behind the last layer, which guesses a further token: attention and a dense feed-forward."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        hidden, width = dims.hidden, dims.block_ff
        self.enorm = nn.RMSNorm(hidden, eps=dims.norm_eps)
        self.hnorm = nn.RMSNorm(hidden, eps=dims.norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.attn_norm = nn.RMSNorm(hidden, eps=dims.norm_eps)
        self.attn = Attention(dims)
        self.ffn_norm = nn.RMSNorm(hidden, eps=dims.norm_eps)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=dims.norm_eps)

    def forward(self, tokens: Tensor, before: Tensor) -> Tensor:
        """Map embedded tokens and the states before each, [B, T, D] both, to its own states [B, T, D]."""
        angles = rotary_angles(self.dims, tokens.shape[1])
        x = self.eh_proj(torch.cat((self.enorm(tokens), self.hnorm(before)), dim=-1))
        x = x + self.attn(self.attn_norm(x), angles)
        normed = self.ffn_norm(x)
        x = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return self.norm(x)


def rotary_angles(dims: Dims, num_positions: int) -> Tensor:
    """Return the angles [T, head_dim] of each position."""
    half = torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim
    angles = torch.outer(torch.arange(num_positions).float(), dims.rope_base**-half)
    return torch.cat((angles, angles), dim=-1)


@torch.inference_mode()
def greedy(
    model: DemoModel, prompts: list[list[int]], end_id: int, max_new_tokens: int = 120
) -> list[list[int]]:
    """Answer all prompts at once, always with the best token; without the end token."""
    rows = [list(p) for p in prompts]
    running = set(range(len(rows)))
    for _ in range(max_new_tokens):
        active = sorted(running)
        if not active:
            break
        width = max(len(rows[i]) for i in active)
        ids = torch.tensor([rows[i] + [end_id] * (width - len(rows[i])) for i in active])
        logits = model(ids)[0]
        for at, i in enumerate(active):
            best = int(logits[at, len(rows[i]) - 1].argmax())
            if best == end_id:
                running.discard(i)
            else:
                rows[i].append(best)
    return [row[len(p) :] for row, p in zip(rows, prompts, strict=True)]
