# SPDX-License-Identifier: Apache-2.0
"""tiny-v4's geometry and first weights, and a quick training forward of Transformers' DeepSeek-V4.

The model is Transformers' own `DeepseekV4ForCausalLM`; its parameters are the float32 master weights.
Training runs the same mathematics as plain functions over a dict of those tensors, because eager V4
launches thousands of small kernels: experts become two dense matrix products with zero weights for the
experts a token did not choose, and attention reads the document numbers instead of a mask tensor.
`train.py` checks both forwards against each other before it starts.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from quantise import fp8_activations
from sinkhorn import sinkhorn
from tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

GEOMETRY = dict(
    vocab_size=VOCABULARY_SIZE, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=5, num_attention_heads=4,
    head_dim=512, qk_rope_head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=128, n_routed_experts=16,
    num_experts_per_tok=4, num_hash_layers=1, sliding_window=512, max_position_embeddings=1024)


def make_config(**changes) -> DeepseekV4Config:
    geometry = {**GEOMETRY, **changes}
    return DeepseekV4Config(
        **geometry, num_key_value_heads=1, n_shared_experts=1, routed_scaling_factor=1.5, swiglu_limit=10.0,
        compress_ratios=[0] * geometry["num_hidden_layers"], index_n_heads=4, index_head_dim=128, index_topk=512,
        num_nextn_predict_layers=0, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID,
        attn_implementation="eager")


@dataclass(frozen=True)
class Sizes:
    """What the training forward reads of a config; a plain class, because a config object does not compile."""

    num_attention_heads: int
    head_dim: int
    o_groups: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int

    @classmethod
    def of(cls, config: DeepseekV4Config) -> "Sizes":
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


def hash_table(vocabulary: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    """`top_k` different experts for every token id."""
    draw = torch.rand(vocabulary, experts, generator=torch.Generator().manual_seed(seed))
    return draw.topk(top_k, dim=-1).indices.sort(-1).values


@torch.no_grad()
def make_model(config: DeepseekV4Config, seed: int) -> DeepseekV4ForCausalLM:
    """The model in float32 with weights that suit a short training run."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).float()
    model.config._experts_implementation = "eager"  # the grouped kernels want bfloat16
    streams, layers = config.hc_mult, config.num_hidden_layers
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(std=0.5)
        elif "lm_head" in name or name.endswith("gate.weight"):
            weight.normal_(std=0.5 / math.sqrt(config.hidden_size))
        elif "_proj" in name:
            weight.normal_(std=weight.shape[-1] ** -0.5)
            if name.endswith(("o_b_proj.weight", "down_proj", "down_proj.weight")):
                weight.mul_((2 * layers) ** -0.5)
    for index, layer in enumerate(model.model.layers):
        for place, connection in enumerate((layer.attn_hc, layer.ffn_hc)):
            own = (2 * index + place) % streams
            connection.fn.normal_(std=0.01)
            connection.scale.fill_(0.3)
            # Each sub-layer favours one stream: equal streams with equal weights would stay equal for ever.
            connection.base[:streams] = -1.4
            connection.base[own] = 0.0
            connection.base[streams:2 * streams] = -0.5
            connection.base[streams + own] = 0.5
            connection.base[2 * streams:] = 3.0 * torch.eye(streams).flatten()
        if layer.mlp.is_hash:
            table = hash_table(config.vocab_size, config.n_routed_experts, config.num_experts_per_tok, seed + index)
            layer.mlp.gate.tid2eid.copy_(table)
    model.model.hc_head.hc_fn.normal_(std=0.01)
    model.model.hc_head.hc_base.fill_(-1.0)
    return model


def rms_norm(x, weight, eps):
    normed = x.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rotate(x, cos, sin):
    """Interleaved rotary embedding of the last columns of x [.., heads, D]; cos and sin are [S, 1, D_rope / 2]."""
    width = 2 * cos.shape[-1]
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


def as_sent(x, quantised):
    """x as an FP8 matrix product reads it where the 0-d tensor `quantised` is true; gradients pass unchanged."""
    return x + (torch.where(quantised, fp8_activations(x.detach()), x.detach()) - x.detach())


def open_streams(streams, w, sizes):
    """mHC: the sub-layer's input, and how its output and the old streams make the new ones."""
    n, eps = sizes.hc_mult, sizes.hc_eps
    flat = streams.flatten(-2).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + sizes.rms_norm_eps)
    pre, post, mix = F.linear(flat, w["fn"]).split([n, n, n * n], -1)
    pre_base, post_base, mix_base = w["base"].split([n, n, n * n])
    scale = w["scale"].unbind(0)
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    mix = torch.softmax((mix * scale[2] + mix_base).unflatten(-1, (n, n)), -1) + eps
    mix = sinkhorn(mix.flatten(0, 1), sizes.hc_sinkhorn_iters, eps).view(mix.shape)
    return (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype), post, mix


def close_streams(streams, post, mix, output):
    mixed = (mix.unsqueeze(-1) * streams.unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * output.unsqueeze(-2) + mixed).to(streams.dtype)


def attention_part(streams, hc, w, cos, sin, documents, quantised, sizes):
    batch, length = streams.shape[:2]
    heads, width, eps = sizes.num_attention_heads, sizes.head_dim, sizes.rms_norm_eps
    x, post, mix = open_streams(streams, hc, sizes)
    x = as_sent(rms_norm(x, w["input_layernorm"], eps), quantised)
    residual = rms_norm(F.linear(x, w["q_a_proj"]), w["q_a_norm"], eps)
    q = F.linear(as_sent(residual, quantised), w["q_b_proj"]).unflatten(-1, (heads, width))
    q = rotate(rms_norm(q, None, eps), cos, sin)
    kv = rms_norm(F.linear(x, w["kv_proj"]), w["kv_norm"], eps)
    kv = rotate(kv.unsqueeze(-2), cos, sin).squeeze(-2)
    # One key-value head: all heads of a position are rows of one product.
    scores = torch.bmm(q.reshape(batch, length * heads, width), kv.transpose(1, 2))
    scores = scores.view(batch, length, heads, length).float() * width**-0.5
    place = torch.arange(length, device=streams.device)
    seen = (place[:, None] >= place) & (place[:, None] - place < sizes.sliding_window)
    seen = (seen & (documents[:, :, None] == documents[:, None, :])).unsqueeze(2)
    scores = scores.masked_fill(~seen, float("-inf"))
    sink = w["sinks"].view(1, 1, heads, 1)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sink).detach()
    shares = torch.exp(scores - highest)
    shares = shares / (shares.sum(-1, keepdim=True) + torch.exp(sink - highest))
    out = torch.bmm(shares.to(kv.dtype).view(batch, length * heads, length), kv).view(batch, length, heads, width)
    out = rotate(out, cos, -sin).reshape(batch * length, sizes.o_groups, -1)
    grouped = w["o_a_proj"].view(sizes.o_groups, -1, out.shape[-1])
    out = torch.bmm(as_sent(out, quantised).transpose(0, 1), grouped.transpose(1, 2))
    out = out.transpose(0, 1).reshape(batch, length, -1)
    return close_streams(streams, post, mix, F.linear(as_sent(out, quantised), w["o_b_proj"]))


def gated(gate, up, limit):
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def expert_part(streams, hc, w, choice_bias, gains, quantised, sizes):
    """The MoE sub-layer.

    `choice_bias` [tokens, experts] decides with the scores who is chosen, and nothing else. `gains` [2, rows]
    multiplies the routed and the shared output of each row: 1, or 0 where the row trains without it.
    """
    experts, limit = sizes.n_routed_experts, sizes.swiglu_limit
    x, post, mix = open_streams(streams, hc, sizes)
    x = rms_norm(x, w["post_attention_layernorm"], sizes.rms_norm_eps).flatten(0, 1)
    scores = F.softplus(F.linear(x, w["gate"]).float()).sqrt()
    with torch.no_grad():
        order = scores + choice_bias
        rank = (order.unsqueeze(-2) > order.unsqueeze(-1)).sum(-1)  # how many experts stand before each
        chosen = (rank < sizes.num_experts_per_tok).float()
    share = scores * chosen
    share = share / (share.sum(-1, keepdim=True) + 1e-20) * sizes.routed_scaling_factor
    sent = as_sent(x, quantised)
    gate, up = F.linear(sent, w["gate_up_proj"].flatten(0, 1)).unflatten(-1, (experts, 2, -1)).unbind(-2)
    act = as_sent(gated(gate, up, limit), quantised) * share.unsqueeze(-1).to(x.dtype)
    routed = act.flatten(1) @ w["down_proj"].transpose(1, 2).flatten(0, 1)
    act = gated(F.linear(sent, w["shared_gate"]), F.linear(sent, w["shared_up"]), limit)
    shared = F.linear(as_sent(act, quantised), w["shared_down"])
    routed, shared = (part.view(*streams.shape[:2], -1) for part in (routed, shared))
    routed_gain, shared_gain = gains.to(x.dtype)[:, :, None, None].unbind()
    output = routed * routed_gain + shared * shared_gain
    return close_streams(streams, post, mix, output), chosen.sum(0)


ATTENTION_NAMES = {"input_layernorm": "input_layernorm.weight", "sinks": "self_attn.sinks"} | {
    name: f"self_attn.{name}.weight"
    for name in ("q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj")}
EXPERT_NAMES = {
    "post_attention_layernorm": "post_attention_layernorm.weight", "gate": "mlp.gate.weight",
    "gate_up_proj": "mlp.experts.gate_up_proj", "down_proj": "mlp.experts.down_proj",
    "shared_gate": "mlp.shared_experts.gate_proj.weight", "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight"}


class TrainingForward:
    """tokens, documents -> logits, over a dict of weights named as in Transformers."""

    def __init__(self, config: DeepseekV4Config, device, compiled: bool):
        self.sizes = Sizes.of(config)
        self.attention, self.experts = attention_part, expert_part
        if compiled:
            self.attention = torch.compile(attention_part, dynamic=False, fullgraph=True)
            self.experts = torch.compile(expert_part, dynamic=False, fullgraph=True)
        half = torch.arange(0, config.qk_rope_head_dim, 2, device=device).float() / config.qk_rope_head_dim
        self.frequencies = 1.0 / config.rope_theta**half

    def __call__(self, weights, biases, tokens, documents, gains, quantised):
        """Logits [B, S, V] and the tokens each expert got, one row a layer. `biases` has one entry a layer."""
        sizes = self.sizes
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, weights["model.embed_tokens.weight"])
        streams = x.unsqueeze(-2).repeat(1, 1, sizes.hc_mult, 1)
        loads = []
        for index, bias in enumerate(biases):
            def take(names, at=f"model.layers.{index}."):
                return {short: weights[at + name] for short, name in names.items()}
            hc = {place: {part: weights[f"model.layers.{index}.{place}.{part}"] for part in ("fn", "base", "scale")}
                  for place in ("attn_hc", "ffn_hc")}
            attention = take(ATTENTION_NAMES)
            streams = self.attention(streams, hc["attn_hc"], attention, cos, sin, documents, quantised, sizes)
            streams, load = self.experts(streams, hc["ffn_hc"], take(EXPERT_NAMES), bias, gains, quantised, sizes)
            loads.append(load)
        flat = rms_norm(streams.flatten(-2).float(), None, sizes.rms_norm_eps)
        pre = F.linear(flat, weights["model.hc_head.hc_fn"]) * weights["model.hc_head.hc_scale"]
        pre = torch.sigmoid(pre + weights["model.hc_head.hc_base"]) + sizes.hc_eps
        x = (pre.unsqueeze(-1) * streams).sum(-2).to(x.dtype)
        x = rms_norm(x, weights["model.norm.weight"], sizes.rms_norm_eps)
        return F.linear(x, weights["lm_head.weight"]), torch.stack(loads)


def choice_biases(model: DeepseekV4ForCausalLM, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Per layer what `expert_part` adds to the scores: a balancing bias, or the hash table as one that always wins."""
    biases = []
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if layer.mlp.is_hash:
            wins = torch.zeros(tokens.numel(), gate.num_experts, device=tokens.device)
            biases.append(wins.scatter_(1, gate.tid2eid[tokens.flatten()], 1e4))
        else:
            biases.append(gate.e_score_correction_bias.repeat(tokens.numel(), 1))
    return biases
