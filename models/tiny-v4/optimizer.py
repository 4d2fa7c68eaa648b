# SPDX-License-Identifier: Apache-2.0
"""Muon for the weight matrices, AdamW for everything else.

Muon (Keller Jordan and others, 2024) orthogonalises the momentum of a matrix. Matrices of one shape are
stacked over layers and experts, so that a step costs a few dozen batched products.
"""

from collections import defaultdict

import torch


def orthogonalise(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix, batched over the first dimension."""
    x = update.bfloat16() if update.is_cuda else update
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.transpose(-1, -2)).float()


def as_matrices(name: str, weight: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns]: each expert's gate, up and down matrix on its own."""
    if name.endswith("gate_up_proj"):
        return weight.view(2 * weight.shape[0], -1, weight.shape[-1])
    return weight.view(-1, *weight.shape[-2:])


class Optimizer:
    """Steps the float32 master weights with gradients handed over as a dict of the same names."""

    def __init__(self, masters: dict[str, torch.nn.Parameter], muon_rate: float, adam_rate: float,
                 momentum: float = 0.95, decay: float = 0.01):
        self.masters, self.muon_rate, self.momentum, self.decay = masters, muon_rate, momentum, decay
        self.by_shape = defaultdict(list)
        for name, weight in masters.items():
            if "_proj" in name:
                self.by_shape[as_matrices(name, weight).shape[1:]].append(name)
        matrices = {name for names in self.by_shape.values() for name in names}
        self.others = [name for name in masters if name not in matrices]
        self.momenta = {shape: torch.cat([torch.zeros_like(as_matrices(name, masters[name])) for name in names])
                        for shape, names in self.by_shape.items()}
        self.adam_rate = adam_rate
        self.adam = torch.optim.AdamW([masters[name] for name in self.others], lr=adam_rate, betas=(0.9, 0.98),
                                      weight_decay=0.0)

    @torch.no_grad()
    def step(self, gradients: dict[str, torch.Tensor], rate: float) -> None:
        """One step at `rate` times the peak learning rates, after clipping the total norm to 1."""
        norms = torch._foreach_norm([gradient.float() for gradient in gradients.values()])
        clip = (1.0 / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
        for name in self.others:
            self.masters[name].grad = gradients[name].float() * clip
        self.adam.param_groups[0]["lr"] = self.adam_rate * rate
        self.adam.step()
        for shape, names in self.by_shape.items():
            gradient = torch.cat([as_matrices(name, gradients[name]) for name in names]).float()
            momentum = self.momenta[shape].lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(momentum, self.momentum))
            step = self.muon_rate * rate * max(1.0, shape[0] / shape[1]) ** 0.5
            parts = update.split([as_matrices(name, self.masters[name]).shape[0] for name in names])
            for name, part in zip(names, parts):
                weight = as_matrices(name, self.masters[name])
                weight.mul_(1 - self.muon_rate * rate * self.decay).add_(part, alpha=-step)
