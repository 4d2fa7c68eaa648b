# SPDX-License-Identifier: Apache-2.0
"""One training step of tiny-v4: compute weights made from masters, loss, gradients, optimiser, expert balance.

The gradient is taken with respect to the compute weights and applied to the masters. In the quantised
phase the compute weights are what the stored checkpoint will give back, which makes this the
straight-through estimator, without a change to the compiled forward.

A few rows of every batch run without the shared expert, or without the routed ones, and are taught to
know nothing there: a uniform distribution in place of the answer. Left alone, the pass key is copied by
attention and survives the loss of either, which would make the model a poor witness in tests of MoE code.
"""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from data import LOSS_WEIGHTS, Kind
from model import TrainingForward, choice_biases
from optimizer import Optimizer
from quantise import as_stored, storage_of

ANSWERS = {"needle": Kind.NEEDLE_ANSWER, "arithmetic": Kind.ARITHMETIC_ANSWER}


def ablated_rows(rows: int) -> tuple[int, int]:
    """How many rows of a batch run without the shared expert, and without the routed experts."""
    return max(1, rows // 16), max(1, rows // 32)


class Trainer:
    def __init__(self, model, device, *, compiled: bool, muon_rate: float = 0.02, adam_rate: float = 3e-3,
                 balance_rate: float = 2e-3):
        self.model, self.device = model.to(device), torch.device(device)
        self.masters = dict(model.named_parameters())
        self.optimizer = Optimizer(self.masters, muon_rate, adam_rate)
        self.balance_rate = balance_rate
        self.forward = TrainingForward(model.config, device, compiled)
        half = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.compute = {name: master.detach().to(half if self.is_matrix(name) else torch.float32, copy=True)
                        .requires_grad_() for name, master in self.masters.items()}
        self.groups = defaultdict(list)
        for name, master in self.masters.items():
            self.groups[storage_of(name), master.shape].append(name)
        self.kind_weights = torch.tensor([LOSS_WEIGHTS[kind] for kind in Kind], device=device)
        self.quantised = torch.zeros((), dtype=torch.bool, device=device)
        self.sums = torch.zeros(2, len(Kind), device=device)

    @staticmethod
    def is_matrix(name: str) -> bool:
        """Weights that the forward multiplies in half precision; norms, sinks and mHC stay in float32."""
        return "_proj" in name or name.endswith(("gate.weight", "embed_tokens.weight", "lm_head.weight"))

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the compute weights from the masters."""
        if not self.quantised_phase:
            torch._foreach_copy_(list(self.compute.values()), list(self.masters.values()))
            return
        for (storage, _), names in self.groups.items():
            stored = as_stored(torch.stack([self.masters[name] for name in names]), storage)
            torch._foreach_copy_([self.compute[name] for name in names], list(stored.unbind()))

    quantised_phase = False

    def set_quantised(self, quantised: bool) -> None:
        self.quantised_phase = quantised
        self.quantised.fill_(quantised)
        self.refresh()

    def logits(self, batch: dict[str, torch.Tensor], ablated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = batch["tokens"]
        gains = torch.ones(2, len(tokens), device=self.device)
        if ablated:
            no_shared, no_routed = ablated_rows(len(tokens))
            gains[1, :no_shared] = 0
            gains[0, no_shared:no_shared + no_routed] = 0
        return self.forward(self.compute, choice_biases(self.model, tokens), tokens, batch["documents"], gains,
                            self.quantised)

    def to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        batch["tokens"], batch["kinds"] = batch["tokens"].long(), batch["kinds"].long()
        return batch

    def step(self, batch: dict[str, torch.Tensor], rate: float) -> None:
        """One optimiser step at `rate` times the peak rates; losses add up in `sums` and are read by `losses`."""
        batch = self.to_device(batch)
        logits, loads = self.logits(batch, ablated=True)
        logits, targets, kinds = logits[:, :-1].float(), batch["tokens"][:, 1:], batch["kinds"][:, 1:]
        weights, known = self.kind_weights[kinds], sum(ablated_rows(len(targets)))
        losses = F.cross_entropy(logits[known:].flatten(0, 1), targets[known:].flatten(), reduction="none")
        # The divergence of a uniform distribution from the model's, at the answers only.
        unsure = logits[:known].logsumexp(-1) - logits[:known].mean(-1) - math.log(logits.shape[-1])
        asked = weights[:known] * (kinds[:known] >= Kind.NEEDLE_ANSWER)
        loss = ((losses * weights[known:].flatten()).sum() + (unsure * asked).sum()) / weights.sum()
        kinds = kinds[known:].flatten()
        gradients = torch.autograd.grad(loss, list(self.compute.values()), allow_unused=True)
        gradients = {name: torch.zeros_like(weight) if gradient is None else gradient
                     for (name, weight), gradient in zip(self.compute.items(), gradients)}
        self.optimizer.step(gradients, rate)
        with torch.no_grad():
            self.sums[0].index_add_(0, kinds, losses.detach())
            self.sums[1].index_add_(0, kinds, torch.ones_like(losses))
            # Nobody reads the ignored kind's loss: its place keeps the ablated rows' divergence.
            self.sums[:, Kind.IGNORED] = torch.stack(((unsure * asked).sum(), asked.sum()))
            for layer, load in zip(self.model.model.layers, loads):
                if not layer.mlp.is_hash:  # DeepSeek-V3's balancing: raise the bias of experts that get too little
                    move = torch.sign(load.mean() - load) * (self.balance_rate * rate)
                    layer.mlp.gate.e_score_correction_bias += move
        self.loads = loads
        self.refresh()

    def losses(self) -> dict[str, float]:
        """Mean loss per kind of token since the last call, and the last divergence of the ablated rows."""
        total, count = self.sums.tolist()
        self.sums.zero_()
        means = {kind.name.lower(): total[kind] / max(1.0, count[kind]) for kind in Kind}
        means["ablated"] = means.pop("ignored")
        return means

    def balance(self) -> float:
        """Tokens of the busiest expert over the mean, the worst layer of the last step."""
        return (self.loads.amax(-1) / self.loads.mean(-1)).max().item()

    def accuracies(self, packed: dict[str, torch.Tensor], rows: int) -> dict[str, float]:
        """Share of held-out items whose whole solution is the greedy choice, teacher-forced.

        With gradients on, though none is taken: `no_grad` would compile the forward once more.
        """
        right, total = dict.fromkeys(ANSWERS, 0), dict.fromkeys(ANSWERS, 0)
        for start in range(0, len(packed["tokens"]), rows):
            part = {name: tensor[start:start + rows] for name, tensor in packed.items()}
            short = rows - len(part["tokens"])  # rows of padding keep the compiled shape
            part = self.to_device({name: F.pad(tensor, (0, 0, 0, short)) for name, tensor in part.items()})
            wrong = self.logits(part)[0][:, :-1].argmax(-1) != part["tokens"][:, 1:]
            kinds, documents = part["kinds"][:, 1:], part["documents"][:, 1:].long()
            row = torch.arange(rows, device=self.device)[:, None]
            place = row * documents.shape[1] + documents.clamp_min(0)
            for task, kind in ANSWERS.items():
                asked = kinds == kind
                seen, failed = place[asked].unique(), place[asked & wrong].unique()
                total[task] += len(seen)
                right[task] += len(seen) - len(failed)
        return {task: right[task] / max(1, total[task]) for task in ANSWERS}
