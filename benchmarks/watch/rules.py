"""The rules that are compared: ours, OLMo-core's and llm-foundry's, each as the steps at which it alarms.

Those of others are written anew from what their sources do (the default parameters of OLMo-core's
`StabilityMonitorCallback` and of llm-foundry's `KillLossSpike`). A rule names an alarm once: it is over, and
another may begin, when the rule has been quiet for `CALM` steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from benchmarks.watch.curves import Curve
from slipway.common.node.events import Start, Train
from slipway.watch.detectors import FIRING, look_for_grad_norm_spike, look_for_loss_spike, look_for_non_finite
from slipway.watch.pace import Schedule
from slipway.watch.parameters import Parameters
from slipway.watch.windows import Window

CALM = 20
# The indices of the steps at which a rule's alarms begin.
Alarms = list[int]


def find_ours(curve: Curve, parameters: Parameters = Parameters()) -> dict[str, Alarms]:  # noqa: B008
    """Return the alarms of our detectors, by their names."""
    readers = {
        "non_finite": look_for_non_finite,
        "loss_spike": look_for_loss_spike,
        "grad_norm_spike": look_for_grad_norm_spike,
    }
    alarms: dict[str, Alarms] = {name: [] for name in readers}
    firing = dict.fromkeys(readers, False)
    window = Window(parameters, Schedule())
    window.take(Start(0.0, 0, len(curve.loss)))
    for index, (loss, norm) in enumerate(zip(curve.loss, curve.grad_norm, strict=True)):
        window.take(Train(float(index + 1), index + 1, loss, None, norm, None, None))
        for name, read in readers.items():
            is_firing = read(window, parameters).state == FIRING
            if is_firing and not firing[name]:
                alarms[name].append(index)
            firing[name] = is_firing
    return alarms


def merge(alarms: dict[str, Alarms]) -> Alarms:
    """Return the alarms of several detectors as one rule's."""
    return sorted({index for each in alarms.values() for index in each})


def find_olmo_core(curve: Curve) -> Alarms:
    """Alarm where the loss or the gradient's norm exceeds mean + 6 sigma of the 128 values before it."""
    spikes = [any(pair) for pair in zip(_exceed(curve.loss), _exceed(curve.grad_norm), strict=True)]
    return list(_begin(spikes))


def _exceed(values: list[float], size: int = 128, sigmas: float = 6.0) -> Iterator[bool]:
    history: deque[float] = deque(maxlen=size)
    total = squares = 0.0
    for value in values:
        is_spike = False
        if len(history) == size:
            mean = total / size
            deviation = math.sqrt(max(squares / size - mean * mean, 0.0))
            is_spike = deviation >= 1e-10 and value > mean + sigmas * deviation
            total, squares = total - history[0], squares - history[0] ** 2
        yield is_spike
        history.append(value)
        total, squares = total + value, squares + value * value


def find_llm_foundry(curve: Curve) -> Alarms:
    """Alarm at the fifth loss in a row of twice the mean of a window, or where half of the window is high.

    The window is a twentieth of the training, 100 steps at least; high is what exceeds 10, or the largest
    loss of the first window.
    """
    size = max(100, round(0.05 * len(curve.loss)))
    history: deque[float] = deque(maxlen=size)
    spikes, outliers, cap, total = [], 0, 10.0, 0.0
    for index, value in enumerate(curve.loss):
        is_alarm = False
        if len(history) == size:
            cap = min(max(history), cap) if index == size else cap
            outliers = outliers + 1 if value >= 2 * total / size else 0
            is_high = index >= 2 * size and sum(map(cap.__lt__, history)) >= size / 2
            is_alarm = outliers > 4 or is_high
            total -= history[0]
        spikes.append(is_alarm)
        history.append(value)
        total += value
    return list(_begin(spikes))


def _begin(spikes: list[bool]) -> Iterator[int]:
    last = -CALM - 1
    for index, is_spike in enumerate(spikes):
        if is_spike:
            if index - last > CALM:
                yield index
            last = index


RULES: dict[str, Callable[[Curve], Alarms]] = {
    "Slipway": lambda curve: merge(find_ours(curve)),
    "OLMo-core": find_olmo_core,
    "llm-foundry": find_llm_foundry,
}
