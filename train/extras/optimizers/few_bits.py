"""AdamW in few bits: moments of 8, and weights of bf16 that do not lose small updates.

A bf16 number has 8 significant bits: an update of less than half of a 256th of a weight leaves it as it is, however
often it is repeated. Two remedies (arXiv 2010.06192): round up or down at random, so that the expectation is right; or
keep what rounding added in a second number for each weight, and subtract it the next time (Kahan's summation).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CPU = 2**22, 2**18  # in fp32 at once: some 100 MB; on a CPU what its caches hold
ADDED = "added_by_rounding"  # Kahan's compensation in a parameter's state: by how much its weight is too large


class Bf16AdamW(torch.optim.AdamW):
    """AdamW that computes in fp32 and stores in bf16; for parameters of other types, AdamW.

    ``update`` ``stochastic`` rounds weights and moments at random, by numbers that are a function of (seed, step,
    parameter, element): equal on every rank and after resuming; ``kahan`` rounds to the nearest and keeps the rest.
    """

    def __init__(self, groups: list[dict[str, Any]], update: str, seed: int, **settings: Any) -> None:
        super().__init__(groups, foreach=False, **settings)
        self._update, self._seed = update, seed
        self._numbers = {p: n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, group in work:
            self._step_of(parameter, group)

    def _step_of(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, names = self.state[parameter], ["exp_avg", "exp_avg_sq"]
        if self._update == "kahan" and parameter.dtype == torch.bfloat16:
            names.append(ADDED)
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
        for name in set(names) - state.keys():  # some of it may come from a checkpoint of another AdamW
            state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        steps = int(state["step"].item())  # on the host: nothing waits
        beta1, beta2 = group["betas"]
        step_size, second_scale = group["lr"] / (1 - beta1**steps), 1 / math.sqrt(1 - beta2**steps)
        tensors: Any = torch.atleast_1d(parameter.grad, parameter, *(state[name] for name in names))
        elements = CHUNK_ELEMENTS_ON_CPU if parameter.device.type == "cpu" else CHUNK_ELEMENTS
        rows = max(1, elements * len(tensors[0]) // max(1, parameter.numel()))
        pieces = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
        for number, (gradient, weight, first, second, *added) in enumerate(pieces):
            gradient = gradient.float()
            mean = first.float().lerp_(gradient, 1 - beta1)
            square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            new = weight.float()
            if added:
                new -= added[0]
            new.mul_(1 - group["lr"] * group["weight_decay"])
            new.addcdiv_(mean, square.sqrt().mul_(second_scale).add_(group["eps"]), value=-step_size)
            for place, (target, value) in enumerate(((first, mean), (second, square), (weight, new))):
                if self._update == "stochastic" and target.dtype == torch.bfloat16:
                    round_at_random_(value, (self._seed, steps, self._numbers[parameter], number, place))
                target.copy_(value)
            if added:
                added[0].copy_(new.neg_().add_(weight))


def round_at_random_(value: Tensor, key: tuple[int, ...]) -> Tensor:
    """Rounds fp32 ``value`` in place to numbers of bf16, up or down by ``key`` such that the mean is ``value``.

    bf16 is the upper half of fp32's bits: adding a random lower half, and dropping it, carries with the right chance.
    """
    noise = random_halves(value.numel(), key, value.device).view(value.shape)
    value.view(torch.int32).add_(noise).bitwise_and_(-(2**16))
    return value


def random_halves(count: int, key: tuple[int, ...], device: torch.device) -> Tensor:
    """(count,) int32, numbers below 2^16 that are a hash of ``key`` and of their position, the same on any device."""
    start, factor = np.random.SeedSequence(key).generate_state(2, np.uint32).view(np.int32).tolist()  # type: ignore
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    numbers.mul_(factor | 1).add_(start)
    for multiplier in (0x7FEB352D, 0x846CA68B - 2**32):  # both as int32
        numbers.bitwise_xor_((numbers >> 16).bitwise_and_(0xFFFF)).mul_(multiplier)
    return (numbers >> 16).bitwise_and_(0xFFFF)


def eight_bit_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW: a byte per moment (arXiv 2110.02861), fp32 in parameters of fewer than 4,096 elements."""
    from bitsandbytes.optim import AdamW8bit

    class EightBitAdamW(AdamW8bit):
        """Keeps the two tables of 256 values, which all parameters share, out of every parameter's state."""

        def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
            state = self.state[p]
            if state["state1"].dtype == torch.uint8:
                tables = {name: self.name2qmap[name].to(p.device) for name in ("dynamic", "udynamic")}
                self.name2qmap.update(tables)
                state.update(qmap1=tables["dynamic"], qmap2=tables["udynamic"])
            super().update_step(group, p, gindex, pindex)
            for name in ("qmap1", "qmap2"):
                state.pop(name, None)

    return EightBitAdamW(groups, **settings)
