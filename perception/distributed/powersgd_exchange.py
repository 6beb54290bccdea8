"""PowerSGD: gradients of matrices travel as low-rank factors, and what those leave out goes into the next step's.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, arXiv:1905.13727, algorithms 1 and 2. For the sum M over
ranks w of M_w, a rank's gradient with its error: P = orthonormal(sum of M_w Q), Q = sum of M_w^T P;
every rank takes P Q^T and keeps the error M_w - P P^T M_w. One step of the power iteration is
enough because Q begins where the last step ended.

A bucket takes two all-reduces: all its P and what is sent exactly in one, all its Q in the other.
The first overlap with backward; the second ones follow each other after it, in bucket order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perception.distributed.communicator import Communicator, Pending
from perception.distributed.exchange import Bucket, EngineExchange

_SEED = 1905_13727
"""The first Q of each parameter is drawn from this and the parameter's index: alike on all ranks."""


@dataclass(frozen=True)
class _Memory:
    """What lasts from step to step for one parameter."""

    error: Tensor
    """(rows, columns), this rank's own; in the units of the gradients, so their scale should not change."""
    right: Tensor
    """(columns, rank), the last step's Q; the same on all ranks."""


@dataclass(frozen=True)
class _Matrix:
    gradient: Tensor
    """(rows, columns), a view of the bucket."""
    left: Tensor
    """(rows, rank), P: a view of the first message."""
    right: Tensor
    """(columns, rank), Q: a view of the second message."""
    memory: _Memory


@dataclass(frozen=True)
class _Part:
    """A bucket that holds matrices to be compressed."""

    matrices: tuple[_Matrix, ...]
    exact: list[Tensor]
    """What is sent as it is, the extras among it: views of the bucket."""
    exact_sent: list[Tensor]
    """The same in the first message."""
    marks: Tensor
    """(matrices,) in the first message: how many ranks have a gradient that is not all 0."""
    num_checked: int
    """Numbers at the start of the first message that must be finite: all but the extras."""
    first: Tensor
    second: Tensor


class PowerSgdExchange:
    """Low-rank factors of fp32 matrices of which these are smaller; everything else exact, as `EngineExchange` does.

    Ranks reconstruct the sum each for itself: they agree to the bit where they compute alike, on
    processors of one kind with equally many threads.
    """

    sum_scale = 1.0

    def __init__(self, communicator: Communicator, name: str, rank: int) -> None:
        """`rank` is the number of columns of P and Q."""
        self._communicator, self._name, self._rank = communicator, name, rank
        self._whole = EngineExchange(communicator, name, "fp32")
        self._buckets: list[Bucket] = []
        self._parts: list[_Part | None] = []
        self._memories: dict[int, _Memory] = {}
        self._pending: list[tuple[int, float, Pending]] = []

    @property
    def spans(self) -> list[tuple[str, float, float]] | None:
        return self._whole.spans

    @spans.setter
    def spans(self, spans: list[tuple[str, float, float]] | None) -> None:
        self._whole.spans = spans

    @property
    def extra_bytes(self) -> int:
        messages = [message for part in self._parts if part is not None for message in (part.first, part.second)]
        return self._whole.extra_bytes + sum(4 * tensor.numel() for tensor in [*messages, *self.state()])

    def allocate(self, sizes: Mapping[torch.dtype, int]) -> dict[torch.dtype, Tensor]:
        return self._whole.allocate(sizes)

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self._parts = [self._part(bucket) for bucket in buckets]
        self._whole.set_buckets(buckets)

    def leave_sums(self) -> dict[torch.dtype, Tensor] | None:
        return None

    def state(self) -> list[Tensor]:
        """Error and Q of each compressed parameter in turn: this rank's own memory, not copies."""
        return [
            tensor
            for _, memory in sorted(self._memories.items(), key=lambda item: item[0])
            for tensor in (memory.error, memory.right)
        ]

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Take up what `state` gave. Raises ValueError if it is of another model or rank."""
        own = self.state()
        if [tensor.shape for tensor in own] != [tensor.shape for tensor in state]:
            raise ValueError("the PowerSGD state is of another model or of another distributed.powersgd_rank")
        for tensor, stored in zip(own, state, strict=True):
            tensor.copy_(stored)

    @torch.no_grad()
    def start(self, index: int) -> None:
        part = self._parts[index]
        if part is None:
            self._whole.start(index)
            return
        # Calls with out= or in place throughout: autocast, if it is on, leaves them in fp32.
        for place, matrix in enumerate(part.matrices):
            part.marks[place] = matrix.gradient.any()
            matrix.gradient.add_(matrix.memory.error)
            torch.mm(matrix.gradient, matrix.memory.right, out=matrix.left)
        if part.exact:
            torch._foreach_copy_(part.exact_sent, part.exact)
        self._pending.append((index, time.perf_counter(), self._send(part.first, f"bucket{index}.left")))

    def progress(self) -> bool:
        return False

    @torch.no_grad()
    def wait(self) -> None:
        started, self._pending = self._pending, []
        sums_are_finite: list[bool] = []
        rights: list[tuple[int, float, Pending]] = []
        for index, began, pending in started:
            pending.wait()
            part = self._started_part(index)
            finite = _is_finite(part.first[: part.num_checked])
            sums_are_finite.append(finite)
            _project(part, finite)
            rights.append((index, began, self._send(part.second, f"bucket{index}.right")))
        self._whole.wait()
        for index, began, pending in rights:
            pending.wait()
            if self.spans is not None:
                self.spans.append((self._buckets[index].title(index), began, time.perf_counter()))
        # A step with inf or NaN anywhere is not taken, so neither errors nor Q of it are kept: memory stays that
        # of the step before, or inf would come back in every later gradient. All ranks decide alike, from sums.
        seconds = [self._started_part(index).second for index, _, _ in started]
        whole = [bucket.gradients for bucket, part in zip(self._buckets, self._parts, strict=True) if part is None]
        keep = all(sums_are_finite) and all(_is_finite(numbers) for numbers in [*seconds, *whole])
        for (index, _, _), finite in zip(started, sums_are_finite, strict=True):
            _reconstruct(self._started_part(index), finite, keep)

    def square_norm(self) -> float | None:
        return None

    def _send(self, message: Tensor, what: str) -> Pending:
        return self._communicator.start_allreduce(message, f"{self._name}.{what}", stream=self._name)

    def _started_part(self, index: int) -> _Part:
        part = self._parts[index]
        assert part is not None
        return part

    def _part(self, bucket: Bucket) -> _Part | None:
        """Messages for a bucket; None if nothing in it is worth compressing."""
        if bucket.buffer.dtype is not torch.float32:
            return None
        compressed: dict[int, Tensor] = {}
        exact: list[Tensor] = []
        for parameter, gradient in zip(bucket.parameters, bucket.matrices, strict=True):
            if gradient.numel() == 0:
                continue
            matrix = _as_matrix(gradient)
            rows, columns = matrix.shape
            if self._rank * (rows + columns) < rows * columns:
                compressed[parameter] = matrix
            else:
                exact.append(matrix.view(-1))
        if not compressed:
            return None
        num_left = self._rank * sum(matrix.shape[0] for matrix in compressed.values())
        num_right = self._rank * sum(matrix.shape[1] for matrix in compressed.values())
        num_checked = num_left + sum(part.numel() for part in exact)
        first = torch.zeros(num_checked + len(compressed) + bucket.num_extras, device=bucket.buffer.device)
        second = torch.zeros(num_right, device=bucket.buffer.device)
        lefts = first[:num_left].split([self._rank * matrix.shape[0] for matrix in compressed.values()])
        rights = second.split([self._rank * matrix.shape[1] for matrix in compressed.values()])
        exact_sent = list(first[num_left:num_checked].split([part.numel() for part in exact])) if exact else []
        marks = first[num_checked : num_checked + len(compressed)]
        if bucket.num_extras:
            exact.append(bucket.extras)
            exact_sent.append(first[num_checked + len(compressed) :])
        matrices = tuple(
            _Matrix(matrix, left.view(-1, self._rank), right.view(-1, self._rank), self._memory(parameter, matrix))
            for (parameter, matrix), left, right in zip(compressed.items(), lefts, rights, strict=True)
        )
        return _Part(matrices, exact, exact_sent, marks, num_checked, first, second)

    def _memory(self, parameter: int, matrix: Tensor) -> _Memory:
        """That of the parameter, whichever bucket it lies in by now."""
        if parameter not in self._memories:
            generator = torch.Generator().manual_seed(_SEED + parameter)
            right = torch.randn(matrix.shape[1], self._rank, generator=generator)
            self._memories[parameter] = _Memory(torch.zeros_like(matrix), right.to(matrix.device))
        return self._memories[parameter]


def _as_matrix(gradient: Tensor) -> Tensor:
    """(rows, columns) view in the order of memory, whatever the strides: the outermost dimension against the rest."""
    ordered = gradient.squeeze()
    ordered = ordered.permute(sorted(range(ordered.ndim), key=ordered.stride, reverse=True))
    return ordered.view(ordered.shape[0] if ordered.ndim else 1, -1)


def _project(part: _Part, finite: bool) -> None:
    """From the sums of P to this rank's Q; leaves its error in place of the gradients."""
    if part.exact:
        torch._foreach_copy_(part.exact, part.exact_sent)
    for matrix in part.matrices:
        if finite:
            # Householder's: stays orthonormal where the gradient's rank is below ours, and gives Q a new start from 0.
            matrix.left.copy_(torch.linalg.qr(matrix.left).Q)
        torch.mm(matrix.gradient.t(), matrix.left, out=matrix.right)
        matrix.gradient.addmm_(matrix.left, matrix.right.t(), alpha=-1)


def _reconstruct(part: _Part, finite: bool, keep: bool) -> None:
    for matrix, num_ranks in zip(part.matrices, part.marks.tolist(), strict=True):
        if num_ranks == 0:
            # The optimizer will not see a gradient that no rank has, so its error waits.
            matrix.gradient.zero_()
            continue
        if keep:
            matrix.memory.error.copy_(matrix.gradient)
            matrix.memory.right.copy_(matrix.right)
        if finite:
            torch.mm(matrix.left, matrix.right.t(), out=matrix.gradient)
        else:
            matrix.gradient.fill_(torch.nan)


def _is_finite(numbers: Tensor) -> bool:
    return bool(torch.isfinite(numbers).all())
