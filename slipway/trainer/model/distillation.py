"""A student that learns from a teacher, in one forward pass of a micro batch, and the loss of its last stage.

The teacher is laid out as the student is, by the same ranks. A pipeline stage computes the teacher's layers
without gradients, then the student's, and sends both hidden states on in one tensor: the schedule sees a
single model with a wider hidden size, and the teacher's logits are on the last stage, as the student's are.
No rank holds more than its share of the teacher. In evaluations only the student computes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.jit import jit_fuser
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from slipway.trainer.config.distillation import Distillation


class Student(GPTModel):  # type: ignore[misc]
    """A chunk of a GPT that learns from the same chunk of a teacher, which :func:`attach_teachers` adds."""

    compute_language_model_loss: Any

    def attach_teacher(self, teacher: GPTModel, config: Any, distillation: Distillation, tokens: int) -> None:
        """Learn from a teacher, which becomes no part of this module: nothing trains or saves it.

        Parameters
        ----------
        config
            The schedule's configuration, whose hidden size is that of the tensors between stages.
        tokens
            Size of the vocabulary: rows behind it, which pad it, have no probability.
        """
        # A tuple hides it: parameters, states and devices of a module are those of its children.
        self._teacher, self._schedule = (teacher,), config
        self._widths = [self.config.hidden_size, teacher.config.hidden_size]
        self._distillation, self._tokens = distillation, tokens
        self._plain_loss = self.compute_language_model_loss
        self._states: list[Any] = []
        self.compute_language_model_loss = self._compute_loss
        teacher.compute_language_model_loss = lambda _, logits: logits
        if distillation.cosine and self.post_process:
            for model in (teacher, self):
                model.decoder.register_forward_hook(lambda *call: self._states.append(call[-1]))

    def train(self, mode: bool = True) -> Student:
        """Switch between training, with the teacher, and evaluation without it."""
        super().train(mode)
        self._schedule.hidden_size = sum(self._widths[: 1 + mode])
        return self

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the hidden states of the stage before: the student's, and in training the teacher's behind."""
        (states,) = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        if states is not None and self.training:
            states, teacher_states = states.split(self._widths, dim=-1)
            self._teacher[0].set_input_tensor(teacher_states.detach())
        super().set_input_tensor(states)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return the losses of the tokens, ``[b, s]``, or the hidden states for the next stage."""
        if not self.training:
            return super().forward(*arguments, **options)
        self._states.clear()
        with torch.no_grad():
            self._teacher_output = self._teacher[0](*arguments, **options)
        output = super().forward(*arguments, **options)
        teacher_output, self._teacher_output = self._teacher_output, None
        return output if self.post_process else torch.cat((output, teacher_output), dim=-1)

    def _compute_loss(self, labels: Any, logits: Any) -> Any:
        if not self.training:
            return self._plain_loss(labels, logits)
        terms, teacher_logits = self._distillation, self._teacher_output
        group, width = parallel_state.get_tensor_model_parallel_group(), teacher_logits.size(-1)
        padding = max(0, min(width, (group.rank() + 1) * width - self._tokens))
        # Finite at each temperature, as the divergence multiplies it by its probability, 0.
        teacher_logits[..., width - padding :] = -1e30
        weights = (terms.cross_entropy, terms.divergence, terms.temperature)
        targets = labels.transpose(0, 1).contiguous()
        losses = _Divergence.apply(logits, teacher_logits, targets, group, *weights)
        if self._states:
            losses = losses + terms.cosine * self._compare_states(group)
        return losses.transpose(0, 1).contiguous()

    def _compare_states(self, group: Any) -> Any:
        """Return one minus the cosine of both models' last hidden states, ``[s, b]``."""
        teacher_states, states = (states.float() for states in self._states)
        self._states.clear()
        distance = 1 - torch.nn.functional.cosine_similarity(states, teacher_states, dim=-1)
        if self.config.sequence_parallel:
            # All ranks have the same loss: a rank's gradient is that of its own tokens.
            distance = gather_from_sequence_parallel_region(
                distance, tensor_parallel_output_grad=False, group=group
            )
        return distance


def attach_teachers(
    config: Any,
    students: Sequence[Student],
    teachers: Sequence[GPTModel],
    distillation: Distillation,
    tokens: int,
) -> Any:
    """Give each chunk of a student the teacher's; return the configuration for the schedule and its wrappers.

    Parameters
    ----------
    config
        The TransformerConfig of the student's layers.
    tokens
        See `Student.attach_teacher`.
    """
    schedule = copy.copy(config)
    for student, teacher in zip(students, teachers, strict=True):
        teacher.requires_grad_(False).eval()
        student.attach_teacher(teacher, schedule, distillation, tokens)
    return schedule


class _Divergence(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy and divergence of logits whose vocabulary is split over a group of ranks.

    With logits ``z`` of the student, ``v`` of the teacher and the temperature T, the divergence times T² is
    ``T² sum(q log(q / p))`` for ``p = softmax(z / T)`` and ``q = softmax(v / T)``, and its gradient
    ``T (p - q)``: Hinton et al. 2015, equation 2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Any,
        teacher_logits: Any,
        labels: Any,
        group: Any,
        entropy_weight: float,
        weight: float,
        temperature: float,
    ) -> Any:
        first = group.rank() * logits.size(-1)
        tops = torch.stack([each.amax(dim=-1, keepdim=True) for each in (logits, teacher_logits)]).float()
        if group.size() > 1:
            dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack(_reduce_vocabulary(logits, teacher_logits, labels, tops, first, temperature))
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        total, predicted, warm, teacher_warm, cross = sums
        totals = torch.stack((total, warm, teacher_warm))
        # Without its history, as the backward pass writes into it.
        ctx.save_for_backward(logits.detach(), teacher_logits, labels, tops, totals)
        ctx.constants = first, entropy_weight, weight, temperature
        entropy = torch.log(total) - predicted
        divergence = cross / teacher_warm - torch.log(teacher_warm) + torch.log(warm)
        return (entropy_weight * entropy + weight * temperature**2 * divergence).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _overwrite_with_gradient(*ctx.saved_tensors, gradient, *ctx.constants), *[None] * 6


# Compiled on a GPU, as those of slipway/trainer/model/loss.py are.
@jit_fuser  # type: ignore[untyped-decorator]
def _reduce_vocabulary(
    logits: Any, teacher_logits: Any, labels: Any, tops: Any, first: int, temperature: float
) -> tuple[Any, ...]:
    """Return the sums over this rank's vocabulary, each ``[s, b, 1]``, of logits less the largest one.

    They are the sum of exponentials; the label's logit, 0 for a label of another rank; the sums of
    exponentials at the temperature, the student's and the teacher's; and the teacher's times the difference.
    """
    own, taught = logits.float() - tops[0], teacher_logits.float() - tops[1]
    places = labels.unsqueeze(-1) - first
    is_here = (places >= 0) & (places < logits.size(-1))
    predicted = torch.where(is_here, own.gather(-1, torch.where(is_here, places, 0)), 0.0)
    total = torch.exp(own).sum(dim=-1, keepdim=True)
    warm = torch.exp(own / temperature).sum(dim=-1, keepdim=True)
    weights = torch.exp(taught / temperature)
    cross = (weights * ((taught - own) / temperature)).sum(dim=-1, keepdim=True)
    return total, predicted, warm, weights.sum(dim=-1, keepdim=True), cross


@jit_fuser  # type: ignore[untyped-decorator]
def _overwrite_with_gradient(
    logits: Any,
    teacher_logits: Any,
    labels: Any,
    tops: Any,
    sums: Any,
    gradient: Any,
    first: int,
    entropy_weight: float,
    weight: float,
    temperature: float,
) -> Any:
    """Return the gradient of the logits in their memory."""
    columns = torch.arange(first, first + logits.size(-1), device=logits.device)
    own = logits.float() - tops[0]
    change = entropy_weight * (torch.exp(own) / sums[0] - (columns == labels.unsqueeze(-1)).float())
    taught = torch.exp((teacher_logits.float() - tops[1]) / temperature) / sums[2]
    change += weight * temperature * (torch.exp(own / temperature) / sums[1] - taught)
    return logits.copy_(change * gradient.unsqueeze(-1))
