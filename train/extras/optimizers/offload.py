"""AdamW with its state in host memory: the device holds only weights and gradients.

A step copies one gradient after the other to the host, updates there, and copies the new weights back; while one
parameter is updated, the gradient of the next is on its way (arXiv 2101.06840 describes the idea).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from train.extras.host_memory import StreamTransfers

MASTER = "master_weight"  # in the state of a parameter of half precision: its fp32 original


class Link:
    """Carries gradients to the host and weights back, through two slots; at once where the device is the host itself.

    From a card on a stream of its own, through page-locked memory of ``num_bytes``, those of the largest parameter. All
    copies of a slot are on that one stream, so a gradient enters it only after the weights before have left; and the
    host writes to it only after it has seen the gradient arrive.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._transfers = StreamTransfers(device) if device.type == "cuda" else None
        self._buffers = [self._transfers.host_buffer(num_bytes) for _ in range(2)] if self._transfers else []
        self._slots: dict[int, tuple[Tensor, Any]] = {}
        self._sent: Any = None

    def _buffer(self, slot: int, like: Tensor) -> Tensor:
        return self._buffers[slot][: like.nbytes].view(like.dtype).view(like.shape)

    def fetch(self, slot: int, gradient: Tensor) -> None:
        """Starts copying ``gradient`` to the host."""
        buffer = self._buffer(slot, gradient) if self._transfers else gradient.to("cpu")
        self._slots[slot] = buffer, self._transfers.copy([(buffer, gradient)]) if self._transfers else None

    def arrived(self, slot: int) -> Tensor:
        """The gradient on the host, once it is there; valid until the slot's next use."""
        buffer, event = self._slots[slot]
        if event is not None:
            event.synchronize()
        return buffer

    def send(self, slot: int, weight: Tensor, parameter: Tensor) -> None:
        """Starts copying ``weight`` from the host into ``parameter``, rounded to its type."""
        if self._transfers is None:
            parameter.copy_(weight)
        else:
            self._sent = self._transfers.copy([(parameter, self._buffer(slot, parameter).copy_(weight))])

    def finish(self) -> None:
        """Everything the device does from now on uses the weights that were sent."""
        if self._transfers is not None:
            self._transfers.wait(self._sent)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW on the host for parameters on a device: bit for bit the update of torch's fused AdamW on a CPU.

    Weights of half precision have an fp32 original on the host, which is what gets updated; the device receives it
    rounded. The state of fp32 weights is that of ``torch.optim.AdamW``: a checkpoint can be resumed with either.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings)
        for group in self.param_groups:  # only now: a scaler would else leave it to this class to skip steps
            group["fused"] = True
        # By parameter: fp32 weights as they are on the device; copies, so not part of the state.
        self._weights: dict[Any, Tensor] = {}
        # Of all parameters: with updates in backward, a step sees one.
        self._largest_bytes = max(p.nbytes for group in self.param_groups for p in group["params"])
        self._link: Link | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore
        if not (work := [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]):
            return
        self._link = self._link or Link(work[0][1].device, self._largest_bytes)
        self._link.fetch(0, work[0][1].grad)
        for number, (group, parameter) in enumerate(work):
            slot = number % 2
            if number + 1 < len(work):
                self._link.fetch(1 - slot, work[number + 1][1].grad)
            weight, state = self._weight_of(parameter), self.state[parameter]
            gradient, (beta1, beta2) = self._link.arrived(slot).to(weight.dtype), group["betas"]
            if gradient.stride() != weight.stride():  # the kernel goes through the memory of both
                gradient = torch.empty_like(weight).copy_(gradient)
            kept = [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]]
            settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            adamw([weight], [gradient], *kept, fused=True, beta1=beta1, beta2=beta2, **settings)
            self._link.send(slot, weight, parameter)
        self._link.finish()

    def _weight_of(self, parameter: nn.Parameter) -> Tensor:
        """The weight on the host, in at least fp32; makes the state where there is none."""
        state, dtype = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        if not state:  # a new one, or one that was emptied: what was copied before is no longer right
            self._weights.pop(parameter, None)
        kept, key = (self._weights, parameter) if parameter.dtype == dtype else (state, MASTER)
        if key not in kept:
            kept[key] = parameter.detach().to("cpu", dtype, copy=True)
        weight = kept[key]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return weight

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts the state on the host, in fp32; torch's own would put it on the parameters' device, in their type."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, entries in state_dict["state"].items():
            parameter, found = parameters[number], dict[str, Tensor](entries)
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            if MASTER in found and not torch.equal(found[MASTER].to("cpu", parameter.dtype), parameter.cpu()):
                found.pop(MASTER)  # an optimizer without originals has made steps since
            self.state[parameter] = {k: v.to("cpu", torch.float32 if k == "step" else dtype) for k, v in found.items()}
        self._weights.clear()
