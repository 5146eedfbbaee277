"""Blocks of transformers as their libraries write them, on [samples, tokens, WIDTH]; all have `hidden` and heads."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jigsaw
from jigsaw.testing import world_mesh

WIDTH, HEADS, KEY_HEADS, TOKENS, SAMPLES, GRID = 24, 6, 2, 10, 4, (4, 4)
MARKS = 64  # bytes that tell whether plain tensors are alike, once, and a sum of squares


class GPTBlock(nn.Module):
    """nanoGPT's: one layer for queries, keys and values, split apart; a mask that is a buffer."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.mlp_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.resid_dropout(self.c_proj(y))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class _TimmAttention(nn.Module):
    def __init__(self, qk_norm=False):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.scale, self.fused_attn = self.head_dim**-0.5, not qk_norm
        self.qkv = nn.Linear(WIDTH, WIDTH * 3)
        norm = nn.LayerNorm if qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            q = q * self.scale
            attn = self.attn_drop((q @ k.transpose(-2, -1)).softmax(dim=-1))
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class _TimmMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2, self.drop2 = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class _LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x * self.gamma


class ViTBlock(nn.Module):
    """timm's Block, with LayerScale, and norms of queries and keys."""

    qk_norm = True

    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(WIDTH), _TimmAttention(self.qk_norm), _LayerScale()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(WIDTH), _TimmMlp(), _LayerScale()

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


def _modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """DiT's block with adaLN-Zero, of a condition that is the mean over tokens, so that it has one argument."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.attn = _TimmAttention()
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.mlp = _TimmMlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH, bias=True))

    def forward(self, x):
        c = x.mean(1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(_modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(_modulate(self.norm2(x), shift_mlp, scale_mlp))


class _HFSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.0)

    def transpose_for_scores(self, x):
        return x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states):
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        scores = torch.matmul(query_layer, key_layer.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        context = torch.matmul(self.dropout(nn.functional.softmax(scores, dim=-1)), value_layer)
        context = context.permute(0, 2, 1, 3).contiguous()
        return context.view(*context.size()[:-2], WIDTH)


class HFViTLayer(nn.Module):
    """transformers' ViTLayer, with its dense layers in modules of their own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({"attention": _HFSelfAttention(), "output": nn.Linear(WIDTH, WIDTH)})
        self.intermediate, self.output = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden_states):
        attention = self.attention["output"](self.attention["attention"](self.layernorm_before(hidden_states)))
        hidden_states = attention + hidden_states
        return self.output(F.gelu(self.intermediate(self.layernorm_after(hidden_states)))) + hidden_states


def _rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _repeat_kv(hidden_states, n_rep):
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class HFLlamaLayer(nn.Module):
    """transformers' LlamaDecoderLayer: grouped heads, rotary embeddings in halves, keys repeated, a gated MLP."""

    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KEY_HEADS * self.head_dim, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(3 * WIDTH, WIDTH, bias=False), nn.SiLU()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.register_buffer("inv_freq", 1.0 / (100.0 ** (torch.arange(0, self.head_dim, 2) / self.head_dim)), False)

    def rotated(self, x):
        freqs = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * self.inv_freq.to(x.dtype)[None]
        emb = torch.cat((freqs, freqs), dim=-1)
        return x * emb.cos() + _rotate_half(x) * emb.sin()

    def attention(self, hidden_states):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.rotated(self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2))
        key = self.rotated(self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2))
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        empty = torch.tensor([], dtype=key.dtype)  # of the cache, which the call makes by default
        key, value = torch.cat([empty, key], dim=-2), torch.cat([empty, value], dim=-2)
        key, value = _repeat_kv(key, HEADS // KEY_HEADS), _repeat_kv(value, HEADS // KEY_HEADS)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.head_dim**-0.5
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float64).to(query.dtype)
        output = torch.matmul(weights, value).transpose(1, 2).contiguous()
        return self.o_proj(output.reshape(*input_shape, -1).contiguous())

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attention(self.input_layernorm(hidden_states))
        x = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MetaLlamaBlock(HFLlamaLayer):
    """Meta's: rotary embeddings by complex numbers, SDPA, and the gate and the way up in one layer."""

    def __init__(self):
        super().__init__()
        self.gate_proj = None
        self.up_proj = nn.Linear(WIDTH, 6 * WIDTH, bias=False)

    def rotated(self, x):
        angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), self.inv_freq.to(x.dtype))
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).to(x.dtype))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def attention(self, hidden_states):
        B, N, _ = hidden_states.shape
        q, k, v = (w(hidden_states) for w in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (self.rotated(y.view(B, N, -1, self.head_dim).transpose(1, 2)) for y in (q, k))
        v = v.view(B, N, -1, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).contiguous().view(B, N, -1))

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attention(self.input_layernorm(hidden_states))
        gate, up = self.up_proj(self.post_attention_layernorm(hidden_states)).chunk(2, dim=-1)
        return hidden_states + self.down_proj(F.silu(gate) * up)


class SwinBlock(nn.Module):
    """Swin's: attention in shifted windows of two by two tokens, with a table of relative positions."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), _TimmMlp()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(9, HEADS) * 0.2)
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + 1
        self.register_buffer("index", apart[..., 0] * 3 + apart[..., 1], persistent=False)

    def window_attention(self, x):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = q * (C // HEADS) ** -0.5 @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(N, N, -1).permute(2, 0, 1).contiguous()
        attn = (attn + bias.unsqueeze(0)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))

    def forward(self, x):
        B, L, C = x.shape
        H, W = GRID
        y = torch.roll(self.norm1(x).view(B, H, W, C), (-1, -1), (1, 2))
        y = y.view(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, C)
        y = self.window_attention(y).view(B, H // 2, W // 2, 2, 2, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        x = x + torch.roll(y, (1, 1), (1, 2)).view(B, L, C)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """torch's own layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x)


BLOCKS = [GPTBlock, ViTBlock, DiTBlock, HFViTLayer, HFLlamaLayer, MetaLlamaBlock, SwinBlock, Encoder]


def _products_are_kept(context, operator, *args, **kwargs):
    is_kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTING = {
    "whole": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _products_are_kept),
    },
}


class Checkpointed(nn.Module):
    """Two blocks, each recomputed in the backward pass, in one of the ways of `CHECKPOINTING`."""

    def __init__(self, block, way):
        super().__init__()
        self.blocks, self.way = nn.ModuleList([block(), block()]), way

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **CHECKPOINTING[self.way])
        return x


def trained_beside_whole(block, axes, spec, plan, checkpointing=None, tokens=TOKENS, **options):
    """Train two blocks on ranks beside plain torch, and return bytes sent, parts held and bytes of whole weights."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    make = (
        (lambda: nn.Sequential(block(), block()))
        if checkpointing is None
        else partial(Checkpointed, block, checkpointing)
    )
    model, whole = make(), make()
    whole.load_state_dict(model.state_dict())
    x = torch.randn(SAMPLES, tokens, WIDTH, requires_grad=True)
    expected = whole(x)
    expected.square().mean().backward()
    mesh = world_mesh(**axes)
    jigsaw.parallelize(model, mesh, tensor=plan, **options)
    with jigsaw.comm.count() as forward:
        out = model(jigsaw.shard(x.detach(), mesh, spec).requires_grad_())
    loss = out.square().mean()
    with jigsaw.comm.count() as backward:
        loss.backward()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-11, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
    held = {name: p.to_local().numel() / p.numel() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    plain = sum(p.numel() * 8 for p in model.parameters() if not isinstance(p, DTensor))
    return forward.sent_bytes, backward.sent_bytes, held, plain
