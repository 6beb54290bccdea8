"""The reducer of one rank: gradients stay where autograd puts them, and nothing is copied or hooked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from perception.distributed.buckets import BucketPlan, ParameterSpec
from perception.distributed.layout import check_frozen, parameter_spec
from perception.distributed.reduction import Reduction


class SoloReducer:
    """`Reducer` for a single rank: weights and clips, but has nobody to talk to."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
        num_extras: int = 0,
    ) -> None:
        """As `GradientReducer`."""
        self._frozen = frozen
        self.parameters = [parameter for _, parameter in parameters]
        self.specs: Sequence[ParameterSpec] = [parameter_spec(name, parameter) for name, parameter in parameters]
        self.plans: Sequence[BucketPlan] = ()
        self.num_extras = num_extras
        self.spans: list[tuple[str, float, float]] | None = None
        self._weight: float | None = None
        self._share = 0.0

    @property
    def buffer_bytes(self) -> int:
        return 0

    @property
    def order(self) -> Sequence[int] | None:
        return None

    def follow(self, order: Sequence[int]) -> None:
        return None

    def leave_to_owners(self, is_own: Callable[[Tensor], bool]) -> None:
        return None

    def local_state(self) -> list[Tensor]:
        return []

    def load_local_state(self, state: Sequence[Tensor]) -> None:
        return None

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._weight, self._share = None, 0.0

    def backward(
        self, loss: Tensor, num_samples: float, last: bool = True, global_samples: float | None = None
    ) -> None:
        self._weight = (self._weight or 0.0) + num_samples
        factor = num_samples / (global_samples or 1.0)
        self._share += factor
        (loss if factor == 1.0 else loss * factor).backward()

    def contribute_nothing(self) -> None:
        self._weight = self._weight or 0.0

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        yield

    @torch.no_grad()
    def finish(self, clip_norm: float = 0.0, extras: Tensor | None = None) -> Reduction:
        check_frozen(self._frozen)
        gradients = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse or gradient.requires_grad:
                parameter.grad = gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach()
            gradients.append(gradient)
        weight = 1.0 if self._weight is None else self._weight
        divisor = self._share if self._share > 0 else 1.0
        norm = float(nn.utils.get_total_norm(gradients)) / divisor if gradients else 0.0
        finite = math.isfinite(norm)
        scale = 1.0 if math.isclose(divisor, 1.0, rel_tol=1e-6) else 1.0 / divisor
        if finite and 0 < clip_norm < norm:
            scale *= clip_norm / norm
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        self._weight, self._share = None, 0.0
        device = self.parameters[0].device
        sums = torch.zeros(self.num_extras, device=device) if extras is None else extras.float().clone()
        return Reduction(norm, finite, weight, 0.0, 0.0, 0.0, sums)

    def remove(self) -> None:
        return None
